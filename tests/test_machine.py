"""No test installs or downloads: each way to do so fails, and fails the test even if it handles the error."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.machine import BARE, INSTALLERS, PROGRAMS

ROOT = Path(__file__).resolve().parents[1]
TRY = """
import os, subprocess, sys, http.client
from tests.machine import Guard
guard = Guard()
with guard.watching():
    try:
        {code}
    except Exception:
        pass
"""


def tried(code: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Try a line of Python under a guard of its own."""
    return subprocess.run(
        [sys.executable, "-c", TRY.format(code=code)],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("code", "fact"),
    [
        ("subprocess.run(['apt-get', 'install', 'chromium'])", "apt-get install chromium"),
        ("subprocess.run('true; sudo ls', shell=True)", "sudo ls"),
        ("subprocess.run(['bash', '-c', 'npm ci || true'])", "npm ci"),
        ("os.system('curl example.org')", "curl example.org"),
        ("subprocess.run(['/usr/bin/apt-get', 'update'])", "/usr/bin/apt-get update"),
        ("subprocess.run([sys.executable, '-m', 'pip', 'install', 'six'])", "pip install six"),
        ("subprocess.run(['true'], env={'PATH': '/usr/bin:/bin'})", "/usr/bin:/bin"),
        ("subprocess.run(['/bin/true'], env={})", "PATH"),
        ("os.execve('/bin/true', ['true'], {})", "PATH"),
        ("http.client.HTTPConnection('192.0.2.1', timeout=1).connect()", "192.0.2.1"),
    ],
)
def test_a_test_that_would_change_the_machine_fails(code: str, fact: str):
    done = tried(code)
    assert done.returncode == 1 and "Forbidden" in done.stderr and fact in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "code",
    [
        "subprocess.run([sys.executable, '-c', ''])",
        "subprocess.run(['true'])",
        "subprocess.run(['true'], env=os.environ)",
        "sys.audit('os.mkdir', os.path.abspath('.hypothesis'), 0o777, -1)",
        "sys.audit('os.mkdir', os.path.abspath('.pytest_cache'), 0o777, -1)",
    ],
)
def test_other_programs_may_run_and_caches_be_made(code: str):
    done = tried(code if "audit" in code else f"{code}.check_returncode()")
    assert (done.returncode, done.stderr) == (0, "")


def test_only_a_running_test_may_not_write_elsewhere(tmp_path: Path):
    """Between tests pytest makes its cache in the checkout, on the first run."""
    program = f"""
import pathlib
from tests import machine
guard, place = machine.Guard(), pathlib.Path({str(tmp_path / "elsewhere")!r})
machine.OWN = (f"{{guard.folder}}/",)
place.mkdir()
place.rmdir()
try:
    with guard.watching():
        place.mkdir()
except machine.Forbidden:
    print(place.exists())
(place.parent / "file").write_text("")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_every_test_is_guarded(request: pytest.FixtureRequest):
    for name in INSTALLERS:
        path = shutil.which(name)
        assert path and Path(path).read_text().startswith("#!/bin/sh") and "no test may call" in Path(path).read_text()
    assert "unchanged_machine" in request.fixturenames


def test_tests_and_what_they_start_have_a_home_of_their_own():
    printed = tried("print(os.path.expanduser('~'), guard.folder)").stdout.split()
    assert printed[0] == f"{printed[1]}/home"
    assert str(Path.home()).startswith(tempfile.gettempdir())


def test_a_bare_machine_has_all_programs_but_those_that_a_machine_may_lack(tmp_path: Path):
    for name in (*PROGRAMS, "true"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    # After `su` PATH may have folders of another user. As root may read all, one that cannot be there stands for them.
    closed = "x" * 300
    code = "import shutil; print(*(shutil.which(name) is not None for name in {names}), file=sys.stderr)"
    for bare in ("", "1"):
        path = os.pathsep.join([str(tmp_path), closed, os.environ["PATH"]])
        done = tried(code.format(names=(*PROGRAMS, "true", "sh")), PATH=path, **{BARE: bare})
        assert done.stderr.split() == [str(not bare)] * len(PROGRAMS) + ["True", "True"]

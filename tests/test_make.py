"""`make` and `.ci/run` with stand-ins for Python and make: what they call, how often, and what they say."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.machine import BARE

ROOT = Path(__file__).resolve().parents[1]
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

# A stand-in for Python: `-c` is the question whether it is good enough, `-m venv` copies itself into the new .venv,
# and every other call is written down.
PYTHON = """#!/bin/sh
case "$1 $2" in
    "-c "*) exit {old} ;;
    "-m venv") mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    *) echo "$*" >> calls ;;
esac
"""


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def make(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # The suite itself may run under make, whose variables would reach this one through the environment.
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", *arguments], cwd=checkout, env=outside, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    script(tmp_path / "old", PYTHON.format(old=1))
    script(tmp_path / "new", PYTHON.format(old=0))
    return tmp_path


def installed(call: str) -> str:
    """The extras that a call of pip installs, as "[test]"."""
    assert "pip install" in call and "-c constraints.txt" in call
    return call.rpartition("-e .")[2]


@needs_make
def test_make_installs_with_the_constraints_once_and_again_when_they_change(checkout: Path) -> None:
    for said in (True, False):
        done = make(checkout, "test", "PYTHON=./absent ./old ./new", "ARGS=-k x")
        assert done.returncode == 0 and ("downloads" in done.stdout) == said
    install, *tests = (checkout / "calls").read_text().splitlines()
    assert installed(install) == "[test]" and len(tests) == 2
    assert all("-m pytest" in call and call.endswith(" -k x") for call in tests)

    later = (checkout / ".venv" / ".has-test").stat().st_mtime + 10
    os.utime(checkout / "constraints.txt", (later, later))
    done = make(checkout, "test")
    assert done.returncode == 0 and "rayfl[test]" in done.stdout
    install, test = (checkout / "calls").read_text().splitlines()[3:]
    assert installed(install) == "[test]" and "-m pytest" in test


@needs_make
def test_the_linters_environment_serves_documentation_and_tests_too(checkout: Path) -> None:
    for target in ("lint", "docs", "test"):
        assert make(checkout, target, "PYTHON=./new").returncode == 0
    install, *calls = (checkout / "calls").read_text().splitlines()
    assert installed(install) == "[dev]"
    assert [call.split()[1] for call in calls] == ["ruff", "ruff", "pyright", "mkdocs", "pytest"]


@needs_make
def test_a_missing_or_old_python_is_named(checkout: Path) -> None:
    done = make(checkout, "demo", "PYTHON=./absent ./old")
    assert done.returncode == 2
    sentence, make_adds = done.stderr.splitlines()
    for fact in ("3.11", "./absent ./old", "python3-venv", "make test PYTHON="):
        assert fact in sentence
    assert make_adds.startswith("make: ***")
    assert not (checkout / ".venv").exists()


# A stand-in for the Python of `make dist`: it builds two empty files, and its environments have a `rayfl`.
DIST_PYTHON = """#!/bin/sh
case "$*" in
    "-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp {folder}/rayfl "$3/bin/rayfl" ;;
    "-m build"*) mkdir dist && touch dist/rayfl-0-py3-none-any.whl dist/rayfl-0.tar.gz ;;
    "-m twine"*) {twine} ;;
esac
"""
DIST_RAYFL = """#!/bin/sh
echo "$PWD:${{PYTHONPATH-unset}}:$*" >> {folder}/calls
echo "demo: 30 rounds"
echo "run directory: $PWD/runs/demo"
"""


def dist(checkout: Path, twine: str = "exit 0") -> subprocess.CompletedProcess[str]:
    """Run .ci/dist, as `make dist` does, with stand-ins."""
    for name, text in (("python", DIST_PYTHON), ("rayfl", DIST_RAYFL)):
        script(checkout / name, text.format(folder=checkout, twine=twine))
    script(checkout / ".ci" / "dist", (ROOT / ".ci" / "dist").read_text())
    around = {**os.environ, "PYTHONPATH": str(checkout), "TMPDIR": str(checkout)}
    return subprocess.run(
        ["bash", ".ci/dist", "./python"], cwd=checkout, env=around, capture_output=True, text=True, check=False
    )


def test_dist_runs_the_demo_outside_the_checkout_and_names_the_files(tmp_path: Path) -> None:
    done = dist(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("dist/rayfl-0-py3-none-any.whl dist/rayfl-0.tar.gz")
    # The folder of the demo is removed, so its path is left out.
    assert "demo: 30 rounds" in done.stdout and "run directory" not in done.stdout
    (call,) = (tmp_path / "calls").read_text().splitlines()
    folder, path, arguments = call.split(":")
    assert folder.startswith(f"{tmp_path}/tmp.") and path == "unset" and arguments == "run demo"


def test_a_step_of_dist_that_fails_is_named_in_the_last_line(tmp_path: Path) -> None:
    done = dist(tmp_path, twine="echo a bad readme; exit 3")
    assert done.returncode == 1 and not (tmp_path / "calls").exists()
    *said, last = done.stderr.splitlines()
    assert said == ["a bad readme"] and "twine" in last and "/log" in last


CI_MAKE = """#!/bin/sh
case "$*" in
    *--keep-going*" lint docs") echo linted; echo built; exit {checks} ;;
    test*) echo "${{{bare}:-0}} $*" >> calls
        [ "$2" ] || [ ! -e said ] || cat said
        echo '5 passed in 0.01s'; [ "$2" ] && code={rest} || code={first}
        [ $code = 0 ] || echo 'make: *** Error' >&2; exit $code ;;
esac
"""
TOOLS = ("bash", "cat", "sh", "dirname", "grep", "mktemp", "rm", "sed", "tail", "tee")
"""What .ci/run needs beside make and Debian's own programs."""


def ci(checkout: Path, checks: int = 0, first: int = 0, rest: int = 0) -> subprocess.CompletedProcess[str]:
    """Run .ci/run where nothing but TOOLS and stand-ins is installed; `bin` may have more of them."""
    (checkout / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", checkout / ".ci" / "run")
    programs = checkout / "bin"
    script(programs / "make", CI_MAKE.format(bare=BARE, checks=checks, first=first, rest=rest))
    for name in TOOLS:
        (programs / name).symlink_to(str(shutil.which(name)))
    guard, *_ = os.environ["PATH"].split(os.pathsep)
    # The suite itself may run as on a bare machine.
    around = {name: value for name, value in os.environ.items() if name != BARE}
    return subprocess.run(
        [programs / "bash", ".ci/run"],
        cwd=checkout,
        env={**around, "PATH": f"{programs}{os.pathsep}{guard}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("checks", "first", "rest", "status"),
    [(0, 0, 0, 0), (3, 0, 0, 3), (0, 2, 0, 2), (0, 0, 4, 4), (0, 2, 4, 2), (3, 2, 4, 3)],
    ids=["pass", "lint or docs", "bare", "rest", "tests", "all"],
)
def test_ci_runs_all_exits_with_the_first_failure_and_ends_on_pytests_line(
    tmp_path: Path, checks: int, first: int, rest: int, status: int
) -> None:
    for name in ("dpkg", "chromium"):
        script(tmp_path / "bin" / name, "#!/bin/sh\nexit 0\n")
    done = ci(tmp_path, checks, first, rest)
    assert done.returncode == status
    assert done.stdout.splitlines()[:2] == ["linted", "built"]
    assert done.stdout.splitlines()[-1] == "5 passed in 0.01s"
    # All fast tests on a bare machine; then the rest, and those that need the machine's programs.
    assert (tmp_path / "calls").read_text().splitlines() == [
        "1 test",
        "0 test ARGS=-m 'not hostile and (slow or machine)'",
    ]


HUNG = "worker 'gw0' crashed while running 'tests/test_a.py::test_b[3]'"


@pytest.mark.parametrize(
    ("said", "passes", "status"),
    [
        ([HUNG, "FAILED tests/test_a.py::test_b[3] - worker 'gw0' crashed"], True, 0),
        ([HUNG, "FAILED tests/test_a.py::test_b[3] - worker 'gw0' crashed"], False, 1),
        ([HUNG, "FAILED tests/test_a.py::test_b[3] - worker", "FAILED tests/test_c.py::test_d - assert"], True, 2),
        ([HUNG, "FAILED tests/test_a.py::test_b[3] - worker", "ERROR tests/test_c.py::test_d - OSError"], True, 2),
        ([HUNG, HUNG, *["FAILED tests/test_a.py::test_b[3] - worker"] * 2], True, 2),
        (["FAILED tests/test_a.py::test_b[3] - assert"], True, 2),
    ],
    ids=["hung", "hung twice", "another failed", "error", "two processes", "no process"],
)
def test_ci_gives_a_test_whose_process_waited_for_ever_one_more_try(
    tmp_path: Path, said: list[str], passes: bool, status: int
) -> None:
    for name in ("dpkg", "chromium"):
        script(tmp_path / "bin" / name, "#!/bin/sh\nexit 0\n")
    (tmp_path / "said").write_text("\n".join([*said, "1 failed in 9 s"]) + "\n")
    script(tmp_path / ".venv" / "bin" / "python", f'#!/bin/sh\necho "$*" >> again\nexit {int(not passes)}\n')
    done = ci(tmp_path, first=2)
    assert done.returncode == status
    again = tmp_path / "again"
    assert again.exists() == (status < 2)
    assert status == 2 or again.read_text() == "-m pytest -n 0 tests/test_a.py::test_b[3]\n"


@pytest.mark.parametrize("works", [True, False])
def test_ci_installs_what_a_fresh_machine_lacks_and_runs_without_it(tmp_path: Path, works: bool) -> None:
    script(tmp_path / "bin" / "dpkg", "#!/bin/sh\nexit 1\n")
    script(tmp_path / "bin" / "apt-get", f'#!/bin/sh\necho "$*" >> apt; echo apt; exit {int(not works)}\n')
    done = ci(tmp_path)
    assert done.returncode == 0 and (tmp_path / "calls").read_text().count("test") == 2
    *said, _, _, last, end = done.stdout.splitlines()
    assert last == end == "5 passed in 0.01s"
    if os.geteuid():
        assert not (tmp_path / "apt").exists()
    else:
        update, *install = (tmp_path / "apt").read_text().splitlines()
        assert update.endswith("update") and all("install" in call and "chromium" in call for call in install)
        assert bool(install) == works
    assert bool(said) != (works and not os.geteuid()) and all("chromium" in line for line in said)

"""`make` and `.ci/run` with stand-ins for Python and make: what they call, how often, and what they say."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("checks", "test", "status"),
    [(0, 0, 0), (3, 0, 3), (0, 2, 2), (3, 2, 3)],
    ids=["pass", "lint or docs", "test", "both"],
)
def test_ci_runs_all_exits_with_the_first_failure_and_ends_on_pytests_line(
    tmp_path: Path, checks: int, test: int, status: int
) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    bin_folder = tmp_path / "bin"
    script(bin_folder / "dpkg", "#!/bin/sh\nexit 0\n")
    script(
        bin_folder / "make",
        f"""#!/bin/sh
case "$*" in
    *--keep-going*" lint docs") echo linted; echo built; exit {checks} ;;
    test*) [ "$2" = "ARGS=-m 'not hostile'" ] || exit 9
        echo '5 passed in 0.01s'; [ {test} = 0 ] || echo 'make: *** Error' >&2; exit {test} ;;
esac
""",
    )
    done = subprocess.run(
        ["bash", ".ci/run"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status
    assert done.stdout.splitlines()[:2] == ["linted", "built"]
    assert done.stdout.splitlines()[-1] == "5 passed in 0.01s"

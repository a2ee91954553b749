"""What tests may use of the machine, and what they may not do to it.

Some tests need a program that a machine may lack: they have the mark `machine(PROGRAM, ...)` and are skipped without
it. If `BARE` is set in the environment, these programs and Debian's Fashion-MNIST are hidden from all tests, so that
any machine can be tried as a fresh one.

No test installs or downloads anything. Each program in INSTALLERS is replaced on PATH, for subprocesses too, by one
that fails; starting it by its path, `python -m pip install`, and a connection to another machine raise Forbidden. So
does writing outside the folders of temporary files, the checkout's caches and .venv, by a test's own process; where
libraries keep caches and settings is a temporary folder for subprocesses too. Each try also fails the test, even if it
handles the error.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BARE = "RAYFL_TESTS_BARE"
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "pdflatex")
"""The programs that the mark `machine` may name, which are hidden if `BARE` is set."""
INSTALLERS = (
    *("apt", "apt-get", "aptitude", "dpkg", "snap", "yum", "dnf", "apk", "brew", "sudo", "doas"),
    *("pip", "pip3", "pipx", "uv", "uvx", "poetry", "conda", "mamba", "npm", "npx", "yarn", "pnpm"),
    *("curl", "wget", "playwright"),
)
_MODULES = {"pip", "uv", "ensurepip", "playwright"}
"""The modules that install when they are run by `python -m`."""
ROOT = Path(__file__).resolve().parents[1]
OWN = (
    *(f"{os.path.realpath(place)}/" for place in {tempfile.gettempdir(), "/tmp", "/dev", "/proc", sys.prefix}),
    *(f"{ROOT}/{name}/" for name in (".venv", ".pytest_cache", ".hypothesis")),
)
"""Where tests may write."""
_HOMES = (
    "HOME",
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"),
    *("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"),
)
"""Where libraries keep what outlives a program."""
_STUB = """#!/bin/sh
echo "${{0##*/}} $*" >> '{calls}'
echo "no test may call ${{0##*/}}" >&2
exit 1
"""


class Forbidden(RuntimeError):
    """A test wanted to install, to download, or to start a program that could."""


def find(*names: str) -> str | None:
    """The path of the first of these programs that the machine has."""
    return next(filter(None, map(shutil.which, names)), None)


def is_bare() -> bool:
    """Whether the machine's programs and Fashion-MNIST are hidden."""
    return bool(os.environ.get(BARE))


class Guard:
    """The programs of `INSTALLERS` that fail, on PATH and for all subprocesses, until the process ends."""

    def __init__(self) -> None:
        self.in_test = False
        self.folder = Path(tempfile.mkdtemp(prefix="guard"))
        self.calls = self.folder / "calls"
        self.calls.touch()
        for name in INSTALLERS:
            path = self.folder / name
            path.write_text(_STUB.format(calls=self.calls))
            path.chmod(0o755)
        folders = os.environ["PATH"].split(os.pathsep)
        if is_bare():
            folders = [self._without_programs(number, Path(one)) for number, one in enumerate(folders)]
        os.environ["PATH"] = os.pathsep.join([str(self.folder), *folders])
        for name in _HOMES:
            os.environ[name] = str(self.folder / name.lower())
        (self.folder / "home").mkdir()
        sys.addaudithook(self._watch)

    def _without_programs(self, number: int, folder: Path) -> str:
        """`folder`, or if it has one of PROGRAMS, a folder of links to all its other files."""
        # Path.exists raises in a folder that another user has closed; PATH may name one after `su`.
        if not any(os.path.exists(folder / name) for name in PROGRAMS):
            return str(folder)
        links = self.folder / f"links-{number}"
        links.mkdir()
        for path in folder.iterdir():
            if path.name not in PROGRAMS:
                (links / path.name).symlink_to(path)
        return str(links)

    def end(self) -> None:
        """Remove the stubs."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Raise Forbidden at the end if one of INSTALLERS was called meanwhile."""
        before = self.calls.stat().st_size
        self.in_test = True
        try:
            yield
        finally:
            self.in_test = False
        with open(self.calls) as file:
            file.seek(before)
            if lines := file.read().splitlines():
                raise Forbidden(f"a test may change nothing on the machine: {'; '.join(lines)}")

    # Any: the arguments of an audit event.
    def _watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        # Between tests pytest makes its cache, in the checkout.
        look = _EVENTS.get(event) or (self.in_test and _WRITES.get(event))
        if look and (reason := look(self.folder, *arguments)):
            with open(self.calls, "a") as file:
                print(reason, file=file)
            raise Forbidden(f"no test may do this: {reason}")


# Any: the arguments of subprocess.Popen.
def _started(folder: Path, executable: Any, words: Any, _cwd: Any, env: Mapping[Any, Any] | None = None) -> str:
    words = [os.fsdecode(word) for word in ([words] if isinstance(words, str | bytes | os.PathLike) else words)]
    program = Path(os.fsdecode(executable) if executable else words[0])
    if program.name in INSTALLERS and program.is_absolute() and program.parent != folder:
        return " ".join(words)
    if words[1:2] == ["-m"] and words[2:3] and words[2] in _MODULES:
        return " ".join(words)
    # An environment may be of bytes.
    path = os.environ["PATH"] if env is None else os.fsdecode(env.get("PATH") or env.get(b"PATH") or os.defpath)
    if str(folder) in path.split(os.pathsep):
        return ""
    # A test may make a stand-in of its own.
    found = [place for name in INSTALLERS if (place := shutil.which(name, path=path)) and not _is_own(place)]
    return f"PATH={path!r} with {found[0]} for {' '.join(words)[:200]}: keep the PATH of the tests" if found else ""


def _spawned(folder: Path, program: Any, words: Sequence[Any], env: Mapping[Any, Any] | None) -> str:
    return _started(folder, program, words, None, env)


# Any: what os.fspath takes, or the number of an open file.
def _written(_folder: Path, *paths: Any) -> str:
    names = [os.fsdecode(path) for path in paths if isinstance(path, str | bytes | os.PathLike)]
    return next((f"writing to {name}" for name in names if not _is_own(name)), "")


# Any: as of _written.
def _opened(folder: Path, path: Any, _mode: str | None, flags: int) -> str:
    return _written(folder, path) if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) else ""


def _is_own(path: str) -> bool:
    """Whether tests may write there."""
    # A folder itself is made too, on the first run.
    place = f"{os.path.abspath(path)}/"
    return place.startswith(OWN) or "/__pycache__" in place


# Any: http.client's connection.
def _connected(_folder: Path, _connection: Any, host: str, _port: int) -> str:
    return "" if host.startswith("127.") or host in ("localhost", "::1") else f"a connection to {host}"


_EVENTS: dict[str, Callable[..., str]] = {
    "subprocess.Popen": _started,
    "os.posix_spawn": _spawned,
    "os.exec": _spawned,
    "http.client.connect": _connected,
}
"""What a guard looks at, and why it refuses it; "" if it does not."""
_WRITES: dict[str, Callable[..., str]] = {
    "open": _opened,
    "os.mkdir": lambda folder, path, _mode, at: _written(folder, path) if at == -1 else "",
    "os.rename": lambda folder, source, target, at, to: _written(folder, source, target) if at == to == -1 else "",
    "os.remove": lambda folder, path, at: _written(folder, path) if at == -1 else "",
    "os.rmdir": lambda folder, path, at: _written(folder, path) if at == -1 else "",
    "os.symlink": lambda folder, _source, target, at: _written(folder, target) if at == -1 else "",
    "os.truncate": lambda folder, path, _length: _written(folder, path),
    "os.chmod": lambda folder, path, _mode, at: _written(folder, path) if at == -1 else "",
}
"""The same while a test runs."""

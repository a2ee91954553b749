"""No other user of the machine enters the folder of a session, and nothing of a session that is over stays."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from actors import folders
from actors.folders import BASE, PrivateFolder
from tests.refusals import check_sentence

ROOT = Path(__file__).parents[2]

_SESSION = """
import os, sys, time, ray
from actors import session
from rayfl.experiment.runtime import Runtime

with session.session(Runtime()):
    from ray._private.worker import _global_node
    print(_global_node.get_session_dir_path(), flush=True)
    sys.stdin.readline()
"""


def taken_by_another_user(path: Path) -> bool:
    """Whether another user of this machine can rename what is at `path`; only root can try."""
    if not (child := os.fork()):
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            path.rename(path.with_name("taken"))
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def session(base: Path, **variables: str) -> "subprocess.Popen[str]":
    """Start a session whose folder goes into `base`. It prints its directory, and ends when its stdin ends."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-c", _SESSION],
        cwd=ROOT,
        env=clean | {"TMPDIR": str(base), **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of this user's with a short path, in which other folders can be made; it is removed afterwards."""
    monkeypatch.delenv(BASE, raising=False)
    folder = PrivateFolder()
    yield Path(folder.path)
    folder.remove()
    assert not Path(folder.path).exists()


@pytest.mark.slow
@pytest.mark.ray
def test_no_other_user_reaches_the_files_of_a_session_and_none_stay(short: Path) -> None:
    short.chmod(0o755)
    running = session(short)
    assert running.stdout is not None
    directory = Path(running.stdout.readline().strip())
    assert directory.is_relative_to(short) and (directory / "sockets" / "plasma_store").is_socket()
    assert any(stat.S_IMODE(part.stat().st_mode) == 0o700 for part in directory.parents if part.is_relative_to(short))
    if os.geteuid() == 0:
        assert not taken_by_another_user(directory / "sockets" / "plasma_store")
    running.communicate(timeout=120)
    assert running.returncode == 0 and list(short.glob("rayfl-*")) == []


@pytest.mark.slow
@pytest.mark.ray
def test_a_killed_session_is_removed_at_the_next_start_and_a_running_one_is_not(short: Path) -> None:
    killed, running = session(short), session(short)
    assert killed.stdout is not None and running.stdout is not None
    left, kept = Path(killed.stdout.readline().strip()), Path(running.stdout.readline().strip())
    own = psutil.Process(killed.pid).children(recursive=True)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    # An agent that is still loading would make its folders again. The parent of a command ends it, too.
    for process in own:
        with suppress(psutil.Error):
            process.kill()
    assert not psutil.wait_procs(own, timeout=60)[1]
    assert left.exists()
    after = session(short)
    assert after.stdout is not None and after.stdout.readline()
    assert not left.exists() and (kept / "sockets" / "plasma_store").exists()
    for each in (running, after):
        each.communicate(timeout=120)
        assert each.returncode == 0
    assert list(short.glob("rayfl-*")) == []


@pytest.mark.ray
def test_ray_starts_where_the_folder_for_temporary_files_has_a_long_path(tmp_path: Path) -> None:
    # As on SLURM.
    base = tmp_path / ("job-" + "1" * 100)
    base.mkdir()
    running = session(base)
    assert running.stdout is not None
    directory = running.stdout.readline().strip()
    running.communicate(timeout=120)
    assert running.returncode == 0 and directory and not directory.startswith(str(base))


def test_the_first_suitable_base_is_taken(short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("a" * 100)
    long.mkdir()
    for unsuitable in (long, short / "nowhere"):
        monkeypatch.setenv("TMPDIR", str(unsuitable))
        folder = PrivateFolder()
        assert Path(folder.path).parent in (Path("/tmp"), Path("/var/tmp"))
        folder.remove()
    monkeypatch.setenv(BASE, str(long))
    with pytest.raises(OSError) as raised:
        PrivateFolder()
    check_sentence(str(raised.value), [long, "too long", "sockets"])


def test_folders_of_others_and_of_other_machines_stay(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BASE, str(short))
    here, elsewhere, empty = (PrivateFolder() for _ in range(3))
    Path(elsewhere.path, folders._HOST).write_text("another machine")
    Path(empty.path, folders._HOST).unlink()
    for each in (here, elsewhere, empty):
        os.close(each._lock)
    link = short / "rayfl-link"
    (target := short / "target").mkdir()
    (target / folders._HOST).write_text(Path(here.path, folders._HOST).read_text())
    link.symlink_to(target)
    folder = PrivateFolder()
    found = {str(one) for one in short.glob("rayfl-*")}
    assert found == {elsewhere.path, empty.path, str(link), folder.path} and target.exists()
    folder.remove()


_SERVER = """
import sys
from actors.fork_server import ForkServer

server = ForkServer()
print(server.folder.path, server.process.pid, flush=True)
sys.stdin.readline()
"""


def test_the_folder_of_a_fork_server_that_was_killed_with_its_driver_is_removed_at_the_next_start(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BASE, str(short))
    driver = subprocess.Popen(
        [sys.executable, "-c", _SERVER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    folder, pid = driver.stdout.readline().split()
    server = psutil.Process(int(pid))
    # Stopped first, so that it does not see its driver's end, and remove the folder itself.
    server.suspend()
    driver.kill()
    driver.communicate(timeout=60)
    server.kill()
    psutil.wait_procs([server], timeout=60)
    assert Path(folder, "socket").is_socket()
    PrivateFolder().remove()
    assert not Path(folder).exists()

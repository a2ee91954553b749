"""The copy of a run: wherever the copying is cut it is a run that goes on; only what has changed travels."""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.single import run
from rayfl.errors import RayflError
from rayfl.experiment.identity import identity
from rayfl.experiment.prepare import prepare
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from rayfl.run_directory.checkpoint import Checkpoints
from rayfl.run_directory.disk import DiskError
from rayfl.run_directory.object_storage import Storage, StorageError
from rayfl.run_directory.play_run import Listener, RunOutput, play_run, recalled
from rayfl.run_directory.record import read_run
from rayfl.run_directory.run_files import own_files
from rayfl.run_directory.run_folder import Copies, fetch, fetch_newer, mirrored, reached
from rayfl.tasks.supervised import with_task
from tests.actors.toys import assert_same_run, experiment, logged
from tests.refusals import check_sentence, refused
from tests.run_directory.s3_server import KEYS, Server, serving

CHANGES: dict[str, Any] = {"runtime": {"executor": "inline"}, "checkpoint": {"every": 1}, "rounds": 3}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as found:
        yield found


@pytest.fixture
def there(server: Server, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """An empty storage."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    server.forget_everything()
    server.make_bucket("bucket")
    return Storage(server.url("bucket/run"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(experiment("fedpse", **CHANGES, output={"report": False}), tmp_path_factory.mktemp("runs") / "run")


def same(here: Path, fetched: Path) -> None:
    """Take every two runs for the same."""


@pytest.fixture
def puts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are copied."""
    names: list[str] = []
    put = Storage.put

    def noted(self: Storage, name: str, path: Path) -> None:
        put(self, name, path)
        names.append(name)

    monkeypatch.setattr(Storage, "put", noted)
    return names


def prepared() -> Setup:
    """The setup of the experiment, with the identity that a command gives it."""
    chosen = experiment("fedpse", **CHANGES)
    setup = prepare(chosen)
    return replace(setup, identity=identity(chosen, with_task(chosen.as_dict(), setup.dataset)))


def half(directory: Path) -> None:
    """Play two of three rounds."""
    setup = prepared()
    with pytest.raises(Exception, match="enough"):
        play_run(
            setup,
            InlineExecutor(setup),
            RunOutput(directory, checkpoints=experiment(**CHANGES).checkpoint),
            Listener(stop_after(2)),
        )


def stop_after(rounds: int) -> Any:
    def on_round(row: Any, means: Any) -> None:
        if row.round == rounds - 1:
            raise RuntimeError("enough")

    return on_round


@pytest.fixture(scope="module")
def unfinished(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("half") / "run"
    half(directory)
    for name in ("experiment.json", "experiment.toml", "platform.json"):
        shutil.copy(finished / name, directory)
    return directory


def test_a_copy_has_all_of_a_run_and_nothing_travels_twice(finished: Path, there: Storage, puts: list[str]):
    copies = Copies(finished, there)
    copies.update()
    assert set(puts) == set(there.files()) == set(own_files(finished)) and len(puts) == len(set(puts))
    assert "lock" not in puts
    manifests = [name for name in puts if name.endswith("manifest.json")]
    assert puts[-len(manifests) :] == manifests and len(manifests) == 2
    puts.clear()
    copies.update()
    assert not puts
    (finished / "origin.json").write_text("{}")
    copies.update()
    assert puts == ["origin.json"]
    assert not Copies(finished, there).is_behind()


def test_a_file_that_checkpoints_share_travels_once(there: Storage, puts: list[str], tmp_path: Path):
    setup = prepare(experiment("fedpse", rounds=6, clients={"count": 10, "per_round": 1}))
    copies = Copies(tmp_path, there)
    play_run(
        setup,
        InlineExecutor(setup),
        RunOutput(tmp_path, checkpoints=Checkpoints(every=1)),
        Listener(lambda row, means: copies.update()),
    )
    newest = {f"checkpoints/00000006/{path.name}": path for path in (tmp_path / "checkpoints/00000006").iterdir()}
    shared = {name for name, path in newest.items() if path.stat().st_nlink > 1}
    assert shared and not shared & {*puts}
    assert all(b"".join(there.pieces(name)) == path.read_bytes() for name, path in newest.items())


def test_wherever_the_copying_is_cut_a_run_is_left_that_goes_on(
    unfinished: Path,
    finished: Path,
    server: Server,
    there: Storage,
    puts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    begun = tmp_path / "begun"
    shutil.copytree(unfinished, begun)
    shutil.rmtree(begun / "checkpoints" / "00000002")
    Copies(begun, there).update()
    before = there.files()
    puts.clear()
    Copies(finished, there).update()
    # What lies there already is not copied again.
    total = len(puts)
    put, remove = Storage.put, Storage.remove
    setup = prepared()
    seen = set()
    for cut in range(total):
        server.forget_everything()
        server.make_bucket("bucket")
        Copies(begun, there).update()
        assert there.files() == before
        left = [cut]

        def counted(self: Storage, name: str, path: Path, left: list[int] = left) -> None:
            if not left[0]:
                raise StorageError("gone")
            left[0] -= 1
            put(self, name, path)

        def allowed(self: Storage, name: str, left: list[int] = left) -> None:
            if left[0]:
                remove(self, name)

        monkeypatch.setattr(Storage, "put", counted)
        monkeypatch.setattr(Storage, "remove", allowed)
        copies = Copies(finished, there)
        with suppress(StorageError):
            copies.update()
        monkeypatch.setattr(Storage, "put", put)
        monkeypatch.setattr(Storage, "remove", remove)
        place = tmp_path / f"cut-{cut}"
        fetch(there, place)
        read_run(place)
        found, _ = recalled(setup, InlineExecutor(setup), place)
        # With what was saved before, or later; never from the start.
        assert found is not None
        seen.add(found.round)
        shutil.rmtree(place)
    assert seen == {1, 2}


def test_a_fetched_run_goes_on_to_the_same_bits(unfinished: Path, finished: Path, there: Storage, tmp_path: Path):
    Copies(unfinished, there).update()
    place = tmp_path / "run"
    assert fetch_newer(there, place, same)
    assert not fetch_newer(there, place, same)
    setup = prepared()
    chosen = experiment("fedpse", **CHANGES)
    play_run(setup, InlineExecutor(setup), RunOutput(place, checkpoints=chosen.checkpoint, resumed=True))
    assert_same_run(shutil.copytree(finished, tmp_path / "finished"), place)


def test_the_run_that_has_come_further_is_taken(unfinished: Path, finished: Path, there: Storage, tmp_path: Path):
    Copies(unfinished, there).update()
    whole = shutil.copytree(finished, tmp_path / "whole")
    assert not fetch_newer(there, whole, same) and read_run(whole).finished
    Copies(finished, there).update()
    behind = shutil.copytree(unfinished, tmp_path / "behind")
    assert fetch_newer(there, behind, same) and read_run(behind).finished
    assert not list(tmp_path.glob("*.fetched"))


def test_another_run_is_not_replaced(unfinished: Path, finished: Path, there: Storage, tmp_path: Path):
    Copies(finished, there).update()
    behind = shutil.copytree(unfinished, tmp_path / "behind")

    def other(here: Path, fetched: Path) -> None:
        raise RayflError("another run")

    with pytest.raises(RayflError, match="another run"):
        fetch_newer(there, behind, other)
    assert not read_run(behind).finished and not list(tmp_path.glob("*.fetched"))


def test_nothing_of_somebody_else_is_fetched_written_or_removed(finished: Path, there: Storage, tmp_path: Path):
    for name in ("notes.txt", "lock"):
        there.put(name, finished / "experiment.toml")
    Copies(finished, there).update()
    fetch(there, tmp_path / "run")
    assert not list(tmp_path.rglob("notes.txt"))
    Copies(finished, there).clear()
    assert "notes.txt" in there.files() and "experiment.json" not in there.files()


def test_how_far_a_run_has_come():
    manifest = "checkpoints/00000004/manifest.json"
    tables = [f"records/{name}.parquet" for name in ("rounds", "clients", "metrics")]
    assert reached([manifest]) is None
    assert reached(["experiment.json"]) == (-1, False)
    assert reached(["experiment.json", "checkpoints/00000006/server.safetensors", manifest]) == (4, False)
    assert reached(["experiment.json", manifest, *tables]) == (4, True)


def test_a_storage_that_refuses_for_a_while_gets_all_afterwards(
    unfinished: Path, there: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    directory = shutil.copytree(unfinished, tmp_path / "run")
    put = Storage.put

    def refuse(self: Storage, name: str, path: Path) -> None:
        raise StorageError("ACCESS_DENIED")

    monkeypatch.setattr(Storage, "put", refuse)
    with mirrored(directory, Storage(there.url)) as round_done:
        round_done()
        monkeypatch.setattr(Storage, "put", put)
    assert set(there.files()) == set(own_files(directory))
    (notice,) = logged(caplog)
    check_sentence(notice, [there.url, directory])


def test_what_cannot_be_copied_at_the_end_is_said_and_kept(
    unfinished: Path, there: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(self: Storage, name: str, path: Path) -> None:
        raise StorageError("ACCESS_DENIED")

    monkeypatch.setattr(Storage, "put", refuse)
    directory = shutil.copytree(unfinished, tmp_path / "run")
    with (
        refused(names=[there.url, f"rayfl resume {directory}"], error=DiskError),
        mirrored(directory, Storage(there.url)),
    ):
        pass
    # The run's own error is the one that is raised.
    with pytest.raises(ZeroDivisionError), mirrored(directory, Storage(there.url)):
        raise ZeroDivisionError
    assert "ACCESS_DENIED" in logged(caplog)[-1]

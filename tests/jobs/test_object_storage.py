"""Runs whose results go to object storage, against a real S3-compatible server: nothing is lost, whatever it does."""

import os
import shutil
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

import rayfl as library
from rayfl import toml
from rayfl.report.results import RunResults
from rayfl.run_directory import checkpoint, object_storage
from rayfl.run_directory.object_storage import Storage, below
from rayfl.run_directory.record import Recorder, Stream, read_run
from rayfl.run_directory.run_files import own_files
from rayfl.run_directory.run_folder import reached
from tests.actors.toys import assert_same_run, experiment, logged
from tests.jobs.commands import rayfl
from tests.refusals import check_sentence, line_with, refused
from tests.run_directory.s3_server import KEYS, Passage, Server, serving
from tests.run_directory.test_full_disk import FULL, refuse

ROUNDS = 4


def loaded(url: str) -> RunResults:
    """The results of the run at a URL."""
    results = library.load(url)
    assert isinstance(results, RunResults)
    return results


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as found:
        yield found


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def folder(server: Server) -> str:
    """The URL of a folder in a new bucket."""
    server.forget_everything()
    server.make_bucket("bucket")
    return server.url("bucket/experiments")


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder."""
    return move_to(tmp_path / "machine", monkeypatch)


def move_to(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path.mkdir()
    monkeypatch.chdir(path)
    return path


def experiment_file(path: Path, directory: str, rounds: int = ROUNDS) -> Path:
    settings = {"runtime": {"executor": "inline"}, "checkpoint": {"every": 1}, "rounds": rounds}
    chosen = experiment("fedpse", **settings, output={"directory": directory, "report": False})
    path.write_text(toml.dumps(chosen.as_dict()))
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("undisturbed")
    result = rayfl("run", experiment_file(home / "run.toml", "runs"), "--output", home / "run")
    assert result.exit_code == 0, result.output
    return home / "run"


def assert_same(undisturbed: Path, directory: Path, folder: Path) -> None:
    """Two runs have the same bits; copies are compared, because the comparing writes into them."""
    assert_same_run(shutil.copytree(undisturbed, folder / "one"), shutil.copytree(directory, folder / "two"))


class Killed(BaseException):
    """Stands for a kill: no `except Exception` sees it."""


def test_a_run_is_copied_resumed_on_another_machine_and_reported_there(
    folder: str, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    result = rayfl("run", experiment_file(Path("run.toml"), folder, rounds=2))
    url = below(folder, "fedpse")
    assert result.exit_code == 0 and f"copy: {url}" in result.output, result.output
    assert set(Storage(url).files()) == set(own_files(Path("runs/fedpse")))
    move_to(tmp_path / "other", monkeypatch)
    result = rayfl("resume", url, "--rounds", ROUNDS)
    assert result.exit_code == 0, result.output
    assert set(Storage(url).files()) == set(own_files(Path("runs/fedpse")))
    move_to(tmp_path / "third", monkeypatch)
    assert loaded(url).finished
    result = rayfl("report", url)
    assert result.exit_code == 0 and Path("report.html").is_file(), result.output
    assert not Path("runs").exists()
    assert_same(undisturbed, Path("../other/runs/fedpse"), tmp_path)


def test_one_command_goes_on_on_any_machine(
    folder: str, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file, url, record = experiment_file(tmp_path / "run.toml", folder), below(folder, "fedpse"), Recorder.round

    def killed(self: Recorder, row, clients, metrics):
        if row.round == 2:
            while (found := reached(Storage(url).files())) is None or found[0] < 1:
                pass
            raise Killed
        record(self, row, clients, metrics)

    monkeypatch.setattr(Recorder, "round", killed)
    with pytest.raises(Killed):
        rayfl("run", file, "--resume")
    monkeypatch.setattr(Recorder, "round", record)
    move_to(tmp_path / "other", monkeypatch)
    result = rayfl("run", file, "--resume")
    assert result.exit_code == 0, result.output
    assert_same(undisturbed, Path("runs/fedpse"), tmp_path)
    # The first machine is behind.
    os.chdir(tmp_path / "machine")
    result = rayfl("run", file, "--resume")
    assert result.exit_code == 0, result.output
    line_with(result.output, [Path("runs/fedpse").absolute(), "finished"])
    assert read_run(Path("runs/fedpse")).finished


def test_a_bucket_that_vanishes_costs_nothing(
    server: Server, folder: str, undisturbed: Path, tmp_path: Path, monkeypatch, caplog
):
    file, url, record = experiment_file(Path("run.toml"), folder), below(folder, "fedpse"), Recorder.round

    def vanishing(self: Recorder, row, clients, metrics):
        if row.round == 1:
            server.forget_everything()
        record(self, row, clients, metrics)

    monkeypatch.setattr(Recorder, "round", vanishing)
    result = rayfl("run", file)
    monkeypatch.setattr(Recorder, "round", record)
    here = Path("runs/fedpse").absolute()
    assert result.exit_code == 1, result.output
    check_sentence(result.stderr.removesuffix("\n"), [url, "NO_SUCH_BUCKET", f"rayfl resume {here}"])
    line_with(logged(caplog)[:1], [url, here])
    assert_same(undisturbed, here, tmp_path)
    server.make_bucket("bucket")
    result = rayfl("resume", here)
    assert result.exit_code == 0, result.output
    assert set(Storage(url).files()) == set(own_files(here))


def test_a_storage_that_never_answers_does_not_hold_the_run(
    server: Server, folder: str, undisturbed: Path, tmp_path: Path, monkeypatch, caplog
):
    monkeypatch.setattr(object_storage, "REQUEST_S", 1.0)
    passage, record = Passage(server), Recorder.round
    folder = passage.reached.url("bucket/experiments")
    file, url = experiment_file(Path("run.toml"), folder), below(folder, "fedpse")

    def falling_silent(self: Recorder, row, clients, metrics):
        if row.round == ROUNDS - 1:
            passage.silent.set()
        record(self, row, clients, metrics)

    monkeypatch.setattr(Recorder, "round", falling_silent)
    result = rayfl("run", file)
    monkeypatch.setattr(Recorder, "round", record)
    here = Path("runs/fedpse").absolute()
    assert result.exit_code == 1, result.output
    check_sentence(result.stderr.removesuffix("\n"), [url, "NETWORK_CONNECTION", f"rayfl resume {here}"])
    line_with(logged(caplog)[:1], [url, here, "continues"])
    assert_same(undisturbed, here, tmp_path)
    other = below(folder, "other")
    refused(rayfl("run", file, "--output", other), names=[other, "NETWORK_CONNECTION"])
    passage.silent.clear()
    result = rayfl("resume", here)
    assert result.exit_code == 0, result.output
    assert set(Storage(url).files()) == set(own_files(here))
    passage.close()


@pytest.mark.parametrize(("owner", "name", "calls"), [(Stream, "append", 7), (checkpoint, "save_states", 3)])
def test_a_full_disk_while_the_copy_is_made_loses_nothing_there_either(
    owner: Any, name: str, calls: int, folder: str, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file, url = experiment_file(tmp_path / "run.toml", folder), below(folder, "fedpse")
    with pytest.MonkeyPatch.context() as patch:
        refuse(patch, owner, name, calls)
        result = rayfl("run", file)
    here = Path("runs/fedpse").absolute()
    if owner is Stream:
        assert result.exit_code == 1, result.output
        check_sentence(result.stderr.removesuffix("\n"), [here, FULL, f"rayfl resume {here}"])
    else:
        # It goes on without a checkpoint.
        assert result.exit_code == 0, result.output
    # The copy is what is here, and goes on elsewhere.
    assert set(Storage(url).files()) == set(own_files(here))
    move_to(tmp_path / "other", monkeypatch)
    result = rayfl("resume", url)
    assert result.exit_code == (0 if owner is Stream else 2), result.output
    assert_same(undisturbed, Path("runs/fedpse") if owner is Stream else here, tmp_path)


def test_a_disk_that_is_too_full_to_fetch_a_run_is_named_and_left_as_it_was(
    folder: str, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file, url = experiment_file(tmp_path / "run.toml", folder, rounds=2), below(folder, "fedpse")
    assert rayfl("run", file).exit_code == 0
    other = move_to(tmp_path / "other", monkeypatch)
    for command in (("resume", url, "--rounds", ROUNDS), ("show", url)):
        with pytest.MonkeyPatch.context() as patch:
            refuse(patch, Storage, "fetch", 1)
            result = rayfl(*command)
        assert result.exit_code == 1, (command, result.output)
        check_sentence(result.stderr.removesuffix("\n"), [FULL, "again"])
        assert not list(other.rglob("*.json"))
    assert rayfl("resume", url, "--rounds", ROUNDS).exit_code == 0
    assert_same(undisturbed, Path("runs/fedpse"), tmp_path)


def test_a_bucket_that_comes_back_has_all_of_the_run(server: Server, folder: str, monkeypatch, caplog):
    file, url, record = experiment_file(Path("run.toml"), folder), below(folder, "fedpse"), Recorder.round

    def failing(self: Recorder, row, clients, metrics):
        if row.round == 1:
            server.forbid_writing("bucket")
        if row.round == 3:
            server.allow_writing("bucket")
        record(self, row, clients, metrics)

    monkeypatch.setattr(Recorder, "round", failing)
    result = rayfl("run", file)
    assert result.exit_code == 0, result.output
    assert "ACCESS_DENIED" in logged(caplog)[0]
    assert set(Storage(url).files()) == set(own_files(Path("runs/fedpse")))


def test_a_place_that_cannot_be_written_to_is_refused_before_the_run(server: Server, folder: str):
    missing = experiment_file(Path("missing.toml"), server.url("nobody/here"))
    refused(rayfl("run", missing), names=["NO_SUCH_BUCKET", "bucket"])
    server.forbid_writing("bucket")
    refused(rayfl("run", experiment_file(Path("forbidden.toml"), folder)), names=["ACCESS_DENIED"])
    assert not Path("runs").exists()


def test_an_account_that_the_storage_does_not_know_is_refused(machine: Path):
    # The first call makes the bucket; those after it need an account, and there is none.
    with serving(INITIAL_NO_AUTH_ACTION_COUNT="1") as strict:
        strict.make_bucket("bucket")
        file = experiment_file(Path("run.toml"), strict.url("bucket/experiments"))
        refused(rayfl("run", file), names=["INVALID_ACCESS_KEY_ID", "account"])
    assert not Path("runs").exists()


class _NeedsAccount(BaseHTTPRequestHandler):
    """Answers as S3 does where a call says nothing of an account."""

    def answer(self) -> None:
        known = "Authorization" in self.headers
        body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        self.send_response(500 if known else 403)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(0 if self.command == "HEAD" else len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def log_message(self, *words: object) -> None:
        """Say nothing."""


def test_missing_credentials_are_refused(monkeypatch: pytest.MonkeyPatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(Path.cwd()))
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _NeedsAccount) as strict:
        threading.Thread(target=strict.serve_forever, daemon=True).start()
        file = experiment_file(Path("run.toml"), Server(strict.server_address[1]).url("bucket/experiments"))
        refused(rayfl("run", file), names=["ACCESS_DENIED", "account"])
        strict.shutdown()
    assert not Path("runs").exists()


def test_a_run_in_the_storage_is_replaced_only_when_asked(folder: str, tmp_path: Path, monkeypatch):
    file, url = experiment_file(tmp_path / "run.toml", folder, rounds=2), below(folder, "fedpse")
    assert rayfl("run", file).exit_code == 0
    move_to(tmp_path / "other", monkeypatch)
    # Here and there the next free name.
    result = rayfl("run", file)
    assert result.exit_code == 0 and f"copy: {below(folder, 'fedpse-2')}" in result.output
    move_to(tmp_path / "third", monkeypatch)
    refused(rayfl("run", file, "--output", url), names=[url, "--overwrite"])
    changed = rayfl("run", file, "seed=9", "--output", url, "--resume")
    refused(changed, names=["finished", "seed=1", "9"])
    before = set(Storage(url).files())
    result = rayfl("run", file, "rounds=1", "--output", url, "--overwrite")
    assert result.exit_code == 0, result.output
    assert set(Storage(url).files()) == set(own_files(Path("runs/fedpse"))) != before


def test_runs_are_listed_and_shown_where_they_lie(server: Server, folder: str, machine: Path):
    file, url = experiment_file(Path("run.toml"), folder, rounds=2), below(folder, "fedpse")
    assert rayfl("run", file).exit_code == 0
    assert rayfl("sweep", file, "sweep.seed=[1, 2]", "rounds=1", "name=both").exit_code == 0
    # A run that was cut before its first round, and a file of somebody else.
    storage = Storage(folder)
    for name in ("experiment.json", "platform.json"):
        storage.put(f"cut/{name}", Path("runs/fedpse", name))
    storage.put("notes.txt", file)
    result = rayfl("show", url)
    assert result.exit_code == 0, result.output
    line_with(result.output, ["finished", "2 of 2"])
    line_with(result.output, [f"rayfl report '{url}'"])
    assert 'name = "fedpse"' in result.output and "uplink" in result.output
    line_with(rayfl("show", below(folder, "cut")).output, [f"rayfl resume '{below(folder, 'cut')}'"])
    refused(rayfl("show", below(folder, "nothing")), names=["nothing", "experiment.json"])
    refused(rayfl("show", server.url("nobody/here")), names=["s3://nobody/here"])
    refused(rayfl("show", "s5://bucket/a"), names=["s5://"])
    refused(rayfl("ls", folder), names=[folder])
    assert sorted(path.name for path in machine.iterdir()) == ["run.toml", "runs"]


def test_a_url_is_refused_where_a_path_is_meant(folder: str):
    file = experiment_file(Path("run.toml"), "runs")
    for arguments in (
        ("sweep", file, "--dir", folder),
        ("report", "runs", "--output", folder),
        ("run", folder),
    ):
        refused(rayfl(*arguments), names=["URL", "path"])
    refused(rayfl("run", file, "--output", "s5://bucket/a"), names=["s5://"])
    refused(rayfl("run", file, "output.directory=s5://bucket/a"), names=["s5://"])
    refused(rayfl("resume", below(folder, "nothing")), names=["nothing", "experiment.json"])
    refused(rayfl("report", below(folder, "nothing")), names=["nothing", "experiment.json"])
    assert sorted(path.name for path in Path().iterdir()) == ["run.toml"]


def test_from_python(folder: str, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, url = experiment_file(tmp_path / "run.toml", "runs", rounds=2), below(folder, "mine")
    first = library.run(file, directory=url, progress=False)
    assert first.directory == Path("runs/mine").absolute()
    move_to(tmp_path / "other", monkeypatch)
    found = library.resume(url, rounds=ROUNDS, progress=False)
    assert found.finished and loaded(url).finished
    assert len(loaded(url).arrow.rounds) == ROUNDS
    assert_same(undisturbed, found.directory, tmp_path)
    for call in (library.load, library.resume):
        with refused(names=[Path(url), "URL"]):
            call(Path(url))


def test_a_sweep_copies_its_runs_and_its_page(folder: str):
    file = experiment_file(Path("run.toml"), folder, rounds=1)
    result = rayfl("sweep", file, "sweep.seed=[1, 2]")
    assert result.exit_code == 0, result.output
    names = Storage(below(folder, "fedpse")).files()
    assert {"seed=1/experiment.json", "seed=2/experiment.json", "comparison.html"} <= set(names)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_on_ray_the_driver_copies(folder: str, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, url = experiment_file(tmp_path / "run.toml", folder, rounds=2), below(folder, "fedpse")
    result = rayfl("run", file, "runtime.executor=ray", "runtime.actors=2")
    assert result.exit_code == 0, result.output
    move_to(tmp_path / "other", monkeypatch)
    result = rayfl("resume", url, "runtime.executor=inline", "--rounds", ROUNDS)
    assert result.exit_code == 0, result.output
    assert_same(undisturbed, Path("runs/fedpse"), tmp_path)

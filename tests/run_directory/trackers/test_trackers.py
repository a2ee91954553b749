"""Trackers get every round once, also after a crash; what fails in one never ends a run; nobody else loads them."""

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.plugins.hparams import metadata as hparams
from tensorboard.plugins.hparams.api_pb2 import Status  # pyright: ignore[reportAttributeAccessIssue]

from rayfl.experiment.experiment import Output
from rayfl.rounds.ledger import MetricRow, RoundRow
from rayfl.run_directory import tracking
from rayfl.run_directory.description import describe_run
from rayfl.run_directory.record import Recorder
from rayfl.run_directory.run_files import require_no_links, require_own_entries
from rayfl.run_directory.run_folder import create_run_directory
from rayfl.run_directory.saved_models import save_model
from rayfl.run_directory.tables import read_tables
from rayfl.run_directory.trackers import tracker as trackers
from rayfl.run_directory.trackers.tracker import TrackerName
from rayfl.run_directory.tracking import Stopped, Tracking
from tests.actors.toys import logged
from tests.jobs.commands import rayfl
from tests.refusals import check_sentence, line_with, refused
from tests.run_directory.trackers.readers import mlflow_client, mlflow_runs, points, tensorboard, wandb_records

ALL: tuple[TrackerName, ...] = ("tensorboard", "mlflow", "wandb")
EXPERIMENT = {
    "name": "demo",
    "rounds": 4,
    "method": {"name": "fedavg", "lr": 0.1},
    "data": {"name": "digits", "root": None},
    "output": {"group": "a sweep", "tags": ["pilot"]},
}


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The variables of whoever runs the tests do not count, and wandb's own cache is not theirs."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))


def described(path: Path) -> Path:
    directory = create_run_directory(path)
    describe_run(directory, EXPERIMENT, {"torch": "2.13.0"}, "seed = 1\n")
    return directory


def play(
    directory: Path, rounds: range, names: tuple[TrackerName, ...] = ALL, end: type[BaseException] | None = None
) -> None:
    """Record and track rounds whose accuracy is round / 8, after those on record before `rounds`."""
    earlier = read_tables(directory) if (directory / "records").exists() else None
    with Recorder(directory, earlier, rounds.start) as recorder, Tracking(directory, names) as following:
        for round in rounds:
            row = RoundRow(round, 2, 1, 80 + round, 320, 1.5, 0.125)
            recorder.round(row, [], [MetricRow(None, "pooled/accuracy", round / 8), MetricRow(0, "own/accuracy", 0.5)])
            following.round(row, {"pooled/accuracy": round / 8})
        if end is not None:
            raise end


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three rounds that played the last two again, after a crash and its only checkpoint, and one more."""
    directory = described(tmp_path_factory.mktemp("runs") / "a run")
    with pytest.raises(ZeroDivisionError):
        play(directory, range(3), end=ZeroDivisionError)
    play(directory, range(1, 4))
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_rounds_that_are_played_again_are_there_once(crashed: Path, name: str):
    assert points(name, crashed, "pooled/accuracy") == [(0, 0.0), (1, 0.125), (2, 0.25), (3, 0.375)]
    # Bits up to round r, both ways: sum of 80 + k + 320 for k = 0..r, that is 400, 801, 1203, 1606.
    megabytes = [value for _, value in points(name, crashed, "communication/total_megabytes")]
    assert megabytes == pytest.approx([400 / 8e6, 801 / 8e6, 1203 / 8e6, 1606 / 8e6])
    assert [value for _, value in points(name, crashed, "time/wall_s")] == [0.125] * 4


def test_mlflow_has_one_run_with_name_group_tags_and_hyper_parameters(crashed: Path):
    (run,) = mlflow_runs(crashed)
    assert run.info.run_name == "a run" and run.info.status == "FINISHED"
    assert mlflow_client(crashed).get_experiment(run.info.experiment_id).name == "demo"
    wanted = {"method": "fedavg", "data": "digits", "group": "a sweep", "pilot": "true"}
    assert wanted.items() <= run.data.tags.items()
    assert run.data.tags["mlflow.note.content"] == "```toml\nseed = 1\n```\n"
    assert run.data.params["method.lr"] == "0.1" and run.data.params["output.tags"] == '["pilot"]'
    assert "data.root" not in run.data.params and "own/accuracy" not in run.data.metrics


def test_wandb_has_one_run_with_name_group_tags_and_settings(crashed: Path):
    runs = [record.run for record in wandb_records(crashed) if record.WhichOneof("record_type") == "run"]
    assert len(runs) >= 2 and len({run.run_id for run in runs}) == 1
    for run in runs:
        assert (run.display_name, run.project, run.run_group) == ("a run", "demo", "a sweep")
        assert list(run.tags) == ["fedavg", "digits", "pilot"] and "seed = 1" in run.notes
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["method"] == EXPERIMENT["method"] and config["rounds"] == 4
    ends = [record.exit.exit_code for record in wandb_records(crashed) if record.WhichOneof("record_type") == "exit"]
    assert ends == [1, 0]


def test_tensorboard_has_hyper_parameters_and_the_experiment_as_text(crashed: Path):
    events = tensorboard(crashed)
    about = events.summary_metadata[hparams.SESSION_START_INFO_TAG].plugin_data.content
    start = hparams.parse_session_start_info_plugin_data(about)
    assert start.hparams["method.lr"].number_value == 0.1 and start.hparams["method.name"].string_value == "fedavg"
    end = hparams.parse_session_end_info_plugin_data(
        events.summary_metadata[hparams.SESSION_END_INFO_TAG].plugin_data.content
    )
    assert end.status == Status.Value("STATUS_SUCCESS")
    assert events.summary_metadata["experiment/text_summary"].plugin_data.plugin_name == "text"
    (text, *_) = events.Tensors("experiment/text_summary")
    assert text.tensor_proto.string_val == [b"```toml\nseed = 1\n```\n"]
    assert {"pooled/accuracy", "clients/delivered", "time/simulated_s"} <= set(events.Tags()["scalars"])


def test_the_directory_holds_nothing_that_is_not_known_as_ours(crashed: Path):
    require_own_entries(crashed)
    require_no_links(crashed)
    assert not (crashed / "wandb" / "latest-run").exists()


@pytest.mark.parametrize("place", ["mlflow/notes.txt", "wandb/notes.txt", "mlflow/0/notes.txt", "trackers.txt"])
def test_a_file_of_the_users_among_them_is_not_removed(tmp_path: Path, place: str):
    directory = described(tmp_path / "run")
    play(directory, range(1), names=("mlflow",))
    (directory / place).parent.mkdir(exist_ok=True)
    (directory / place).write_text("mine")
    with refused(names=[directory / place]):
        create_run_directory(directory, overwrite=True)
    (directory / place).unlink()
    create_run_directory(directory, overwrite=True)
    assert [path.name for path in directory.iterdir() if path.name != "lock"] in ([], ["wandb"])


@pytest.mark.parametrize("name", ALL)
def test_a_tracker_that_is_asked_for_later_gets_all_rounds(tmp_path: Path, name: TrackerName):
    directory = described(tmp_path / "run")
    play(directory, range(2), names=())
    assert not any((directory / folder).exists() for folder in (*ALL, "trackers.json"))
    play(directory, range(2, 3), names=(name,))
    assert points(name, directory, "pooled/accuracy") == [(0, 0.0), (1, 0.125), (2, 0.25)]
    assert points(name, directory, "communication/uplink_bits") == [(0, 80), (1, 81), (2, 82)]


def test_wandb_may_begin_again_within_the_second(tmp_path: Path):
    directory = described(tmp_path / "run")
    for round in range(2):
        play(directory, range(round, round + 1), names=("wandb",))
    assert points("wandb", directory, "pooled/accuracy") == [(0, 0.0), (1, 0.125)]
    require_own_entries(directory)


def test_a_run_that_a_signal_stopped_is_no_failure(tmp_path: Path):
    directory = described(tmp_path / "run")
    with pytest.raises(Stopped):
        play(directory, range(1), names=("mlflow",), end=Stopped)
    assert [run.info.status for run in mlflow_runs(directory)] == ["KILLED"]


def test_a_moved_run_goes_on_in_its_new_place_alone(tmp_path: Path):
    before, after = described(tmp_path / "before"), tmp_path / "after"
    play(before, range(1), names=("mlflow",))
    before.rename(after)
    play(after, range(1, 2), names=("mlflow",))
    with Recorder(after, read_tables(after), 2), Tracking(after, ("mlflow",)) as following:
        following.model(Path(shutil.copy(after / "experiment.toml", after / "global.safetensors")))
    assert points("mlflow", after, "pooled/accuracy") == [(0, 0.0), (1, 0.125)]
    (copy,) = after.glob("mlflow/*/*/artifacts/models/global.safetensors")
    assert copy.read_text() == "seed = 1\n" and not before.exists()


@pytest.mark.parametrize("content", ["{", "[]", '{"mlflow": 3}', '{"mlflow": {"place": "x", "run": "y"}}'])
def test_damaged_notes_begin_a_new_run_with_all_rounds(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture):
    directory = described(tmp_path / "run")
    play(directory, range(1), names=())
    (directory / "trackers.json").write_text(content)
    play(directory, range(1, 2), names=("mlflow",))
    assert points("mlflow", directory, "pooled/accuracy") == [(0, 0.0), (1, 0.125)]
    line_with(logged(caplog), [directory / "trackers.json"])


def test_a_run_that_was_deleted_in_mlflow_is_begun_again(tmp_path: Path):
    directory = described(tmp_path / "run")
    play(directory, range(1), names=("mlflow",))
    (gone,) = mlflow_runs(directory)
    mlflow_client(directory).delete_run(gone.info.run_id)
    play(directory, range(1, 2), names=("mlflow",))
    assert points("mlflow", directory, "pooled/accuracy") == [(0, 0.0), (1, 0.125)]


class Failing:
    """A tracker that takes so many calls."""

    mark, next_round = None, 0

    def __init__(self, calls: int, sent: list[int]) -> None:
        self.left, self.sent = calls, sent

    def round(self, round: int, values: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise ConnectionError("the server\nis away")
        self.sent.append(round)

    model = round

    def close(self, status: str) -> None:
        raise ConnectionError("still away")


def with_failing(patch: pytest.MonkeyPatch, make: Callable[[], Failing]) -> None:
    """Let mlflow be another tracker, or one that cannot begin."""
    real = tracking.adapter
    patch.setattr(tracking, "adapter", lambda name: (lambda *_: make()) if name == "mlflow" else real(name))


def refusing() -> Failing:
    raise ConnectionError("the server\nis away")


@pytest.mark.parametrize("calls", [None, 0, 1])
def test_a_tracker_that_fails_is_left_aside_with_one_notice_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, calls: int | None
):
    sent: list[int] = []
    directory = described(tmp_path / "run")
    with_failing(monkeypatch, refusing if calls is None else lambda: Failing(calls, sent))
    play(directory, range(3), names=("mlflow", "tensorboard"))
    (notice,) = logged(caplog)
    check_sentence(notice, ["mlflow", "ConnectionError: the server is away", "rayfl resume"])
    assert sent == list(range(calls or 0))
    assert [step for step, _ in points("tensorboard", directory, "pooled/accuracy")] == [0, 1, 2]


def test_what_a_failed_tracker_lacks_is_sent_when_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from rayfl.run_directory.trackers.mlflow_run import MlflowRun

    directory = described(tmp_path / "run")
    whole = MlflowRun.round

    def failing(self: MlflowRun, round: int, values: Any) -> None:
        if round == 1:
            raise OSError("no space left on device")
        whole(self, round, values)

    with monkeypatch.context() as patch:
        patch.setattr(MlflowRun, "round", failing)
        play(directory, range(3), names=("mlflow",))
    assert points("mlflow", directory, "pooled/accuracy") == [(0, 0.0)]
    assert [run.info.status for run in mlflow_runs(directory)] == ["FAILED"]
    play(directory, range(3, 4), names=("mlflow",))
    assert points("mlflow", directory, "pooled/accuracy") == [(0, 0.0), (1, 0.125), (2, 0.25), (3, 0.375)]


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_tracker_that_is_not_installed_is_refused_before_the_run(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda one, *more: None if one == name else real(one, *more))
    result = rayfl("run", "demo", f'output.track=["tensorboard", "{name}"]', "--inline", "--output", tmp_path / "run")
    refused(
        result,
        names=["output.track", name, f"pip install 'rayfl[{name}]'"],
    )
    assert not (tmp_path / "run").exists()


def test_the_setting_is_one_list():
    # Any: as a file has it.
    def output(**values: Any) -> Output:
        return Output(**values)

    assert Output().track == ("tensorboard",)
    assert output(track="mlflow").track == ("mlflow",) and output(track=[]).track == ()
    with refused(names=["track", "mlflow"]):
        Output(track=("mlflow", "mlflow"))
    with refused(names=["track", "aim", "tensorboard", "mlflow", "wandb"]):
        output(track=["aim"])
    with refused(names=["tags", "no/slash"]):
        Output(tags=("no/slash",))


def test_the_writer_gets_the_drivers_variables_of_the_trackers_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "./store")
    monkeypatch.setenv("WANDB_MODE", "online")
    assert trackers.environment(["tensorboard"]) == {}
    assert trackers.environment(["mlflow"])["MLFLOW_TRACKING_URI"] == (tmp_path / "store").as_uri()
    assert trackers.environment(["wandb"])["WANDB_MODE"] == "online"
    assert not any(key.startswith("WANDB") for key in trackers.environment(["mlflow"]))
    monkeypatch.setenv("WANDB_NOTES", "x" * 5000)
    with refused(names=["WANDB_NOTES", "4,000"]):
        trackers.environment(["wandb"])


def test_no_package_tells_its_makers_of_its_use_unless_the_user_lets_it(monkeypatch: pytest.MonkeyPatch):
    # Set first, so that what the adapters set is taken back.
    for name in ("MLFLOW_DISABLE_TELEMETRY", "WANDB_ERROR_REPORTING"):
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)
    for name in ALL:
        trackers.adapter(name)
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true" and os.environ["WANDB_ERROR_REPORTING"] == "false"
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "false")
    trackers.adapter("mlflow")
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "false"


def test_a_sweeps_runs_are_a_group_of_one_experiment_with_their_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Also into the place that the user names.
    store = tmp_path / "store"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    file = tmp_path / "small.toml"
    file.write_text(
        'rounds = 1\ndata = "digits"\npartition = "iid"\nclients.count = 2\nmodel = "logistic"\nmethod = "fedavg"\n'
        "[runtime]\nexecutor = 'inline'\n[output]\nreport = false\ntrack = ['mlflow']\n[sweep]\nseed = [1, 2]\n"
    )
    monkeypatch.setattr("jobs.sweep.draw", lambda *_: None)
    result = rayfl("sweep", file, "--dir", tmp_path / "sweep")
    assert result.exit_code == 0, result.output
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "mlflow").symlink_to(store)
    runs = sorted(mlflow_runs(tmp_path / "link"), key=lambda run: run.info.run_name or "")
    assert [run.info.run_name for run in runs] == ["seed=1", "seed=2"]
    assert [run.data.tags["group"] for run in runs] == ["sweep", "sweep"]
    assert [run.data.params["seed"] for run in runs] == ["1", "2"]
    client = mlflow_client(tmp_path / "link")
    for run in runs:
        assert [one.path for one in client.list_artifacts(run.info.run_id)] == ["experiment.toml", "models"]
        names = [one.path for one in client.list_artifacts(run.info.run_id, "models")]
        assert names == ["models/global.safetensors", "models/inputs.json"]
    assert not list((tmp_path / "sweep").glob("*/mlflow")) and not list((tmp_path / "sweep").glob("*/tensorboard"))


def test_final_models_are_artifacts_whose_bytes_are_there_once(tmp_path: Path):
    import torch

    directory = described(tmp_path / "run")
    with Recorder(directory), Tracking(directory, ("mlflow", "wandb")) as following:
        [path] = save_model(directory, "global", [{"w": torch.ones(3)}])
        (inputs := path.with_name("inputs.json")).write_text("{}")
        following.model(path)
    for file in (path, inputs):
        (artifact,) = directory.glob(f"mlflow/*/*/artifacts/models/{file.name}")
        assert artifact.stat().st_ino == file.stat().st_ino
    artifacts = [one.request.log_artifact.artifact for one in wandb_records(directory) if one.request.ByteSize()]
    artifacts += [one.artifact for one in wandb_records(directory) if one.WhichOneof("record_type") == "artifact"]
    (model,) = [one for one in artifacts if one.type == "model"]
    found = {(entry.path, entry.local_path, entry.size) for entry in model.manifest.contents}
    assert found == {(file.name, str(file), file.stat().st_size) for file in (path, inputs)}
    require_own_entries(directory)

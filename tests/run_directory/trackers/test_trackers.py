"""Trackers get every round as it ends, also after a crash; what fails in one never ends a run."""

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.plugins.hparams import metadata as hparams
from tensorboard.plugins.hparams.api_pb2 import Status  # pyright: ignore[reportAttributeAccessIssue]

from rayfl.experiment.experiment import Output
from rayfl.rounds.ledger import MetricRow, RoundRow
from rayfl.run_directory.description import Description
from rayfl.run_directory.record import Recorder, read_tables
from rayfl.run_directory.run_files import require_no_links, require_own_entries
from rayfl.run_directory.run_folder import create_run_directory
from rayfl.run_directory.saved_models import save_model
from rayfl.run_directory.trackers import tracker as trackers
from rayfl.run_directory.trackers import wandb_run
from rayfl.run_directory.trackers.tracker import TrackerName
from rayfl.run_directory.tracking import Tracking
from tests.actors.toys import logged
from tests.jobs.commands import rayfl
from tests.refusals import check_sentence, refused
from tests.run_directory.trackers.readers import points, tensorboard, wandb_records

ALL: tuple[TrackerName, ...] = ("tensorboard", "wandb")
EXPERIMENT = {
    "name": "demo",
    "rounds": 4,
    "method": {"name": "fedavg", "lr": 0.1},
    "data": {"name": "digits", "root": None},
}


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The variables of whoever runs the tests do not count, and wandb's own cache is not theirs."""
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_RUN_GROUP", "WANDB_TAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))


def described(path: Path) -> Path:
    directory = create_run_directory(path)
    Description(EXPERIMENT).write(directory, {"torch": "2.13.0"})
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
def test_rounds_that_are_played_again_have_the_same_values(crashed: Path, name: str):
    accuracies = points(name, crashed, "pooled/accuracy")
    assert sorted(set(accuracies)) == [(0, 0.0), (1, 0.125), (2, 0.25), (3, 0.375)]
    # TensorBoard drops the earlier values of rounds 1 and 2, and W&B has them twice.
    assert len(accuracies) == (4 if name == "tensorboard" else 6)
    # Bits up to round r, both ways: sum of 80 + k + 320 for k = 0..r, that is 400, 801, 1203, 1606.
    megabytes = sorted(set(points(name, crashed, "communication/total_megabytes")))
    assert [value for _, value in megabytes] == pytest.approx([400 / 8e6, 801 / 8e6, 1203 / 8e6, 1606 / 8e6])
    assert {value for _, value in points(name, crashed, "time/wall_s")} == {0.125}


def test_wandb_has_one_run_with_name_group_and_settings(crashed: Path):
    runs = [record.run for record in wandb_records(crashed) if record.WhichOneof("record_type") == "run"]
    assert len(runs) >= 2 and len({run.run_id for run in runs}) == 1
    for run in runs:
        assert (run.display_name, run.project, run.run_group) == ("a run", "demo", crashed.parent.name)
        assert 'name = "demo"' in run.notes
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
    experiment = (crashed / "experiment.toml").read_text(encoding="utf-8")
    assert text.tensor_proto.string_val == [f"```toml\n{experiment}```\n".encode()]
    assert {"pooled/accuracy", "clients/delivered", "time/simulated_s"} <= set(events.Tags()["scalars"])


def test_the_directory_holds_nothing_that_is_not_known_as_ours(crashed: Path):
    require_own_entries(crashed)
    require_no_links(crashed)
    assert not (crashed / "wandb" / "latest-run").exists()


@pytest.mark.parametrize("place", ["wandb/notes.txt", "tensorboard/notes.txt", "trackers.txt"])
def test_a_file_of_the_users_among_them_is_not_removed(tmp_path: Path, place: str):
    directory = described(tmp_path / "run")
    play(directory, range(1), names=("tensorboard",))
    (directory / place).parent.mkdir(exist_ok=True)
    (directory / place).write_text("mine")
    with refused(names=[directory / place]):
        create_run_directory(directory, overwrite=True)
    (directory / place).unlink()
    create_run_directory(directory, overwrite=True)
    assert [path.name for path in directory.iterdir() if path.name != "lock"] in ([], ["wandb"])


@pytest.mark.parametrize("name", ALL)
def test_a_tracker_that_is_asked_for_later_gets_the_rounds_from_then_on(tmp_path: Path, name: TrackerName):
    directory = described(tmp_path / "run")
    play(directory, range(2), names=())
    assert not any((directory / folder).exists() for folder in ALL)
    play(directory, range(2, 3), names=(name,))
    assert points(name, directory, "pooled/accuracy") == [(2, 0.25)]
    assert points(name, directory, "communication/total_megabytes") == [(2, pytest.approx(1203 / 8e6))]


def test_wandb_may_begin_again_within_the_second(tmp_path: Path):
    directory = described(tmp_path / "run")
    for round in range(2):
        play(directory, range(round, round + 1), names=("wandb",))
    assert points("wandb", directory, "pooled/accuracy") == [(0, 0.0), (1, 0.125)]
    require_own_entries(directory)


class Failing:
    """A tracker that takes so many calls."""

    def __init__(self, calls: int, sent: list[int]) -> None:
        self.left, self.sent = calls, sent

    def round(self, round: int, values: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise ConnectionError("the server\nis away")
        self.sent.append(round)

    model = round

    def close(self, finished: bool) -> None:
        raise ConnectionError("still away")


def with_failing(patch: pytest.MonkeyPatch, make: Callable[[], Failing]) -> None:
    """Let wandb be another tracker, or one that cannot begin."""
    patch.setattr(wandb_run, "WandbRun", lambda *_: make())


def refusing() -> Failing:
    raise ConnectionError("the server\nis away")


@pytest.mark.parametrize("calls", [None, 0, 1])
def test_a_tracker_that_fails_is_left_aside_with_one_notice_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, calls: int | None
):
    sent: list[int] = []
    directory = described(tmp_path / "run")
    with_failing(monkeypatch, refusing if calls is None else lambda: Failing(calls, sent))
    play(directory, range(3), names=("wandb", "tensorboard"))
    (notice,) = logged(caplog)
    check_sentence(notice, ["wandb", "ConnectionError: the server is away"])
    assert sent == list(range(calls or 0))
    assert [step for step, _ in points("tensorboard", directory, "pooled/accuracy")] == [0, 1, 2]


def test_a_tracker_that_is_not_installed_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda one, *more: None if one == "wandb" else real(one, *more))
    result = rayfl("run", "demo", 'output.track=["tensorboard", "wandb"]', "--inline", "--output", tmp_path / "run")
    refused(result, names=["output.track", "wandb", "pip install 'rayfl[wandb]'"])
    assert not (tmp_path / "run").exists()


def test_the_setting_is_one_list():
    # Any: as a file has it.
    def output(**values: Any) -> Output:
        return Output(**values)

    assert Output().track == ("tensorboard",)
    assert output(track="wandb").track == ("wandb",) and output(track=[]).track == ()
    with refused(names=["track", "aim", "tensorboard", "wandb"]):
        output(track=["aim"])


def test_the_writer_gets_the_drivers_variables_of_the_trackers_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    assert trackers.environment(["tensorboard"]) == {}
    assert trackers.environment(["wandb"])["WANDB_MODE"] == "online"


def test_a_sweeps_runs_are_a_group_of_one_project_with_their_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # W&B's reports of errors to its makers are off unless the user lets it. Set first, so that it is taken back.
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "before")
    monkeypatch.delenv("WANDB_ERROR_REPORTING")
    file = tmp_path / "small.toml"
    file.write_text(
        'rounds = 1\ndata = "digits"\npartition = "iid"\nclients.count = 2\nmodel = "logistic"\nmethod = "fedavg"\n'
        "[runtime]\nexecutor = 'inline'\n[output]\nreport = false\ntrack = ['wandb']\n[sweep]\nseed = [1, 2]\n"
    )
    monkeypatch.setattr("jobs.sweep.draw", lambda *_: None)
    result = rayfl("sweep", file, "--dir", tmp_path / "sweep")
    assert result.exit_code == 0, result.output
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"
    for seed in (1, 2):
        records = list(wandb_records(tmp_path / "sweep" / f"seed={seed}"))
        (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
        assert (run.display_name, run.project, run.run_group) == (f"seed={seed}", "small", "sweep")
        assert {"key": "seed", "value_json": str(seed)} in [
            {"key": item.key, "value_json": item.value_json} for item in run.config.update
        ]
        (model,) = [one.artifact for one in records if one.WhichOneof("record_type") == "artifact"]
        assert [entry.path for entry in model.manifest.contents] == ["global.safetensors", "inputs.json"]
    assert not list((tmp_path / "sweep").glob("*/tensorboard"))


def test_final_models_are_artifacts_whose_bytes_are_not_copied(tmp_path: Path):
    import torch

    directory = described(tmp_path / "run")
    with Recorder(directory), Tracking(directory, ("wandb",)) as following:
        [path] = save_model(directory, "global", [{"w": torch.ones(3)}])
        (inputs := path.with_name("inputs.json")).write_text("{}")
        following.model(path)
    artifacts = [one.request.log_artifact.artifact for one in wandb_records(directory) if one.request.ByteSize()]
    artifacts += [one.artifact for one in wandb_records(directory) if one.WhichOneof("record_type") == "artifact"]
    (model,) = [one for one in artifacts if one.type == "model"]
    found = {(entry.path, entry.local_path, entry.size) for entry in model.manifest.contents}
    assert found == {(file.name, str(file), file.stat().st_size) for file in (path, inputs)}
    require_own_entries(directory)

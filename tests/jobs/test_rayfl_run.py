"""`rayfl.run`, `stream`, `resume`, `sweep`, `load`: the command's bits, as Python objects; mistakes as exceptions."""

import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import rayfl
from jobs import single
from jobs.python_api import SweepFailed
from rayfl.methods.server.fedavg import FedAvg
from rayfl.run_directory.saved_models import load_model
from tests.actors.toys import assert_same_run
from tests.jobs.commands import rayfl as command
from tests.refusals import check_sentence, refused

# Any: pandas has types of its own for every cell.
API: Any = rayfl
SETTINGS: dict[str, Any] = {
    "rounds": 3,
    "data": "digits",
    "partition": {"name": "dirichlet-client", "alpha": 0.5},
    "clients": {"count": 4, "per_round": 2},
    "model": "logistic",
    "method": {"name": "ditto", "lr": 0.1},
    "runtime": {"executor": "inline"},
    "output": {"report": False},
}
FILE = """
rounds = 3
data = "digits"
partition = {name = "dirichlet-client", alpha = 0.5}
clients = {count = 4, per_round = 2}
model = "logistic"
method = {name = "ditto", lr = 0.1}
output = {report = false}
"""


class Failing(FedAvg):
    """A method that fails at a learning rate above 1."""

    paper = "None"

    def begin(self, state: Any, received: Any, ctx: Any) -> Any:
        if self.hyper.lr > 1:
            raise RuntimeError("too fast")
        return super().begin(state, received, ctx)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of Ditto: 3 rounds, 2 of 4 clients in each."""
    return API.run(directory=tmp_path_factory.mktemp("played") / "run", progress=False, **SETTINGS)


def test_keywords_a_file_overrides_and_an_experiment_are_one_run(played: Any, tmp_path: Path):
    (tmp_path / "x.toml").write_text(FILE, encoding="utf-8")
    assert command("run", tmp_path / "x.toml", "--inline", "--output", tmp_path / "command").exit_code == 0
    rounds: list[Any] = []
    # Settings of each kind, which give what the file has.
    given = {"method.lr": 0.1, "clients": {"count": 4, "per_round": 2}}
    API.run(
        tmp_path / "x.toml",
        "runtime.executor=inline",
        "method.lr=0.3",
        directory=tmp_path / "file",
        on_round=rounds.append,
        progress=False,
        **given,
    )
    changed = API.Experiment(**{**SETTINGS, "rounds": 2})
    assert [one.round for one in rounds] == [0, 1, 2] and {one.planned for one in rounds} == {3}
    API.run(changed, directory=str(tmp_path / "changed"), progress=False, rounds=3)
    for other in ("command", "file", "changed"):
        assert_same_bits(played.directory, tmp_path / other, tmp_path)


def assert_same_bits(a: Path, b: Path, folder: Path) -> None:
    """Two finished runs are the same; compared are copies, which `assert_same_run` may change."""
    for name, directory in (("a", a), ("b", b)):
        shutil.copytree(directory, folder / "compared" / name)
    assert_same_run(folder / "compared" / "a", folder / "compared" / "b")
    shutil.rmtree(folder / "compared")


def test_a_callback_that_has_enough_leaves_a_run_that_can_go_on(tmp_path: Path):
    rounds: list[Any] = []

    def is_enough(one: Any) -> bool:
        rounds.append(one)
        return True

    found = API.run(directory=tmp_path / "run", on_round=is_enough, progress=False, **{**SETTINGS, "rounds": 40})
    assert rounds[0].planned == 40 and 0 < rounds[0].metrics["own/accuracy"] < 1
    assert not found.finished and 1 <= len(found.rounds) < 40
    assert (found.directory / "checkpoints" / f"{len(found.rounds):08}").is_dir()


def test_a_callback_that_raises_ends_the_run_and_it_is_resumed(played: Any, tmp_path: Path):
    def stop(one: Any) -> None:
        if one.round == 1:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        API.run(directory=tmp_path / "run", on_round=stop, progress=False, **{**SETTINGS, "checkpoint": {"every": 1}})
    assert not API.load(tmp_path / "run").finished
    resumed = API.resume(tmp_path / "run", progress=False)
    assert resumed.finished
    assert_same_bits(played.directory, tmp_path / "run", tmp_path)
    with refused(names=["method.lr=0.1", "new run"]):
        API.resume(tmp_path / "run", **{"method.lr": 0.2})
    assert len(API.resume(tmp_path / "run", "rounds=5", progress=False).rounds) == 5


def test_tables_are_data_frames_of_what_was_recorded(played: Any):
    for name in ("rounds", "clients", "metrics"):
        frame, table = getattr(played, name), getattr(played.arrow, name)
        assert list(frame.columns) == table.column_names and len(frame) == table.num_rows > 0
    assert played.metrics.client.isna().any() and played.metrics.client.dropna().between(0, 3).all()
    own = played.frame["own/accuracy"]
    assert own.iloc[-1] == played.summary["final"]["own/accuracy"]
    bits = played.rounds.uplink_bits.sum() + played.rounds.downlink_bits.sum()
    assert played.frame.total_megabytes.iloc[-1] == pytest.approx(bits / 8e6)
    assert played.frame.total_simulated_s.tolist() == pytest.approx(played.rounds.simulated_s.cumsum().tolist())
    again = API.load(str(played.directory))
    assert type(again).__name__ == "RunResults"
    pd.testing.assert_frame_equal(again.frame, played.frame)
    assert again.finished
    check_sentence(repr(again), ["3 rounds", played.directory])


def test_a_model_is_the_module_with_the_weights_that_were_evaluated(played: Any):
    results = API.load(played.directory)
    assert type(results).__name__ == "RunResults" and results.model_names == ["global", "personal"]
    before = torch.get_rng_state()
    model = results.model()
    assert torch.equal(torch.get_rng_state(), before) and not model.training
    dataset = API.Experiment(**SETTINGS).data.load()
    with torch.no_grad():
        right = model.network(dataset.prepare(dataset.test.inputs)).argmax(1).numpy() == dataset.test.labels
    assert right.mean() == pytest.approx(results.summary["final"]["pooled/accuracy"])
    client = int(results.clients.client.iloc[0])
    personal = results.personal_model(client).network.state_dict()
    written = load_model(results.directory, "personal")
    assert personal and all(torch.equal(tensor, written[f"{client}/{name}"]) for name, tensor in personal.items())
    with refused(names=["client 9", "model"]):
        results.personal_model(9)


def test_a_model_is_that_of_the_json_file_whatever_the_toml_file_says(played: Any, tmp_path: Path):
    directory = shutil.copytree(played.directory, tmp_path / "run")
    (directory / "experiment.toml").write_text("rounds = 1\n")
    results = API.load(directory)
    assert type(results).__name__ == "RunResults"
    assert [*results.model().state_dict()] == [*played.model().state_dict()]


def test_a_model_of_a_class_without_a_name_is_built_where_the_class_is(tmp_path: Path):
    class Local(torch.nn.Sequential):
        def __init__(self, num_classes: int) -> None:
            super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))

    given = {**SETTINGS, "rounds": 1, "model": Local, "method": FedAvg(lr=0.1)}
    results = API.run(directory=tmp_path / "run", progress=False, **given)
    assert isinstance(results.model().network, Local)
    again = API.load(results.directory)
    assert type(again).__name__ == "RunResults"
    with refused(names=["Local", "Python"]):
        again.model()
    with refused(names=["personal.safetensors"]):
        again.personal_model(0)


@pytest.mark.usefixtures("undrawn")
def test_a_sweep_is_one_tidy_frame(tmp_path: Path):
    given = {**SETTINGS, "rounds": 2, "sweep": {"seed": [1, 2], "method": ["local", FedAvg]}}
    found = API.sweep(directory=tmp_path / "sweep", progress=False, **given)
    assert len(found) == 4 and (tmp_path / "sweep" / "comparison.html").is_file()
    varied = found.settings[["seed", "method.name"]].values.tolist()
    assert varied == [[1, "local"], [1, "fedavg"], [2, "local"], [2, "fedavg"]]
    assert len(found.frame) == 8 and {"run", "seed", "method.name", "round", "own/accuracy"} <= set(found.frame.columns)
    of_one = found.frame[(found.frame.seed == 2) & (found.frame["method.name"] == "fedavg")]
    assert of_one["own/accuracy"].tolist() == found.runs[3].frame["own/accuracy"].tolist()
    assert found.summary["own/accuracy"].tolist() == [one.summary["final"]["own/accuracy"] for one in found.runs]
    check_sentence(repr(found), ["4 runs", tmp_path / "sweep"])
    # What has finished is not run again.
    again = API.sweep(directory=tmp_path / "sweep", progress=False, **given)
    assert again.frame.wall_s.tolist() == found.frame.wall_s.tolist()
    loaded = API.load(tmp_path / "sweep")
    assert type(loaded).__name__ == "SweepResults" and sorted(loaded.frame.wall_s) == sorted(found.frame.wall_s)


@pytest.mark.usefixtures("undrawn")
def test_a_files_sweep_loses_the_keys_that_the_call_sets(tmp_path: Path):
    (tmp_path / "x.toml").write_text(FILE + "[sweep]\nseed = [1, 2]\nmethod.lr = [0.1, 0.2]\n", encoding="utf-8")
    with refused(names=["rayfl.sweep"]):
        API.run(tmp_path / "x.toml")
    changes = {"directory": tmp_path / "sweep", "progress": False, "rounds": 1, "runtime": {"executor": "inline"}}
    found = API.sweep(tmp_path / "x.toml", "sweep.clients.count=[3, 4]", "seed=7", **changes, **{"method.lr": 0.3})
    assert found.settings[["seed", "clients.count"]].values.tolist() == [[7, 3], [7, 4]]
    assert [one.settings["method"]["lr"] for one in found.runs] == [0.3, 0.3]


@pytest.mark.usefixtures("undrawn")
def test_a_run_of_a_sweep_that_fails_is_an_exception_at_its_end(tmp_path: Path):
    given = {**SETTINGS, "rounds": 1, "method": Failing, "sweep": {"method.lr": [2.0, 0.1]}}
    with refused(names=["1", "2", "lr=2.0", "too fast", tmp_path / "sweep"], error=SweepFailed) as raised:
        API.sweep(directory=tmp_path / "sweep", progress=False, **given)
    assert list(raised.value.errors) == ["lr=2.0"] and raised.value.directory == tmp_path / "sweep"
    assert API.load(tmp_path / "sweep" / "lr=0.1").finished


@pytest.mark.usefixtures("undrawn")
def test_a_sweep_of_what_has_no_name_is_run_once_and_in_this_process(tmp_path: Path):
    class Local(FedAvg):
        paper = "None"

    given = {**SETTINGS, "rounds": 1, "method": Local, "sweep": {"seed": [1]}, "directory": tmp_path / "sweep"}
    with refused(names=["Local", "file", "module"]):
        API.sweep(parallel=2, **given)
    assert not (tmp_path / "sweep").exists()
    with refused(names=["Local", "seed=1", "directory"]):
        for _ in range(2):
            API.sweep(progress=False, **given)
    assert API.load(tmp_path / "sweep" / "seed=1").finished


@pytest.mark.parametrize(
    ("call", "arguments", "settings", "facts"),
    [
        ("run", (), {"rouns": 3}, ["'rouns'", "'rounds'"]),
        ("run", (), {"method": {"name": "fedavgg"}}, ["method", "'fedavgg'", "'fedavg'"]),
        ("run", (4,), {}, ["4", "path", "Experiment", "keywords"]),
        ("run", ("absent.toml",), {}, ["absent.toml", "TOML"]),
        ("run", ("demoo",), {}, ["demoo", "'demo'"]),
        ("run", (), {"sweep": {"seed": [1]}}, ["sweep", "rayfl.sweep"]),
        ("sweep", (), {}, ['sweep={"KEY": [VALUE, ...]}', "rayfl.run"]),
        ("sweep", (), {"sweep": {"seed": 3}}, ["sweep.seed=3", "list"]),
        ("load", ("absent",), None, ["/absent", "experiment.json"]),
    ],
)
def test_a_mistake_is_an_exception_with_one_sentence(
    call: str, arguments: tuple, settings: dict | None, facts: list[str], tmp_path: Path, monkeypatch: Any
):
    monkeypatch.chdir(tmp_path)
    base = {} if arguments or settings is None else SETTINGS
    with refused(names=facts):
        getattr(API, call)(*arguments, **{**base, **(settings or {})})
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_directory_takes_the_next_one_where_another_was_faster(tmp_path: Path, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)
    prepare, prepared = single.prepare, []

    def slowly(experiment: Any) -> Any:
        # Meanwhile one run has begun in the directory that was free, and another has just made the next one.
        prepared.append(experiment)
        Path("runs/small/records").mkdir(parents=True)
        Path("runs/small-2").mkdir()
        return prepare(experiment)

    monkeypatch.setattr(single, "prepare", slowly)
    found = API.run(name="small", **{**SETTINGS, "rounds": 1}, progress=False)
    assert found.directory == tmp_path / "runs/small-3" and found.finished
    assert len(prepared) == 1 and not any(Path("runs/small-2").iterdir())
    # Who names a directory gets that one or none.
    shutil.rmtree("runs/small")
    shutil.rmtree("runs/small-2")
    with refused(names=["runs/small", "another directory"]):
        API.run(name="small", **{**SETTINGS, "rounds": 1}, progress=False, directory="runs/small")

"""What clients did stands beside what came of it, and settings that were left out stand for what they mean."""

import json
from pathlib import Path
from typing import Any

import pytest

import rayfl
from rayfl.errors import RayflError
from rayfl.experiment.report_options import ReportOptions
from rayfl.methods.peers.dpsgd import DPSGDHyper
from rayfl.methods.peers.dpsgd_ft import DPSGDFTHyper
from rayfl.methods.personal.ditto import DittoHyper
from rayfl.methods.personal.fedavg_ft import FedAvgFTHyper
from rayfl.methods.personal.perfedavg import PerFedAvgHyper
from rayfl.methods.shared.local_training import LocalTraining
from rayfl.report.groups import group_runs
from rayfl.report.page_tables import differing
from rayfl.report.series import mean_over
from rayfl.report.summary import comparison
from rayfl.run_directory.record import Run, read_run
from tests.jobs.commands import rayfl as command

# Any: rayfl looks its functions up when they are asked for.
API: Any = rayfl


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """1,437 images for 6 clients, 239 or 240 each: 8 steps of 32 an epoch."""
    found, folder = {}, tmp_path_factory.mktemp("runs")
    for name, method in {
        "fedavg": "fedavg",
        "one": {"name": "fedavg", "epochs": 1},
        "ditto": "ditto",
        "local": "local",
    }.items():
        clients: dict[str, Any] = {"count": 6} if name == "local" else {"count": 6, "per_round": 2}
        API.run(
            directory=folder / name, progress=False, name=name, rounds=3, data="digits", partition="iid",
            clients=clients, model="logistic", method=method, runtime={"executor": "inline"}, output={"report": False},
        )  # fmt: skip
        found[name] = read_run(folder / name)
    return found


@pytest.mark.slow
def test_the_main_table_shows_the_work(runs: dict[str, Run]):
    table = comparison([runs[name] for name in ("fedavg", "ditto", "local")], ReportOptions())[0]
    place = table.heads.index("Clients")
    assert list(table.heads[place : place + 3]) == ["Clients", "Steps", "Examples"]
    work = {row[0]: list(row[place : place + 2]) for row in table.rows}
    # Ditto has 2 epochs for the global model and 3 for the personal one.
    assert work == {"fedavg": ["2", "8"], "ditto": ["2", "40"], "local": ["6", "8"]}
    examples = [mean_over(runs[name], "num_samples", "num_samples") for name in ("fedavg", "ditto", "local")]
    assert examples == pytest.approx([239.5, 5 * 239.5, 239.5], rel=3e-3)


def test_the_work_of_a_run_is_among_its_numbers(runs: dict[str, Run]):
    shown = command("show", runs["ditto"].directory).output
    rows = [line.split("│") for line in shown.splitlines() if "per round" in line]
    numbers = {one.strip(): value.strip() for _, one, value, *_ in rows}
    assert (numbers["clients that worked per round"], numbers["steps per client per round"]) == ("2", "40")
    found = json.loads(command("report", "--json", runs["local"].directory).output)[0]
    assert (found["clients_per_round"], found["steps_per_client_round"]) == (6.0, 8.0)


def test_what_was_left_out_is_recorded_and_compared(runs: dict[str, Run]):
    method: Any = runs["ditto"].experiment["method"]
    assert (method["epochs"], method["personal_epochs"]) == (2, 3)
    differences = comparison([runs["fedavg"], runs["ditto"]], ReportOptions())[-1]
    assert "differs" in differences.title
    values = {row[0]: set(row[1:]) for row in differences.rows}
    assert values["method.epochs"] == {"1", "2"} and "3" in values["method.personal_epochs"]
    # One epoch that is given is one that is left out: the second run starts a group since it has the same seed.
    one, other = group_runs([runs["fedavg"], runs["one"]])
    assert one.settings == other.settings


def test_the_work_that_settings_leave_out():
    assert (LocalTraining().epochs, LocalTraining().steps) == (1, None)
    assert (LocalTraining(steps=4).epochs, LocalTraining(steps=4).steps) == (None, 4)
    assert (PerFedAvgHyper().epochs, PerFedAvgHyper().steps) == (None, 20)
    assert (DPSGDHyper(order="lian").epochs, DPSGDHyper(order="lian").steps) == (None, 1)
    assert DPSGDHyper().epochs == 1 and DPSGDHyper(order="lian", epochs=2).steps is None
    assert DittoHyper(personal_steps=5).personal_epochs is None
    # What is left out is not given, so that it contradicts nothing, and is the same when it is read back.
    assert "epochs" not in LocalTraining().model_fields_set
    for hyper in (LocalTraining(), DittoHyper(), PerFedAvgHyper(), DPSGDHyper(order="lian")):
        assert type(hyper)(**hyper.model_dump()).model_dump() == hyper.model_dump()
    with pytest.raises(RayflError):
        LocalTraining(epochs=1, steps=2)


def test_rates_that_settings_leave_out():
    for hyper in (DittoHyper(lr=0.3), DittoHyper(lr=0.3, lr_decay=0.9)):
        assert hyper.personal_lr == 0.3 and DittoHyper(**hyper.model_dump()).model_dump() == hyper.model_dump()
        assert hyper.personal_stage(3).lr == hyper.stage(3).lr
    for kind in (FedAvgFTHyper, DPSGDFTHyper):
        for steps, epochs in ((None, None), (None, 4), (4, None)):
            hyper = kind(lr=0.3, steps=steps, epochs=epochs)
            epochs = None if steps else epochs or 1
            assert (hyper.ft_lr, hyper.ft_epochs) == (0.3, epochs)
            assert kind(**hyper.model_dump()).model_dump() == hyper.model_dump()
            assert hyper.fine_tuning().epochs == epochs and hyper.fine_tuning().lr == 0.3
        assert kind(lr=0.3, ft_lr=0.2).ft_lr == 0.2


def test_own_modules_are_called_by_their_class():
    one, other = "files/plugin-0acd12345678.py:FedRep", "files/plugin-ffff12345678.py:FedRep"
    assert differing([{"method.name": one}, {"method.name": "fedavg"}]) == [("method.name", ["FedRep", "fedavg"])]
    assert differing([{"method.name": one}, {"method.name": other}]) == [("method.name", [one, other])]
    assert differing([{"data.path": "a/b.npz"}, {}]) == [("data.path", ["a/b.npz", "\u2013"])]


def test_a_copy_of_the_file_does_the_same_work(runs: dict[str, Run], tmp_path: Path):
    again = tmp_path / "again"
    assert command("run", runs["ditto"].directory / "experiment.toml", "--output", again).exit_code == 0
    assert read_run(again).metrics == runs["ditto"].metrics

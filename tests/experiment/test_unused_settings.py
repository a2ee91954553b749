"""A setting that does nothing is refused in one sentence, or left out of those runs of a sweep in which it does."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jobs import single
from rayfl import tree
from rayfl.choices.kinds import named
from rayfl.data.batches import Batch
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.experiment.sweep import combine
from rayfl.methods.base import Method, PeerHalf
from rayfl.methods.masks.mcepl import MCEPL
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalTraining
from rayfl.population.sampling import Clients
from rayfl.rounds.model_sums import model_sums, values
from rayfl.run_directory.record import read_run
from rayfl.testing.executors import play as played
from rayfl.testing.watching import watched
from tests.contracts.every_method import experiment
from tests.contracts.seams.quadratic import Quadratic, setup
from tests.refusals import refused
from tests.small_cases import small_cases

PEERS = sorted(name for name, kind in named(Method).items() if issubclass(kind, PeerHalf))
ALONE = ["ind_mask", "ind_weipru", "local"]
NO_OWN_MODEL = ["fedavg", "fedprox", "fedopt", "scaffold", "diana", "signsgd", "stem", "fedmgda", "lag_ps"]


@pytest.mark.parametrize(
    ("name", "settings", "names"),
    [
        ("fedopt", {"server_optimizer": "adagrad", "beta2": 0.5}, ["method.beta2=0.5", "server_optimizer='adagrad'"]),
        ("fedscr", {"divergence_factor": 0.5}, ["method.divergence_factor=0.5", "adaptive=false"]),
        ("fedscr", {"significance_factor": 0.5}, ["method.significance_factor=0.5", "adaptive=false"]),
        ("fedscr", {"variance_factor": 0.5}, ["method.variance_factor=0.5", "adaptive=false"]),
        ("scaffold", {"control_batch_size": 8}, ["method.control_batch_size=8", "option='II'"]),
        ("perfedavg", {"variant": "fo", "delta": 0.1}, ["method.delta=0.1", "variant='fo'"]),
        ("perfedavg", {"variant": "exact", "delta": 0.1}, ["method.delta=0.1", "variant='exact'"]),
        ("mixture_admm", {"cg_iterations": 5}, ["method.cg_iterations=5", "x_step='gradient'"]),
        ("dispfl", {"distribution": "uniform", "erk_power": 2.0}, ["method.erk_power=2.0", "distribution='uniform'"]),
        ("mcepl", {"fil": 0, "fil_share": 0.5}, ["method.fil_share=0.5", "fil=0"]),
        ("ind_weipru", {"fil_share": 0.5}, ["method.fil_share=0.5", "fil=0"]),
        ("fedfomo", {"epsilon": 0.0, "epsilon_decay": 0.2}, ["method.epsilon_decay=0.2", "epsilon=0.0"]),
        (
            "adiana",
            {"eta": 0.1, "smoothness": 20.0},
            ["method.smoothness=20.0", "follow from it"],
        ),
        ("ditto", {"lam": 0.0, "pull": "after"}, ["method.pull='after'", "lam=0.0"]),
        ("lag_ps", {"threshold": 0.0, "smoothness": 2.0}, ["method.smoothness=2.0", "threshold=0.0"]),
    ],
)
def test_a_setting_that_another_one_leaves_out(name: str, settings: dict[str, Any], names: list[str]):
    with refused(names=[*names, "does nothing", "remove"]):
        experiment(name, method={"name": name, **settings})


@pytest.mark.parametrize("name", PEERS)
@small_cases(
    "tables, names",
    [
        ({"clients": {"per_round": 3}}, ["clients.per_round=3", "train every round"]),
        ({"clients": {"fraction": 0.5}}, ["clients.fraction=0.5", "train every round"]),
        ({"clients": {"deadline_s": 3.0}}, ["clients.deadline_s=3.0", "no server"]),
        ({"clients": {"take_first": 3}}, ["clients.take_first=3", "no server"]),
        ({"clients": {"upload_loss": 0.3}}, ["clients.upload_loss=0.3", "no server"]),
        ({"clients": {"dropout_after_download": 0.3}}, ["clients.dropout_after_download=0.3", "no server"]),
        ({"downlink": {"name": "topk", "keep_ratio": 0.2}}, ["downlink='topk'"]),
    ],
)
def test_what_only_a_server_does_is_refused_among_peers(name: str, tables: dict[str, Any], names: list[str]):
    with refused(names=[*names, named(Method)[name].__name__, "does nothing"]):
        experiment(name, **tables)


@pytest.mark.parametrize("name", ALONE)
def test_nobody_to_talk_to(name: str):
    for tables in ({"topology": "ring"}, {"topology": {"name": "ring", "weights": "metropolis"}}):
        with refused(names=["topology", "exchange nothing", "does nothing"]):
            experiment(name, **tables)
    with refused(names=["clients.uplink_mbps=1.0", "exchange nothing"]):
        experiment(name, clients={"uplink_mbps": 1.0})


@pytest.mark.parametrize("name", NO_OWN_MODEL)
def test_personal_models_of_clients_that_have_none(name: str):
    with refused(names=["evaluation.personal_on_pooled=true", named(Method)[name].__name__, "models of their own"]):
        experiment(name, evaluation={"personal_on_pooled": True})


@pytest.mark.parametrize(("name", "rate"), [("fedavg_ft", "lr"), ("perfedavg", "alpha")])
def test_models_that_adapt_are_evaluated_on_the_pooled_set(name: str, rate: str):
    """One step on all of its examples, from the global model: x - rate * gradient, as the pages say."""
    own = {"batch_size": 0, "steps": 1} if name == "fedavg_ft" else {"steps": 2}
    here = prepare(experiment(name, method={"name": name, **own}, rounds=1, evaluation={"personal_on_pooled": True}))
    (record,), (run_state,) = played(here)
    found = {(row.client, row.name): row.value for row in record.metrics}
    model = here.server_half.model(run_state.server)
    for client in range(6):
        rows = here.partition.train[client]
        inputs, labels = here.device_data.train.take(here.device_data.train.order(rows))
        gradient = here.method.task.grad(model, Batch(here.device_data.normalise(inputs), labels))
        adapted = tree.add(model, gradient, -getattr(here.method.hyper, rate))
        rows = np.arange(len(here.dataset.test))
        expected = values(here, model_sums(here, adapted, "test", rows).total.sums)
        assert found[client, "personal_pooled/loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert {"personal_pooled/accuracy", "personal_pooled_after_training/accuracy"} <= record.means.keys()


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("dispfl", {"density": 0.3}),
        ("mcepl", {"retention_ratio": 0.3}),
        ("ind_mask", {"retention_ratio": 0.3}),
        ("ind_weipru", {"retention_ratio": 0.3}),
        ("avr_weipru", {"retention_ratio": 0.3}),
        ("par_weipru", {"retention_ratio": 0.3}),
        ("subfedavg", {"target_density": 0.3}),
        ("lotteryfl", {"target_density": 0.3}),
        ("lottery_dsgd", {"target_density": 0.3}),
        ("fedpse", {"keep_ratio": 0.3}),
        ("fedstc", {"keep_ratio": 0.3}),
        ("fedscr", {"keep_ratio": 0.3}),
        ("fedscr", {"downlink": "structured"}),
    ],
)
def test_two_settings_for_the_same_thing(name: str, own: dict[str, Any]):
    ((key, value),) = own.items()
    with refused(names=[f"method.{key}={value!r}", "clients.retention_ratio", "both", "give one"]):
        experiment(name, method={"name": name, **own}, clients={"retention_ratio": 0.5})
    experiment(name, method={"name": name, **own})
    experiment(name, method={"name": name}, clients={"retention_ratio": 0.5})


def test_an_uplink_with_a_share_of_its_own():
    for uplink in (
        {"name": "topk", "keep_ratio": 0.3},
        {"name": "feedback", "inner": {"name": "topk", "keep_ratio": 0.3}},
    ):
        with refused(names=["uplink", "keep_ratio", "clients.retention_ratio", "give one"]):
            experiment("fedavg", uplink=uplink, clients={"retention_ratio": 0.5})
    experiment("fedavg", uplink={"name": "feedback", "inner": "topk"}, clients={"retention_ratio": 0.5})


@pytest.mark.parametrize("name", sorted(named(Method)))
def test_defaults_that_are_written_out_are_allowed(name: str):
    """A run's own description has every setting, and makes the same experiment again."""
    made = experiment(name, method={"name": name})
    assert Experiment(**made.as_dict()) == made


def test_in_a_sweep_a_setting_is_left_out_of_the_runs_in_which_it_does_nothing(caplog: pytest.LogCaptureFixture):
    tables = experiment("dpsgd").as_dict() | {"evaluation": {"personal_on_pooled": True}}
    methods = ["dpsgd", "local", "fedavg"]
    with caplog.at_level(logging.INFO, "rayfl"):
        peers, alone, server = (one.experiment for one in combine(dict(tables), {"method": methods}))
    assert peers.topology is not None and alone.topology is None and server.topology is None
    kept = [one.evaluation.personal_on_pooled for one in (peers, alone, server)]
    assert kept == [True, True, False]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and all("left out" in one for one in said)
    assert "topology" in said[0] and "2 of 3 runs" in said[0] and "'local'" in said[0]
    with refused(names=["local", "topology", "exchange nothing"]):
        combine(dict(tables), {"method": ["local", "ind_mask"]})
    with refused(names=["dpsgd", "clients.per_round=3"]):
        combine({**tables, "clients": Clients(count=6, per_round=3)}, {"method": ["dpsgd", "fedavg"]})
    with refused(names=["clients.per_round=3", "DPSGD"]):
        combine(dict(tables), {"clients.per_round": [3, 4]})


OWN = """
from pydantic import Field

from rayfl.methods.base import State
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalTraining


class MineHyper(LocalTraining):
    read: float = Field(default=1.0, description="read in a hook")
    lr: float = Field(default=0.1, description="a default of its own")
    also_read: float = Field(default=1.0, description="read by another name of the settings")
    forgotten: float = Field(default=1.0, description="read by nobody")


class Mine(FedAvg):
    hyper: MineHyper
    paper = "none"

    def step(self, carry, batch, *, stage):
        hyper = self.hyper
        carry = super().step(carry, batch, stage=stage)
        return {**carry, "loss": carry["loss"] * hyper.also_read} if self.hyper.read else carry
"""
BY_NAME = """

class ByName(Mine):
    def plan(self, round_number, coin):
        assert [getattr(self.hyper, name) for name in ("read", "for" "gotten")]
        return super().plan(round_number, coin)
"""
PASSED_ON = """

class PassedOn(Mine):
    def plan(self, round_number, coin):
        print(self.hyper)
        return super().plan(round_number, coin)
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    """The path of somebody's method, which no test before has loaded."""
    (tmp_path / "mine.py").write_text(f"{OWN}# {tmp_path}\n")
    return str(tmp_path / "mine.py")


def own_experiment(method: dict[str, Any]) -> Experiment:
    return Experiment(**{**experiment("fedavg").as_dict(), "method": method})


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["inline", "ray"])
def test_a_strangers_setting_that_no_code_reads(mine: str, tmp_path: Path, executor: str):
    def play(kind: str, **hyper: float) -> Path:
        chosen = {"name": f"{mine}:{kind}", **hyper}
        runtime = {"executor": executor, "actors": 2}
        runtime = {**runtime, "num_cpus": 0.5} if executor == "ray" else {"executor": executor}
        small = {"clients": Clients(count=4), "runtime": runtime, "output": {"report": False, "track": []}}
        tables = {**own_experiment(chosen).as_dict(), "rounds": 3, **small}
        return single.run(Experiment(**tables), tmp_path / f"{kind}{len([*tmp_path.iterdir()])}")

    with refused(names=["method.forgotten=2.0", "Mine", mine, "round 0", "remove"]):
        play("Mine", read=0.5, forgotten=2.0)
    if executor == "ray":
        # In the client actors alone, as the others read it.
        assert read_run(play("Mine", also_read=0.5)).rounds.num_rows == 3
        return
    play("Mine", read=0.5, also_read=0.5, lr=0.5, clip_norm=0.5)
    for kind, more in (("ByName", BY_NAME), ("PassedOn", PASSED_ON)):
        Path(mine).write_text(f"{OWN}{more}# {tmp_path}\n")
        play(kind, forgotten=2.0)


def test_the_watch_sees_a_setting_that_is_not_read():
    class CarelessHyper(LocalTraining):
        forgotten: float = 1.0

    class Careless(FedAvg):
        hyper: CarelessHyper

    here, log = watched(setup(Careless(Quadratic(), CarelessHyper(lr=0.1)), rounds=1))
    played(here)
    assert CarelessHyper.model_fields.keys() - log.read - here.method.hyper.unused().keys() == {"forgotten"}
    assert "lr_rounds" in here.method.hyper.unused()


def test_a_width_of_stacks_that_the_loop_does_not_make():
    with refused(names=["runtime.stack_width=3", "engine=", "loop"]):
        experiment("fedavg", runtime={"engine": "loop", "stack_width": 3})


def test_shares_of_layers_that_the_model_does_not_have():
    with refused(names=["method.first_conv=0.5", "more than two", "remove"]):
        prepare(experiment("mcepl", method={"name": "mcepl", "first_conv": 0.5}))
    prepare(experiment("mcepl", method={"name": "mcepl", "first_fc": 0.5}))
    convolution = {"weight": torch.zeros(4, 3, 3, 3)}
    MCEPL(first_conv=0.5).check_model(convolution)
    with refused(names=["method.first_fc=0.5", "two dimensions", "remove"]):
        MCEPL(first_fc=0.5).check_model(convolution)


def test_a_downlink_s_speed_where_nothing_comes_down():
    with refused(names=["clients.downlink_mbps=1.0", "PFNM", "nothing", "remove"]):
        experiment("pfnm", clients={"downlink_mbps": 1.0})
    experiment("pfnm", clients={"uplink_mbps": 1.0})

"""Elastic around FedAvg and its relatives, none of which knows of it.

The server gets zeta times the averaged delta and then steps in its own way; all of it in numpy, on quadratics.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rayfl.methods
from rayfl.determinism import seeding
from rayfl.methods.base import Context, Finished, ServerHalf, State, Tree, WeightedMean
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from rayfl.wrappers.elastic import Elastic
from tests.contracts.seams.closed_form import TENSORS, flat, points
from tests.contracts.seams.quadratic import HELDOUT, Quadratic
from tests.methods.averaging import (
    ABSENCES,
    ENGINES,
    Factors,
    HeavyBall,
    Moments,
    Server,
    assert_follows,
    followed,
    made,
    proximal,
    scaffolded,
    share,
    untouched,
)
from tests.methods.personal.test_perfedavg import meta_trained
from tests.methods.personal.test_pfedme import global_path
from tests.population.statuses import with_status
from tests.refusals import refused

MEMORY, FLOOR, ROUNDS = 0.8, 0.25, 6
HYPER = {"lr": 0.1, "batch_size": 2}

CASES: dict[str, tuple[str, dict[str, Any], Callable[[Setup, Factors], list[np.ndarray]]]] = {
    "fedavg": ("fedavg", {}, lambda here, zeta: followed(here, Server(), factors=zeta)),
    "fedavg, uniform": ("fedavg", {"weighting": "uniform"}, lambda here, zeta: followed(here, Server(), factors=zeta)),
    "fedavgm": (
        "fedavgm",
        {"server_momentum": 0.6, "server_lr": 0.8},
        lambda here, zeta: followed(here, HeavyBall(0.8, 0.6), factors=zeta),
    ),
    "fedprox": ("fedprox", {"mu": 0.5}, lambda here, zeta: followed(here, Server(), proximal(0.5), zeta)),
    **{
        f"fedopt {kind}": (
            "fedopt",
            {"server_optimizer": kind, "server_lr": 0.1, "beta1": 0.7, "tau": 0.05}
            | ({} if kind == "adagrad" else {"beta2": 0.8}),
            lambda here, zeta, kind=kind: followed(here, Moments(kind, 0.1, 0.7, 0.8, 0.05), factors=zeta),
        )
        for kind in ("adagrad", "adam", "yogi")
    },
    **{
        f"scaffold {option}": (
            "scaffold",
            {"option": option, "server_lr": 0.9},
            lambda here, zeta: [x for x, _, _ in scaffolded(here, zeta)],
        )
        for option in ("I", "II")
    },
    "perfedavg": ("perfedavg", {"alpha": 0.2, "steps": 3, "variant": "exact"}, meta_trained),
    "pfedme": (
        "pfedme",
        {"lam": 4.0, "personal_lr": 0.15, "inner_steps": 3, "steps": 3, "beta": 1.5},
        global_path,
    ),
}


def zeta_of(here: Setup) -> Factors:
    """zeta by Eq. 5 to 7. The output is c o x, so the gradient of the mean of ||F||^2 is 2 mean(c^2) o x."""

    def zeta(round: int, x: np.ndarray) -> np.ndarray:
        delivered = with_status(here.population.sample_round(round), "delivered")
        total = np.zeros(10)
        for client in delivered:
            heldout, omega = points(here, client, "heldout"), np.zeros(10)
            generator = seeding.generator(here.seed, round, client, "train/sensitivity/batches")
            for rows in np.split(generator.permutation(HELDOUT), 2):
                omega = MEMORY * omega + (1 - MEMORY) * np.abs(2 * (heldout[rows].c ** 2).mean(axis=0) * x)
            total += share(here, client) * omega
        return np.concatenate([1 + FLOOR - total[tensor] / total[tensor].max() for tensor in TENSORS])

    return zeta


@pytest.mark.parametrize(
    ("engine", "clients"), [("loop", ABSENCES[0]), *zip(ENGINES, ABSENCES[1:], strict=True)], ids=str
)
@pytest.mark.parametrize("case", CASES)
def test_zeta_multiplies_the_delta_before_the_servers_step(case: str, engine: str, clients: dict[str, Any]):
    name, hyper, reference = CASES[case]
    plain = made(name, {**HYPER, **hyper}, rounds=ROUNDS, engine=engine, clients=clients)
    here = replace(plain, method=Elastic(plain.method, Elastic.Hyper(mu=MEMORY, tau=FLOOR, batch_size=2)))
    records, run_states = play(here)
    path = reference(plain, zeta_of(plain))
    assert_follows(run_states, path, tolerance=2e-5)
    assert np.abs(path[-1] - reference(plain, untouched)[-1]).max() > 1e-2
    # The sensitivity goes up beside what the method sends, and nothing more comes down.
    bare = play(plain)[0]
    for record, other in zip(records, bare, strict=True):
        assert record.row.uplink_bits == other.row.uplink_bits + 320 * record.row.delivered
        assert record.row.downlink_bits == other.row.downlink_bits


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize("kind", ["adam", "yogi"])
def test_zeta_may_multiply_the_servers_step(kind: str, clients: dict[str, Any]):
    hyper = {"server_optimizer": kind, "server_lr": 0.2, "beta1": 0.7, "beta2": 0.8, "tau": 0.05}
    plain = made("fedopt", {**HYPER, **hyper}, rounds=ROUNDS, clients=clients)
    elastic = Elastic.Hyper(mu=MEMORY, tau=FLOOR, batch_size=2, applied="after")
    zeta, scales = zeta_of(plain), list[np.ndarray]()

    class Rescaled(Moments):
        def step(self, x: np.ndarray, delta: np.ndarray) -> np.ndarray:
            return x + scales[-1] * (super().step(x, delta) - x)

    def watched(round: int, x: np.ndarray) -> np.ndarray:
        scales.append(zeta(round, x))
        return np.ones(10)

    path = followed(plain, Rescaled(kind, 0.2, 0.7, 0.8, 0.05), factors=watched)
    run_states = play(replace(plain, method=Elastic(plain.method, elastic)))[1]
    assert_follows(run_states, path, tolerance=2e-5)
    before = play(replace(plain, method=Elastic(plain.method, elastic.model_copy(update={"applied": "before"}))))[1]
    assert np.abs(flat(before[-1].server["params"]) - path[-1]).max() > 1e-2


class Parted(GradientMethod, ServerHalf):
    """A method whose server keeps no "params"."""

    gather = {"delta": WeightedMean()}

    def finish(self, state: State, carry: LocalCarry, ctx: Context) -> Finished:
        return Finished(state, {"delta": self.delta(carry)})

    def init_server(self, params: Tree) -> State:
        return {"left": params, "right": params}

    def model(self, server: State) -> Tree:
        return server["left"]


def test_what_the_servers_step_or_the_outputs_need():
    with refused(names=["applied='after'", "Parted", "'before'"]):
        Elastic(Parted(Quadratic()), Elastic.Hyper(applied="after"))
    with refused(names=["sensitivity='outputs'", "norm"]):
        Elastic(made("fedavg", HYPER).method, Elastic.Hyper(sensitivity="outputs")).check_model({})


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
def test_scaffolds_control_variates_are_left_alone(clients: dict[str, Any]):
    plain = made("scaffold", HYPER, rounds=ROUNDS, clients=clients)
    here = replace(plain, method=Elastic(plain.method, Elastic.Hyper(mu=MEMORY, tau=FLOOR, batch_size=2)))
    for run_state, (_, c, own) in zip(play(here)[1], scaffolded(plain, zeta_of(plain)), strict=True):
        np.testing.assert_allclose(flat(run_state.server["control_variate"]), c, rtol=1e-4, atol=2e-5)
        np.testing.assert_allclose(c, own.mean(axis=0), atol=1e-12)


def test_fedavg_ft_is_wrapped_with_its_fine_tuning():
    plain = made("fedavg_ft", HYPER)
    assert Elastic(plain.method).eval_stages(0) == plain.method.eval_stages(0) != ()


def test_no_method_knows_of_elastic():
    files = list(Path(rayfl.methods.__path__[0]).rglob("*.py"))
    assert len(files) > 6
    for file in files:
        imports = [line for line in file.read_text(encoding="utf-8").splitlines() if "import" in line]
        assert not any("elastic" in line.lower() for line in imports), file.name

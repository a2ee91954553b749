"""A wrapper that knows nothing of what it wraps: a held-out stage, another objective, and a rescaled delta."""

import numpy as np
import pytest

from rayfl import tree
from rayfl.determinism import seeding
from rayfl.methods.masks.dispfl import DisPFL
from rayfl.methods.personal.fedfomo import FedFomo
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.server.scaffold import Scaffold
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from rayfl.wrappers.elastic import Elastic
from tests.contracts.seams.closed_form import TENSORS, batches, flat, points, start
from tests.contracts.seams.quadratic import HELDOUT, Quadratic, setup
from tests.contracts.seams.ways import Way
from tests.refusals import refused

LR, MEMORY, FLOOR, ROUNDS = 0.1, 0.8, 0.5, 4
HYPER = {"lr": LR, "epochs": 1, "batch_size": 2}


def factors(setup: Setup, round: int, x: np.ndarray) -> np.ndarray:
    """zeta [10]: the output is c o x, so the gradient of its mean squared norm is 2 mean(c^2) o x."""
    total = np.zeros(10)
    for client in setup.population.sample_round(round).selected:
        omega, heldout = np.zeros(10), points(setup, client, "heldout")
        order = heldout_order(setup, round, client)
        for rows in np.split(order, 2):
            omega = MEMORY * omega + (1 - MEMORY) * np.abs(2 * (heldout[rows].c ** 2).mean(axis=0) * x)
        total += omega
    return np.concatenate([1 + FLOOR - total[tensor] / total[tensor].max() for tensor in TENSORS])


def heldout_order(setup: Setup, round: int, client: int) -> np.ndarray:
    """Four held-out examples in the order of the round, two a batch."""
    generator = seeding.generator(setup.seed, round, client, "train/sensitivity/batches")
    assert HELDOUT == 4
    return generator.permutation(HELDOUT)


def expected(setup: Setup, elastic: bool) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """x after every round, and c and all c_i at the end."""
    x, c, own, models = start(setup), np.zeros(10), np.zeros((4, 10)), []
    for round in range(ROUNDS):
        zeta = factors(setup, round, x) if elastic else 1.0
        selected = setup.population.sample_round(round).selected
        deltas, changes = [], []
        for i in selected:
            y, stream = x, batches(setup, round, i, epochs=1, batch_size=2)
            for batch in stream:
                y = y - LR * (batch.gradient(y) - own[i] + c)
            new = own[i] - c + (x - y) / (len(stream) * LR)
            deltas.append(x - y)
            changes.append(new - own[i])
            own[i] = new
        x = x - zeta * np.mean(deltas, axis=0)
        c = c + len(selected) / 4 * np.mean(changes, axis=0)
        models.append(x)
    return models, c, own


@pytest.mark.parametrize("per_round", [4, 3])
@pytest.mark.parametrize("elastic", [True, False])
def test_elastic_scaffold_follows_its_equations(way: Way, elastic: bool, per_round: int):
    scaffold = Scaffold(Quadratic(), Scaffold.Hyper(**HYPER))
    method = Elastic(scaffold, Elastic.Hyper(mu=MEMORY, tau=FLOOR, batch_size=2)) if elastic else scaffold
    here = setup(method, rounds=ROUNDS, engine=way.engine, clients={"per_round": per_round})
    models, c, own = expected(here, elastic)
    executor = way.executor(here)
    records, run_states = play(here, executor)
    np.testing.assert_allclose(
        [flat(run_state.server["params"]) for run_state in run_states], models, rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(flat(run_states[-1].server["control_variate"]), c, rtol=1e-4, atol=1e-5)
    for client, state in run_states[-1].states.items():
        np.testing.assert_allclose(
            flat(tree.to_tensors(executor.get(state))["control_variate"]), own[client], rtol=1e-4, atol=1e-5
        )
    # c is the mean of all c_i, whoever took part.
    np.testing.assert_allclose(c, own.mean(axis=0), atol=1e-12)
    # Delta, control and sensitivity, 40 bytes each.
    assert records[0].row.uplink_bits == 320 * per_round * (3 if elastic else 2)


def test_the_most_sensitive_entry_gets_exactly_the_floor():
    elastic = Elastic(Scaffold(Quadratic()), Elastic.Hyper(tau=0.25))
    sensitivity = {name: tensor.abs() for name, tensor in Quadratic().init(1).items()}
    zeta = tree.map(elastic.factors, elastic.normalised(sensitivity))
    for name, tensor in zeta.items():
        assert tensor.flatten()[sensitivity[name].argmax()] == 0.25
        assert tensor.max() <= 1.25


def test_elastic_wraps_other_methods_too(way: Way):
    inner = FedAvg(Quadratic(), FedAvg.Hyper(**HYPER))
    here = setup(Elastic(inner, Elastic.Hyper(mu=MEMORY, batch_size=2)), rounds=1, engine=way.engine)
    plain = setup(inner, rounds=1, engine=way.engine)
    x = start(here)
    moved, scaled = (flat(play(s, way.executor(s))[1][0].server["params"]) - x for s in (plain, here))
    assert (moved / scaled).min() > 0
    # Every factor is in [tau, 1 + tau].
    assert 0.5 - 1e-5 <= (scaled / moved).min() < (scaled / moved).max() <= 1.5 + 1e-5


def test_elastic_refuses_what_has_no_delta_or_no_server():
    with refused(names=["elastic", "delta", "FedFomo", "remove"]):
        Elastic(FedFomo(Quadratic()))
    with refused(names=["Elastic", "server", "DisPFL"]):
        Elastic(DisPFL(Quadratic()))

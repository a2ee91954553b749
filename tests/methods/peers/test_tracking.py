"""Gradient tracking (DSGT, K-GT) and exact diffusion (LED, D2) against their papers' recursions; what they keep, and
where they come to rest."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array

from rayfl.methods.peers.led import LED
from rayfl.rounds.rounds import RunState
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from rayfl.topology.graphs import (
    FixedGraph,
    FullyConnected,
    Grid,
    OnePeerExponential,
    RandomRegular,
    Ring,
    Topology,
    Torus,
)
from rayfl.topology.mixing import Exchange, mixing_weights
from tests.contracts.seams.closed_form import batches, points, start
from tests.methods.gossip import of_states
from tests.methods.plain_peers import ABSENCES, DIM, NUM_PEERS, absent, made, matrix, models, world_of
from tests.refusals import refused

METHODS = ("dsgt", "kgt", "led", "d2")
LINE, METROPOLIS = Grid(rows=1, weights="metropolis"), Ring(weights="metropolis")
CHANGING = RandomRegular(degree=2, weights="metropolis")


def seen(here: Setup, round: int, client: int) -> list[Any]:
    """A client's batches of a round."""
    hyper: Any = here.method.hyper
    steps = getattr(hyper, "steps", 1)
    epochs = None if steps else hyper.epochs
    return batches(here, round, client, epochs=epochs, steps=steps, batch_size=hyper.batch_size or 100)


def exchanged(here: Setup, round: int) -> tuple[np.ndarray, np.ndarray]:
    """W [4, 4] of a round, with the identity's rows for absent peers, and who trains."""
    assert here.topology is not None
    away, lost = absent(here.population.sample_round(round, everyone=True))
    weights = matrix(here.topology, here.seed, round, [i for i in range(NUM_PEERS) if i not in away])
    lazy: Any = getattr(here.method.hyper, "lazy", False)
    return (np.eye(NUM_PEERS) + weights) / 2 if lazy else weights, ~np.isin(np.arange(NUM_PEERS), [*lost])


def dsgt(here: Setup) -> list[np.ndarray]:
    """v^{t+1} = W v^t + u^{t+1} - u^t; x^{t+1} = W (x^t - eta v^t), or W x^t - eta v^t."""
    hyper: Any = here.method.hyper
    x = np.tile(start(here), (NUM_PEERS, 1))
    mixed, old, after = np.zeros_like(x), np.zeros_like(x), []
    for round in range(here.rounds):
        weights, trains = exchanged(here, round)
        u = np.array([seen(here, round, i)[0].gradient(x[i]) for i in range(NUM_PEERS)])
        v, eta = mixed + u - old, hyper.rate(round)
        moved = weights @ (x - eta * v) if hyper.order == "step_first" else weights @ x - eta * v
        pairs = ((moved, x), (weights @ v, mixed), (u, old))
        x, mixed, old = (np.where(trains[:, None], new, was) for new, was in pairs)
        after.append(x)
    return after


def local(here: Setup, round: int, x: np.ndarray, shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """K steps along g_i + shift_i from every x_i, and the K of each peer [4, 1]."""
    hyper: Any = here.method.hyper
    trained, counts, eta = x.copy(), [], hyper.rate(round)
    for i in range(NUM_PEERS):
        mine = seen(here, round, i)
        counts.append([len(mine)])
        for batch in mine:
            trained[i] -= eta * (batch.gradient(trained[i]) + shift[i])
    return trained, np.array(counts, float)


def kgt(here: Setup) -> list[np.ndarray]:
    hyper: Any = here.method.hyper
    x = np.tile(start(here), (NUM_PEERS, 1))
    c, after = np.zeros_like(x), []
    for round in range(here.rounds):
        weights, trains = exchanged(here, round)
        y, counts = local(here, round, x, c)
        z = (x - y) / counts / hyper.rate(round)
        moved = weights @ (x + hyper.mixed_lr * (y - x))
        x, c = (np.where(trains[:, None], new, was) for new, was in ((moved, x), (c + weights @ z - z, c)))
        after.append(x)
    return after


def led(here: Setup) -> list[np.ndarray]:
    """The paper's y: phi <- phi - eta g - beta y, then y <- y + phi - W phi, with beta = 1 / K."""
    hyper: Any = here.method.hyper
    x, eta = np.tile(start(here), (NUM_PEERS, 1)), hyper.lr
    y, after = np.zeros_like(x), []
    for round in range(here.rounds):
        weights, trains = exchanged(here, round)
        counts = np.array([[len(seen(here, round, i))] for i in range(NUM_PEERS)])
        phi, _ = local(here, round, x, y / counts / eta)
        x, y = (np.where(trains[:, None], new, was) for new, was in ((weights @ phi, x), (y + phi - weights @ phi, y)))
        after.append(x)
    return after


def d2(here: Setup) -> list[np.ndarray]:
    """x^{t+1} = W (2 x^t - x^{t-1} - eta (g^t - g^{t-1})); every peer in every round."""
    hyper: Any = here.method.hyper
    x, eta = np.tile(start(here), (NUM_PEERS, 1)), hyper.lr
    before, old, after = x, np.zeros_like(x), []
    for round in range(here.rounds):
        weights, _ = exchanged(here, round)
        g = np.array([seen(here, round, i)[0].gradient(x[i]) for i in range(NUM_PEERS)])
        before, x = x, weights @ (2 * x - before - eta * (g - old)) if round else weights @ (x - eta * g)
        old = g
        after.append(x)
    return after


LAZY = {"lazy": True, "batch_size": 2}
CASES: list[tuple[str, Callable[[Setup], list[np.ndarray]], dict[str, Any], Topology, Any]] = [
    ("dsgt", dsgt, {"batch_size": 2, "lr": 0.05}, OnePeerExponential(), ABSENCES[0]),
    ("dsgt", dsgt, {"lr": 0.1, "order": "mix_first", "lr_decay": 0.9}, LINE, ABSENCES[2]),
    ("kgt", kgt, {"batch_size": 2, "steps": 3, "lr": 0.05, "mixed_lr": 0.8}, OnePeerExponential(), ABSENCES[0]),
    ("kgt", kgt, {"batch_size": 2, "epochs": 2, "lr": 0.05, "lr_decay": 0.9}, METROPOLIS, ABSENCES[2]),
    ("led", led, {"batch_size": 2, "steps": 3, "lr": 0.05}, FullyConnected(), ABSENCES[0]),
    ("led", led, {**LAZY, "steps": 2, "lr": 0.05}, CHANGING, ABSENCES[2]),
    ("d2", d2, {"batch_size": 2, "lr": 0.1}, FullyConnected(), ABSENCES[0]),
    ("d2", d2, {**LAZY, "lr": 0.1}, Ring(), ABSENCES[0]),
]


@pytest.mark.parametrize(("name", "reference", "hyper", "topology", "clients"), CASES)
def test_follows_its_equations(
    name: str, reference: Callable[[Setup], list[np.ndarray]], hyper: Any, topology: Topology, clients: Any
):
    if hyper.get("lazy") is None and name in ("led", "d2"):
        hyper = {**hyper, "lazy": False}
    here = made(name, hyper, rounds=6, topology=topology, clients=clients)
    expected, run_states = reference(here), play(here)[1]
    away = [absent(here.population.sample_round(round, everyone=True)) for round in range(here.rounds)]
    assert not clients or (any(one for one, _ in away) and any(lost for _, lost in away))
    for run_state, x in zip(run_states, expected, strict=True):
        np.testing.assert_allclose(models(here, run_state), x, rtol=1e-6, atol=1e-6)
        if name != "dsgt":
            np.testing.assert_allclose(present_sum(here, run_state, "correction"), 0, atol=2e-5)


def present_sum(here: Setup, run_state: RunState, name: str) -> np.ndarray:
    """The sum over all peers of a tree that begins at 0."""
    if len(run_state.states) < NUM_PEERS:
        return np.zeros(DIM)
    return of_states(here, run_state, name).sum(axis=0)


def minimiser(here: Setup) -> np.ndarray:
    """x* of the mean of the f_i, at which single gradients are far from 0."""
    mine = [points(here, i) for i in range(NUM_PEERS)]
    weighted = np.array([(client.a * client.c).mean(axis=0) for client in mine])
    found = weighted.sum(axis=0) / np.array([client.hessian() for client in mine]).sum(axis=0)
    assert np.abs([client.gradient(found) for client in mine]).max() > 0.3
    return found


@pytest.mark.parametrize("topology", [METROPOLIS, LINE], ids=lambda graph: graph.name)
@pytest.mark.parametrize("name", METHODS)
def test_a_constant_step_ends_at_the_minimiser_of_unlike_peers(name: str, topology: Topology):
    work = {"steps": 4} if name in ("kgt", "led") else {}
    here = made(name, {"lr": 0.1 if work else 0.2, "batch_size": 0, **work}, rounds=120, topology=topology)
    last = play(here)[1][-1]
    np.testing.assert_allclose(models(here, last), np.tile(minimiser(here), (NUM_PEERS, 1)), atol=1e-3)
    if name != "dsgt":
        # The fixed point has c_i = -grad f_i(x*).
        gradients = [points(here, i).gradient(minimiser(here)) for i in range(NUM_PEERS)]
        np.testing.assert_allclose(of_states(here, last, "correction"), -np.array(gradients), atol=2e-3)


@pytest.mark.parametrize("topology", [METROPOLIS, LINE], ids=lambda graph: graph.name)
def test_with_the_same_step_dpsgd_ends_elsewhere(topology: Topology):
    plain = made("dpsgd", {"lr": 0.1, "batch_size": 0, "steps": 4}, rounds=60, topology=topology)
    assert np.abs(models(plain, play(plain)[1][-1]) - minimiser(plain)).max() > 0.05


@pytest.mark.parametrize("name", ["kgt", "led"])
def test_peers_that_take_fewer_steps_still_end_there(name: str):
    clients = {"work": "capacity", "examples_per_s": [250.0, 1000.0, 1000.0, 500.0]}
    here = made(name, {"lr": 0.1, "batch_size": 0, "steps": 4}, rounds=120, topology=METROPOLIS, clients=clients)
    records, run_states = play(here)
    assert len({row.num_steps for row in records[0].clients}) > 1
    x = models(here, run_states[-1])
    np.testing.assert_allclose(x, np.tile(minimiser(here), (NUM_PEERS, 1)), atol=1e-3)


@pytest.mark.parametrize("name", METHODS)
def test_with_absent_peers_it_still_ends_there(name: str):
    here = made(name, {"lr": 0.2, "batch_size": 0}, rounds=160, topology=METROPOLIS, clients=ABSENCES[1])
    x = models(here, play(here)[1][-1])
    np.testing.assert_allclose(x, np.tile(minimiser(here), (NUM_PEERS, 1)), atol=1e-3)


@pytest.mark.parametrize("name", METHODS)
def test_with_equal_weights_of_all_it_is_gradient_descent(name: str):
    own = {"dsgt": {}, "kgt": {"steps": 1}, "led": {"steps": 1, "lazy": False}, "d2": {"lazy": False}}[name]
    here = made(name, {"lr": 0.2, "batch_size": 0, **own}, rounds=5, topology=FullyConnected())
    x = start(here)
    for run_state in play(here)[1]:
        x = x - 0.2 * np.mean([points(here, i).gradient(x) for i in range(NUM_PEERS)], axis=0)
        np.testing.assert_allclose(models(here, run_state), np.tile(x, (NUM_PEERS, 1)), atol=1e-6)


def test_one_step_of_kgt_is_dsgt_and_the_mean_of_trackers_is_that_of_gradients():
    options: dict[str, Any] = {"rounds": 5, "topology": LINE}
    tracking = made("dsgt", {"lr": 0.1, "batch_size": 2}, **options)
    local = made("kgt", {"lr": 0.1, "batch_size": 2, "steps": 1}, **options)
    for run_state, other in zip(play(tracking)[1], play(local)[1], strict=True):
        np.testing.assert_allclose(models(tracking, run_state), models(local, other), atol=2e-6)
        np.testing.assert_allclose(of_states(tracking, run_state, "drift").sum(axis=0), 0, atol=2e-6)


def test_a_matrix_below_the_bound_diverges_unless_it_is_lazy(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    # A ring of four that keeps 0.1: eigenvalues 1, 0.1, 0.1 and 0.1 - 0.9 = -0.8, below -1/3.
    weights = 0.1 * np.eye(4) + 0.45 * Ring().receives(4, 0, 0)
    (tmp_path / "ring.csv").write_text("\n".join(" ".join(map(str, row)) for row in weights))
    ring = FixedGraph(path=str(tmp_path / "ring.csv"), weighted=True)
    here = made("d2", {"lr": 0.05, "batch_size": 0}, rounds=50, topology=ring.read(4))
    apart = np.arange(4.0)[:, None] * np.ones(DIM)
    spread = [np.ptp(models(here, play(here, run_state=world_of_d2(apart, here))[1][-1]), axis=0).max()]
    with refused(names=["method.lazy=false", "-0.8", "-0.3233"]):
        made("d2", {"lazy": False}, topology=ring.read(4))
    monkeypatch.setattr(LED, "mixing", lambda self, weights, exchange: weights)
    spread.append(np.ptp(models(here, play(here, run_state=world_of_d2(apart, here))[1][-1]), axis=0).max())
    assert spread[0] < 0.1 and spread[1] > 1e3


def world_of_d2(x: np.ndarray, here: Setup) -> RunState:
    """The world before round 0 with these models, and corrections of 0."""
    plain = world_of(x, here)
    zeros = world_of(np.zeros_like(x), here)
    states = {i: {**plain.states[i], "correction": zeros.states[i]["params"]} for i in plain.states}
    return RunState(states=states)


def test_lazy_is_chosen_by_eigenvalues_and_changes():
    everyone = Exchange(0, 0, np.full(16, True), True)
    torus, full = (mixing_weights(t.receives(16, 0, 0), "uniform") for t in (Torus(), FullyConnected()))
    halved = (np.eye(16) + torus.toarray()) / 2
    method = LED()
    np.testing.assert_array_equal(method.mixing(torus, everyone).toarray(), halved)
    assert method.mixing(full, everyone) is full
    changing = Exchange(0, 0, np.full(16, True), False)
    np.testing.assert_array_equal(method.mixing(full, changing).toarray(), (np.eye(16) + full.toarray()) / 2)
    many = csr_array(np.eye(1001))
    assert method.mixing(many, Exchange(0, 0, np.full(1001, True), True)) is not many


@pytest.mark.parametrize(
    ("name", "options", "names"),
    [
        ("led", {"hyper": {"lazy": False}, "topology": CHANGING}, ["method.lazy=false", "changes"]),
        ("led", {"hyper": {"lazy": False}, "clients": ABSENCES[1]}, ["method.lazy=false", "absent"]),
        ("d2", {"topology": OnePeerExponential()}, ["one-peer-exponential", "D2", "symmetric"]),
        ("dsgt", {"topology": Grid(rows=1)}, ["grid", "DSGT", "column 0", "metropolis"]),
        ("kgt", {"topology": Ring(), "clients": ABSENCES[1]}, ["KGT", "absent", "column", "metropolis"]),
    ],
)
def test_what_its_matrix_does_not_allow_is_refused(name: str, options: dict[str, Any], names: list[str]):
    hyper = options.pop("hyper", {})
    with refused(names=names):
        made(name, hyper, **{"topology": METROPOLIS, **options})


def test_steps_and_momentum_that_would_be_ignored_are_refused():
    given = (("d2", {"steps": 2}), ("d2", {"epochs": 1}), ("led", {"momentum": 0.9}), ("dsgt", {"steps": 2}))
    for name, hyper in given:
        with refused(names=[*hyper]):
            made(name, hyper)

"""FedU with a server and among peers, against its equations in float64; the sum that is kept, and the bound."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rayfl import tree
from rayfl.compress.sparse import TopK
from rayfl.methods.personal.fedu import laplacian_step
from rayfl.rounds.executor import InlineExecutor
from rayfl.testing.executors import play
from rayfl.topology.graphs import (
    FixedGraph,
    FullyConnected,
    Grid,
    RandomNeighbours,
    RandomRegular,
    Ring,
    Topology,
    largest_laplacian_eigenvalue,
)
from tests.contracts.every_method import experiment
from tests.contracts.seams.closed_form import batches, flat
from tests.methods.own_models import CLIENTS, MODEL_BITS, common, curvature, made, personal, rounds_of
from tests.methods.reference import DIM, NUM_CLASSES, played, setup_of
from tests.population.statuses import with_status
from tests.refusals import refused

GRAPHS = (
    (Ring(), 0.3),
    (Grid(rows=1), 0.45),
    (Grid(rows=1, weights="metropolis"), 1.2),
    (FullyConnected(), 0.2),
    (RandomRegular(degree=2), 0.4),
)
by_graph = pytest.mark.parametrize(("topology", "lap_step"), GRAPHS, ids=lambda value: getattr(value, "name", value))
ABSENCES = ({}, {"per_round": 2}, {"dropout_before_download": 0.3, "dropout_after_training": 0.3})
HYPER = {"lr": 0.1, "lr_decay": 0.9, "steps": 3, "batch_size": 2, "lap_step": 0.3}


def a_kl(topology: Topology, seed: int, round: int, present: list[int]) -> np.ndarray:
    """The weights of the links among those who are present, one by one."""
    graph, weights = topology.receives(4, seed, round), np.zeros((4, 4))
    degree = {k: sum(bool(graph[k, other]) for other in present) for k in present}
    for k in present:
        for other in present:
            if graph[k, other]:
                largest = max(degree[k], degree[other])
                weights[k, other] = 1.0 if topology.weights == "uniform" else 1 / (1 + largest)
    return weights


def at_server(state: Any) -> np.ndarray:
    """All w_k as the server has them, [4, 10]."""
    return np.stack([flat({n: m[k] for n, m in state.server["models"].items()}) for k in CLIENTS])


def followed(here: Any, server: bool) -> list[tuple[np.ndarray, list[int]]]:
    """By round all w_k, as the server or the peers have them, and who exchanged."""
    hyper, w, seen = here.method.hyper, common(here), []
    for round in range(here.rounds):
        drawn = here.population.sample_round(round, everyone=not server)
        there = list(with_status(drawn, "delivered"))
        # Peers that are away from the exchange train all the same, unless they vanish with what they trained.
        trains = there if server else sorted({*there, *with_status(drawn, "dropped_before_download")})
        for k in trains:
            for batch in batches(here, round, k, epochs=None, steps=hyper.steps, batch_size=hyper.batch_size):
                w[k] = w[k] - hyper.lr * hyper.lr_decay**round * batch.gradient(w[k])
        if there:
            a, trained = a_kl(here.topology, here.seed, round, list(CLIENTS) if server else there), w.copy()
            for k in CLIENTS:
                w[k] = trained[k] - hyper.lap_step * sum(
                    a[k, other] * (trained[k] - trained[other]) for other in CLIENTS
                )
        seen.append((w.copy(), there))
    return seen


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@by_graph
def test_the_server_follows_the_equations(topology: Topology, lap_step: float, clients: dict[str, Any]):
    hyper = {"lr": 0.1, "lr_decay": 0.9, "steps": 3, "batch_size": 2, "lap_step": lap_step}
    here = made("fedu", hyper, rounds=6, topology=topology, clients=clients)
    behind: set[int] = set()
    for (record, own, state), (w, there) in zip(rounds_of(here), followed(here, server=True), strict=True):
        for k in CLIENTS:
            if k in there:
                np.testing.assert_allclose(own[k], w[k], rtol=1e-5, atol=1e-5)
            if there:
                np.testing.assert_allclose(at_server(state)[k], w[k], rtol=1e-5, atol=1e-5)
        # Up one model, down one; a client whose w_k moved while it was away downloads that first.
        bits = {row.client: (row.uplink_bits, row.downlink_bits) for row in record.clients if row.client in there}
        assert bits == {k: (MODEL_BITS, MODEL_BITS * (1 + (k in behind))) for k in there}
        behind = (behind | set(CLIENTS)) - set(there) if there else behind


def test_a_round_in_which_nobody_delivers_moves_nothing():
    here = made("fedu", HYPER, rounds=8, topology=Ring(), clients={"dropout_after_training": 0.7})
    models = [at_server(state) for _, _, state in rounds_of(here)]
    silent = [round for round, (_, there) in enumerate(followed(here, server=True)) if not there]
    # The clients differ by then, so that a step along the Laplacian would move them.
    apart = [round for round in silent if round and np.ptp(models[round - 1], axis=0).max() > 0.01]
    assert apart
    for round in apart:
        assert np.array_equal(models[round], models[round - 1])


class Scaled(nn.Module):
    """Logits W x times a learnable scale, a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, NUM_CLASSES)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scale * self.linear(inputs)


def test_a_parameter_without_dimensions_is_mixed_like_any_other():
    ends = {}
    for name in ("fedu", "dfedu"):
        hyper = {"lr": 0.5, "steps": 3, "batch_size": 2, "lap_step": 0.3}
        here = replace(setup_of(name, hyper, build=Scaled), topology=Ring())
        executor, run_state = InlineExecutor(here), played(here)[-1][1]
        ends[name] = {i: tree.to_tensors(executor.get(ref))["params"] for i, ref in run_state.states.items()}
    for i, model in ends["fedu"].items():
        assert model["scale"].shape == () and model["scale"] != 2
        for name, value in model.items():
            np.testing.assert_allclose(value, ends["dfedu"][i][name], rtol=1e-5, atol=1e-6)
    # A path 0 - 1 - 2 with weights 1 and 2: w_1 is pulled by both of its neighbours.
    links = np.array([[0, 1, 0], [1, 0, 2], [0, 2, 0]], np.float64)
    moved = laplacian_step(torch.tensor([1.0, 2.0, 5.0]), links, 0.1)
    np.testing.assert_allclose(moved, [1 - 0.1 * -1, 2 - 0.1 * (1 - 6), 5 - 0.1 * 6], rtol=1e-6)


@pytest.mark.parametrize("clients", (ABSENCES[0], ABSENCES[2]), ids=str)
@by_graph
def test_peers_follow_the_equations(topology: Topology, lap_step: float, clients: dict[str, Any]):
    hyper = {"lr": 0.1, "lr_decay": 0.9, "steps": 3, "batch_size": 2, "lap_step": lap_step}
    here = made("dfedu", hyper, rounds=6, topology=topology, clients=clients)
    for (record, own, _), (w, there) in zip(rounds_of(here), followed(here, server=False), strict=True):
        np.testing.assert_allclose(own, w, rtol=1e-5, atol=1e-5)
        graph = topology.receives(4, here.seed, record.row.round)
        for row in (row for row in record.clients if row.client in there):
            degree = sum(bool(graph[row.client, other]) for other in there)
            assert (row.uplink_bits, row.downlink_bits) == (degree * MODEL_BITS, degree * MODEL_BITS)


def test_with_everybody_there_a_server_and_peers_do_the_same():
    hyper = {"lr": 0.1, "steps": 2, "batch_size": 2, "lap_step": 0.3}
    ends = [rounds_of(made(name, hyper, topology=Ring(), rounds=3))[-1][1] for name in ("fedu", "dfedu")]
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("uplink", [None, TopK(keep_ratio=0.3)], ids=["dense", "topk"])
@pytest.mark.parametrize("name", ["fedu", "dfedu"])
def test_the_exchange_keeps_the_sum_of_all_models(name: str, uplink: TopK | None):
    # With a tiny learning rate only the exchange moves anything, once two rounds have set the clients apart.
    options: dict[str, Any] = {"topology": Grid(rows=1), "uplink": uplink, "clients": {"dropout_before_download": 0.3}}
    apart = made(name, {"lr": 0.2, "steps": 3, "batch_size": 2, "lap_step": 0.4}, rounds=2, **options)
    still = made(name, {"lr": 1e-9, "steps": 1, "batch_size": 2, "lap_step": 0.4}, rounds=12, **options)
    states = play(apart)[1]
    later = play(still, run_state=states[-1])[1]

    def models(state: Any) -> np.ndarray:
        return personal(still, state) if name == "dfedu" else at_server(state)

    before, after = models(states[-1]), models(later[-1])
    spread = [np.abs(w - w.mean(axis=0)).max() for w in (before, after)]
    np.testing.assert_allclose(after.sum(axis=0), before.sum(axis=0), atol=2e-5)
    # Top k of what does not change sends the same entries again and again, and the others never mix.
    assert spread[1] < 0.5 * spread[0] or uplink is not None


def test_the_fixed_point_solves_the_linear_system():
    # With one step of the whole split and both steps small, w_k rests where h_k w_k - b_k + (lap_step / lr) (L w)_k = 0
    # up to O(lr): w <- (I - s L)(w - lr (H w - b)), so w = w - lr g - s L w + lr s L g.
    lr, step = 0.4, 0.1
    here = made("fedu", {"lr": lr, "steps": 1, "batch_size": 0, "lap_step": step}, rounds=50, topology=Ring())
    own = personal(here, play(here)[1][-1])
    h, b = curvature(here)
    a = Ring().receives(4, 0, 0).astype(float)
    mixing = np.eye(4) - step * (np.diag(a.sum(axis=1)) - a)
    for entry in range(10):
        # w = M (w - lr (H w - b)): (I - M (I - lr H)) w = lr M b.
        system = np.eye(4) - mixing @ (np.eye(4) - lr * np.diag(h[:, entry]))
        np.testing.assert_allclose(own[:, entry], np.linalg.solve(system, lr * mixing @ b[:, entry]), atol=1e-4)


def test_lambda_max_of_known_graphs():
    # A cycle of n has 2 - 2 cos(2 pi j / n), a complete graph n, a path of two 2.
    assert largest_laplacian_eigenvalue(Ring(), 6, 0) == pytest.approx(4)
    assert largest_laplacian_eigenvalue(Ring(), 5, 0) == pytest.approx(2 - 2 * np.cos(4 * np.pi / 5))
    assert largest_laplacian_eigenvalue(FullyConnected(), 7, 0) == pytest.approx(7)
    # Graphs that vary have a bound that holds in every round.
    varying = RandomRegular(degree=3)
    bound = largest_laplacian_eigenvalue(varying, 8, 0)
    assert bound == 6
    for round in range(20):
        a = varying.receives(8, 0, round).astype(float)
        assert np.linalg.eigvalsh(np.diag(a.sum(axis=1)) - a)[-1] <= bound + 1e-9


@pytest.mark.parametrize("name", ["fedu", "dfedu"])
def test_a_step_beyond_the_bound_is_refused(name: str):
    # lambda_max of four in a ring is 4; a step of 0.5 takes its alternating mode times 1 - 4 * 0.5 = -1.
    with refused(names=["method.lap_step=0.5", "below 0.5", "0.25"]):
        made(name, {"lap_step": 0.5}, topology=Ring())
    made(name, {"lap_step": 0.499}, topology=Ring())


@pytest.mark.parametrize("name", ["fedu", "dfedu"])
def test_graphs_that_do_not_fit_are_refused(name: str, tmp_path: Any):
    with refused(names=["topology", "directed", "symmetric"]):
        made(name, {}, topology=RandomNeighbours(degree=2))
    (tmp_path / "graph.csv").write_text("0 1 1\n1 0 1\n1 1 0\n", encoding="utf-8")
    with refused(names=["graph.csv", "3 x 3", "4 x 4", "clients.count=4"]):
        made(name, {}, topology=FixedGraph(path=str(tmp_path / "graph.csv")).read(4))


def test_fedu_needs_a_graph_and_other_server_methods_refuse_one():
    with refused(names=["FedU", "graph", "add", "[topology]"]):
        made("fedu", {})
    with refused(names=["FedAvg", "server", "remove", "topology"]):
        experiment("fedavg", topology="ring")
    with refused(names=["server", "FedU", "remove"]):
        from rayfl.experiment.prepare import prepare

        prepare(experiment("fedu", wrap="elastic"))

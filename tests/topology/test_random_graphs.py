"""Epidemic Learning, MATCHA, networkx's graphs and graphs by round: degrees, rates, files."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from rayfl.choices.kinds import make
from rayfl.experiment.prepare import prepare
from rayfl.testing.executors import play
from rayfl.topology.by_round import GraphsByRound
from rayfl.topology.graphs import ErdosRenyi, Grid, RandomNeighbours, Ring, Topology, connected
from rayfl.topology.matcha import Matcha, activation, best_alpha, colours, laplacian
from rayfl.topology.mixing import Exchange, mixing_weights
from rayfl.topology.random_graphs import Epidemic, Geometric, SmallWorld
from tests.contracts.every_method import experiment
from tests.refusals import refused


def test_epidemic_learning_sends_to_so_many_and_shrinks_disagreement_as_computed():
    """E sum ||x_i' - xbar||^2 = c sum ||x_i - xbar||^2, c = (1 - (1 - s/(n-1))^n) / s - 1/(n-1): 15/64 for n=5, s=2."""
    x = np.random.default_rng(0).standard_normal(5)
    x -= x.mean()
    ratios = []
    for round in range(3000):
        graph = Epidemic(degree=2).receives(5, 1, round)
        assert graph.sum(axis=0).tolist() == [2] * 5 and not graph.diagonal().any()
        ratios.append(((mixing_weights(graph, "uniform") @ x) ** 2).sum() / (x**2).sum())
    error = np.std(ratios) / np.sqrt(len(ratios))
    assert abs(np.mean(ratios) - 15 / 64) < 4.5 * error < 0.02
    assert Epidemic().receives(9, 0, 0).sum(axis=0).tolist() == [4] * 9
    with refused(names=["degree=5", "5 peers", "at most 4"]):
        Epidemic(degree=5).receives(5, 0, 0)


@pytest.mark.parametrize("topology", [SmallWorld(rewired=0.3), Geometric(), SmallWorld(neighbours=2, rewired=0.0)])
def test_graphs_of_networkx_are_connected_symmetric_and_fixed(topology: Topology):
    graphs = [topology.receives(20, 4, round) for round in range(2)]
    assert np.array_equal(graphs[0], graphs[1]) and np.array_equal(graphs[0], graphs[0].T) and connected(graphs[0])
    other = topology.receives(20, 5, 0)
    assert not np.array_equal(graphs[0], other) or getattr(topology, "rewired", 1.0) == 0
    if getattr(topology, "rewired", 1.0) == 0:
        assert np.array_equal(other, Ring().receives(20, 0, 0))


def test_numbers_that_give_no_graph_are_refused():
    with refused(names=["neighbours=3", "even"]):
        SmallWorld(neighbours=3).receives(8, 0, 0)
    with refused(names=["20 peers", "100 draws", "radius=0.01"]):
        Geometric(radius=0.01).receives(20, 0, 0)


def plan(topology: Topology, num_peers: int, p: np.ndarray | None, budget: float) -> tuple[np.ndarray, np.ndarray]:
    links = np.argwhere(np.triu(topology.receives(num_peers, 3, 0)))
    matchings = colours(tuple((first, second) for first, second in links.tolist()))
    for matching in matchings:
        ends = np.array(matching).ravel()
        assert len(set(ends.tolist())) == len(ends)
    laplacians = np.array([laplacian(num_peers, tuple(matching)) for matching in matchings])
    assert np.array_equal(
        laplacians.sum(axis=0), np.diag(laplacians.sum(axis=0).diagonal()) - topology.receives(num_peers, 3, 0)
    )
    return laplacians, activation(laplacians, budget) if p is None else p


@pytest.mark.parametrize(
    ("topology", "num_peers", "budget", "alpha", "rho"),
    [(Ring(), 4, 0.5, 1 / 2, 1 / 2), (Ring(), 4, 1.0, 1 / 3, 1 / 9), (Grid(rows=1), 2, 0.3, 1 / 2, 0.7)],
    ids=["ring", "whole ring", "one link"],
)
def test_matcha_by_hand(topology: Topology, num_peers: int, budget: float, alpha: float, rho: float):
    laplacians, p = plan(topology, num_peers, None, budget)
    assert p == pytest.approx([budget] * len(p), abs=1e-6)
    assert best_alpha(laplacians, p) == (pytest.approx(alpha, abs=1e-6), pytest.approx(rho, abs=1e-9))


def test_rho_is_the_mean_over_all_subsets_of_matchings_and_no_other_probabilities_connect_better():
    topology = ErdosRenyi(p=0.5)
    laplacians, p = plan(topology, 8, None, 0.5)
    alpha, rho = best_alpha(laplacians, p)
    expected = np.zeros((8, 8))
    for active in itertools.product((0, 1), repeat=len(p)):
        chance = np.prod(np.where(active, p, 1 - p))
        w = np.eye(8) - alpha * np.tensordot(np.array(active), laplacians, 1)
        expected += chance * w.T @ w
    assert np.linalg.eigvalsh(expected - 1 / 8)[-1] == pytest.approx(rho, abs=1e-9)

    def second(p: np.ndarray) -> float:
        return np.linalg.eigvalsh(np.tensordot(p, laplacians, 1))[1]

    assert p.sum() <= 0.5 * len(p) + 1e-6 and p.min() >= 0 and p.max() <= 1
    draw = np.random.default_rng(0)
    for _ in range(200):
        other = np.clip(p + 0.1 * draw.standard_normal(len(p)), 0, 1)
        other *= min(1.0, 0.5 * len(p) / other.sum())
        assert second(other) <= second(p) + 5e-3


def test_matcha_activates_as_often_as_it_says_and_keeps_the_mean():
    topology = Matcha(base=ErdosRenyi(p=0.5), budget=0.5)
    matchings, probabilities, alpha = topology.plan(8, 3)
    counts = np.zeros(len(matchings))
    for round in range(400):
        graph = topology.sparse(8, 3, round)
        counts += [bool(graph[matching[0]]) for matching in matchings]
        weights = topology.mixing(graph, Exchange(3, round, np.full(8, True), False))
        np.testing.assert_allclose(weights.toarray(), np.eye(8) - alpha * laplacian_of(graph.toarray()), atol=1e-12)
    np.testing.assert_allclose(counts / 400, probabilities, atol=0.12)


def laplacian_of(graph: np.ndarray) -> np.ndarray:
    return np.diag(graph.sum(axis=1)) - graph.astype(float)


@pytest.mark.parametrize("method", ["dpsgd", "led", "dsgt"])
def test_methods_run_on_matcha(method: str):
    records, _ = play(prepare(experiment(method, topology={"name": "matcha", "base": "ring"})))
    degrees = [m.value for record in records for m in record.metrics if m.name == "graph/mean_degree"]
    assert all(degree is not None and degree <= 2 for degree in degrees)


def test_what_matcha_cannot_do_is_refused():
    with refused(names=["topology.base='random'", "changes"]):
        Matcha(base=RandomNeighbours(degree=2)).receives(6, 0, 0)
    with refused(names=["matcha", "1001"]):
        Matcha().sparse(1001, 0, 0)
    with refused(names=["topology.weights", "matcha", "weights of its own"]):
        prepare(experiment("dpsgd", topology={"name": "matcha", "weights": "metropolis"}))


def test_a_graph_for_each_round_in_one_file(tmp_path: Path):
    (tmp_path / "graphs.csv").write_text("# round i j\n0 0 1\n0 1 2\n2,2,0\n")
    topology = make(Topology, {"name": "file-by-round", "path": str(tmp_path / "graphs.csv")}).read(3)
    seen = [topology.receives(3, 0, round).astype(int).tolist() for round in range(4)]
    assert seen[0] == [[0, 1, 0], [1, 0, 1], [0, 1, 0]] == seen[3]
    assert seen[1] == [[0, 0, 0]] * 3 and seen[2] == [[0, 0, 1], [0, 0, 0], [1, 0, 0]]
    np.save(tmp_path / "graphs.npy", np.array([seen[2], seen[0]]))
    known = GraphsByRound(path=str(tmp_path / "graphs.npy"), weights="metropolis").read(3)
    assert known.receives(3, 0, 1).astype(int).tolist() == seen[0] and known.weights == "metropolis" and known.varying


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("0 1\n1 2\n", ["2 x 2", "3 x 3", "a round from 0"]),
        ("-1 0 1\n", ["1 x 3", "a round from 0"]),
        ("0 0 7\n", ["edge 0 7", "0 to 2"]),
        ("a b c\n", ["graphs", "'a'"]),
    ],
)
def test_text_that_has_no_graphs(tmp_path: Path, text: str, names: list[str]):
    (tmp_path / "graphs.txt").write_text(text)
    with refused(names=names):
        GraphsByRound(path=str(tmp_path / "graphs.txt")).read(3)

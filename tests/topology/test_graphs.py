"""Graphs and mixing weights, by hand."""

import numpy as np
import pytest

from rayfl.determinism.seeding import generator
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.topology.graphs import (
    ErdosRenyi,
    Exponential,
    FullyConnected,
    Grid,
    OnePeerExponential,
    RandomNeighbours,
    RandomRegular,
    Ring,
    Topology,
    Torus,
    connected,
)
from rayfl.topology.mixing import mixing_weights, without_diagonal
from tests.refusals import refused

ALL = [
    Ring(),
    Grid(),
    Torus(),
    Exponential(),
    OnePeerExponential(),
    FullyConnected(),
    ErdosRenyi(p=0.5),
    RandomNeighbours(degree=2),
    RandomRegular(degree=2),
]


def neighbours(topology: Topology, num_peers: int, peer: int, round: int = 0) -> list[int]:
    return np.flatnonzero(topology.receives(num_peers, 0, round)[peer]).tolist()


@pytest.mark.parametrize("topology", ALL)
def test_sparse_graphs_are_plain_ones_and_have_the_weights_of_plain_ones(topology: Topology):
    for num_peers, round in ((8, 0), (12, 1)):
        graph, sparse = topology.receives(num_peers, 3, round), topology.sparse(num_peers, 3, round)
        assert np.array_equal(sparse.toarray(), graph) and sparse.has_sorted_indices and sparse.data.all()
        closed = graph | np.eye(num_peers, dtype=bool)
        uniform = mixing_weights(sparse, "uniform")
        assert np.array_equal(uniform.toarray(), closed / closed.sum(axis=1, keepdims=True))
        assert np.array_equal(without_diagonal(uniform).toarray(), np.where(graph, uniform.toarray(), 0.0))
        if np.array_equal(graph, graph.T):
            # The bits of the diagonal depend on the order in which a row is added up.
            degree = graph.sum(axis=1)
            links = np.where(graph, 1.0 / (1.0 + np.maximum.outer(degree, degree)), 0.0)
            expected = links + np.diag(1.0 - links.sum(axis=1))
            assert np.array_equal(mixing_weights(sparse, "metropolis").toarray(), expected)


def test_random_graphs_are_those_that_were_drawn_pair_by_pair():
    """Draws are keyed, so an experiment keeps its graph."""
    drawn = generator(3, purpose="erdos-renyi").random((9, 9)) < 0.8
    upper = np.triu(drawn, 1)
    assert np.array_equal(ErdosRenyi(p=0.8).receives(9, 3, 0), upper | upper.T)
    draws, graph = generator(3, 2, purpose="random neighbours"), RandomNeighbours(degree=3).receives(9, 3, 2)
    for peer in range(9):
        others = np.delete(np.arange(9), peer)
        assert np.flatnonzero(graph[peer]).tolist() == sorted(draws.choice(others, 3, replace=False).tolist())


def test_a_graph_of_many_peers_takes_memory_for_its_links_alone():
    graph = RandomNeighbours(degree=10).sparse(3000, 1, 0)
    weights = mixing_weights(graph, "uniform")
    assert graph.nnz == 30_000 and weights.nnz == 33_000
    assert graph.shape == (3000, 3000) and weights.data.nbytes + weights.indices.nbytes < 10**6


def test_ring():
    assert Ring().receives(4, 0, 0).astype(int).tolist() == [[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]]
    assert Ring().receives(2, 0, 0).astype(int).tolist() == [[0, 1], [1, 0]]


def test_fully_connected():
    assert FullyConnected().receives(3, 0, 0).astype(int).tolist() == [[0, 1, 1], [1, 0, 1], [1, 1, 0]]


@pytest.mark.parametrize("p", [0.3, 0.5, 1.0])
def test_erdos_renyi_is_symmetric_connected_and_the_same_every_round(p: float):
    graphs = [ErdosRenyi(p=p).receives(12, 4, round) for round in range(3)]
    assert all(np.array_equal(graphs[0], graph) for graph in graphs)
    assert np.array_equal(graphs[0], graphs[0].T) and connected(graphs[0])
    assert not np.array_equal(graphs[0], ErdosRenyi(p=p).receives(12, 5, 0)) or p == 1.0


def test_erdos_renyi_has_the_edges_that_p_says():
    # 200 peers, 19900 pairs, p = 0.3: mean 5970, standard deviation sqrt(19900 * 0.3 * 0.7) = 65; five of them.
    edges = ErdosRenyi(p=0.3).receives(200, 1, 0).sum() / 2
    assert abs(edges - 5970) < 325


def test_erdos_renyi_gives_up_on_what_is_never_connected():
    with refused(names=["p=", "larger p"]):
        ErdosRenyi(p=1e-6).receives(5, 0, 0)


def test_random_neighbours_receive_from_exactly_so_many_and_change_every_round():
    graphs = [RandomNeighbours(degree=3).receives(8, 1, round) for round in range(5)]
    for graph in graphs:
        assert graph.sum(axis=1).tolist() == [3] * 8
        assert not graph.diagonal().any()
    assert not np.array_equal(graphs[0], graphs[1])
    assert np.array_equal(graphs[0], RandomNeighbours(degree=3).receives(8, 1, 0))
    # Directed: somebody is heard by more or by fewer than three.
    assert any((graph.sum(axis=0) != 3).any() for graph in graphs)


def test_random_neighbours_need_enough_peers():
    with refused(names=["degree=4", "4 peers", "at most 3"]):
        RandomNeighbours(degree=4).receives(4, 0, 0)


@pytest.mark.parametrize("topology", ALL, ids=lambda topology: topology.name)
def test_nobody_is_its_own_neighbour(topology: Topology):
    assert not topology.receives(6, 3, 2).diagonal().any()


def test_one_peer_is_no_graph():
    tables = {"data": "digits", "partition": "iid", "model": "logistic", "method": "dpsgd", "topology": "ring"}
    with refused(names=["clients.count=1", "at least 2"]):
        prepare(Experiment(rounds=1, clients={"count": 1}, **tables))


def test_grid_has_neighbours_above_below_and_beside():
    # 0 1 2 3
    # 4 5 6 7
    # 8 9 10 11
    assert neighbours(Grid(), 12, 0) == [1, 4]
    assert neighbours(Grid(), 12, 6) == [2, 5, 7, 10]
    assert neighbours(Grid(), 12, 11) == [7, 10]
    assert neighbours(Grid(rows=2), 12, 0) == [1, 6]
    assert neighbours(Grid(rows=1), 5, 2) == [1, 3]


def test_torus_wraps_around():
    assert neighbours(Torus(), 12, 0) == [1, 3, 4, 8]
    assert neighbours(Torus(), 12, 6) == [2, 5, 7, 10]
    # Two rows: above and below are the same; one row: a ring.
    assert neighbours(Torus(), 6, 0) == [1, 2, 3]
    assert np.array_equal(Torus(rows=1).receives(5, 0, 0), Ring().receives(5, 0, 0))


@pytest.mark.parametrize("topology", [Grid(), Torus()], ids=lambda topology: topology.name)
def test_a_grid_needs_rows_that_fit(topology: Topology):
    with refused(names=["7 peers", "rows=1"]):
        topology.receives(7, 0, 0)
    with refused(names=["rows=5", "12 peers"]):
        topology.model_copy(update={"rows": 5}).receives(12, 0, 0)


def test_exponential_hears_powers_of_two_further_on():
    assert neighbours(Exponential(), 8, 6) == [0, 2, 7]
    assert neighbours(Exponential(), 6, 0) == [1, 2, 4]
    assert neighbours(Exponential(), 2, 0) == [1]
    # ceil(log2 9) = 4 others: 1, 2, 4, 8.
    assert neighbours(Exponential(), 9, 0) == [1, 2, 4, 8]


def test_one_peer_exponential_hears_one_at_a_time():
    assert [neighbours(OnePeerExponential(), 8, 6, round) for round in range(4)] == [[7], [0], [2], [7]]
    assert [neighbours(OnePeerExponential(), 2, 1, round) for round in range(2)] == [[0], [0]]


def test_one_peer_exponential_reaches_the_mean_after_log2_n_rounds():
    # n = 8: the product of three mixing matrices is the matrix of 1/8, exactly.
    x = np.random.default_rng(0).standard_normal(8)
    for start in range(3):
        mixed = x
        for round in range(start, start + 3):
            mixed = mixing_weights(OnePeerExponential().receives(8, 0, round), "uniform") @ mixed
        np.testing.assert_allclose(mixed, x.mean(), rtol=0, atol=1e-15)


@pytest.mark.parametrize(("num_peers", "degree"), [(8, 3), (9, 4), (10, 8), (10, 9), (6, 1), (30, 10)])
def test_random_regular_is_symmetric_and_everyone_has_as_many(num_peers: int, degree: int):
    graphs = [RandomRegular(degree=degree).receives(num_peers, 1, round) for round in range(6)]
    for graph in graphs:
        assert np.array_equal(graph, graph.T) and not graph.diagonal().any()
        assert graph.sum(axis=0).tolist() == [degree] * num_peers
    assert np.array_equal(graphs[3], RandomRegular(degree=degree).receives(num_peers, 1, 3))
    assert degree == num_peers - 1 or any(not np.array_equal(graphs[0], graph) for graph in graphs[1:])


def test_random_regular_draws_every_pair_as_often():
    # 10 peers of degree 3: a pair is linked with probability 1/3; 600 draws, standard deviation 0.019, five of them.
    share = np.mean([RandomRegular(degree=3).receives(10, 2, round) for round in range(600)], axis=0)
    assert np.abs(share[~np.eye(10, dtype=bool)] - 1 / 3).max() < 0.097


def test_random_regular_needs_an_even_number_of_ends():
    with refused(names=["degree=3", "5 peers", "even"]):
        RandomRegular(degree=3).receives(5, 0, 0)
    with refused(names=["degree=5", "5 peers"]):
        RandomRegular(degree=5).receives(5, 0, 0)


def test_connected_follows_directed_links_both_ways():
    # 0 hears 1 hears 2: what 2 knows comes to all, what 0 knows to nobody.
    chain = np.array([[0, 1, 0], [0, 0, 1], [0, 0, 0]], bool)
    assert not connected(chain) and not connected(chain.T)
    chain[2, 0] = True
    assert connected(chain)


def test_connected():
    path = np.zeros((4, 4), bool)
    path[[0, 1, 1, 2], [1, 0, 2, 1]] = True
    assert not connected(path)
    path[[2, 3], [3, 2]] = True
    assert connected(path)
    assert connected(np.zeros((1, 1), bool))


def test_uniform_weights():
    # Peer 0 hears nobody, peer 1 hears 0, peer 2 hears both.
    graph = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0]], bool)
    third = 1 / 3
    assert mixing_weights(graph, "uniform").toarray().tolist() == [[1, 0, 0], [0.5, 0.5, 0], [third, third, third]]


def test_metropolis_weights():
    # A path 0 - 1 - 2 has degrees 1, 2, 1: edges weigh 1 / (1 + 2), the rest stays with oneself.
    path = np.array([[0, 1, 0], [1, 0, 1], [0, 1, 0]], bool)
    weights = mixing_weights(path, "metropolis").toarray()
    np.testing.assert_allclose(weights, np.array([[2, 1, 0], [1, 1, 1], [0, 1, 2]]) / 3, rtol=1e-15)


@pytest.mark.parametrize("seed", range(3))
def test_metropolis_keeps_the_mean_and_uniform_keeps_a_consensus(seed: int):
    graph = ErdosRenyi(p=0.4).receives(9, seed, 0)
    x = np.random.default_rng(seed).standard_normal(9)
    assert (mixing_weights(graph, "metropolis") @ x).mean() == pytest.approx(x.mean(), abs=1e-12)
    for rule in ("uniform", "metropolis"):
        np.testing.assert_allclose(mixing_weights(graph, rule) @ np.ones(9), 1.0, rtol=1e-12)


def test_metropolis_needs_a_symmetric_graph():
    with refused(names=["uniform", "weights"]):
        mixing_weights(np.array([[0, 1], [0, 0]], bool), "metropolis")

"""Graphs and mixing weights, by hand."""

import numpy as np
import pytest

from rayfl.topology import (
    ErdosRenyi,
    FullyConnected,
    RandomNeighbours,
    Ring,
    Topology,
    connected,
    mixing_weights,
)

ALL = [Ring(), FullyConnected(), ErdosRenyi(p=0.5), RandomNeighbours(degree=2)]


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
    with pytest.raises(ValueError, match="larger p"):
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
    with pytest.raises(ValueError, match="degree=4 is too many neighbours for 4 peers; at most 3 fit"):
        RandomNeighbours(degree=4).receives(4, 0, 0)


@pytest.mark.parametrize("topology", ALL, ids=lambda topology: topology.name)
def test_nobody_is_its_own_neighbour(topology: Topology):
    assert not topology.receives(6, 3, 2).diagonal().any()


@pytest.mark.parametrize("topology", [t for t in ALL if t.name != "random"], ids=lambda topology: topology.name)
def test_one_peer_is_no_graph(topology: Topology):
    with pytest.raises(ValueError, match="at least 2 clients"):
        topology.receives(1, 0, 0)


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
    assert mixing_weights(graph, "uniform").tolist() == [[1, 0, 0], [0.5, 0.5, 0], [third, third, third]]


def test_metropolis_weights():
    # A path 0 - 1 - 2 has degrees 1, 2, 1: edges weigh 1 / (1 + 2), the rest stays with oneself.
    path = np.array([[0, 1, 0], [1, 0, 1], [0, 1, 0]], bool)
    weights = mixing_weights(path, "metropolis")
    np.testing.assert_allclose(weights, np.array([[2, 1, 0], [1, 1, 1], [0, 1, 2]]) / 3, rtol=1e-15)


@pytest.mark.parametrize("seed", range(3))
def test_metropolis_keeps_the_mean_and_uniform_keeps_a_consensus(seed: int):
    graph = ErdosRenyi(p=0.4).receives(9, seed, 0)
    x = np.random.default_rng(seed).standard_normal(9)
    assert (mixing_weights(graph, "metropolis") @ x).mean() == pytest.approx(x.mean(), abs=1e-12)
    for rule in ("uniform", "metropolis"):
        np.testing.assert_allclose(mixing_weights(graph, rule) @ np.ones(9), 1.0, rtol=1e-12)


def test_metropolis_needs_a_symmetric_graph():
    with pytest.raises(ValueError, match="use uniform weights"):
        mixing_weights(np.array([[0, 1], [0, 0]], bool), "metropolis")

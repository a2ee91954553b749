"""Degrees, connectedness and spectral gaps against closed forms."""

import math

import numpy as np
import pytest
from scipy.sparse import csr_array

from rayfl.topology.graphs import (
    ErdosRenyi,
    Exponential,
    FullyConnected,
    Ring,
    Torus,
)
from rayfl.topology.mixing import mixing_weights
from rayfl.topology.statistics import round_metrics, spectral_gap


@pytest.mark.parametrize("size", [3, 4, 7, 16])
def test_gap_of_a_ring(size: int):
    # The eigenvalues of a circulant with 1/3 at distance 0 and 1 are 1/3 + 2/3 cos(2 pi k / n).
    values = sorted(abs(1 / 3 + 2 / 3 * math.cos(2 * math.pi * k / size)) for k in range(size))
    weights = mixing_weights(Ring().receives(size, 0, 0), "uniform")
    assert spectral_gap(weights) == pytest.approx(1 - values[-2], abs=1e-12)


def test_gap_of_a_torus():
    # Sums of the cosines of both directions: (1 + 2 cos(2 pi a / 3) + 2 cos(2 pi b / 4)) / 5.
    values = sorted(
        abs(1 + 2 * math.cos(2 * math.pi * a / 3) + 2 * math.cos(2 * math.pi * b / 4)) / 5
        for a in range(3)
        for b in range(4)
    )
    weights = mixing_weights(Torus().receives(12, 0, 0), "uniform")
    assert spectral_gap(weights) == pytest.approx(1 - values[-2], abs=1e-12)


def test_gap_of_a_directed_circulant():
    # Exponential graph of 8: (1 + w + w^2 + w^4) / 4 with w = exp(2 pi i k / 8); Ying et al.: 2 / (1 + log2 n) = 1/2.
    assert spectral_gap(mixing_weights(Exponential().receives(8, 0, 0), "uniform")) == pytest.approx(0.5, abs=1e-12)


def test_gaps_at_the_ends():
    everyone = mixing_weights(FullyConnected().receives(5, 0, 0), "uniform")
    assert spectral_gap(everyone) == pytest.approx(1.0, abs=1e-12)
    assert spectral_gap(np.eye(4)) == 0.0
    assert spectral_gap(np.eye(1)) == 1.0
    # Two peers that only swap never agree: eigenvalues 1 and -1.
    assert spectral_gap(np.array([[0.0, 1.0], [1.0, 0.0]])) == pytest.approx(0.0, abs=1e-12)


def test_metrics_of_a_round_are_of_those_present():
    # Peer 3 is away: of the ring 0-1-2-3 the line 0-1-2 remains.
    graph = Ring().receives(4, 0, 0)
    present = np.array([True, True, True, False])
    graph = graph & present[:, None] & present[None, :]
    metrics = round_metrics(mixing_weights(graph, "metropolis"), present)
    # Metropolis on the line: [[2, 1, 0], [1, 1, 1], [0, 1, 2]] / 3 has the eigenvalues 1, 2/3, 0.
    assert metrics == {
        "graph/mean_degree": pytest.approx(4 / 3),
        "graph/max_degree": 2,
        "graph/connected": 1.0,
        "graph/spectral_gap": pytest.approx(1 / 3, abs=1e-9),
    }
    apart = round_metrics(csr_array(np.eye(4)), np.full(4, True))
    assert (apart["graph/connected"], apart["graph/spectral_gap"]) == (0.0, 0.0)
    assert round_metrics(csr_array(np.eye(4)), np.array([True, False, False, False])) == {}


@pytest.mark.parametrize("topology", [Ring(weights="metropolis"), ErdosRenyi(p=0.4, weights="metropolis")])
def test_the_gap_bounds_how_fast_peers_agree(topology):
    weights = mixing_weights(topology.receives(10, 1, 0), topology.weights)
    x = np.random.default_rng(0).standard_normal(10)
    apart = [np.linalg.norm(x - x.mean())]
    for _ in range(20):
        x = weights @ x
        apart.append(np.linalg.norm(x - x.mean()))
    rates = np.array(apart[1:]) / apart[:-1]
    assert (rates <= 1 - spectral_gap(weights) + 1e-12).all()
    assert rates[-1] == pytest.approx(1 - spectral_gap(weights), rel=0.02)

"""Rules for mixing weights against their closed forms, weights from files and plug-ins, and what does not fit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array

from rayfl.experiment.prepare import prepare
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from rayfl.topology.graphs import FixedGraph, Grid, RandomNeighbours, Ring, Torus
from rayfl.topology.mixing import Exchange, Needs, check_weights, mixing_weights
from tests.contracts.every_method import experiment
from tests.refusals import refused

PATH = np.diag(np.ones(3, bool), 1) | np.diag(np.ones(3, bool), -1)
STAR = np.zeros((5, 5), bool)
STAR[0, 1:] = STAR[1:, 0] = True


def everyone(num_peers: int, absent: tuple[int, ...] = ()) -> Exchange:
    return Exchange(0, 0, ~np.isin(np.arange(num_peers), absent), True)


def test_laplacian_weights():
    # Of a star of n: l_2 = 1 and l_n = n, so epsilon = 2 / (n + 1), and the hub keeps 1 - (n - 1) epsilon < 0.
    star = mixing_weights(STAR, "laplacian").toarray()
    np.testing.assert_allclose(star, np.where(STAR, 1 / 3, np.diag([-1 / 3, *[2 / 3] * 4])), atol=1e-12)
    given = mixing_weights(PATH, "laplacian", 0.25).toarray()
    np.testing.assert_allclose(given, np.where(PATH, 0.25, np.diag([0.75, 0.5, 0.5, 0.75])), atol=1e-15)
    # Max-degree weights are those of epsilon = 1 / (1 + d_max).
    np.testing.assert_allclose(
        mixing_weights(PATH, "max-degree").toarray(), mixing_weights(PATH, "laplacian", 1 / 3).toarray(), atol=1e-15
    )
    # No other constant agrees faster: the second largest |eigenvalue| of W is least.
    rates = [np.sort(abs(np.linalg.eigvalsh(mixing_weights(PATH, "laplacian", e).toarray())))[-2] for e in (0.3, 0.55)]
    best = np.sort(abs(np.linalg.eigvalsh(mixing_weights(PATH, "laplacian").toarray())))[-2]
    assert best < min(rates)
    assert np.array_equal(mixing_weights(np.zeros((3, 3), bool), "laplacian").toarray(), np.eye(3))


def test_a_constant_under_which_disagreement_grows_is_refused():
    # l_n of a star of 5 is 5.
    with refused(names=["topology.epsilon=0.4", "below 0.4"]):
        mixing_weights(STAR, "laplacian", 0.4)
    many = Ring().sparse(1001, 0, 0)
    with refused(names=["topology.epsilon", "1000"]):
        mixing_weights(many, "laplacian")
    assert mixing_weights(many, "laplacian", 0.4).nnz == 3003


def test_column_weights_are_the_shares_of_senders():
    # 0 sends to 1 and 2; 1 to 2; 2 to 0.
    graph = np.array([[0, 0, 1], [1, 0, 0], [1, 1, 0]], bool)
    expected = [[1 / 3, 0, 1 / 2], [1 / 3, 1 / 2, 0], [1 / 3, 1 / 2, 1 / 2]]
    np.testing.assert_allclose(mixing_weights(graph, "column").toarray(), expected, rtol=1e-15)
    # By hand: x = (3, 6, 0) becomes (1, 4, 4).
    np.testing.assert_allclose(mixing_weights(graph, "column") @ np.array([3.0, 6.0, 0.0]), [1, 4, 4], atol=1e-12)


def test_rules_agree_where_they_must():
    for graph in (Ring().receives(6, 0, 0), Torus().receives(16, 0, 0)):
        uniform = mixing_weights(graph, "uniform").toarray()
        for rule in ("metropolis", "max-degree", "column"):
            np.testing.assert_allclose(mixing_weights(graph, rule).toarray(), uniform, atol=1e-15)
    assert np.linalg.eigvalsh(mixing_weights(Ring().receives(6, 0, 0), "uniform").toarray())[0] == pytest.approx(-1 / 3)
    assert np.linalg.eigvalsh(mixing_weights(Torus().receives(16, 0, 0), "uniform").toarray())[0] == pytest.approx(-0.6)


@pytest.mark.parametrize(
    ("needs", "rows", "names"),
    [
        ("row", [[0.5, 0.5], [0.2, 0.7]], ["row 1", "0.9"]),
        ("column", [[0.5, 0.5], [0.3, 0.5]], ["column 0", "0.8", "weights='column'"]),
        ("column", [[1.5, 0.5], [-0.5, 0.5]], ["-0.5", "row 1", "negative"]),
        ("symmetric", [[0.5, 0.5], [0.4, 0.6]], ["symmetric", "row 0, column 1", "0.5", "0.4", "metropolis"]),
        ("doubly", [[0.5, 0.5], [0.4, 0.6]], ["column 0", "0.9", "metropolis"]),
        ("row", [[np.nan, 0.5], [0.4, 0.6]], ["row 0", "NaN"]),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_their_row(needs: Needs, rows: list[list[float]], names: list[str]):
    with refused(names=names):
        check_weights(csr_array(np.array(rows)), csr_array(~np.eye(2, dtype=bool)), needs)


def test_weights_off_the_graph_or_of_another_size_are_refused():
    graph = Grid(rows=1).sparse(3, 0, 0)
    with refused(names=["row 0", "column 2", "no such link"]):
        check_weights(csr_array(np.full((3, 3), 1 / 3)), graph, "row")
    with refused(names=["(2, 2)", "(3, 3)"]):
        check_weights(csr_array(np.eye(2)), graph, "row")


def weighted(folder: Path, text: str, **settings: Any) -> FixedGraph:
    path = folder / "weights.csv"
    path.write_text(text)
    return FixedGraph(path=str(path), weighted=True, **settings)


def matrix(topology: FixedGraph, num_peers: int, absent: tuple[int, ...] = ()) -> list[list[float]]:
    known = topology.read(num_peers)
    graph = known.receives(num_peers, 0, 0)
    graph[list(absent)] = False
    graph[:, list(absent)] = False
    return known.mixing(csr_array(graph), everyone(num_peers, absent)).toarray().round(12).tolist()


def test_a_file_with_weights(tmp_path: Path):
    rows = [[0.5, 0.25, 0.25], [0.25, 0.75, 0], [0.25, 0, 0.75]]
    assert matrix(weighted(tmp_path, "0.5,0.25,0.25\n0.25,0.75,0\n0.25,0,0.75\n"), 3) == rows
    text = "0 1 0.25\n0 2 0.25\n"
    assert matrix(weighted(tmp_path, text + "3 3 1"), 4) == [[*row, 0] for row in rows] + [[0, 0, 0, 1]]
    # The weight of an absent neighbour stays with the receiver.
    assert matrix(weighted(tmp_path, text), 3, (2,)) == [[0.75, 0.25, 0], [0.25, 0.75, 0], [0, 0, 1]]
    # With columns that sum to 1 it stays with the sender.
    columns = weighted(tmp_path, "0.4,0,0.5\n0.3,1,0.25\n0.3,0,0.25\n")
    assert matrix(columns, 3, (1,)) == [[0.7, 0, 0.5], [0, 1, 0], [0.3, 0, 0.5]]
    one_way = weighted(tmp_path, "0 1 0.25\n", directed=True)
    assert matrix(one_way, 2) == [[0.75, 0.25], [0, 1]]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("0 1 0.2\n1 0 0.2\n", ["two weights", "0", "1", "directed"]),
        ("0 1\n1 2\n", ["2 x 2", "4 x 4", "a weight per line"]),
        ("0 4 0.5\n", ["edge 0 4", "0 to 3"]),
        ("9 9 0.5\n", ["edge 9 9"]),
    ],
)
def test_a_file_whose_weights_cannot_be_read(tmp_path: Path, text: str, names: list[str]):
    with refused(names=names):
        weighted(tmp_path, text).read(4)


EXAMPLE = f"{Path(__file__).resolve().parents[2]}/jobs/examples/my_peers.py:Stubborn"


def stubborn(method: str = "dpsgd", **options: Any) -> Setup:
    return prepare(experiment(method, topology={"name": EXAMPLE, **options}))


def test_a_plugin_has_weights_of_its_own():
    # The eigenvalue of a ring of six nearest to 1 is own + (1 - own) cos(2 pi / 6); cos is 1/2.
    for own in (0.8, 0.5):
        last = play(stubborn(own=own))[0][-1]
        gaps = [metric.value for metric in last.metrics if metric.name == "graph/spectral_gap"]
        assert gaps == [pytest.approx((1 - own) / 2)]
    stubborn("choco")
    with refused(names=["topology.weights", "weights of its own"]):
        stubborn(weights="metropolis")


def test_what_does_not_fit_the_method_is_refused_before_the_run(tmp_path: Path):
    path = tmp_path / "weights.csv"
    path.write_text("\n".join(" ".join(map(str, row)) for row in np.full((6, 6), 0.2)))
    with refused(names=["topology", "DPSGD", "row 0 sums to 1.2"]):
        prepare(experiment("dpsgd", topology={"name": "file", "path": str(path), "weighted": True}))
    with refused(names=["weights=", "weighted=true"]):
        FixedGraph(path="graph.csv", weighted=True, weights="metropolis")
    with refused(names=["epsilon", "uniform"]):
        Ring(epsilon=0.1)
    with refused(names=["DPSGD", "row", "column"]):
        prepare(experiment("dpsgd", topology=RandomNeighbours(degree=2, weights="column")))

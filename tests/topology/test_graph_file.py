"""Graphs from files: matrices, lists of edges, and what is said of files that are neither."""

from pathlib import Path

import numpy as np
import pytest

from rayfl.choices.kinds import make
from rayfl.topology.graphs import FixedGraph, Topology
from tests.refusals import refused

DIRECTED = [[0, 1, 0], [0, 0, 1], [1, 1, 0]]


def written(folder: Path, text: str, name: str = "graph.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def read_adjacency(path: Path, num_peers: int, directed: bool = False) -> np.ndarray:
    return FixedGraph(path=str(path), directed=directed).receives(num_peers, 0, 0)


def test_a_matrix_in_any_form(tmp_path: Path):
    array = np.array(DIRECTED)
    for dtype in (bool, np.int64, np.float32):
        np.save(tmp_path / "graph.npy", array.astype(dtype))
        assert read_adjacency(tmp_path / "graph.npy", 3).astype(int).tolist() == DIRECTED
    for text in ("0,1,0\n0,0,1\n1,1,0\n", "# peers\n0 1 0\n\n0 0 1\n1 1 0", "0.0, 1.0, 0\n0;0;1\n1,1,0\n"):
        assert read_adjacency(written(tmp_path, text), 3).astype(int).tolist() == DIRECTED


def test_the_diagonal_says_nothing(tmp_path: Path):
    assert read_adjacency(written(tmp_path, "1,1\n1,1\n"), 2).astype(int).tolist() == [[0, 1], [1, 0]]
    assert not read_adjacency(written(tmp_path, "0 1\n2 2\n"), 3)[2].any()


def test_edges_go_both_ways_unless_directed(tmp_path: Path):
    path = written(tmp_path, "# i j\n0 1\n2,1\n", "edges.txt")
    assert read_adjacency(path, 4).astype(int).tolist() == [[0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    np.save(tmp_path / "edges.npy", np.array([[0, 1], [2, 1]]))
    assert np.array_equal(read_adjacency(tmp_path / "edges.npy", 4), read_adjacency(path, 4))
    one_way = read_adjacency(path, 4, directed=True).astype(int).tolist()
    assert one_way == [[0, 1, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("0,1\n1,0,0\n1,1,0\n", ["columns", "2", "3"]),
        ("0 1 0\n1 0 0\n", ["2 x 3", "3 x 3", "clients.count=3"]),
        ("", ["0", "3 x 3", "clients.count=3"]),
        ("0,1,0\n1,0,2\n0,1,0\n", ["holds 2", "1 for a link"]),
        ("from,to\n0,1\n", ["graph", "'from'", "row 0"]),
        ("0,1\n1,3\n", ["graph", "edge 1 3", "0 to 2", "clients.count=3"]),
        ("0,1\n1,0.5\n", ["graph", "edge 1 0.5"]),
        ("0,-1\n", ["edge 0 -1"]),
        ("0,nan\n", ["edge 0 nan"]),
    ],
)
def test_text_that_is_no_graph(tmp_path: Path, text: str, names: list[str]):
    with refused(names=names) as error:
        read_adjacency(written(tmp_path, text), 3)
    assert "\n" not in str(error.value)


def test_files_that_are_no_graph(tmp_path: Path):
    with refused(names=["nowhere.csv", "does not exist"]):
        read_adjacency(tmp_path / "nowhere.csv", 3)
    with refused(names=[tmp_path, "directory"]):
        read_adjacency(tmp_path, 3)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with refused(names=["binary.csv", "UTF-8"]):
        read_adjacency(tmp_path / "binary.csv", 3)
    with refused(names=["text.npy", "damaged"]):
        read_adjacency(written(tmp_path, "0 1", "text.npy"), 3)
    np.save(tmp_path / "pickled.npy", np.array([{}, 1], dtype=object), allow_pickle=True)
    with refused(names=["pickled.npy", "pickled"]):
        read_adjacency(tmp_path / "pickled.npy", 3)
    np.save(tmp_path / "words.npy", np.array(["a"]))
    with refused(names=["no numbers"]):
        read_adjacency(tmp_path / "words.npy", 3)
    np.save(tmp_path / "long.npy", np.zeros((2, 3)))
    with refused(names=["2 x 3", "clients.count=3", "3 x 3"]):
        read_adjacency(tmp_path / "long.npy", 3)


def test_a_topology_from_a_file(tmp_path: Path):
    path = written(tmp_path, "0 1\n1 2\n", "edges.txt")
    topology = make(Topology, {"name": "file", "path": str(path)})
    assert isinstance(topology, FixedGraph) and not topology.varying
    assert topology.receives(3, 0, 0).astype(int).tolist() == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]


def test_a_topology_that_was_read_needs_no_file_any_more(tmp_path: Path):
    path = written(tmp_path, "0 1\n1 2\n", "edges.txt")
    given = FixedGraph(path=str(path), weights="metropolis")
    expected = given.receives(3, 0, 0)
    known = given.read(3)
    path.unlink()
    known.receives(3, 0, 0)[:] = True
    assert known.weights == "metropolis" and np.array_equal(known.receives(3, 1, 7), expected)

"""Graphs from files: matrices, lists of edges, and what is said of files that are neither."""

from pathlib import Path

import networkx
import numpy as np
import pytest

from rayfl.choices.kinds import make
from rayfl.topology.graph_file import read_weights
from rayfl.topology.graphs import FixedGraph, Topology
from tests.refusals import check_sentence, refused

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


LINE = [[0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1], [0, 0, 1, 0]]


@pytest.mark.parametrize(
    "text",
    [
        "4\n0 1\n1 2\n2 3\n",
        "4 3\n0 1\n1 2\n2 3\n",
        "0 1 4\n1 2 5\n2 3 0.5\n",
        "source,target\n0,1\n1,2\n2,3\n",
        "from;to;weight\n0;1;1\n1;2;1\n2;3;1\n",
        "Id,Source,Target,Type,Label,Weight\n7,0,1,Undirected,,1.0\n8,1,2,Undirected,,1.0\n9,2,3,Undirected,,2\n",
        "0 1 {}\n1 2 {}\n2 3 {}\n",
        "0 1 {'weight': 4}\n1 2 {'weight': 2.5}\n2 3 {'color': 'red', 'weight': 1}\n",
        "bob alice\nbob carol\ncarol dave\n",
        "n2 n10\nn1 n2\nn10 n11\n",
        "source,target,weight\nalice,bob,1\nbob,carol,1\ncarol,dave,2\n",
        ",0,1,2,3\n0,0,1,0,0\n1,1,0,1,0\n2,0,1,0,1\n3,0,0,1,0\n",
        ",a,b,c,d\na,0,1,0,0\nb,1,0,1,0\nc,0,1,0,1\nd,0,0,1,0\n",
        "a,b,c,d\n0,1,0,0\n1,0,1,0\n0,1,0,1\n0,0,1,0\n",
        "0,1,2,3\n0,1,0,0\n1,0,1,0\n0,1,0,1\n0,0,1,0\n",
    ],
)
def test_texts_of_other_programs(tmp_path: Path, text: str):
    assert read_adjacency(written(tmp_path, text), 4).astype(int).tolist() == LINE


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("5\n0 1\n", ["5 peers", "clients.count=5"]),
        ("alice bob\nbob carol\n", ["3 names", "clients.count=3"]),
        ("1 2\n2 3\n3 4\n", ["edge 3 4", "subtract 1"]),
        (",a,b,c,d\nb,0,1,0,0\na,1,0,1,0\nc,0,1,0,1\nd,0,0,1,0\n", ["row 'b'", "column is 'a'", "order"]),
        ("0 1 3\n1 2\n2 3\n3\n", ["columns", "3 to 2", "row 2 of 4"]),
        ("0 1 x\n1 2 y\n", ["'x'", "no number"]),
        ("0 1 3\n0 4 2\n", ["edge 0 4", "0 to 3"]),
    ],
)
def test_texts_of_other_programs_that_do_not_fit(tmp_path: Path, text: str, names: list[str]):
    with refused(names=["graph.csv", *names]):
        read_adjacency(written(tmp_path, text), 4)


def test_weights_and_names_are_noticed_or_used(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = written(tmp_path, "b a 0.25\nb c 0.5\n")
    read_adjacency(path, 3)
    check_sentence(caplog.messages[0], [path, "0 is 'a'", "1 is 'b'"])
    check_sentence(caplog.messages[1], [path, "topology.weighted=true"])
    links, weights = read_weights(path, 3)
    matrix = np.zeros((3, 3))
    matrix[*links.T] = weights
    assert matrix.tolist() == [[0.75, 0.25, 0], [0.25, 0.25, 0.5], [0, 0.5, 0.5]]


def test_peers_without_edges_and_weights_above_one_are_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = written(tmp_path, "0 1 0.75\n1 2 0.5\n")
    read_weights(path, 5)
    check_sentence(caplog.messages[0], [path, "2 of the 5 peers", "such as 3"])
    check_sentence(caplog.messages[1], [path, "peer 1", "sum to 1.25", "itself -0.25", "1 1 WEIGHT"])
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("ending", ["graphml", "gml", "gexf", "net"])
def test_files_that_networkx_writes(tmp_path: Path, ending: str):
    write = {"graphml": "write_graphml", "gml": "write_gml", "gexf": "write_gexf", "net": "write_pajek"}[ending]
    line = networkx.Graph([("0", "1"), ("1", "2"), ("2", "3")])
    getattr(networkx, write)(line, tmp_path / f"a.{ending}")
    assert read_adjacency(tmp_path / f"a.{ending}", 4).astype(int).tolist() == LINE
    with refused(names=[f"a.{ending}", "4 names", "clients.count=4"]):
        read_adjacency(tmp_path / f"a.{ending}", 5)
    getattr(networkx, write)(networkx.DiGraph([("0", "1"), ("1", "2")]), tmp_path / f"b.{ending}")
    with refused(names=[f"b.{ending}", "topology.directed=true"]):
        read_adjacency(tmp_path / f"b.{ending}", 3)
    one_way = read_adjacency(tmp_path / f"b.{ending}", 3, directed=True)
    assert one_way.astype(int).tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 0]]
    with refused(names=[f"a.{ending}", "undirected", "topology.directed"]):
        read_adjacency(tmp_path / f"a.{ending}", 4, directed=True)
    (tmp_path / f"c.{ending}").write_text("<graph [")
    if ending != "net":
        with refused(names=[f"c.{ending}", "cannot be read"]):
            read_adjacency(tmp_path / f"c.{ending}", 4)


def test_weights_of_graphml_are_mixing_weights(tmp_path: Path):
    graph = networkx.Graph()
    graph.add_weighted_edges_from([(0, 1, 0.25), (1, 2, 0.25)])
    networkx.write_graphml(graph, tmp_path / "a.graphml")
    links, weights = read_weights(tmp_path / "a.graphml", 3)
    matrix = np.zeros((3, 3))
    matrix[*links.T] = weights
    assert matrix.tolist() == [[0.75, 0.25, 0], [0.25, 0.5, 0.25], [0, 0.25, 0.75]]
    graph.add_edge(0, 2)
    networkx.write_graphml(graph, tmp_path / "b.graphml")
    with refused(names=["b.graphml", "2 of 3 edges"]):
        read_weights(tmp_path / "b.graphml", 3)


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

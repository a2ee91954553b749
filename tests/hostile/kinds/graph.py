"""Files of a graph: text and .npy."""

import io
import os

import numpy as np

from tests.hostile.case import Case, Content, experiment
from tests.hostile.kinds.damage import DEEP_JSON, GARBAGE, endless, folder, link_to_itself, link_to_nothing


def graph(
    name: str,
    content: Content,
    *names: str,
    path: str = "graph.csv",
    in_suite: bool = False,
    in_process: bool = False,
    code: int = 2,
) -> Case:
    """Four peers on the graph in this file, refused in a sentence that names it."""
    topology = {"name": "file", "path": path}
    return Case(
        "graph",
        name,
        ["run", "bad.toml", "--output", "run"],
        names or ([path] if code else []),
        {path: content, "bad.toml": experiment(method={"name": "dpsgd"}, topology=topology)},
        code=code,
        may_write=[] if code else ["run"],
        in_suite=in_suite,
        in_process=in_process,
    )


def npy(name: str, content: Content, *names: str, in_suite: bool = False) -> Case:
    return graph(name, content, *names, path="graph.npy", in_suite=in_suite)


def saved(array: np.ndarray, allow_pickle: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=allow_pickle)
    return file.getvalue()


def header(text: str, body: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    """A .npy file with a header of this text."""
    return b"\x93NUMPY" + version + len(text).to_bytes(2, "little") + text.encode() + body


def shaped(shape: str, kind: str = "|b1", body: bytes = b"\0" * 16) -> bytes:
    return header(f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}}}\n", body)


def zipped(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, adjacency=array)
    return file.getvalue()


def half(array: np.ndarray) -> bytes:
    return saved(array)[:-8]


RING = "0,1,0,1\n1,0,1,0\n0,1,0,1\n1,0,1,0\n"
EYE = np.ones((4, 4))

CASES = [
    graph("valid: a matrix", RING, code=0),
    graph("valid: edges", "0 1\n1 2\n2 3\n3 0\n", code=0),
    graph("valid: .npy", saved(EYE), path="graph.npy", code=0),
    # Paths.
    graph("no such file", lambda path: None, in_process=True),
    graph("a folder", folder),
    graph("a FIFO", os.mkfifo, in_suite=True),
    graph("a device", endless),
    graph("a link to nothing", link_to_nothing),
    graph("a link to itself", link_to_itself),
    Case(
        "graph",
        "a name of 300 letters",
        ["run", "bad.toml"],
        ["xxx"],
        {"bad.toml": experiment(method="dpsgd", topology={"name": "file", "path": "x" * 300})},
    ),
    Case(
        "graph",
        "a name with a null byte",
        ["run", "bad.toml"],
        ["topology.path"],
        {"bad.toml": experiment(method="dpsgd", topology={"name": "file", "path": "a\0b"})},
    ),
    Case(
        "graph",
        "the home of nobody",
        ["run", "bad.toml"],
        ["~nobody-of-this-name/x"],
        {"bad.toml": experiment(method="dpsgd", topology={"name": "file", "path": "~nobody-of-this-name/x"})},
    ),
    Case(
        "graph",
        "no path",
        ["run", "bad.toml"],
        ["topology.path"],
        {"bad.toml": experiment(method="dpsgd", topology={"name": "file", "path": ""})},
    ),
    # Text.
    graph("empty", ""),
    graph("comments only", "# a\n# b\n"),
    graph("garbage", GARBAGE),
    graph("zeros", b"\0" * 100),
    graph("words", "a,b\nc,d\n", "line 1"),
    graph("NaN", RING.replace("1", "nan", 1)),
    graph("infinity", RING.replace("1", "inf", 1)),
    graph("twos", RING.replace("1", "2", 1)),
    graph("negative", RING.replace("1", "-1", 1)),
    graph("halves", RING.replace("1", "0.5", 1)),
    graph("rows of several lengths", "0,1,0,1\n1,0\n"),
    graph("one row too few", "0,1,0,1\n1,0,1,0\n0,1,0,1\n"),
    graph("a column too many", RING.replace("\n", ",0\n")),
    graph("an edge to peer 4", "0 4\n", "edge 0 4"),
    graph("an edge to peer -1", "0 -1\n", "edge 0 -1"),
    graph("an edge to half a peer", "0 1.5\n", "edge 0 1.5"),
    graph("an edge to NaN", "0 nan\n", "edge 0 nan"),
    graph("an edge to infinity", "inf 0\n", "edge inf 0"),
    graph("an edge to 1e308", "1e308 0\n", "edge 1e+308 0"),
    graph("an edge of 5,000 digits", "9" * 5000 + " 0\n", "edge inf 0"),
    graph("a line of a million values", "1," * 1_000_000),
    graph("JSON", DEEP_JSON),
    # .npy.
    npy("empty .npy", b""),
    npy("no .npy", GARBAGE),
    npy("cut .npy", half(EYE)),
    npy("a magic number and nothing else", b"\x93NUMPY"),
    npy("version 9", header("{}", version=b"\x09\x00")),
    npy("text for a matrix", saved(np.array([["a", "b"], ["c", "d"]]))),
    npy("pickled objects", saved(np.array([{"a": 1}], dtype=object), allow_pickle=True)),
    npy("five peers", saved(np.ones((5, 5)))),
    npy("a vector", saved(np.ones(16))),
    npy("a single number", saved(np.array(1.0))),
    npy("three axes", saved(np.ones((4, 4, 1)))),
    npy("NaN in a matrix", saved(np.full((4, 4), np.nan))),
    npy("complex numbers", saved(EYE.astype(complex))),
    npy("a shape of 10^13", shaped("(10000000, 1000000)"), in_suite=True),
    npy("a shape of 10^40", shaped(f"({10**20}, {10**20})")),
    npy("a negative shape", shaped("(-4, -4)")),
    npy("a shape that is text", shaped("'ab'")),
    npy("a shape of a fraction", shaped("(4.5, 4)")),
    npy("a shape whose product is right", shaped("(0, 1000000000000000000000)")),
    npy("an unclosed header", header("{'descr': '|b1', 'shape': (4, 4), ")),
    npy("a header that is no table", header("[1, 2]\n")),
    npy("a header without a shape", header("{'descr': '|b1', 'fortran_order': False}\n")),
    npy("a deep header", header("(" * 20_000 + ")" * 20_000 + "\n"), in_suite=True),
    npy("a header that runs code", header("__import__('os').mkdir('made')\n")),
    npy("an unknown type", shaped("(4, 4)", kind="|x9")),
    npy("a type of 10^9 bytes", shaped("(4, 4)", kind="|S1000000000")),
    npy("a damaged archive", zipped(EYE)[:200]),
    npy("an archive whose end is another's", zipped(EYE)[:300] + zipped(EYE)[-22:]),
    graph("an archive by its name", zipped(EYE), path="graph.npz"),
    npy("an archive for a matrix", b"PK\x03\x04" + b"\0" * 100),
]  # fmt: skip

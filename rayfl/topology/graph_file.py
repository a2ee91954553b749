"""A graph over peers from a file: which peers receive from which.

- `.npy`: an array of numbers or booleans; nothing pickled is read.
- any other ending: text with values between spaces or commas, without what follows a # in a line.

With n rows of n values it is a matrix of 0 and 1, with two values a row a list of edges between peers 0 to n - 1.

Row i of a matrix has 1 in the columns that peer i receives from; the diagonal is ignored, since each peer has its own
model. An edge goes both ways unless the list is directed: then "i j" means that i receives from j.
"""

import warnings
from pathlib import Path

import numpy as np

from rayfl.errors import RayflError
from rayfl.limits.npy import read_npy
from rayfl.limits.regular_files import read_text, reading


def read_links(path: Path, num_peers: int, directed: bool = False) -> np.ndarray:
    """The links, each as receiver and sender: int64 [num_links, 2]. A link may come twice, and join a peer to itself.

    Raise RayflError if the file has no such graph.
    """
    with reading(path, "give a graph as a .npy file, a CSV file or a list of edges"):
        values = read_npy(path) if path.suffix == ".npy" else _read_text(path)
    if values.dtype.kind not in "biuf":
        raise RayflError(f"the graph {path} holds no numbers; save a matrix of 0 and 1")
    is_list = values.shape != (num_peers, num_peers) and values.shape[1:] == (2,)
    return _edges(path, values, num_peers, directed) if is_list else _matrix(path, values, num_peers)


def _read_text(path: Path) -> np.ndarray:
    lines = read_text(path).replace(",", " ").replace(";", " ").splitlines()
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        # numpy warns of a file without numbers, whose shape is refused later.
        return np.loadtxt(lines, ndmin=2)


def _matrix(path: Path, values: np.ndarray, num_peers: int) -> np.ndarray:
    if values.shape != (num_peers, num_peers):
        shape = " x ".join(str(size) for size in values.shape) or "a single number"
        raise RayflError(
            f"the graph {path} is {shape}; clients.count={num_peers} needs a matrix {num_peers} x {num_peers}, or text "
            "with two peers per line"
        )
    strange = values[(values != 0) & (values != 1)]
    if strange.size:
        raise RayflError(f"the graph {path} holds {strange.flat[0]:g}; a matrix has 1 for a link and 0 for none")
    return np.argwhere(values)


def _edges(path: Path, pairs: np.ndarray, num_peers: int, directed: bool) -> np.ndarray:
    strange = pairs[~np.isin(pairs, np.arange(num_peers)).all(axis=1)]
    if len(strange):
        first, second = strange[0]
        raise RayflError(
            f"the graph {path} has the edge {first:g} {second:g}; clients.count={num_peers} peers are 0 to "
            f"{num_peers - 1}"
        )
    links = pairs.astype(np.int64)
    return links if directed else np.concatenate([links, links[:, ::-1]])

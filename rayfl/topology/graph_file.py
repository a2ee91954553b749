"""A graph over peers from a file: which peers receive from which.

- `.npy`: an array of numbers or booleans; nothing pickled is read.
- any other ending: text with values between spaces or commas, without what follows a # in a line.

With n rows of n values it is a matrix of 0 and 1, with two values a row a list of edges between peers 0 to n - 1.

Row i of a matrix has 1 in the columns that peer i receives from; the diagonal is ignored, since each peer has its own
model. An edge goes both ways unless the list is directed: then "i j" means that i receives from j.

With mixing weights the matrix has any numbers, and its diagonal counts; a list has three values a row, the third of
which is the weight that i gives to what j sends. A peer without a weight for itself ("i i 0.5") gives itself what the
others leave of 1.
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
    values = _read(path)
    is_list = values.shape != (num_peers, num_peers) and values.shape[1:] == (2,)
    if is_list:
        return _edges(path, values, num_peers, directed)
    _require_matrix(path, values, num_peers, "two peers per line")
    strange = values[(values != 0) & (values != 1)]
    if strange.size:
        raise RayflError(
            f"the graph {path} holds {strange.flat[0]:g}; a matrix has 1 for a link and 0 for none, unless topology."
            "weighted=true makes its numbers mixing weights"
        )
    return np.argwhere(values)


def read_weights(path: Path, num_peers: int, directed: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The links and each peer's own entry, as receiver and sender, int64 [num, 2], and their weights, float64 [num].

    Raise RayflError if the file has no such weights.
    """
    values = _read(path).astype(np.float64)
    if values.shape == (num_peers, num_peers) or values.shape[1:] != (3,):
        _require_matrix(path, values, num_peers, "two peers and a weight per line")
        links = np.argwhere(values)
        return links, values[*links.T]
    itself = values[:, 0] == values[:, 1]
    ends = [_edges(path, values[~itself, :2], num_peers, directed), _edges(path, values[itself, :2], num_peers, True)]
    links = np.concatenate(ends)
    distinct, counts = np.unique(links, axis=0, return_counts=True)
    if (again := distinct[counts > 1]).size:
        receiver, sender = again[0]
        raise RayflError(
            f"the graph {path} has two weights that {receiver} gives to what {sender} sends; give one"
            + ("" if directed else ", or set topology.directed=true if every line is one direction")
        )
    numbers = np.concatenate([np.tile(values[~itself, 2], 1 if directed else 2), values[itself, 2]])
    others = np.setdiff1d(np.arange(num_peers), links[links[:, 0] == links[:, 1], 0])
    given = np.bincount(links[:, 0], numbers, num_peers)[others]
    return np.concatenate([links, np.stack([others, others], axis=1)]), np.concatenate([numbers, 1.0 - given])


def _read(path: Path) -> np.ndarray:
    """The numbers of a file. Raise RayflError if it has none."""
    with reading(path, "give a graph as a .npy file, a CSV file or a list of edges"):
        values = read_npy(path) if path.suffix == ".npy" else _read_text(path)
    if values.dtype.kind not in "biuf":
        raise RayflError(f"the graph {path} holds no numbers; save a matrix of 0 and 1")
    return values


def _read_text(path: Path) -> np.ndarray:
    lines = read_text(path).replace(",", " ").replace(";", " ").splitlines()
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        # numpy warns of a file without numbers, whose shape is refused later.
        return np.loadtxt(lines, ndmin=2)


def _require_matrix(path: Path, values: np.ndarray, num_peers: int, lines: str) -> None:
    if values.shape != (num_peers, num_peers):
        shape = " x ".join(str(size) for size in values.shape) or "a single number"
        raise RayflError(
            f"the graph {path} is {shape}; clients.count={num_peers} needs a matrix {num_peers} x {num_peers}, or text "
            f"with {lines}"
        )


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

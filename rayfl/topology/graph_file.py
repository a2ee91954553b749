"""A graph over peers from a file: which peers receive from which.

- `.npy`: an array of numbers or booleans; nothing pickled is read.
- `.graphml`, `.gml`, `.gexf`, `.net` (Pajek): read by networkx.
- any other ending: text with values between spaces or commas, without what follows a # in a line. It may have a header,
  names in place of numbers, and a first line with the number of peers (see graph_formats.py).

With n rows of n values it is a matrix of 0 and 1, with two values a row a list of edges between peers 0 to n - 1.
Weights in a third column do nothing without mixing weights, and a notice says so.

Row i of a matrix has 1 in the columns that peer i receives from; the diagonal is ignored, since each peer has its own
model. An edge goes both ways unless the list is directed: then "i j" means that i receives from j.

With mixing weights the matrix has any numbers, and its diagonal counts; a list has three values a row, the third of
which is the weight that i gives to what j sends. A peer without a weight for itself ("i i 0.5") gives itself what the
others leave of 1.
"""

from logging import WARNING
from pathlib import Path

import numpy as np

from rayfl.errors import RayflError, log_once
from rayfl.limits.npy import read_npy
from rayfl.limits.regular_files import read_text, reading
from rayfl.topology.graph_formats import READERS, read_graph_file, read_text_graph


def read_links(path: Path, num_peers: int, directed: bool = False) -> np.ndarray:
    """The links, each as receiver and sender: int64 [num_links, 2]. A link may come twice, and join a peer to itself.

    Raise RayflError if the file has no such graph.
    """
    values = _read(path, num_peers, directed)
    if _are_weighted_edges(values, num_peers):
        if (values[:, 2] != 1).any():
            log_once(
                WARNING,
                f"the weights of the edges of {path} are not used; topology.weighted=true makes them mixing weights",
            )
        values = values[:, :2]
    if values.shape != (num_peers, num_peers) and values.shape[1:] == (2,):
        return _noted_alone(path, _edges(path, values, num_peers, directed), num_peers)
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
    values = _read(path, num_peers, directed).astype(np.float64)
    if values.shape == (num_peers, num_peers) or values.shape[1:] != (3,):
        _require_matrix(path, values, num_peers, "two peers and a weight per line")
        links = np.argwhere(values)
        return links, values[*links.T]
    itself = values[:, 0] == values[:, 1]
    ends = [_edges(path, values[~itself, :2], num_peers, directed), _edges(path, values[itself, :2], num_peers, True)]
    links = _noted_alone(path, np.concatenate(ends), num_peers)
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
    if (much := np.flatnonzero(given > 1)).size:
        peer = others[much[0]]
        log_once(
            WARNING,
            f"the weights that peer {peer} gives to others in {path} sum to {given[much[0]]:g}, so that it gives "
            f"itself {1 - given[much[0]]:g}; if that is not intended, divide them, or add a line {peer} {peer} WEIGHT",
        )
    return np.concatenate([links, np.stack([others, others], axis=1)]), np.concatenate([numbers, 1.0 - given])


def read_rounds(path: Path, num_peers: int, directed: bool = False) -> list[np.ndarray]:
    """The links of each round, as `read_links` has them: from matrices in a .npy file [rounds, n, n], or from text with
    a round and two peers per line. Raise RayflError for anything else."""
    with reading(path, "give graphs as a .npy file, or text with a round and two peers per line"):
        is_array = path.suffix == ".npy"
        values = read_npy(path) if is_array else np.loadtxt(read_text(path).replace(",", " ").splitlines(), ndmin=2)
    if values.dtype.kind in "biuf" and values.shape[1:] == (num_peers, num_peers):
        if ((values == 0) | (values == 1)).all():
            return [np.argwhere(matrix) for matrix in values]
    elif values.dtype.kind in "biuf" and values.ndim == 2 and values.shape[1] == 3 and len(values):
        rounds = values[:, 0]
        if np.isin(rounds, np.arange(10 * len(values) + 1)).all():
            return [_edges(path, values[rounds == t, 1:], num_peers, directed) for t in range(int(rounds.max()) + 1)]
    shape = " x ".join(str(size) for size in values.shape)
    raise RayflError(
        f"the graphs of {path} are {shape} numbers; clients.count={num_peers} needs a .npy file of 0 and 1 with a "
        f"matrix {num_peers} x {num_peers} for each round, or text whose lines have a round from 0 and two peers"
    )


def _are_weighted_edges(values: np.ndarray, num_peers: int) -> bool:
    """Whether the rows are two peers and a weight.

    Three rows, or those of three peers, may be a matrix: edges then are no loops and have weights, and some number is
    neither 0 nor 1.
    """
    if values.shape[1:] != (3,) or 3 not in (num_peers, len(values)):
        return values.shape[1:] == (3,)
    first, second, weights = values.T
    are_ends = np.isin(values[:, :2], np.arange(num_peers)).all() and (first != second).all()
    return bool(are_ends and weights.all() and not np.isin(values, (0, 1)).all())


def _read(path: Path, num_peers: int, directed: bool) -> np.ndarray:
    """The numbers of a file. Raise RayflError if it has none."""
    # networkx raises many types of exceptions for damaged files.
    with reading(path, "give a graph as a .npy file, a CSV file, a list of edges, or GraphML", Exception):
        if path.suffix.lower() in READERS:
            return read_graph_file(path, num_peers, directed)
        values = read_npy(path) if path.suffix == ".npy" else read_text_graph(path, num_peers)
    if values.dtype.kind not in "biuf":
        raise RayflError(f"the graph {path} holds no numbers; save a matrix of 0 and 1")
    return values


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
        from_one = (
            "; subtract 1 from all, since it counts from 1" if np.isin(pairs - 1, np.arange(num_peers)).all() else ""
        )
        raise RayflError(
            f"the graph {path} has the edge {first:g} {second:g}; clients.count={num_peers} peers are 0 to "
            f"{num_peers - 1}{from_one}"
        )
    links = pairs.astype(np.int64)
    return links if directed else np.concatenate([links, links[:, ::-1]])


def _noted_alone(path: Path, links: np.ndarray, num_peers: int) -> np.ndarray:
    """The links; a notice says which peers have none."""
    if len(alone := np.setdiff1d(np.arange(num_peers), links)):
        log_once(
            WARNING,
            f"{path} has no edge of {len(alone)} of the {num_peers} peers, such as {alone[0]}: they train alone",
        )
    return links

"""A graph over peers from a file: who receives from whom.

- `.npy`: a matrix [n, n] of 0 and 1 (numbers or booleans; nothing pickled is read).
- any other ending: text with values between spaces or commas, lines that begin with # left out. With n values in
  each of n lines it is such a matrix; with two values a line it is a list of edges between peers 0 to n - 1.

Row i of a matrix has 1 in the columns that peer i receives from; the diagonal is ignored, since each peer has its own
model. An edge goes both ways unless the list is directed: then "i j" means that i receives from j.
"""

from pathlib import Path

import numpy as np

from rayfl.errors import RayflError, reason
from rayfl.limits.npy import read_npy
from rayfl.limits.regular_files import read_text


def read_adjacency(path: Path, num_peers: int, directed: bool = False) -> np.ndarray:
    """Boolean [num_peers, num_peers], diagonal False. RayflError if the file has no such graph."""
    graph = _matrix(path, _load(path), num_peers) if path.suffix == ".npy" else _text(path, num_peers, directed)
    np.fill_diagonal(graph, False)
    return graph


def _load(path: Path) -> np.ndarray:
    try:
        values = read_npy(path)
    except OSError as error:
        raise RayflError(f"the graph {path} cannot be read ({reason(error)}); give the path of a .npy file") from None
    except RayflError:
        raise
    except ValueError as error:
        raise RayflError(f"the graph {path} is no .npy file of numbers ({error}); write it with numpy.save") from None
    if values.dtype.kind not in "biuf":
        raise RayflError(f"the graph {path} holds no numbers; save a matrix of 0 and 1")
    return values


def _text(path: Path, num_peers: int, directed: bool) -> np.ndarray:
    rows = _rows(path)
    widths = {len(row) for row in rows.values()}
    if widths == {num_peers} and len(rows) == num_peers:
        return _matrix(path, np.array(list(rows.values())), num_peers)
    if widths == {2}:
        return _edges(path, rows, num_peers, directed)
    columns = " or ".join(str(width) for width in sorted(widths)) or "no"
    raise RayflError(
        f"the graph {path} has {len(rows)} lines of {columns} values; give {num_peers} lines of {num_peers} values "
        f"(clients.count={num_peers}), or two peers a line"
    )


def _rows(path: Path) -> dict[int, list[float]]:
    """The numbers of each line by its number."""
    try:
        lines = read_text(path).splitlines()
    except UnicodeDecodeError:
        raise RayflError(
            f"the graph {path} is no UTF-8 text; give a .npy file, a CSV file or a list of edges"
        ) from None
    except OSError as error:
        raise RayflError(f"the graph {path} cannot be read ({reason(error)}); give the path of a file") from None
    rows: dict[int, list[float]] = {}
    for number, line in enumerate(lines, start=1):
        words = line.replace(",", " ").replace(";", " ").split()
        if not words or words[0].startswith("#"):
            continue
        try:
            rows[number] = [float(word) for word in words]
        except ValueError:
            raise RayflError(
                f"line {number} of the graph {path} has {line.strip()[:40]!r}; give numbers only"
            ) from None
    return rows


def _matrix(path: Path, values: np.ndarray, num_peers: int) -> np.ndarray:
    if values.shape != (num_peers, num_peers):
        shape = " x ".join(str(size) for size in values.shape) or "a single number"
        raise RayflError(
            f"the graph {path} is {shape}; clients.count={num_peers} needs a matrix {num_peers} x {num_peers}"
        )
    strange = values[(values != 0) & (values != 1)]
    if strange.size:
        raise RayflError(f"the graph {path} holds {strange.flat[0]:g}; a matrix has 1 for a link and 0 for none")
    return values.astype(bool)


def _edges(path: Path, rows: dict[int, list[float]], num_peers: int, directed: bool) -> np.ndarray:
    graph = np.zeros((num_peers, num_peers), dtype=bool)
    for number, (one, other) in rows.items():
        for peer in (one, other):
            if peer not in range(num_peers):
                raise RayflError(
                    f"line {number} of the graph {path} names peer {peer:g}; peers are 0 to {num_peers - 1} "
                    f"(clients.count={num_peers})"
                )
        graph[int(one), int(other)] = True
    return graph if directed else graph | graph.T

"""Graphs in the formats of other programs, as numbers: a matrix [n, n], or a row for each edge with perhaps a weight.

Texts may have a first line with the number of nodes (and of edges), a header, row names, names in place of numbers, and
what networkx and pandas write. GraphML, GML, GEXF and Pajek files are read by networkx.
"""

import re
from collections.abc import Iterable, Sequence
from logging import WARNING
from pathlib import Path

import numpy as np

from rayfl.errors import RayflError, log_once
from rayfl.limits.regular_files import read_text, require_regular
from rayfl.settings import shown
from rayfl.untyped import Anything

READERS = {".graphml": "read_graphml", ".gml": "read_gml", ".gexf": "read_gexf", ".net": "read_pajek"}
"""The functions of networkx that read files with these endings."""
_ENDS = ("source", "from", "src", "u", "i", "node1"), ("target", "to", "dst", "v", "j", "node2")
_WEIGHT = ("weight", "w", "value")
_COMMENTS = re.compile(r"(#|%|//).*")
_DATA = re.compile(r"\{(?:[^}]*'weight': ([^,}]+))?[^}]*\}")
"""What networkx writes after an edge: {'weight': 4}."""


def read_text_graph(path: Path, num_peers: int) -> np.ndarray:
    """The numbers of a text, float64: [n, n], or edges [m, 2] or, with weights, [m, 3]. Raise ValueError or RayflError
    if it has none."""
    text = read_text(path)
    if text.lstrip()[:1] in ("{", "["):
        raise ValueError("it is JSON, and not a line for each edge")
    lines = [_COMMENTS.sub("", line) for line in _DATA.sub(r" \1", text).splitlines()]
    rows = [_cells(line) for line in lines if line.strip(" \t,;")]
    rows = _without_counts(path, rows, num_peers)
    if not rows:
        return np.empty((0, 0))
    if len({len(row) for row in rows}) > 1:
        place = next(place for place, row in enumerate(rows) if len(row) != len(rows[0]))
        raise ValueError(
            f"the number of columns changed from {len(rows[0])} to {len(rows[place])} at row {place + 1} of {len(rows)}"
            ", and a list has one edge a row"
        )
    width = len(rows[0])
    names, rows = _header(rows, num_peers)
    if width == num_peers + 1 and len(rows) == num_peers and names is not None:
        rows = _without_row_names(path, names[1:], rows)
    elif names is not None and (width != num_peers or {name.lower() for name in names} & {*_ENDS[0], *_ENDS[1]}):
        rows = _edge_columns(names, rows)
    has_names = not all(_is_number(cell) for row in rows for cell in row[:2])
    if len(rows[0]) in (2, 3) and (has_names or len(rows[0]) != num_peers):
        return _numbered(path, [row[:2] for row in rows], [row[2:] for row in rows], num_peers)
    return np.array([[_number(cell) for cell in row] for row in rows]).reshape(len(rows), -1)


def _cells(line: str) -> list[str]:
    """The fields of a line between commas, semicolons, tabs or blanks; an empty field counts only between the first
    three."""
    separator = next((mark for mark in ",;\t" if mark in line.strip()), None)
    if separator is None:
        return line.split()
    fields = [field.strip().strip('"') for field in line.strip("\n").split(separator)]
    return fields if separator != "\t" or "" not in fields[1:] else line.split()


def _without_counts(path: Path, rows: list[list[str]], num_peers: int) -> list[list[str]]:
    """The rows without a first one that has the number of nodes, alone or with that of edges."""
    if len(rows) < 2 or not all(cell.isdecimal() for cell in rows[0]):
        return rows
    counts = [*map(int, rows[0])]
    if len(counts) == 1 and len(rows[1]) > 1:
        if counts[0] != num_peers:
            raise RayflError(f"the graph {path} has {counts[0]} peers by its first line; set clients.count={counts[0]}")
        return rows[1:]
    return rows[1:] if counts == [num_peers, len(rows) - 1] else rows


def _header(rows: list[list[str]], num_peers: int) -> tuple[list[str] | None, list[list[str]]]:
    """The names of the columns, if the first row has them, and the other rows."""
    if len(rows) < 2:
        return None, rows
    first = rows[0]
    is_index = first[0] == "" or (len(rows) == num_peers + 1 and first == [*map(str, range(num_peers))])
    named = [cell for cell in first if not _is_number(cell)]
    known = {word for words in (*_ENDS, _WEIGHT) for word in words}
    # Names of peers in a list are no header.
    is_header = is_index or len(named) > 2 or any(cell.lower() in known for cell in named)
    is_header = is_header or (bool(named) and all(_is_number(cell) for cell in rows[1]))
    return (first, rows[1:]) if is_header else (None, rows)


def _without_row_names(path: Path, columns: Sequence[str], rows: list[list[str]]) -> list[list[str]]:
    """A matrix without the names of its rows, which must be those of the columns."""
    for name, row in zip(columns, rows, strict=True):
        if row[0] != name:
            raise RayflError(
                f"the graph {path} has the row {row[0]!r} where the column is {name!r}; give both in the same order"
            )
    return [row[1:] for row in rows]


def _edge_columns(names: Sequence[str], rows: list[list[str]]) -> list[list[str]]:
    """The two ends of each edge, and its weight if a column has that name, or if there are just three columns."""
    places = {name.lower(): place for place, name in enumerate(names)}
    ends = [next((places[word] for word in words if word in places), side) for side, words in enumerate(_ENDS)]
    weights = [places[word] for word in _WEIGHT if word in places][:1] or ([2] if len(names) == 3 else [])
    return [[row[place] for place in (*ends, *weights)] for row in rows]


def _numbered(
    path: Path, pairs: Sequence[Sequence[Anything]], weights: Sequence[Sequence[Anything]], num_peers: int
) -> np.ndarray:
    """Edges [m, 2] or [m, 3] with numbers in place of names, which are numbered in their order."""
    ends: list[list[float]]
    if all(_is_number(end) for pair in pairs for end in pair):
        ends = [[float(end) for end in pair] for pair in pairs]
    else:
        numbers = peer_numbers(path, {str(end) for pair in pairs for end in pair}, num_peers)
        ends = [[numbers[str(end)] for end in pair] for pair in pairs]
    return np.column_stack([np.array(ends), [[_number(weight) for weight in row] for row in weights]])


def peer_numbers(path: Path, names: Iterable[str], num_peers: int) -> dict[str, int]:
    """The number of each peer, by the whole numbers in the names if all have just one, or else by their order.

    Raise RayflError unless there are `num_peers` names. A notice says which is which.
    """
    names = {*names}
    if len(names) != num_peers:
        raise RayflError(
            f"the graph {path} has {len(names)} names of peers; set clients.count={len(names)}, or give all"
        )
    digits = {name: re.findall(r"\d+", name) for name in names}
    is_single = all(len(found_digits) == 1 for found_digits in digits.values())
    ordered = sorted(names, key=lambda name: (int(digits[name][0]), name) if is_single else (0, name))
    if ordered != [*map(str, range(num_peers))]:
        first = ", ".join(f"{number} is {name!r}" for number, name in enumerate(ordered[:3]))
        log_once(WARNING, f"{path} has names of peers, which get the numbers of clients in their order: {first}, ...")
    return {name: number for number, name in enumerate(ordered)}


def read_graph_file(path: Path, num_peers: int, directed: bool) -> np.ndarray:
    """The edges of a GraphML, GML, GEXF or Pajek file, [m, 2], or [m, 3] if all have a weight.

    Raise RayflError if it has not `num_peers` nodes, or if it is directed and the topology is not; what networkx raises
    for damaged files.
    """
    import networkx

    require_regular(path)
    if path.suffix.lower() == ".gml":
        # Labels of a GML file may be missing, or there twice.
        try:
            graph: Anything = networkx.read_gml(path)
        except networkx.NetworkXError:
            graph = networkx.read_gml(path, label="id")
    else:
        graph = getattr(networkx, READERS[path.suffix.lower()])(path)
    if graph.is_directed() != directed and graph.number_of_edges():
        way = "set topology.directed=true" if graph.is_directed() else "remove topology.directed"
        raise RayflError(f"the graph {path} is {'' if graph.is_directed() else 'un'}directed; {way}")
    numbers = peer_numbers(path, map(str, graph.nodes), num_peers)
    edges = [
        (numbers[str(first)], numbers[str(second)], data.get("weight"))
        for first, second, data in graph.edges(data=True)
    ]
    weights = [[_number(weight)] for _, _, weight in edges if weight is not None]
    if weights and len(weights) != len(edges):
        raise RayflError(f"the graph {path} has weights of {len(weights)} of {len(edges)} edges; give all one, or none")
    return np.array([[*edge[:2], *(weights[row] if weights else [])] for row, edge in enumerate(edges)]).reshape(
        len(edges), 3 if weights else 2
    )


def _is_number(cell: Anything) -> bool:
    try:
        float(cell)
    except (TypeError, ValueError):
        return False
    return True


def _number(cell: Anything) -> float:
    if not _is_number(cell):
        raise ValueError(f"{shown(cell)} is no number")
    return float(cell)

"""Drawings of peers' graphs: peers coloured by the value of their own models, links as wide as the bytes over them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rayfl.choices.kinds import make, named
from rayfl.errors import RayflError
from rayfl.experiment.table import located
from rayfl.metrics.facts import Facts
from rayfl.report import wording
from rayfl.report.charts import Figure, Section, Spec, data, told
from rayfl.report.groups import Group
from rayfl.report.series import facts, last_of_clients, metric_names, series, table_name
from rayfl.run_directory.record import Run
from rayfl.topology.graphs import Topology

MOST_PEERS = 100
"""A graph of more peers is not drawn."""
MOST_GRAPHS = 9
"""The most graphs of one page."""
_NUMBERED = 36
"""Up to this number of peers each shows its number."""
_SIDE = 330
"""Width and height of a drawing in pixels."""


class DrawnGraph(NamedTuple):
    """heard: whether receiver i hears sender j, bool [n, n], in the last round; link_bytes: the bytes over each link of
    a sender, in the whole run or, if the graph changes, in that round, [n]."""

    topology: Topology
    heard: np.ndarray
    link_bytes: np.ndarray


def graph_section(groups: Sequence[Group], names: Sequence[str]) -> Section:
    """A figure of each graph of peers, of the first run that has it; no figure without peers that exchange messages.

    names: metrics, of which the first one with a value for each peer colours the peers.
    """
    first: dict[str, Group] = {}
    for group in groups:
        if "graph/mean_degree" in metric_names(group.runs[0]) or table_name(group.runs[0], "schedule") == "gossip":
            settings = [item for item in group.settings.items() if item[0].startswith(("topology", "clients.count"))]
            first.setdefault(repr(settings), group)
    figures = [_figure(group.runs[0], group.label * (len(groups) > 1), names) for group in first.values()]
    intro = "Who hears whom." + f" Of {len(first)} graphs, the first {MOST_GRAPHS}." * (len(first) > MOST_GRAPHS)
    return Section("Graph of peers", intro, [figure for figure in figures[:MOST_GRAPHS] if figure is not None])


def _figure(run: Run, label: str, names: Sequence[str]) -> Figure | None:
    """The drawing of a run's graph, or why there is none; None if the run directory does not tell."""
    title = label or table_name(run, "topology") or "ring"
    num_peers = int(run.clients["client"].to_numpy().max(initial=-1)) + 1
    if num_peers > MOST_PEERS:
        return Figure(title, f"{num_peers:,} peers are too many to draw; up to {MOST_PEERS} are drawn.", {})
    try:
        graph = _drawn(run, num_peers)
    except (RayflError, OSError, ValueError, IndexError):
        return None
    if graph is None:
        return Figure(title, "A graph of a class from elsewhere is not drawn, as a page runs no code of a run.", {})
    name = next((name for name in names if len(last_of_clients(run, name)[0])), "")
    values = dict(zip(*(column.tolist() for column in last_of_clients(run, name)), strict=True))
    return Figure(title, _caption(run, graph, name, values), graph_chart(graph, values, facts(run, name)))


def _drawn(run: Run, num_peers: int) -> DrawnGraph | None:
    """The graph of a run; None if its class is a third party's file. Each sender's bits are divided equally among those
    who hear it."""
    table = located(run.experiment, run.directory).get("topology") or {"name": "ring"}
    if any(name not in named(Topology) for name in _names(table)):
        return None
    topology = make(Topology, table).read(num_peers)
    last_round = run.rounds["round"].to_pylist()[-1]
    heard = topology.sparse(num_peers, int(str(run.experiment.get("seed"))), last_round).toarray().astype(bool)
    clients = run.clients.to_pandas()
    counted = clients[clients["round"] == last_round] if topology.varying else clients
    sent = np.bincount(counted["client"], counted["uplink_bits"], num_peers) / 8
    return DrawnGraph(topology, heard, sent / heard.sum(axis=0).clip(1))


def _names(table: Mapping[str, object]) -> list[str]:
    """The names of a topology and of those inside it."""
    inner = [name for value in table.values() if isinstance(value, Mapping) for name in _names(value)]
    return [str(table.get("name")), *inner]


def graph_chart(graph: DrawnGraph, values: Mapping[int, float], value_facts: Facts) -> Spec:
    """Peers as dots in the colours of their `values`, and links as lines; a link of one direction has a tip at the end
    that receives."""
    places = _places(graph)
    few = len(places) <= _NUMBERED
    span = {"scale": {"domain": [-1.2, 1.2], "nice": False}, "axis": None, "type": "quantitative"}
    at = {axis: {"field": axis, **span} for axis in "xy"}
    return {
        "width": _SIDE,
        "height": _SIDE,
        "layer": [
            _link_layer(_links(graph, places, 0.16 if few else 0.09), at),
            _peer_layer(graph, places, values, value_facts, at, few),
        ],
        "resolve": {"scale": {"color": "independent"}},
    }


def _link_layer(links: list[dict[str, object]], at: Mapping[str, Spec]) -> Spec:
    """The lines and their tips. `at`: the encoding of x and y."""
    heavy = {"field": "bytes", "type": "quantitative", "scale": {"range": [0.4, 4.5], "zero": True}, "legend": None}
    tips = {axis: {**place, "field": f"{axis}2"} for axis, place in at.items()}
    return {
        **data(links, len(links)),
        "layer": [
            {
                "mark": {"type": "rule", "strokeCap": "round", "opacity": 0.85},
                "encoding": {
                    **at,
                    "x2": {"field": "x2"},
                    "y2": {"field": "y2"},
                    "strokeWidth": heavy,
                    "tooltip": [{**told("from", "Peers"), "type": "nominal"}, told("bytes", "Bytes")],
                },
            },
            {
                "transform": [{"filter": "datum.one_way"}],
                "mark": {"type": "point", "shape": "triangle-up", "filled": True, "size": 45, "opacity": 0.85},
                "encoding": {**tips, "angle": {"field": "angle", "type": "quantitative", "scale": None}},
            },
        ],
    }


def _peer_layer(
    graph: DrawnGraph,
    places: np.ndarray,
    values: Mapping[int, float],
    value_facts: Facts,
    at: Mapping[str, Spec],
    few: bool,
) -> Spec:
    """The dots, with numbers if they are few."""
    hears, heard = (graph.heard.sum(axis=axis).tolist() for axis in (1, 0))
    peers = [
        {"peer": peer, "x": x, "y": y, "value": values.get(peer, np.nan), "hears": hears[peer], "heard": heard[peer]}
        for peer, (x, y) in enumerate(places.tolist())
    ]
    known = [value for value in values.values() if np.isfinite(value)] or [0.0, 1.0]
    low, high = min(known), max(known)
    legend = {"title": value_facts.title, "format": ".0%" if value_facts.is_percent else ".3~g", "gradientLength": 160}
    color = {
        "field": "value",
        "type": "quantitative",
        "scale": {"scheme": "viridis", "domain": [low, high if high > low else low + 1e-6]},
        "legend": legend if np.isfinite([*values.values()]).any() else None,
    }
    words = [
        told("peer", "Peer"),
        told("value", value_facts.title, value_facts.is_percent),
        told("hears", "Hears"),
        told("heard", "Is heard by"),
    ]
    dot = {"type": "circle", "size": 430 if few else 130, "opacity": 1, "stroke": "#888888"}
    ink = {"condition": {"test": f"datum.value > {(low + high) / 2}", "value": "#000000"}, "value": "#ffffff"}
    number = {"mark": {"type": "text", "fontSize": 11}, "encoding": {"text": {"field": "peer"}, "color": ink}}
    layers = [{"mark": dot, "encoding": {"color": color, "tooltip": words}}, *([number] * few)]
    return {**data(peers, len(peers)), "encoding": dict(at), "layer": layers}


def _places(graph: DrawnGraph) -> np.ndarray:
    """Where the peers are drawn, in [-1, 1], float64 [n, 2]: on a circle if the graph changes or is in parts."""
    import networkx

    shape = networkx.from_numpy_array(graph.heard | graph.heard.T)
    is_known = not graph.topology.varying and networkx.is_connected(shape)
    places = (networkx.kamada_kawai_layout if is_known else networkx.circular_layout)(shape)
    points = np.array([places[peer] for peer in range(len(places))])
    return points / np.abs(points).max(initial=1e-9)


def _links(graph: DrawnGraph, places: np.ndarray, radius: float) -> list[dict[str, object]]:
    """A row for each two peers with a link, with the bytes of both directions; a link of one direction ends at the
    receiver's dot."""
    rows = []
    for first, second in np.argwhere(np.triu(graph.heard | graph.heard.T, 1)).tolist():
        ways = [way for way in ((first, second), (second, first)) if graph.heard[way]]
        receiver, sender = ways[0]
        both = len(ways) == 2
        (x, y), (x2, y2) = places[[sender, receiver]].tolist()
        cut = 0.0 if both else radius / max(np.hypot(x2 - x, y2 - y), 1e-9)
        rows.append(
            {"from": f"{sender} and {receiver}" if both else f"{sender} to {receiver}", "one_way": not both}
            | {"bytes": float(sum(graph.link_bytes[sender] for _, sender in ways))}
            | {"angle": float(np.degrees(np.arctan2(x2 - x, y2 - y)))}
            | {"x": x, "y": y, "x2": float(x2 - cut * (x2 - x)), "y2": float(y2 - cut * (y2 - y))}
        )
    return rows


def _caption(run: Run, graph: DrawnGraph, name: str, values: Mapping[int, float]) -> str:
    """What the drawing shows, and the graph's spectral gap beside the result."""
    gaps = series(run, "graph/spectral_gap")
    known = np.array([value for value in values.values() if np.isfinite(value)])
    weights = "" if graph.topology.own_weights else graph.topology.weights
    in_words = facts(run, name).words
    sentences = {
        f"{len(graph.heard)} peers" + f", {weights} weights" * bool(weights) + ".": True,
        f"Spectral gap {0.0 if gaps is None else gaps.values.mean():.3g}"
        + " in the mean over rounds" * graph.topology.varying
        + ".": gaps is not None,
        f"{wording.title(name, facts(run, name))}: {in_words(float(known.mean() if len(known) else 0))} in the mean, "
        f"{in_words(float(known.min(initial=np.inf)))} to {in_words(float(known.max(initial=-np.inf)))}, at the last "
        "evaluation, in colours.": len(known) > 0,
        "The graph changes from round to round: this is that of the last one.": graph.topology.varying,
        "A tip is at the peer that receives; links without one go both ways.": (graph.heard != graph.heard.T).any(),
        "Links are as wide as the bytes over them, if each message to a neighbour is as large as the others: at most "
        f"{wording.megabytes(graph.link_bytes[graph.heard.any(axis=0)].max(initial=0) / 1e6)} in a direction.": True,
    }
    return " ".join(sentence for sentence, holds in sentences.items() if holds)

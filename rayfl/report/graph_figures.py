"""Drawings of peers' graphs: peers coloured by the value of their own models, links as wide as the bytes over them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import scipy

from rayfl.choices.kinds import make, named
from rayfl.errors import RayflError
from rayfl.experiment.identity import determining_settings
from rayfl.experiment.table import located
from rayfl.metrics.facts import Facts
from rayfl.report import wording
from rayfl.report.charts import Figure, Section, Spec, data, told
from rayfl.report.groups import Group
from rayfl.report.series import facts, last_by_client, series, table_name
from rayfl.run_directory.record import Run
from rayfl.topology.graphs import Topology, connected
from rayfl.topology.mixing import Sparse, is_symmetric

MOST_PEERS = 100
"""A graph of more peers is not drawn."""
MOST_GRAPHS = 9
"""The most graphs of one page."""
_MOST_ROUNDS = 200
"""The last rounds whose links are drawn, if every round has a graph of its own."""
_MOST_LINKS = 1500
_NUMBERED = 36
"""Up to this number of peers each shows its number."""
_LINK_WORDS = {"from": "Peers", "rounds": "In the last round"}
_SIDE = 330
"""Width and height of a drawing in pixels."""


class DrawnGraph(NamedTuple):
    """links: bytes that receiver i had from sender j, [n, n]; last: the graph of the last round, boolean [n, n]."""

    topology: Topology
    links: Sparse
    last: Sparse


def graph_section(groups: Sequence[Group], names: Sequence[str]) -> Section:
    """A figure of each graph of peers, of the first run that has it; no figure without peers that exchange messages.

    names: metrics, of which the first one with a value for each peer colours the peers.
    """
    first: dict[str, tuple[Group, Run]] = {}
    for group in groups:
        run = group.runs[0]
        if "graph/mean_degree" in run.metrics["name"].unique().to_pylist() or table_name(run, "schedule") == "gossip":
            settings = determining_settings(run.experiment)
            key = repr([item for item in settings.items() if item[0].startswith(("topology", "clients.count"))])
            first.setdefault(key, (group, run))
    figures = [
        figure
        for group, run in [*first.values()][:MOST_GRAPHS]
        if (figure := _figure(run, group.label if len(groups) > 1 else "", names)) is not None
    ]
    intro = "Who hears whom." + f" Of {len(first)} graphs, the first {MOST_GRAPHS}." * (len(first) > MOST_GRAPHS)
    return Section("Graph of peers", intro, figures)


def _figure(run: Run, label: str, names: Sequence[str]) -> Figure | None:
    """The drawing of a run's graph, or why there is none; None if the run directory does not tell."""
    title = label or (table_name(run, "topology") or "ring")
    bits = _sent(run)
    if bits.shape[1] > MOST_PEERS:
        return Figure(title, f"{bits.shape[1]:,} peers are too many to draw; up to {MOST_PEERS} are drawn.", {})
    try:
        graph = _drawn(run, bits)
    except (RayflError, OSError, ValueError):
        return None
    if graph is None:
        return Figure(title, "A graph of a class from elsewhere is not drawn, as a page runs no code of a run.", {})
    name = next((name for name in names if last_by_client(run, name)), "")
    values = last_by_client(run, name)
    return Figure(title, _caption(run, graph, name, values), graph_chart(graph, values, facts(run, name)))


def _sent(run: Run) -> np.ndarray:
    """Bits that each peer sent, [num_rounds, num_peers]."""
    rows = run.clients.select(["round", "client", "uplink_bits"])
    clients = rows["client"].to_numpy()
    starts = np.searchsorted(run.rounds["round"].to_numpy(), rows["round"].to_numpy())
    bits = np.zeros((len(run.rounds), int(clients.max(initial=-1)) + 1))
    np.add.at(bits, (starts, clients), rows["uplink_bits"].to_numpy())
    return bits


def _drawn(run: Run, bits: np.ndarray) -> DrawnGraph | None:
    """The graph of a run, whose peers sent `bits`; None if its class is a third party's file. Each sender's bits are
    divided equally among those who hear it in the round."""
    table = located(run.experiment, run.directory).get("topology") or {"name": "ring"}
    if any(name not in named(Topology) for name in _names(table)):
        return None
    num_peers = bits.shape[1]
    topology = make(Topology, table).read(num_peers)
    seed = int(str(run.experiment.get("seed")))
    rounds = run.rounds["round"].to_numpy().tolist()
    amounts = bits[-_MOST_ROUNDS:] if topology.varying else bits.sum(axis=0, keepdims=True)
    links = scipy.sparse.csr_array((num_peers, num_peers))
    last = links
    for number, amount in zip(rounds[-len(amounts) :], amounts, strict=True):
        last = topology.sparse(num_peers, seed, number)
        links = links + last.astype(np.float64) @ scipy.sparse.diags_array(amount / 8 / last.sum(axis=0).clip(1))
    return DrawnGraph(topology, scipy.sparse.csr_array(last if links.nnz > _MOST_LINKS else links), last)


def _names(table: Mapping[str, object]) -> list[str]:
    """The names of a topology and of those inside it."""
    inner = [name for value in table.values() if isinstance(value, Mapping) for name in _names(value)]
    return [str(table.get("name")), *inner]


def graph_chart(graph: DrawnGraph, values: Mapping[int, float], value_facts: Facts) -> Spec:
    """Peers as dots in the colours of their `values`, and links as lines; a link of one direction has a tip at the end
    that receives. Links that the last round lacks are pale."""
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
    faint = {"field": "strength", "type": "quantitative", "scale": None}
    heavy = {"field": "bytes", "type": "quantitative", "scale": {"range": [0.4, 4.5], "zero": True}, "legend": None}
    words = ({**told(field, title), "type": "nominal"} for field, title in _LINK_WORDS.items())
    ends = {f"{axis}2": {"field": f"{axis}2"} for axis in at}
    lines = {**at, **ends, "strokeWidth": heavy, "opacity": faint, "tooltip": [*words, told("bytes", "Bytes")]}
    tips = {axis: {**place, "field": f"{axis}2"} for axis, place in at.items()}
    angle = {"field": "angle", "type": "quantitative", "scale": None}
    return {
        **data(links, len(links)),
        "layer": [
            {"mark": {"type": "rule", "strokeCap": "round"}, "encoding": lines},
            {
                "transform": [{"filter": "datum.one_way"}],
                "mark": {"type": "point", "shape": "triangle-up", "filled": True, "size": 45},
                "encoding": {**tips, "angle": angle, "opacity": faint},
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
    hears, heard = (graph.last.sum(axis=axis).astype(int).tolist() for axis in (1, 0))
    peers = [
        {"peer": peer, "x": x, "y": y, "value": values.get(peer, np.nan), "hears": hears[peer], "heard": heard[peer]}
        for peer, (x, y) in enumerate(places.tolist())
    ]
    title = value_facts.title
    known = [value for value in values.values() if np.isfinite(value)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    legend = {"title": title, "format": ".0%" if value_facts.is_percent else ".3~g", "gradientLength": 160}
    shades = {"scheme": "viridis", "domain": [low, high if high > low else low + 1e-6]}
    color = {"field": "value", "type": "quantitative", "scale": shades, "legend": legend if known else None}
    words = [told("peer", "Peer"), told("value", title, value_facts.is_percent)]
    words += [told("hears", "Hears"), told("heard", "Is heard by")]
    dot = {"type": "circle", "size": 430 if few else 130, "opacity": 1, "stroke": "#888888"}
    layers: list[Spec] = [{"mark": dot, "encoding": {"color": color, "tooltip": words}}]
    if few:
        ink = {"condition": {"test": f"datum.value > {(low + high) / 2}", "value": "#000000"}, "value": "#ffffff"}
        number = {"text": {"field": "peer"}, "color": ink}
        layers.append({"mark": {"type": "text", "fontSize": 11}, "encoding": number})
    return {**data(peers, len(peers)), "encoding": dict(at), "layer": layers}


def _places(graph: DrawnGraph) -> np.ndarray:
    """Where the peers are drawn, in [-1, 1], float64 [n, 2]: on a circle if the graph changes or is in parts."""
    import networkx

    both = ((graph.last + graph.last.T) > 0).astype(int)
    shape = networkx.from_scipy_sparse_array(both)
    is_known = not graph.topology.varying and connected(both)
    places = (networkx.kamada_kawai_layout if is_known else networkx.circular_layout)(shape)
    points = np.array([places[peer] for peer in range(len(places))])
    return points / np.abs(points).max(initial=1e-9)


def _links(graph: DrawnGraph, places: np.ndarray, radius: float) -> list[dict[str, object]]:
    """A row for each two peers with a link, with the bytes of both directions. The directions are those of the last
    round, or, if it lacks the link, of all rounds; a link of one direction ends at the receiver's dot."""
    links, last = graph.links.tocoo(), graph.last.toarray()
    amounts = {(int(i), int(j)): float(amount) for i, j, amount in zip(links.row, links.col, links.data, strict=True)}
    rows = []
    for first, second in sorted({(min(link), max(link)) for link in amounts}):
        ways = [way for way in ((first, second), (second, first)) if way in amounts]
        in_last = [way for way in ways if last[way]]
        both = len(in_last or ways) == 2
        receiver, sender = (in_last or ways)[0]
        (x, y), (x2, y2) = places[sender], places[receiver]
        length = max(float(np.hypot(x2 - x, y2 - y)), 1e-9)
        cut = 0.0 if both else radius / length
        rows.append(
            {"from": f"{sender} and {receiver}" if both else f"{sender} to {receiver}", "one_way": not both}
            | {"bytes": sum(amounts[way] for way in ways), "rounds": "yes" if in_last else "no"}
            | {"strength": 0.85 if in_last else 0.12, "angle": float(np.degrees(np.arctan2(x2 - x, y2 - y)))}
            | {"x": float(x), "y": float(y), "x2": float(x2 - cut * (x2 - x)), "y2": float(y2 - cut * (y2 - y))}
        )
    return rows


def _caption(run: Run, graph: DrawnGraph, name: str, values: Mapping[int, float]) -> str:
    """What the drawing shows, and the graph's spectral gap beside the result."""
    gaps = series(run, "graph/spectral_gap")
    known = np.array([value for value in values.values() if np.isfinite(value)])
    is_one_way = not is_symmetric(graph.last)
    weights = "" if graph.topology.own_weights else graph.topology.weights
    most = float(graph.links.max()) if graph.links.nnz else 0.0
    value_facts = facts(run, name)
    sentences = {
        f"{graph.last.shape[0]} peers" + f", {weights} weights" * bool(weights) + ".": True,
        f"Spectral gap {0.0 if gaps is None else gaps.values.mean():.3g}"
        + " in the mean over rounds" * graph.topology.varying
        + ".": gaps is not None,
        f"{wording.title(name, value_facts)}: {value_facts.words(float(known.mean() if len(known) else 0))} in the "
        f"mean, {value_facts.words(float(known.min(initial=np.inf)))} to "
        f"{value_facts.words(float(known.max(initial=-np.inf)))}, at the last evaluation, in colours.": len(known) > 0,
        "The graph changes from round to round: strong links are those of the last round, pale ones "
        "those of other rounds.": graph.topology.varying and graph.links.nnz > graph.last.nnz,
        "The graph changes from round to round: this is that of the last one.": graph.topology.varying
        and graph.links.nnz <= graph.last.nnz,
        "A tip is at the peer that receives; links without one go both ways.": is_one_way,
        "Links are as wide as the bytes over them, if each message to a neighbour is as large as the others: at most "
        f"{wording.megabytes(most / 1e6)} in a direction.": graph.links.dtype != bool,
    }
    return " ".join(sentence for sentence, holds in sentences.items() if holds)

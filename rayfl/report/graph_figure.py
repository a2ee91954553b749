"""The figure of a run among peers: its graph, with statistics."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from rayfl.choices import plugins
from rayfl.choices.kinds import make
from rayfl.errors import RayflError
from rayfl.experiment.input_files import located
from rayfl.population.sampling import Clients
from rayfl.report.charts import Figure, Section, Spec, data, thinned, told
from rayfl.report.groups import Group
from rayfl.run_directory.description import EXPERIMENT
from rayfl.run_directory.record import Run
from rayfl.settings import dotted, shown
from rayfl.topology.graphs import MOST_PEERS, Grid, Topology
from rayfl.topology.statistics import facts

Value = TypeVar("Value")
_MOST_LINKS = 3000
"""The most links that are drawn."""


def graph_section(groups: Sequence[Group]) -> Section:
    """The graph of a single run among at most `MOST_PEERS` peers; without figures for other runs.

    Anybody may have written experiment.json: RayflError for values of other types than a run's.
    """
    run = groups[0].runs[0]
    if len(groups) > 1 or not run.experiment.get("topology"):
        return Section("Graph", "", [])
    peers, seed, rounds = (setting(run, key, int) for key in ("clients.count", "seed", "rounds"))
    setting(run, "topology.name", str)
    if "clients.unseen" in dotted(run.experiment):
        peers = Clients(count=peers, unseen=setting(run, "clients.unseen", float)).num_seen
    if peers > MOST_PEERS:
        return Section("Graph", "", [])
    try:
        topology = _topology(run)
        sentence = facts(topology, peers, seed, rounds).sentence
        return Section("Graph", f"{sentence} Mixing weights: {topology.weights}.", [_drawn(topology, peers, seed)])
    except ValueError:
        # The graph's file is gone, or only its own run may load its class.
        return Section("Graph", "", [])


def setting(run: Run, key: str, kind: type[Value]) -> Value:
    """The value of a dotted key. RayflError unless it is of this type."""
    found = dotted(run.experiment).get(key)
    if type(found) is not kind:
        raise RayflError(
            f"{run.directory / EXPERIMENT} has {key}={shown(found)}, and it must be {kind.__name__}: restore it"
        )
    return found


def _topology(run: Run) -> Topology:
    """The run's topology. Raise RayflError if building it would run code of the run directory."""
    given = located(run.experiment, run.directory)["topology"]
    if plugins.would_run_code(given["name"]):  # type: ignore[index]
        raise RayflError("a page runs no code of a run directory")
    return make(Topology, given)  # type: ignore[arg-type]


def _drawn(topology: Topology, num_peers: int, seed: int) -> Figure:
    """Peers as dots, links as lines; if the graph varies, the one of round 0."""
    graph = topology.receives(num_peers, seed, 0)
    links = np.argwhere(np.triu(graph | graph.T))
    caption = "Who exchanges with whom when everybody is present."
    caption += " Links go one way." * (not np.array_equal(graph, graph.T))
    caption += " Every round has another graph; this is the one of round 0." * topology.varying
    if len(links) > _MOST_LINKS:
        caption += f" Of its {len(links):,} links {_MOST_LINKS:,} are drawn."
    return Figure("Peers and links", caption, graph_chart(_places(topology, num_peers), links))


def _places(topology: Topology, num_peers: int) -> np.ndarray:
    """The places of the peers [n, 2]: those of a grid row by row, others on a circle."""
    if isinstance(topology, Grid):
        row, column = np.divmod(np.arange(num_peers), num_peers // topology.num_rows(num_peers))
        return np.stack([column, -row], axis=1).astype(np.float64)
    angle = np.pi / 2 - 2 * np.pi * np.arange(num_peers) / num_peers
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


def graph_chart(places: np.ndarray, links: np.ndarray) -> Spec:
    """Nodes at `places` [n, 2] and lines between the pairs in `links` [num_links, 2]; at most 3,000 lines."""
    links = thinned(links, _MOST_LINKS)
    (x, y), (x2, y2) = places[links[:, 0]].T, places[links[:, 1]].T
    nodes = {"x": places[:, 0], "y": places[:, 1], "peer": np.arange(len(places))}
    axis = {"type": "quantitative", "axis": None, "scale": {"zero": False, "nice": False, "padding": 18}}
    return {
        "width": 330,
        "height": 330,
        "encoding": {"x": {"field": "x", **axis}, "y": {"field": "y", **axis}},
        "layer": [
            {
                **data([{"x": x, "y": y, "x2": x2, "y2": y2}], len(links)),
                "transform": [{"flatten": ["x", "y", "x2", "y2"]}],
                "mark": {"type": "rule", "opacity": float(np.clip(60 / max(len(links), 1), 0.06, 0.7))},
                "encoding": {"x2": {"field": "x2"}, "y2": {"field": "y2"}},
            },
            {
                **data([nodes], 0),
                "transform": [{"flatten": ["x", "y", "peer"]}],
                "mark": {"type": "circle", "size": max(12, 260 - 4 * len(places)), "opacity": 1},
                "encoding": {"tooltip": [told("peer", "Peer")]},
            },
        ],
    }

"""A run among peers on a page: its graph, the graph's statistics, and the traffic of the busiest peer."""

from collections.abc import Sequence

import numpy as np

from rayfl.choices import plugins
from rayfl.choices.kinds import make
from rayfl.errors import RayflError
from rayfl.experiment.input_files import located
from rayfl.report.charts import MOST_LINKS, Line, graph_chart, lines_chart
from rayfl.report.panels import Figure, Section
from rayfl.report.series import MEGABYTE_BITS, Group, cost
from rayfl.run_directory.record import Run
from rayfl.topology.graphs import Grid, Topology
from rayfl.topology.statistics import facts


def graph_section(groups: Sequence[Group]) -> Section:
    """The graph of a single run among peers; without figures for anything else."""
    run = groups[0].runs[0]
    empty = Section("Graph", "", [])
    if len(groups) > 1 or not run.experiment.get("topology"):
        return empty
    try:
        return Section("Graph", _sentence(run), [_drawn(run), *_busiest(run)])
    except ValueError:
        # A graph from a file that is no longer there, or of a class that only its own run may load.
        return Section("Graph", "", _busiest(run))


def busiest(run: Run) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rounds, and for each the megabytes that the busiest peer sends, that it receives, and that a peer receives on
    average; peers that are away count in the mean."""
    rounds = run.rounds["round"].to_numpy()
    places = np.searchsorted(rounds, run.clients["round"].to_numpy())
    whole = places < len(rounds)
    up, down = (run.clients[name].to_numpy() / MEGABYTE_BITS for name in ("uplink_bits", "downlink_bits"))
    most_up, most_down, total = (np.zeros(len(rounds)) for _ in range(3))
    np.maximum.at(most_up, places[whole], up[whole])
    np.maximum.at(most_down, places[whole], down[whole])
    np.add.at(total, places[whole], down[whole])
    count = np.bincount(places[whole], minlength=len(rounds))
    return rounds, most_up, most_down, total / np.maximum(count, 1)


def _topology(run: Run) -> tuple[Topology, int, int, int]:
    """The topology, the number of peers, the seed and the number of rounds."""
    given = located(run.experiment, run.directory)
    if plugins.would_run_code(given["topology"]["name"]):  # type: ignore[index]
        raise RayflError("a page runs no code of a run directory")
    topology: Topology = make(Topology, given["topology"])  # type: ignore[arg-type]
    clients: dict[str, int] = given["clients"]  # type: ignore[assignment]
    return topology, clients["count"], int(given["seed"]), int(given["rounds"])  # type: ignore[call-overload]


def _sentence(run: Run) -> str:
    topology, num_peers, seed, rounds = _topology(run)
    return f"{facts(topology, num_peers, seed, rounds).sentence} Mixing weights: {topology.weights}."


def _drawn(run: Run) -> Figure:
    """Peers as dots, links as lines; of a graph that varies that of round 0."""
    topology, num_peers, seed, _ = _topology(run)
    graph = topology.receives(num_peers, seed, 0)
    links = np.argwhere(np.triu(graph | graph.T))
    directed = not np.array_equal(graph, graph.T)
    caption = "Who exchanges with whom when everybody is present."
    caption += " Links go one way." if directed else ""
    caption += " Every round has another graph; this is that of round 0." if topology.varying else ""
    if len(links) > MOST_LINKS:
        caption += f" Of its {len(links):,} links {MOST_LINKS:,} are drawn."
    return Figure("Peers and links", caption, graph_chart(_places(topology, num_peers), links))


def _places(topology: Topology, num_peers: int) -> np.ndarray:
    """Where the peers are drawn [n, 2]: a grid's row by row, others on a circle."""
    if isinstance(topology, Grid):
        row, column = np.divmod(np.arange(num_peers), num_peers // topology.num_rows(num_peers))
        return np.stack([column, -row], axis=1).astype(np.float64)
    angle = np.pi / 2 - 2 * np.pi * np.arange(num_peers) / num_peers
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


def _busiest(run: Run) -> list[Figure]:
    """The busiest peer's traffic over the rounds, where anything is sent."""
    rounds, most_up, most_down, mean = busiest(run)
    if not most_down.any():
        return []
    over = cost(run).over(rounds)
    lines = [
        Line("Busiest peer, sent", 0, over, most_up),
        Line("Busiest peer, received", 1, over, most_down),
        Line("Mean over peers, received", 2, over, mean),
    ]
    caption = (
        "What the peer with the most to send sends in a round, over all its links together, and what the one with the "
        "most to receive receives: as really encoded. 1 MB is a million bytes."
    )
    return [Figure("The busiest peer", caption, lines_chart(lines, "MB a round", from_zero=True), legend=True)]

"""Statistics of the graph of a run among peers, in words."""

from collections.abc import Sequence
from typing import TypeVar

from rayfl.choices import plugins
from rayfl.choices.kinds import make
from rayfl.errors import RayflError
from rayfl.experiment.input_files import located
from rayfl.population.sampling import Clients
from rayfl.report.groups import Group
from rayfl.run_directory.description import EXPERIMENT
from rayfl.run_directory.record import Run
from rayfl.settings import dotted, shown
from rayfl.topology.graphs import MOST_PEERS, Topology
from rayfl.topology.statistics import facts

Value = TypeVar("Value")


def graph_words(groups: Sequence[Group]) -> str:
    """Sentences on the graph of a single run among at most `MOST_PEERS` peers; "" for other runs.

    Anybody may have written experiment.json: RayflError for values of other types than a run's.
    """
    run = groups[0].runs[0]
    if len(groups) > 1 or not run.experiment.get("topology"):
        return ""
    peers, seed, rounds = (setting(run, key, int) for key in ("clients.count", "seed", "rounds"))
    setting(run, "topology.name", str)
    if "clients.unseen" in dotted(run.experiment):
        peers = Clients(count=peers, unseen=setting(run, "clients.unseen", float)).num_seen
    if peers > MOST_PEERS:
        return ""
    try:
        topology = _topology(run)
        return f"{facts(topology, peers, seed, rounds).sentence} Mixing weights: {topology.weights}."
    except ValueError:
        # The graph's file is gone, or only its own run may load its class.
        return ""


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

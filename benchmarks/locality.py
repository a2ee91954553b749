"""The benchmark `locality`: the bytes that a round moves between nodes.

The clients of scaffold remember a control variate as large as the model. Simulated nodes on one machine, each with one
core and one client actor, have these states. The same rounds are played twice: with calls sent to the nodes of their
clients' states, and with calls sent in order to any free actor. The losses must be the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from ray import ObjectRef
from ray.experimental import get_local_object_locations

from actors import session
from actors.client import Actor
from actors.object_store import WaitingJobs, inputs
from actors.ray_executor import PendingCalls, RayExecutor
from benchmarks.client_actors import client_actors
from benchmarks.figures import Column, Figures, Results
from benchmarks.local_cluster import own_cluster
from jobs.display import print_table
from rayfl.determinism.process import prepare_process
from rayfl.errors import RayflError
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.runtime import Runtime
from rayfl.rounds.executor import Job, Ref
from rayfl.rounds.ledger import RoundRecord
from rayfl.rounds.rounds import RunState, simulate
from rayfl.rounds.setup import Setup


class ToStates(RayExecutor):
    """Send calls to the nodes of their clients' states, as every run does, and add up the bytes that move."""

    moved_bytes = 0
    """Bytes of inputs that were on other nodes than the actors to which they were sent."""

    def _pending(self, shared: Ref, jobs: Sequence[Job]) -> PendingCalls:
        self.jobs = jobs
        self.places = get_local_object_locations(
            [ref for job in jobs for ref in inputs(job.inputs)[0] if isinstance(ref, ObjectRef)]
        )
        return super()._pending(shared, jobs)

    def _next_pair(self, waiting: WaitingJobs) -> tuple[int, Actor]:
        index, actor = super()._next_pair(waiting)
        refs, _ = inputs(self.jobs[index].inputs)
        for place in (self.places[ref] for ref in refs if ref in self.places):
            if place["node_ids"] and self.pool.ready[actor].node not in place["node_ids"]:
                self.moved_bytes += place["object_size"]
        return index, actor


class InOrder(ToStates):
    """Send calls in their order to any free actor, wherever the clients' states lie."""

    def _pending(self, shared: Ref, jobs: Sequence[Job]) -> PendingCalls:
        return replace(super()._pending(shared, jobs), homes=())


WAYS: dict[str, type[ToStates]] = {"whoever is free": InOrder, "the states' node": ToStates}


@dataclass
class Rounds:
    """For each round: bytes of states and messages that calls read from other nodes, bytes through the machine's
    loopback device, seconds, and the loss."""

    moved: list[int]
    network: list[int]
    seconds: list[float]
    losses: list[float]


def experiment(clients: int, participants: int, rounds: int, hidden: int) -> Experiment:
    """Scaffold on digits: an MLP, two short steps per client, an evaluation only after the last round."""
    return Experiment(
        name="locality",
        rounds=rounds,
        data="digits",
        partition="iid",
        clients={"count": clients, "per_round": participants},
        model={"name": "mlp", "hidden": [hidden]},
        method={"name": "scaffold", "lr": 0.05, "steps": 2, "batch_size": 4},
        evaluation={"every": 0},
    )


def play(setup: Setup, runtime: Runtime, kind: type[ToStates]) -> Rounds:
    """Play all rounds on the Ray of this session."""
    measured, before = Rounds([], [], [], []), [0, loopback_bytes()]

    def on_round(record: RoundRecord, run_state: RunState) -> None:
        now = [pool.moved_bytes, loopback_bytes()]
        measured.moved.append(now[0] - before[0])
        measured.network.append(now[1] - before[1])
        measured.seconds.append(record.row.wall_s)
        measured.losses.append(record.means["train/loss"])
        before[:] = now

    with client_actors(setup, runtime, kind) as pool:
        simulate(setup, pool, on_round)
    return measured


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.1f}"


def loopback_bytes() -> int:
    """Bytes received on the loopback device since the machine started, by all processes. 0 if this is not Linux."""
    devices = Path("/proc/net/dev")
    lines = devices.read_text(encoding="utf-8").splitlines() if devices.exists() else []
    return sum(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("lo:"))


COLUMNS = (
    Column("participants", "participants"),
    Column("way", "a call goes to"),
    Column("state_bytes", "all their states, MB", _megabytes),
    Column("moved_bytes", "from another node, MB", _megabytes),
    Column("loopback_bytes", "loopback, MB", _megabytes),
    Column("median_s", "seconds", "{:.2f}"),
)


def bench_locality(clients: int, nodes: int, rounds: int, hidden: int, results: Results) -> None:
    """Measure rounds of all clients and of a quarter of them, print a table, and write `results`.

    Raise RayflError, before anything is measured, for arguments that are not allowed and if `results` cannot be
    written; ClusterError if no cluster starts; AssertionError if a loss depends on the actors that did the work.
    """
    from rayfl.experiment.prepare import prepare

    least = {"--clients": (clients, 4), "--nodes": (nodes, 1), "--rounds": (rounds, 2), "--hidden": (hidden, 1)}
    for option, (value, bound) in least.items():
        if value < bound:
            raise RayflError(f"{option} {value} is not allowed; it must be a whole number of at least {bound}")
    results.require()
    prepare_process()
    title = f"A round of scaffold: {clients} clients on {nodes} simulated nodes"
    figures = Figures(
        "rounds",
        COLUMNS,
        title,
        f"Medians of the second half of {rounds} rounds. Who takes part for the first time has no state yet.",
    )
    with own_cluster(nodes) as cluster:
        runtime = Runtime(address=cluster.address, actors=nodes)
        with session.session(runtime):
            for participants in (clients, clients // 4):
                setup = prepare(experiment(clients, participants, rounds, hidden))
                played = {way: play(setup, runtime, kind) for way, kind in WAYS.items()}
                assert len({tuple(each.losses) for each in played.values()}) == 1, "a loss depends on who did the work"
                size = 4 * sum(array.size for array in setup.initial_arrays.values())
                for way, each in played.items():
                    medians = [median(values[rounds // 2 :]) for values in (each.moved, each.network, each.seconds)]
                    figures.add(participants, way, participants * size, *medians)
    print_table(figures.table())
    results.write(figures, clients=clients, nodes=nodes, rounds=rounds, hidden=hidden)

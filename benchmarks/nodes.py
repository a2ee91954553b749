"""The benchmark `scale --nodes`: many small calls on simulated nodes, and their cost for the coordinator.

`python -m benchmarks.nodes NODES ACTORS PARTICIPANTS ROUNDS` starts a local cluster and plays rounds in this process as
the coordinator does: the process's time and memory stand for the coordinator's. The model is small, so that calls, sums
and records take nearly all of the time.
"""

import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.client_actors import client_actors
from benchmarks.figures import Column, Figures, Results, gigabytes
from benchmarks.local_cluster import own_cluster
from benchmarks.memory import run_watched
from benchmarks.start import processor_times
from jobs.display import print_table
from rayfl import tree
from rayfl.determinism.platform import describe
from rayfl.errors import RayflError
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.experiment.runtime import Runtime
from rayfl.gather import Handle
from rayfl.limits import memory
from rayfl.rounds.executor import Executor, Job, JobResult, Ref
from rayfl.rounds.ledger import RoundRow
from rayfl.rounds.resources import Use
from rayfl.run_directory.description import Description
from rayfl.run_directory.play_run import Listener, RunOutput, play_run
from rayfl.run_directory.run_folder import create_run_directory

ACTORS = (8, 16, 32, 64)
PARTICIPANTS, ROUNDS, WARMUP = 1_000, 10, 2
ACTOR_BYTES = 200 * 10**6
"""Memory of an actor that has loaded torch and has hardly any data."""


class Measuring:
    """An executor that counts calls, seconds of waiting for answers, and bytes that this process fetches."""

    def __init__(self, inner: Executor) -> None:
        self.inner, self.num_workers = inner, inner.num_workers
        self.calls = self.fetched_bytes = 0
        self.waited_s = self.counting_s = 0.0

    def settings_read(self) -> frozenset[tuple[str, str]] | None:
        """What all processes have read."""
        return self.inner.settings_read()

    def used(self) -> list[Use]:
        """What the processes have used."""
        return self.inner.used()

    # Any: a value of any type.
    def put(self, value: Any) -> Ref:
        """Put a value into the object store."""
        return self.inner.put(value)

    def put_all(self, values: Iterable[Any]) -> list[Ref]:
        """Put values into the object store."""
        return self.inner.put_all(values)

    def handle(self, ref: Ref) -> Handle:
        """The handle of a packet."""
        return self.inner.handle(ref)

    def get(self, ref: Ref) -> Any:
        """Get a value from the object store, and count its bytes."""
        value = self.inner.get(ref)
        self._count(value)
        return value

    def run(self, shared: Ref, jobs: Sequence[Job]) -> list[JobResult]:
        """Do all jobs, and count them and their results."""
        begun = time.perf_counter()
        done = self.inner.run(shared, jobs)
        self.waited_s += time.perf_counter() - begun
        self.calls += len(jobs)
        self._count([each.result for each in done])
        return done

    def _count(self, value: Any) -> None:
        begun = time.process_time()
        self.fetched_bytes += pickled_bytes(value)
        self.counting_s += time.process_time() - begun


# Any: a value of any type.
def pickled_bytes(value: Any) -> int:
    """The size of a value as Ray sends it: pickled, plus the buffers of its arrays."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return len(head) + sum(buffer.raw().nbytes for buffer in buffers)


def experiment(actors: int, participants: int, rounds: int, **runtime: object) -> Experiment:
    """Each of `participants` clients takes one step of logistic regression on one of its digits."""
    tables: dict[str, Any] = {
        "name": "nodes",
        "rounds": rounds,
        "data": "digits",
        "partition": "iid",
        "clients": {"count": participants},
        "model": "logistic",
        "method": {"name": "fedavg", "lr": 0.05, "steps": 1, "batch_size": 1},
        "evaluation": {"every": 0, "pooled": False, "own": False},
        "runtime": {"actors": actors, "num_cpus": 1, "start_timeout_s": 900.0, **runtime},
        "output": {"report": False, "save_models": False},
    }
    return Experiment(**tables)


def play(chosen: Experiment, executor: Executor, directory: Path) -> dict[str, Any]:
    """Play all rounds and measure those after the first `WARMUP`: means per round, and the median of the seconds."""
    setup, measuring = prepare(chosen), Measuring(executor)
    create_run_directory(directory)
    Description(chosen.as_dict()).write(directory, describe(1))
    seconds: list[float] = []
    marks: list[dict[str, float]] = []

    def on_round(row: RoundRow, means: Mapping[str, float]) -> None:
        seconds.append(row.wall_s)
        if len(seconds) in (WARMUP, chosen.rounds):
            kinds: dict[str, float] = {}
            for pid, (kind, cpu_s) in processor_times(os.getpid()).items():
                if pid != os.getpid():
                    kinds[kind] = kinds.get(kind, 0.0) + cpu_s
            numbers = {
                "coordinator_cpu_s": time.process_time() - measuring.counting_s,
                "actors_cpu_s": kinds.pop("ClientActor", 0.0),
                "ray_cpu_s": sum(kinds.values()),
                "calls": measuring.calls,
                "waited_s": measuring.waited_s,
                "fetched_bytes": measuring.fetched_bytes,
                "elapsed_s": time.perf_counter(),
            }
            marks.append(numbers)

    play_run(setup, measuring, RunOutput(directory, save_models=False), Listener(on_round))
    first, last = marks
    counted = chosen.rounds - WARMUP
    means = {name: (last[name] - first[name]) / counted for name in first}
    return {"median_s": median(seconds[WARMUP:]), "parameters": tree.num_entries(setup.initial), **means}


def figures(nodes: int, actors: int, participants: int, rounds: int) -> dict[str, Any]:
    """Play on a cluster of `nodes` nodes with room for the actors."""
    with own_cluster(nodes, num_cpus=-(-actors // nodes)) as cluster, tempfile.TemporaryDirectory() as scratch:
        chosen = experiment(actors, participants, WARMUP + rounds, address=cluster.address)
        with client_actors(prepare(chosen), Runtime(**chosen.runtime.model_dump())) as pool:
            return play(chosen, pool, Path(scratch) / "run")


COLUMNS = (
    Column("actors", "actors"),
    Column("median_s"),
    Column("rounds_a_second", "rounds / s", "{:.2f}"),
    Column("calls", "calls", "{:.0f}"),
    Column("waited_s", "waiting, s", "{:.3f}"),
    Column("coordinator_cpu_s", "coordinator, s", "{:.3f}"),
    Column("coordinator_share", "of all", "{:.0%}"),
    Column("actors_cpu_s", "actors, s", "{:.3f}"),
    Column("ray_cpu_s", "Ray, s", "{:.3f}"),
    Column("fetched_bytes", "fetched, kB", lambda size: f"{size / 1e3:,.0f}"),
    Column("peak_bytes", "peak, GB", gigabytes),
    Column("elapsed_s"),
)


def by_calls(rows: Sequence[Mapping[str, float]], key: str) -> tuple[float, float]:
    """Fit the figure `key` = a * calls + b by least squares over the rows; return (a, b)."""
    slope, rest = np.polyfit([row["calls"] for row in rows], [row[key] for row in rows], 1)
    return float(slope), float(rest)


def bench_nodes(nodes: int, actors: Sequence[int], participants: int, results: Results) -> None:
    """Measure rounds with each number of `actors` on simulated nodes; print a row each and write `results`.

    Raise RayflError, before any measurement, for a number below 1 and if `results` cannot be written.
    """
    if nodes < 1 or participants < 1 or min(actors) < 1:
        raise RayflError(
            f"--nodes {nodes} --actors {min(actors)} --participants {participants}: each must be at least 1"
        )
    prepare(experiment(1, participants, WARMUP + ROUNDS))
    memory.require(max(actors) * ACTOR_BYTES, f"--actors {max(actors)}", "give fewer")
    results.require()
    figures = Figures("nodes", COLUMNS, f"{nodes} simulated nodes, {participants:,} participants a round")
    parameters = 0
    for count in actors:
        print(f"{count} actors ...", file=sys.stderr, flush=True)
        given = map(str, (nodes, count, participants, ROUNDS))
        output, peak_bytes = run_watched("benchmarks.nodes", *given)
        row = {"actors": count, "peak_bytes": peak_bytes, **json.loads(output)}
        row["rounds_a_second"] = 1 / row["median_s"]
        row["coordinator_share"] = row["coordinator_cpu_s"] / sum(
            row[name] for name in ("coordinator_cpu_s", "actors_cpu_s", "ray_cpu_s")
        )
        parameters = row["parameters"]
        figures.add(*(row[column.key] for column in COLUMNS))
    print_table(figures.table(), 120)
    facts: dict[str, float] = {}
    if len({row["calls"] for row in figures.rows}) > 1:
        call_s, rest_s = by_calls(figures.rows, "coordinator_cpu_s")
        call_bytes, rest_bytes = by_calls(figures.rows, "fetched_bytes")
        facts = {"call_cpu_s": call_s, "rest_cpu_s": rest_s, "call_bytes": call_bytes, "rest_bytes": rest_bytes}
        print(f"The coordinator's part of a round: {1e3 * call_s:.2f} ms of CPU and {call_bytes / 1e3:.1f} kB a call,")
        print(f"and {1e3 * rest_s:.1f} ms and {rest_bytes / 1e3:.0f} kB for {participants:,} participants besides.")
    print(f"FedAvg, logistic regression of {parameters} parameters, one step on one example; {ROUNDS} rounds after")
    print(f"{WARMUP}: median rounds a second, then means of a round: how long the coordinator waits for calls, the")
    print("processor time of coordinator, actors and Ray, and what the coordinator fetches. All nodes share this")
    print("machine's cores, so more actors are no faster here: what counts is the coordinator's own time.")
    cores = os.cpu_count()
    results.write(figures, nodes=nodes, participants=participants, parameters=parameters, cores=cores, **facts)


if __name__ == "__main__":
    print(json.dumps(figures(*map(int, sys.argv[1:]))), flush=True)

"""The benchmark `scale`: time and memory by the number of clients and actors, and the cost of states.

Every run is a process of its own with a Ray of its own, one after another (benchmarks/played.py). Every round has 100
participants that do the same work however many clients there are.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.figures import Column, Figures, Results
from benchmarks.memory import run_watched
from benchmarks.played import Played, from_json
from benchmarks.run_bits import difference
from jobs.display import print_table
from rayfl.experiment.experiment import Experiment
from rayfl.run_directory import disk
from rayfl.run_directory.record import read_run

MB = 10**6

Measure = Callable[[Experiment, Path, Sequence[int]], tuple[Played, int]]
"""Run an experiment into a new directory, and measure its memory after the given rounds. Return the figures and the
peak memory of all processes together."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the runs in the four tables."""

    clients: tuple[int, ...] = (100, 1_000, 10_000)
    actors: tuple[int, ...] = (1, 2, 4)
    participants: int = 100
    rounds: int = 20
    keepers: int = 2_000
    keeping_rounds: int = 200
    spillers: int = 300
    spilling_rounds: int = 8
    small_store_mb: int = 150
    checkpoint_rounds: int = 60

    @property
    def looks(self) -> tuple[int, ...]:
        """Rounds after which the memory of runs with states is measured: a tenth, half and all of them."""
        return self.keeping_rounds // 10, self.keeping_rounds // 2, self.keeping_rounds


def bench_scale(results: Results, sizes: Sizes = Sizes()) -> int:
    """Measure, print a table for each question and write `results`.

    Return an exit code: 1 if spilled states came back changed. Raise RayflError, before anything is measured, if
    `results` cannot be written.
    """
    results.require()
    parts: list[Figures] = []
    with tempfile.TemporaryDirectory(prefix="scale") as scratch:
        for part in (populations, states, checkpoints, spilling):
            parts.append(part(measured, Path(scratch) / str(len(parts)), sizes))
            print_table(parts[-1].table())
    print("Each run was a process of its own; MB are 10^6 bytes, shared pages counted once.")
    results.write(*parts)
    return int(any(row.get("same_bits") is False for figures in parts for row in figures.rows))


def measured(experiment: Experiment, directory: Path, watched: Sequence[int]) -> tuple[Played, int]:
    """A `Measure` that runs in another process. Raise ClusterError if it fails."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    file = directory.with_suffix(".json")
    file.write_text(json.dumps(experiment.as_dict()), encoding="utf-8")
    print(f"{directory.name} ...", file=sys.stderr, flush=True)
    output, peak_bytes = run_watched("benchmarks.played", str(file), str(directory), *map(str, watched))
    return from_json(output), peak_bytes


def shown(size: float) -> str:
    """Bytes as megabytes."""
    return f"{size / MB:,.0f}"


def populations(measure: Measure, home: Path, sizes: Sizes) -> Figures:
    """Measure FedAvg with different numbers of clients and actors."""
    columns = (
        Column("clients", "clients", "{:,}"),
        Column("actors", "actors"),
        Column("median_s", "seconds a round", "{:.3f}"),
        Column("peak_bytes", "peak memory, MB", shown),
        Column("growth_bytes", "growth, MB", lambda size: f"{size / MB:+.1f}"),
    )
    title = f"FedAvg, Fashion-MNIST, convnet2, {sizes.participants} participants a round"
    watched = (sizes.rounds // 4, sizes.rounds)
    caption = f"44,426 parameters. Growth: from round {watched[0]} to round {watched[1]}."
    figures = Figures("populations", columns, title, caption)
    for clients in sizes.clients:
        for actors in sizes.actors:
            method = {"name": "fedavg", "lr": 0.05, "steps": 10, "batch_size": 6}
            chosen = experiment(clients, sizes.participants, sizes.rounds, "convnet2", method, actors=actors)
            played, peak = measure(chosen, home / f"{clients} clients, {actors} actors", watched)
            before, after = (played.resident[mark].total for mark in watched)
            figures.add(clients, actors, median(played.seconds[1:]), peak, after - before)
    return figures


def states(measure: Measure, home: Path, sizes: Sizes) -> Figures:
    """Measure whether memory grows with the rounds in methods whose clients have states."""
    columns = (
        Column("method", "method"),
        Column("round", "round"),
        Column("clients_seen", "clients seen", "{:,}"),
        Column("coordinator_bytes", "coordinator", shown),
        Column("actors_bytes", "actors", shown),
        Column("stored_bytes", "store in use", shown),
        Column("shared_bytes", "shared pages", shown),
        Column("rest_bytes", "rest", shown),
    )
    title = (
        f"{sizes.keepers:,} clients with states, mlp of 11,140 parameters, {sizes.participants} participants a round"
    )
    caption = "MB. Shared pages: those of the store that were ever in use. A client once seen has a state."
    figures = Figures("states", columns, title, caption)
    for method in ("scaffold", "fedpse"):
        chosen = keeping(method, sizes, sizes.keeping_rounds)
        played, _ = measure(chosen, home / method, sizes.looks)
        for mark in sizes.looks:
            now = played.resident[mark]
            memory = (now.coordinator, now.actors, played.stored[mark], now.shared, now.rest)
            figures.add(method, mark, seen(home / method, mark), *memory)
    return figures


def checkpoints(measure: Measure, home: Path, sizes: Sizes) -> Figures:
    """Measure the cost of checkpoints in the last two thirds of the rounds, when most clients have a state."""
    columns = (
        Column("every", "checkpoint every", lambda every: str(every or "never")),
        Column("mean_s", "seconds a round", "{:.3f}"),
        Column("beside_share", "beside the rounds", "{:.1%}"),
        Column("checkpoints_share", "of them checkpoints", "{:.1%}"),
        Column("checkpoint_bytes", "a checkpoint, MB", shown),
    )
    title = f"Checkpoints: scaffold, {sizes.keepers:,} clients with states, mlp of 11,140 parameters"
    caption = "Seconds a round: mean, saving included. Beside the rounds: share of all time."
    figures = Figures("checkpoints", columns, title, caption)
    first, records = sizes.checkpoint_rounds // 3, 0.0
    for every in (0, 10, 1):
        chosen = keeping("scaffold", sizes, sizes.checkpoint_rounds, every=every)
        directory = home / f"a checkpoint every {every}"
        played, _ = measure(chosen, directory, ())
        between = played.between_s[first - 1 :]
        beside = [total - work for total, work in zip(between, played.seconds[first:], strict=True)]
        records = sum(beside) / len(beside) if every == 0 else records
        mine = sum(beside) - records * len(beside)
        shares = (sum(beside) / sum(between), mine / sum(between))
        figures.add(every, sum(between) / len(between), *shares, saved_bytes(directory))
    return figures


def spilling(measure: Measure, home: Path, sizes: Sizes) -> Figures:
    """Compare states in a store that is too small with states in one that holds them: the bits must be the same."""
    columns = (
        Column("store_mb", "object store, MB"),
        Column("median_s", "seconds a round", "{:.3f}"),
        Column("states_bytes", "states, MB", shown),
        Column("spilled_bytes", "spilled, MB", shown),
        Column("restored_bytes", "read back, MB", shown),
        Column("same_bits", "states and models", lambda same: "the same bits" if same else "OTHER BITS"),
    )
    title = f"{sizes.spillers} clients of scaffold with 0.4 million parameters each, in a store too small for them"
    figures, calm = Figures("spilling", columns, title), None
    for megabytes in (16 * sizes.small_store_mb, sizes.small_store_mb):
        directory = home / f"store of {megabytes} MB"
        played, _ = measure(spilling_experiment(sizes, megabytes), directory, ())
        traffic = (saved_bytes(directory), played.spilled_bytes, played.restored_bytes)
        same = None if calm is None else ends_alike(calm, directory)
        figures.add(megabytes, median(played.seconds[1:]), *traffic, same)
        calm = directory
    return figures


# Any: tables of an experiment.
def experiment(
    count: int,
    per_round: int,
    rounds: int,
    model: Any,
    method: Any,
    every: int = 0,
    data: str = "fashion-mnist",
    **runtime: Any,
) -> Experiment:
    """An experiment without evaluation, on actors of half a core."""
    tables: dict[str, Any] = {
        "name": method["name"],
        "rounds": rounds,
        "data": data,
        "partition": "iid",
        "clients": {"count": count, "per_round": min(count, per_round)},
        "model": model,
        "method": method,
        "evaluation": {"every": 0, "pooled": False, "own": False},
        "checkpoint": {"every": every},
        "runtime": {"actors": 2, "num_cpus": 0.5, "object_store_memory_mb": 1000, **runtime},
        "output": {"report": False},
    }
    return Experiment(**tables)


def keeping(method: str, sizes: Sizes, rounds: int, every: int = 0) -> Experiment:
    """Clients that each have a state: 45 kB with scaffold; 134 kB with fedpse, and 45 kB more on the server."""
    hyper = {"name": method, "lr": 0.05, "steps": 2, "batch_size": 10}
    return experiment(sizes.keepers, sizes.participants, rounds, {"name": "mlp", "hidden": [14]}, hyper, every)


def spilling_experiment(sizes: Sizes, megabytes: int) -> Experiment:
    """A state of 1.6 MB a client; a checkpoint at the end."""
    hyper = {"name": "scaffold", "lr": 0.05, "steps": 1, "batch_size": 5}
    model = {"name": "mlp", "hidden": [600, 600]}
    rounds, store = sizes.spilling_rounds, {"object_store_memory_mb": megabytes}
    return experiment(sizes.spillers, sizes.spillers // 4, rounds, model, hyper, rounds, "digits", **store)


def seen(directory: Path, rounds: int) -> int:
    """The number of clients that took part in any of the first `rounds` rounds."""
    clients = read_run(directory).clients
    return len(np.unique(clients["client"].to_numpy()[clients["round"].to_numpy() < rounds]))


def last_checkpoint(directory: Path) -> Path | None:
    """The newest checkpoint of a run."""
    saved = list(disk.checkpoints(directory))
    return directory / "checkpoints" / f"{saved[0]:08d}" if saved else None


def saved_bytes(directory: Path) -> int:
    """The size of the states in the newest checkpoint, the server's and all clients'; 0 without a checkpoint."""
    place = last_checkpoint(directory)
    return sum(path.stat().st_size for path in place.glob("*.safetensors")) if place else 0


def ends_alike(a: Path, b: Path) -> bool:
    """True if two runs have the same records, models and last checkpoints, bit for bit."""
    places = last_checkpoint(a), last_checkpoint(b)
    assert places[0] and places[1], "runs whose states are compared save them at the end"
    return not difference(a, b)

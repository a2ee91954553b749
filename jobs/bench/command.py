"""Runs the workloads and their bare loops as processes of their own, one after another, and prints ratios."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from jobs.bench.memory import run_watched
from jobs.bench.workloads import WORKLOADS
from jobs.standard_output import print_table
from rayfl.settings import nearest

ACTORS = 2


@dataclass(frozen=True)
class Measured:
    """One program's round times and its peak memory, all processes together."""

    seconds: tuple[float, ...]
    peak_bytes: int

    @property
    def median(self) -> float:
        """Median seconds a round."""
        return statistics.median(self.seconds)


def measure(module: str, *arguments: str) -> Measured:
    """Run a module that prints its round times as JSON on its last line."""
    output, peak_bytes = run_watched(module, *arguments)
    return Measured(tuple(json.loads(output)), peak_bytes)


def bench(names: Sequence[str]) -> None:
    """Measure the named workloads, all where none is named, and print a row each. ValueError on an unknown name."""
    for name in names:
        if name not in WORKLOADS:
            raise ValueError(f"unknown workload {name!r}: {nearest(name, WORKLOADS)}")
    table = Table("workload", "bare, 1 process", "bare, 2 processes", "rayfl", "ratio to the better", "peak memory, GB")
    for name in names or WORKLOADS:
        print(f"{name}: {WORKLOADS[name].about}", flush=True)
        single, double = measure("jobs.bench.bare", name, "1"), measure("jobs.bench.bare", name, "2")
        ours = measure("jobs.bench.ours", name, str(ACTORS))
        ratio = ours.median / min(single.median, double.median)
        seconds = [f"{each.median:.3f} s" for each in (single, double, ours)]
        peaks = " / ".join(f"{each.peak_bytes / 1e9:.2f}" for each in (single, double, ours))
        table.add_row(name, *seconds, f"{ratio:.2f}", peaks)
    print_table(table)
    print("Median seconds a round. Peak memory (bare 1 / bare 2 / rayfl): all processes, shared pages counted once.")
    print("rayfl runs two actors of one thread each and an object store of 1 GB (runtime.object_store_memory_mb).")


def bench_compressors(names: Sequence[str], num_entries: int, plot: Path, overwrite: bool) -> None:
    """Measure the compressors; see `jobs.bench.compressors`. ValueError where workloads are named too."""
    if names:
        raise ValueError(f"--compressors measures no workload, and {names[0]!r} is one; leave out one of the two")
    from jobs.bench import compressors

    compressors.bench(num_entries, plot, overwrite)


def bench_chaos(methods: Sequence[str], kills: int, seed: int, results: Path | None, overwrite: bool) -> int:
    """Kill what can be killed; see `jobs.bench.chaos`. Returns an exit code. ValueError on what cannot be done."""
    from jobs.bench import chaos
    from rayfl.choices import find
    from rayfl.methods.base import Method

    for name in methods:
        find(Method, name)
    if kills < 1:
        raise ValueError(f"--kills {kills} is not allowed; it must be a whole number of at least 1")
    return chaos.bench(methods or chaos.METHODS, kills, seed, results, overwrite)


def bench_exchange(names: Sequence[str], peers: int, entries: int) -> None:
    """Measure an exchange among peers; see `jobs.bench.exchange`. ValueError where workloads are named too."""
    if names:
        raise ValueError(f"--exchange measures no workload, and {names[0]!r} is one; leave out one of the two")
    from jobs.bench import exchange

    exchange.bench_exchange(peers, entries)


def bench_scale(workloads: Sequence[str]) -> int:
    """Measure runs of more and more clients; see `jobs.bench.scale`. Returns an exit code. ValueError on workloads."""
    if workloads:
        raise ValueError(f"--scale has runs of its own, and {workloads[0]!r} is a workload; leave out one of the two")
    from jobs.bench import scale

    return scale.bench()

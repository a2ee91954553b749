"""`rayfl bench rounds`: the workloads and their bare loops, each a process of its own, one after another."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jobs.bench.figures import Column, Figures, Results
from jobs.bench.memory import run_watched
from jobs.bench.workloads import WORKLOADS
from jobs.standard_output import print_table
from rayfl.settings import nearest

ACTORS = 2
COLUMNS = (
    Column("workload", "workload"),
    Column("program", "program"),
    Column("median_s", "seconds a round", "{:.3f}"),
    Column("ratio", "rayfl / this", "{:.2f}"),
    Column("peak_bytes", "peak memory, GB", lambda size: f"{size / 1e9:.2f}"),
    Column("seconds"),
)


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


def bench_rounds(names: Sequence[str], results: Results) -> None:
    """Measure the named workloads, all where none is named; print a row a program and write `results`.

    ValueError, before anything is measured, on an unknown name and where `results` cannot be written.
    """
    for name in names:
        if name not in WORKLOADS:
            raise ValueError(f"unknown workload {name!r}: {nearest(name, WORKLOADS)}")
    results.require()
    figures = Figures("rounds", COLUMNS)
    for name in names or WORKLOADS:
        print(f"{name}: {WORKLOADS[name].about}", flush=True)
        bare = {
            "bare, 1 process": measure("jobs.bench.bare", name, "1"),
            "bare, 2 processes": measure("jobs.bench.bare", name, "2"),
        }
        add_rows(figures, name, bare, measure("jobs.bench.ours", name, str(ACTORS)))
    print_table(figures.table())
    print("Median seconds a round; rayfl / this: how many times as long rayfl takes. The better bare loop is bold.")
    print("Peak memory: all processes, shared pages counted once.")
    print("rayfl runs two actors of one thread each and an object store of 1 GB (runtime.object_store_memory_mb).")
    results.write(figures, actors=ACTORS)


def add_rows(figures: Figures, workload: str, bare: Mapping[str, Measured], ours: Measured) -> None:
    """A row for every program that ran a workload."""
    better = min(bare, key=lambda name: bare[name].median)
    for name, measured in {**bare, "rayfl": ours}.items():
        ratio = ours.median / measured.median
        values = (workload, name, measured.median, ratio, measured.peak_bytes, measured.seconds)
        figures.add(*values, bold=name == better)

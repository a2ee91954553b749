"""The benchmark `rounds`: rayfl, bare loops and other simulators, each in its own process, one after another.

The bare loop runs twice: as a researcher would write it, and with rayfl's allocator, arithmetic and memory format.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from actors.errors import ClusterError
from benchmarks.figures import Column, Figures, Results, gigabytes
from benchmarks.memory import run_watched
from benchmarks.ours import registered
from benchmarks.peers.work import Plan, Work
from benchmarks.workloads import WORKLOADS, Workload
from jobs.display import print_table
from rayfl import tree
from rayfl.determinism import process
from rayfl.errors import RayflError, did_you_mean
from rayfl.experiment.prepare import prepare
from rayfl.rounds.setup import Setup
from rayfl.task import NetworkTask

ACTORS = 2
PEERS = {"flower": ("Flower", "flwr"), "pfl_research": ("pfl-research", "pfl"), "blazefl": ("BlazeFL", "blazefl")}
"""The other simulators by the module in benchmarks/peers that runs them: names, and packages."""
COLUMNS = (
    Column("workload", "workload"),
    Column("program", "program"),
    Column("median_s", "seconds a round", "{:.3f}"),
    Column("ratio", "rayfl / this", "{:.2f}"),
    Column("peak_bytes", "peak memory, GB", gigabytes),
    Column("version"),
    Column("seconds"),
)


@dataclass(frozen=True)
class Measured:
    """One program's round times, its version, and its peak memory, all processes together."""

    seconds: tuple[float, ...]
    version: str
    peak_bytes: int

    @property
    def median(self) -> float:
        """Median seconds a round."""
        return statistics.median(self.seconds)


def bench_rounds(
    names: Sequence[str], results: Results, rounds: int | None = None, pythons: Sequence[str] | None = None
) -> None:
    """Measure the named workloads, by default all; print a row per program and write `results`.

    `rounds`: the number of measured rounds, instead of the workload's. `pythons`: the interpreters of environments that
    may have the other simulators; None: do not run them. Raise RayflError, before anything is measured, for arguments
    that are not allowed; ClusterError at the end if another simulator failed.
    """
    for name in names:
        if name not in WORKLOADS:
            raise RayflError(f"unknown workload {name!r}: {did_you_mean(name, WORKLOADS)}")
    if rounds is not None and rounds < 1:
        raise RayflError(f"--rounds {rounds} is not allowed; it must be a whole number of at least 1")
    results.require()
    peers = {} if pythons is None else installed(pythons)
    figures, failed = Figures("rounds", COLUMNS), list[str]()
    for workload in [WORKLOADS[name] for name in names or WORKLOADS]:
        print(f"{workload.name}: {workload.about}", flush=True)
        chosen = workload if rounds is None else replace(workload, rounds=rounds)
        with tempfile.TemporaryDirectory(prefix="rounds") as scratch:
            bare, others, wrong = rivals(chosen, Path(scratch), peers)
        failed += wrong
        add_rows(figures, chosen.name, bare, others, ours(chosen))
    print_table(figures.table())
    print("Median seconds a round; rayfl / this: how many times as long rayfl takes. The best bare loop is bold;")
    print("tuned: with rayfl's allocator, arithmetic and memory format. Peak memory: all processes, shared pages once.")
    print("rayfl runs two actors of one thread each and an object store of 1 GB (runtime.object_store_memory_mb).")
    for name, package in PEERS.values() if pythons is not None else ():
        if name not in {PEERS[module][0] for module in peers}:
            print(f"{name} is not measured: no environment of --peers-python has the package {package}")
    results.write(figures, actors=ACTORS)
    if failed:
        raise ClusterError(f"not measured: {'; '.join(failed)}")


def add_rows(
    figures: Figures, workload: str, bare: Mapping[str, Measured], others: Mapping[str, Measured], ours: Measured
) -> None:
    """Add a row for every program that ran a workload."""
    best = min(bare, key=lambda name: bare[name].median)
    for name, each in {**bare, **others, "rayfl": ours}.items():
        values = (each.median, ours.median / each.median, each.peak_bytes, each.version, each.seconds)
        figures.add(workload, name, *values, bold=name == best)


def ours(workload: Workload) -> Measured:
    """Run rayfl."""
    return measured(*run_watched("benchmarks.ours", workload.name, str(ACTORS), str(workload.rounds)))


def rivals(
    workload: Workload, scratch: Path, peers: Mapping[str, str]
) -> tuple[dict[str, Measured], dict[str, Measured], list[str]]:
    """Run all other programs. Return the bare loops and the other simulators by name, and why some failed."""
    work, bare, others, failed = scratch / "work", dict[str, Measured](), dict[str, Measured](), list[str]()
    work.mkdir()
    files(workload).write(work)
    lend(scratch)
    for tuned, memory_format in ((False, "contiguous"), (True, Work.read(work).plan.memory_format)):
        for processes in (1, 2):
            name = f"bare{', tuned' * tuned}, {processes} process{'es' * (processes > 1)}"
            given = (str(work), str(processes), memory_format)
            bare[name] = rival("bare", *given, scratch=scratch, tuned=tuned)
    for module, python in peers.items():
        try:
            others[PEERS[module][0]] = rival(module, str(work), scratch=scratch, python=python)
        except ClusterError as error:
            failed.append(f"{PEERS[module][0]} on {workload.name}: {error}")
    return bare, others, failed


def lend(scratch: Path) -> None:
    """Copy the programs of benchmarks/peers into a package `benchmarks` in `scratch`, without the rest of it."""
    folder = Path(__file__).parent / "peers"
    shutil.copytree(folder, scratch / "benchmarks" / "peers", ignore=shutil.ignore_patterns("__pycache__"))
    (scratch / "benchmarks" / "__init__.py").touch()


def rival(program: str, *arguments: str, scratch: Path, python: str = sys.executable, tuned: bool = False) -> Measured:
    """Run one of the programs that `lend` copied; `tuned`: with rayfl's allocator and arithmetic."""
    around = environment(tuned)
    around["PYTHONPATH"] = os.pathsep.join(filter(None, [str(scratch), around.get("PYTHONPATH")]))
    module = f"benchmarks.peers.{program}"
    return measured(*run_watched(module, *arguments, python=python, environment=around, folder=scratch))


def measured(output: str, peak_bytes: int) -> Measured:
    """The figures that a program printed as JSON; if it names its memory on a GPU, that replaces `peak_bytes`."""
    figures = json.loads(output)
    return Measured(tuple(figures["seconds"]), figures["version"], figures.get("peak_bytes", peak_bytes))


def files(workload: Workload) -> Work:
    """A workload for programs without rayfl, with the clients that rayfl draws."""
    experiment = workload.experiment()
    return files_of(workload, registered(experiment, prepare(experiment), workload.copies))


def files_of(workload: Workload, setup: Setup) -> Work:
    """The same with the data, the clients and the rounds of a setup."""
    task, hyper, shards = setup.method.task, setup.method.hyper.model_dump(), setup.partition.train
    assert isinstance(task, NetworkTask)
    # Any: a table of an experiment.
    model: dict[str, Any] = dict(workload.model)
    rounds = setup.rounds
    selected = [sorted(setup.population.sample_round(round_number).selected) for round_number in range(rounds)]
    plan = Plan(
        name=workload.name,
        channels=tuple(model.get("channels", ())),
        hidden=tuple(model["hidden"]),
        num_parameters=tree.num_entries(setup.initial),
        memory_format=task.network.memory_format,
        lr=hyper["lr"],
        batch_size=hyper["batch_size"],
        epochs=None if hyper["steps"] else hyper["epochs"],
        steps=hyper["steps"],
        per_round=len(selected[0]),
        rounds=rounds,
        warmup=workload.warmup,
    )
    data = setup.dataset
    inputs, labels = data.prepare(data.train.inputs).numpy(), data.train.labels.astype(np.int64)
    return Work(plan, inputs, labels, shards.indices, shards.offsets, np.array(selected))


_ASK = """
import importlib.metadata, json, sys
found = []
for name in sys.argv[1:]:
    try:
        importlib.metadata.version(name)
        found.append(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def installed(pythons: Sequence[str]) -> dict[str, str]:
    """For each other simulator, the first of the interpreters that has it; simulators that none has are left out.

    Raise RayflError if an interpreter does not run.
    """
    interpreters: dict[str, str] = {}
    for python in pythons:
        try:
            asked = [python, "-c", _ASK, *(package for _, package in PEERS.values())]
            done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60)
            names = json.loads(done.stdout)
        except (OSError, ValueError, subprocess.SubprocessError):
            raise RayflError(
                f"--peers-python {python} is no Python that runs; give the interpreter of an environment, as "
                "ENVIRONMENT/bin/python"
            ) from None
        for module, (_, package) in PEERS.items():
            if package in names:
                interpreters.setdefault(module, python)
    return interpreters


def environment(prepared: bool) -> dict[str, str]:
    """This process's environment for a program that does not know rayfl.

    `prepared`: with all that `prepare_process` sets, the allocator included; otherwise without any of it.
    """
    pinned = process.pinned()
    others = {name: value for name, value in os.environ.items() if name not in pinned}
    if not prepared:
        return others
    allocator = {name: str(value) for name, (_, value) in process.ALLOCATOR.items()}
    return {**others, **{name: value for name, value in pinned.items() if value is not None}, **allocator}

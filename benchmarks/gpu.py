"""The benchmark `gpu`: rayfl without Ray beside a bare loop on one device.

A process runs one program after another, so that data are made once and libraries are loaded once. Several processes at
once stand for actors with fractions of a GPU. All data are synthetic images of the workloads' sizes.
"""

import itertools
import json
import math
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import torch

from actors.errors import ClusterError
from benchmarks.figures import Column, Figures, Results, gigabytes
from benchmarks.gpu_program import CLIENTS, CODECS, GPU_WORKLOADS, MODELS, Task, experiment, samples_of_client
from benchmarks.rounds import PEERS, files_of, installed, lend, rival
from jobs.display import print_table
from rayfl.determinism.process import ArithmeticPrecision
from rayfl.errors import RayflError, did_you_mean
from rayfl.experiment.prepare import prepare

PARTS = (1, 2, 4)
"""Numbers of processes that share the device. Also numbers of workers whose results are compared bit for bit."""
CODEC_ENTRIES = 11_000_000
"""Length of the vector that compressors encode and decode."""
BARE, BARE_PROGRAM = "bare loop", "bare"
"""The bare loop in tables, and its `Task.program`."""


WORKLOAD_COLUMNS = (
    Column("workload", "workload"),
    Column("program", "program"),
    Column("median_s", "seconds a round", "{:.4f}"),
    Column("speed", "bare / this", "{:.2f}"),
    Column("peak_bytes", "memory, GB", gigabytes),
    Column("busy", "busy", "{:.0%}"),
    Column("joules_a_round", "J a round", "{:.1f}"),
    Column("width", "stack", "{}"),
    Column("seconds"),
)
MODEL_COLUMNS = (
    Column("model", "model"),
    Column("loop_s", "one by one, s", "{:.4f}"),
    Column("vmap_s", "stacked, s", "{:.4f}"),
    Column("speed", "one by one / stacked", "{:.2f}"),
    Column("width", "stack"),
    Column("rule", "the rule's choice"),
)

CODEC_COLUMNS = (
    Column("compressor", "compressor"),
    Column("entries", "numbers", "{:,}"),
    Column("milliseconds", "encode and decode, ms", "{:.2f}"),
    Column("decode_milliseconds", "of which decode", "{:.2f}"),
    Column("same_bytes", "bytes as in main memory"),
)

PEER, PEER_WORKLOADS = "pfl_research", ("W1", "W2", "W3")
"""The other simulator that uses a GPU, and the workloads that it can run without rayfl."""

Together = Sequence[Task]
"""Tasks that run at the same time, each in a process of its own."""
Run = Callable[[Sequence[Together], float], Iterator[list[dict[str, Any]] | None]]
"""Run one `Together` after another, and yield the figures of each when it is known; None if it took too long."""


class Process:
    """A process of `module`, whose lines a thread reads; leaving the block ends it."""

    def __init__(self, tasks: Sequence[Task], module: str = "benchmarks.gpu_program") -> None:
        command = [sys.executable, "-m", module, json.dumps([asdict(task) for task in tasks])]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._lines = queue.SimpleQueue[str]()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()

    def figures(self, task: Task, limit_s: float) -> dict[str, Any] | None:
        """The next figures, those of `task`; None if none come within the limit. Raise RuntimeError if it has ended."""
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            return None
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"{task.program} {task.workload} ended with exit code {code}, as it says")
        return json.loads(line)


def run(steps: Sequence[Together], limit_s: float) -> Iterator[list[dict[str, Any]] | None]:
    """Consecutive steps of one task share a process, which makes their data once. Raise RuntimeError if one fails."""
    for are_single, group in itertools.groupby(steps, lambda tasks: len(tasks) == 1):
        if are_single:
            yield from _in_turn([task for (task,) in group], limit_s)
        else:
            yield from (_at_once(tasks, limit_s) for tasks in group)


def _in_turn(tasks: Sequence[Task], limit_s: float) -> Iterator[list[dict[str, Any]] | None]:
    """One process for all tasks; a task that takes too long ends it, and another one does the rest."""
    while tasks:
        with Process(tasks) as process:
            for task in tasks:
                figures = process.figures(task, limit_s)
                tasks = tasks[1:]
                yield None if figures is None else [figures]
                if figures is None:
                    break


def _at_once(tasks: Together, limit_s: float) -> list[dict[str, Any]] | None:
    with ExitStack() as opened:
        processes = [opened.enter_context(Process([task])) for task in tasks]
        figures = [process.figures(task, limit_s) for process, task in zip(processes, tasks, strict=True)]
    known = [each for each in figures if each is not None]
    return known if len(known) == len(tasks) else None


def bench_gpu(
    names: Sequence[str],
    results: Results,
    *,
    device: str = "auto",
    precision: ArithmeticPrecision = "fp32",
    engine: Literal["auto", "loop", "vmap"] = "auto",
    rounds: int | None = None,
    scale: float = 1.0,
    python: str | None = None,
    limit_s: float = 60.0,
    run: Run = run,
) -> int:
    """Measure WORKLOADs, architectures and compressors (by default all), print tables and write `results`, each row as
    soon as it is known.

    `engine`: that of the WORKLOADs. `python`: the interpreter of an environment with pfl-research, which runs them too;
    by default this one, if it has it. `limit_s`: seconds for a row, the start of a process included; a row that takes
    longer is left out. `run`: how processes are run. Return an exit code: 1 if two runs, or runs with other numbers of
    workers, differ in a bit, or if a packet's bytes on the device differ from those in main memory. Raise RayflError,
    before anything is measured, for an unknown name, a missing device or pfl-research, and if `results` cannot be
    written; raise ClusterError at the end if pfl-research failed.
    """
    known = [*GPU_WORKLOADS, *MODELS, *CODECS]
    for name in names:
        if name not in known:
            raise RayflError(f"unknown workload {name!r}: {did_you_mean(name, known)}")
    chosen, device = names or known, found_device(device)
    check(precision, device, rounds, scale)
    python = python or (sys.executable if precision == "fp32" and PEER in installed([sys.executable]) else None)
    check_peer(python, precision)
    results.require()
    base = Task("rayfl", device=device, precision=precision, rounds=rounds, scale=scale)
    print(f"device: {described(device)}; precision {precision}; {scale:g} of the workloads' examples", flush=True)
    bench = Bench(results, lambda steps: run(steps, limit_s), limit_s)
    bench.facts |= {"device": device, "described": described(device), "precision": precision}
    bench.facts |= {"engine": engine, "scale": scale, "same_bits": bench.bits, "left_out": bench.left_out}
    for name in filter(GPU_WORKLOADS.__contains__, chosen):
        print(f"{name}: {GPU_WORKLOADS[name].about}", flush=True)
        task = replace(base, workload=name, engine=engine)
        bench.workload_rows(task)
        if python and name in PEER_WORKLOADS:
            bench.peer_row(task, python)
    for name in filter(MODELS.__contains__, chosen):
        bench.model_row(replace(base, workload=name))
    names = [*filter(CODECS.__contains__, chosen)]
    bench.codec_rows([replace(base, program="codec", workload=name) for name in names])
    bench.report(scale)
    if bench.failed:
        raise ClusterError(f"not measured: {'; '.join(bench.failed)}")
    return 0 if all(bench.bits.values()) and all(row["same_bytes"] for row in bench.codecs.rows) else 1


def check(precision: ArithmeticPrecision, device: str, rounds: int | None, scale: float) -> None:
    """Raise RayflError for options that are not allowed."""
    if precision == "tf32" and device == "cpu":
        raise RayflError("--precision tf32 is for GPUs, and the device is 'cpu'; give fp32 or bf16")
    if rounds is not None and rounds < 1:
        raise RayflError(f"--rounds {rounds} is not allowed; it must be a whole number of at least 1")
    if not 0 < scale <= 1:
        raise RayflError(f"--scale {scale:g} is outside (0, 1]; 1 takes all of the workloads' examples")


def check_peer(python: str | None, precision: ArithmeticPrecision) -> None:
    """Raise RayflError if pfl-research is not there, or would compute in another precision."""
    if python and precision != "fp32":
        raise RayflError(f"--peers-python is for --precision fp32, and that is {precision}; leave one of them out")
    if python and PEER not in installed([python]):
        raise RayflError(f"--peers-python {python} has no pfl-research; run {python} -m pip install pfl")


def found_device(device: str) -> str:
    """The device of a name, which may be "auto". Raise RayflError if there is no GPU."""
    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise RayflError("--device cuda needs a GPU, and torch sees none here; give --device cpu")
    return ("cuda" if there else "cpu") if device == "auto" else device


def described(device: str) -> str:
    """The device in words."""
    return f"cuda, {torch.cuda.get_device_name(0)}" if device == "cuda" else "cpu, of which no figure is one of a GPU"


@dataclass
class Bench:
    """The tables, and what is written with them after every row."""

    results: Results
    run: Callable[[Sequence[Together]], Iterator[list[dict[str, Any]] | None]]
    limit_s: float
    workloads: Figures = field(default_factory=lambda: Figures("workloads", WORKLOAD_COLUMNS))
    models: Figures = field(default_factory=lambda: Figures("models", MODEL_COLUMNS))
    codecs: Figures = field(default_factory=lambda: Figures("codecs", CODEC_COLUMNS))
    bits: dict[str, bool] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, figures: Figures, *values: Any, bold: bool = False) -> None:
        """Add a row, print it, and write all rows."""
        figures.add(*values, bold=bold)
        shown = [column for column in figures.columns if column.heading]
        cells = [(column.heading, column.cell(figures.rows[-1][column.key])) for column in shown]
        (_, first), *others = cells
        print(f"  {first}: {', '.join(f'{head} {cell}' for head, cell in others if cell)}", flush=True)
        self.write()

    def write(self) -> None:
        """Write what is known."""
        self.results.save(self.workloads, self.models, self.codecs, **self.facts)

    def leave_out(self, what: str) -> None:
        """Tell that a row took too long."""
        self.left_out.append(what)
        print(f"  {what}: left out, more than {self.limit_s:g} s", flush=True)

    def workload_rows(self, task: Task) -> None:
        """A row for the bare loop and one for each number in PARTS; whether runs in one process had the same bits."""
        alone = [replace(task, program=BARE_PROGRAM), *(replace(task, workers=workers) for workers in (1, *PARTS))]
        several = [[replace(task, part=parts, seed=1 + index) for index in range(parts)] for parts in PARTS[1:]]
        steps = [*([each] for each in alone), *several]
        digests = list[str]()
        reference = math.nan
        for tasks, together in zip(steps, self.run(steps), strict=True):
            program, parts, workers = tasks[0].program, len(tasks), tasks[0].workers
            name = BARE if program == BARE_PROGRAM else f"rayfl, {parts} process{'es' if parts > 1 else ''}"
            if together is None:
                self.leave_out(f"{task.workload}, {name}" + f", {workers} workers" * (workers > 1))
                continue
            if program != BARE_PROGRAM and parts == 1:
                digests.append(together[0]["digest"])
                if len(digests) > 1:
                    continue
            median = max(statistics.median(process["seconds"]) for process in together)
            reference = median if program == BARE_PROGRAM else reference
            self.workload_row(name, together, median, reference)
        self.bits[task.workload] = len({*digests}) == 1
        self.write()

    def workload_row(self, program: str, together: Sequence[dict[str, Any]], median: float, reference: float) -> None:
        """A row of processes that ran at the same time; the first of them watched the GPU."""
        first = together[0]
        joules = None if first["joules"] is None else first["joules"] / len(first["seconds"])
        peak = sum(process["peak_bytes"] for process in together)
        seconds = [process["seconds"] for process in together]
        speed = None if math.isnan(reference) else reference / median
        values = (first["workload"], program, median, speed, peak, first["busy"], joules, first.get("width"), seconds)
        self.add(self.workloads, *values, bold=program == BARE)

    def peer_row(self, task: Task, python: str) -> None:
        """A row for pfl-research on the same device: one process with all examples on the device."""
        try:
            with tempfile.TemporaryDirectory(prefix="gpu") as scratch:
                work = Path(scratch, "work")
                work.mkdir()
                files_of(GPU_WORKLOADS[task.workload], prepare(experiment(task))).write(work)
                lend(Path(scratch))
                peer = rival(PEER, str(work), task.device, scratch=Path(scratch), python=python)
        except ClusterError as error:
            self.failed.append(f"{PEERS[PEER][0]} on {task.workload}: {error}")
            return
        known = {(row["workload"], row["program"]): row["median_s"] for row in self.workloads.rows}
        reference = known.get((task.workload, BARE))
        name = f"{PEERS[PEER][0]} {peer.version}"
        speed = reference and reference / peer.median
        nothing = (None, None, None)
        self.add(self.workloads, task.workload, name, peer.median, speed, peer.peak_bytes, *nothing, [peer.seconds])

    def model_row(self, task: Task) -> None:
        """A row for an architecture: one by one, in stacks, and the rule's choice."""
        both = [*self.run([[replace(task, engine="loop")], [replace(task, engine="vmap")]])]
        if None in both:
            self.leave_out(task.workload)
            return
        loop, vmap = (figures[0] for figures in both if figures)
        one_by_one, stacked = (statistics.median(each["seconds"]) for each in (loop, vmap))
        chosen = "one by one" if vmap["rule_width"] == 1 else f"stacks of {vmap['rule_width']}"
        self.add(self.models, task.workload, one_by_one, stacked, one_by_one / stacked, vmap["width"], chosen)

    def codec_rows(self, tasks: Sequence[Task]) -> None:
        """A row for a compressor: median milliseconds to encode a vector on the device and decode it in main memory."""
        steps = [[replace(task, entries=max(1000, round(CODEC_ENTRIES * task.scale)))] for task in tasks]
        for (task,), figures in zip(steps, self.run(steps), strict=True):
            if figures is None:
                self.leave_out(task.workload)
                continue
            whole, decoding = (1e3 * statistics.median(figures[0][name]) for name in ("seconds", "decoding"))
            self.add(self.codecs, task.workload, task.entries, whole, decoding, figures[0]["same_bytes"])

    def report(self, scale: float) -> None:
        """Print all tables, and write the rows."""
        if self.workloads.rows:
            print_table(self.workloads.table())
            print("Median seconds a round; of several processes, each with a share of the participants, the slowest's.")
            print(
                "Memory: reserved on the GPU, on a CPU the process's most until then. Busy: time with a kernel running."
            )
        if self.models.rows:
            print_table(self.models.table())
            images = round(0.9 * samples_of_client(scale))
            print(f"Seconds a round of {CLIENTS} clients with {images} images each, one by one and in stacks.")
        if self.codecs.rows:
            print_table(self.codecs.table())
        for name, same in self.bits.items():
            print(f"{name}: {'the same bits' if same else 'OTHER BITS'} twice, and for {PARTS} workers")
        self.write()
        print(f"figures: {self.results.path}")

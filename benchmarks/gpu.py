"""The benchmark `gpu`: rayfl without Ray beside a bare loop on one device, each program in its own process.

Several processes at once stand for actors with fractions of a GPU. All data are synthetic images of the workloads'
sizes.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

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
BARE = "bare loop"


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

Run = Callable[[Sequence[Task]], list[dict[str, Any]]]
"""Run processes at the same time, and return the figures of each."""


def run(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Start a process for each task and wait for all. Raise RuntimeError if one fails."""
    command = [sys.executable, "-m", "benchmarks.gpu_program"]
    begun = [
        subprocess.Popen([*command, json.dumps(asdict(task))], stdout=subprocess.PIPE, text=True) for task in tasks
    ]
    results = []
    for process, task in zip(begun, tasks, strict=True):
        output, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{task.program} {task.workload} ended with exit code {process.returncode}, as it says")
        results.append(json.loads(output.strip().splitlines()[-1]))
    return results


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
    run: Run = run,
) -> int:
    """Measure WORKLOADs, architectures and compressors (by default all), print tables and write `results`.

    `engine`: that of the WORKLOADs. `python`: the interpreter of an environment with pfl-research, which runs them too.
    `run`: how processes are run. Return an exit code: 1 if two runs, or runs with other numbers of workers, differ in a
    bit, or if a packet's bytes on the device differ from those in main memory. Raise RayflError, before anything is
    measured, for an unknown name, a missing device or pfl-research, and if `results` cannot be written; raise
    ClusterError at the end if pfl-research failed.
    """
    known = [*GPU_WORKLOADS, *MODELS, *CODECS]
    for name in names:
        if name not in known:
            raise RayflError(f"unknown workload {name!r}: {did_you_mean(name, known)}")
    chosen, device = names or known, found_device(device)
    check(precision, device, rounds, scale)
    check_peer(python, precision)
    results.require()
    base = Task("rayfl", device=device, precision=precision, rounds=rounds, scale=scale)
    print(f"device: {described(device)}; precision {precision}; {scale:g} of the workloads' examples", flush=True)
    workloads, bits, failed = Figures("workloads", WORKLOAD_COLUMNS), dict[str, bool](), list[str]()
    for name in filter(GPU_WORKLOADS.__contains__, chosen):
        print(f"{name}: {GPU_WORKLOADS[name].about}", flush=True)
        task = replace(base, workload=name, engine=engine)
        bits[name] = workload_rows(workloads, task, run)
        if python and name in PEER_WORKLOADS:
            try:
                peer_row(workloads, task, python)
            except ClusterError as error:
                failed.append(f"{PEERS[PEER][0]} on {name}: {error}")
    models = Figures("models", MODEL_COLUMNS)
    for name in filter(MODELS.__contains__, chosen):
        model_row(models, replace(base, workload=name), run)
    codecs = Figures("codecs", CODEC_COLUMNS)
    for name in filter(CODECS.__contains__, chosen):
        codec_row(codecs, replace(base, program="codec", workload=name), run)
    report(workloads, models, codecs, bits, scale)
    facts = {"device": device, "described": described(device), "precision": precision, "engine": engine, "scale": scale}
    results.write(workloads, models, codecs, **facts, same_bits=bits)
    if failed:
        raise ClusterError(f"not measured: {'; '.join(failed)}")
    return 0 if all(bits.values()) and all(row["same_bytes"] for row in codecs.rows) else 1


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


def workload_rows(figures: Figures, task: Task, run: Run) -> bool:
    """Add a row for the bare loop and one for each number in PARTS. Return whether all runs had the same bits."""
    (bare,) = run([replace(task, program="bare")])
    reference = statistics.median(bare["seconds"])
    digests = set[str]()
    for parts in PARTS:
        together = run([replace(task, part=parts, seed=1 + index) for index in range(parts)])
        median = max(statistics.median(process["seconds"]) for process in together)
        add_row(figures, f"rayfl, {parts} process{'es' if parts > 1 else ''}", together, median, reference)
        if parts == 1:
            digests.add(together[0]["digest"])
    add_row(figures, BARE, [bare], reference, reference)
    for workers in PARTS:
        digests.add(run([replace(task, workers=workers)])[0]["digest"])
    return len(digests) == 1


def peer_row(figures: Figures, task: Task, python: str) -> None:
    """Add a row for pfl-research on the same device: one process with all examples on the device."""
    with tempfile.TemporaryDirectory(prefix="gpu") as scratch:
        work = Path(scratch, "work")
        work.mkdir()
        files_of(GPU_WORKLOADS[task.workload], prepare(experiment(task))).write(work)
        lend(Path(scratch))
        peer = rival(PEER, str(work), task.device, scratch=Path(scratch), python=python)
    (reference,) = (
        row["median_s"] for row in figures.rows if (row["workload"], row["program"]) == (task.workload, BARE)
    )
    nothing = (None, None, None)
    name = f"{PEERS[PEER][0]} {peer.version}"
    figures.add(task.workload, name, peer.median, reference / peer.median, peer.peak_bytes, *nothing, [peer.seconds])


def add_row(
    figures: Figures, program: str, together: Sequence[dict[str, Any]], median: float, reference: float
) -> None:
    """Add a row of processes that ran at the same time; the first of them watched the GPU."""
    first = together[0]
    joules = None if first["joules"] is None else first["joules"] / len(first["seconds"])
    peak = sum(process["peak_bytes"] for process in together)
    figures.add(
        first["workload"],
        program,
        median,
        reference / median,
        peak,
        first["busy"],
        joules,
        first.get("width"),
        [process["seconds"] for process in together],
        bold=program == BARE,
    )


def model_row(figures: Figures, task: Task, run: Run) -> None:
    """Add a row for an architecture: one by one, in stacks, and the rule's choice."""
    loop, vmap, auto = (run([replace(task, engine=engine)])[0] for engine in ("loop", "vmap", "auto"))
    one_by_one, stacked = (statistics.median(each["seconds"]) for each in (loop, vmap))
    chosen = "one by one" if auto["width"] == 1 else f"stacks of {auto['width']}"
    figures.add(task.workload, one_by_one, stacked, one_by_one / stacked, vmap["width"], chosen)


def codec_row(figures: Figures, task: Task, run: Run) -> None:
    """Add a row for a compressor: median milliseconds to encode a vector on the device and decode it in main memory."""
    (figures_of_task,) = run([replace(task, entries=max(1000, round(CODEC_ENTRIES * task.scale)))])
    whole, decoding = (1e3 * statistics.median(figures_of_task[name]) for name in ("seconds", "decoding"))
    figures.add(task.workload, figures_of_task["entries"], whole, decoding, figures_of_task["same_bytes"])


def report(workloads: Figures, models: Figures, codecs: Figures, bits: dict[str, bool], scale: float) -> None:
    """Print all tables."""
    if workloads.rows:
        print_table(workloads.table())
        print("Median seconds a round; of several processes, each with its share of the participants, the slowest's.")
        print("Memory: reserved on the GPU, on a CPU resident. Busy: share of time with a kernel running (nvidia-smi).")
    if models.rows:
        print_table(models.table())
        images = round(0.9 * samples_of_client(scale))
        print(f"Seconds a round of {CLIENTS} clients with {images} images each, one by one and in stacks.")
    if codecs.rows:
        print_table(codecs.table())
    for name, same in bits.items():
        print(f"{name}: {'the same bits' if same else 'OTHER BITS'} twice, and for {PARTS} workers")

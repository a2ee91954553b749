"""The benchmark `scale --parameters`: the memory of each process in rounds of FedAvg with one large model.

Two actors, four clients a round, each of which makes one step; a checkpoint after each round, and the final model. The
model is an MLP on digits, and most of it is the matrix between its two hidden layers.
"""

import json
import math
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.figures import Column, Figures, Results, gigabytes
from benchmarks.memory import descendants
from benchmarks.scale import experiment
from jobs.display import print_table
from rayfl.errors import RayflError
from rayfl.experiment.experiment import Experiment

ROUNDS, LOOK_S = 3, 0.1
BUILDS, PLAYS, COORDINATOR, ACTOR = "driver, before the rounds", "driver, in the rounds", "coordinator", "an actor"
KINDS = {b"ray::ClientActor": ACTOR, b"ray::Coordinator": COORDINATOR}


def bench_large_model(parameters: int, results: Results) -> None:
    """Play the rounds, print a table and write `results`. Raise RayflError if `parameters` is too small."""
    if parameters < 10_000:
        raise RayflError(f"--parameters={parameters} must be at least 10,000")
    results.require()
    chosen, size = large(parameters)
    with tempfile.TemporaryDirectory(prefix="large") as scratch:
        file = Path(scratch) / "experiment.json"
        file.write_text(json.dumps(chosen.as_dict()), encoding="utf-8")
        most = watched([sys.executable, "-m", "benchmarks.played", str(file), str(Path(scratch) / "run")])
    columns = (
        Column("process", "process"),
        Column("bytes", "memory of its own at most, GB", gigabytes),
        Column("models", "in models", "{:.2f}"),
    )
    caption = f"The model has {size / 1e9:.3f} GB. Memory of its own: without files and the object store."
    figures = Figures(
        "large_model", columns, "FedAvg with a large model, two actors, four clients of one step", caption
    )
    for process, bytes_of_kind in most.items():
        figures.add(process, bytes_of_kind, bytes_of_kind / size)
    print_table(figures.table())
    results.write(figures, model_bytes=size)


def large(parameters: int) -> tuple[Experiment, int]:
    """The experiment, and the bytes of its model of about so many parameters."""
    # 64 h + h + h h + h + 10 h + 10 parameters.
    hidden = max(1, round(-38 + math.sqrt(38**2 + parameters)))
    size = 4 * (hidden * hidden + 76 * hidden + 10)
    model, method = {"name": "mlp", "hidden": [hidden, hidden]}, {"name": "fedavg", "steps": 1, "batch_size": 1}
    store = 200 + 6 * size // 10**6
    return experiment(8, 4, ROUNDS, model, method, 1, "digits", num_cpus=1, object_store_memory_mb=store), size


def watched(command: list[str]) -> dict[str, int]:
    """The most memory of its own, in bytes, of each kind of process while a command runs."""
    most: dict[str, int] = {BUILDS: 0, PLAYS: 0, COORDINATOR: 0, ACTOR: 0}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            used = own_bytes(process.pid)
            used[PLAYS if ACTOR in used else BUILDS] = used.pop("", 0)
            most |= {kind: max(most[kind], size) for kind, size in used.items()}
            time.sleep(LOOK_S)
    if process.returncode:
        raise RayflError(f"{' '.join(command)} ended with exit code {process.returncode}; its output is above")
    return most


def own_bytes(driver: int) -> dict[str, int]:
    """The memory of its own of the driver, under "", of the coordinator, and of the largest actor."""
    used: dict[str, int] = {}
    for pid in descendants(driver):
        # A process may end meanwhile.
        with suppress(OSError, IndexError, ValueError):
            name = Path(f"/proc/{pid}/cmdline").read_bytes()
            size = 1024 * int(Path(f"/proc/{pid}/status").read_text().partition("RssAnon:")[2].split()[0])
            kind = next((kind for start, kind in KINDS.items() if name.startswith(start)), None)
            if pid == driver or kind:
                used[kind or ""] = max(size, used.get(kind or "", 0))
    return used

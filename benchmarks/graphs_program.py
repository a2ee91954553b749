"""One process of `python -m benchmarks graphs`: it does tasks in turn and prints the figures of each as JSON.

On a CPU, where nothing can be captured, the recorder of the tests stands for CUDA graphs, so that every program runs.
"""

import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rayfl.determinism.process import prepare_process

prepare_process()

from benchmarks import gpu_program  # noqa: E402
from benchmarks.gpu_program import GPU_WORKLOADS, MODELS, Task, bare, codec, digest, measured, warmup  # noqa: E402
from benchmarks.played_graphs import CpuRecorder  # noqa: E402
from rayfl.choices.kinds import named  # noqa: E402
from rayfl.data.loading import keeping_datasets  # noqa: E402
from rayfl.experiment.experiment import Experiment  # noqa: E402
from rayfl.experiment.prepare import prepare  # noqa: E402
from rayfl.methods.base import Method, PeerHalf  # noqa: E402
from rayfl.rounds.executor import InlineExecutor  # noqa: E402
from rayfl.rounds.ledger import RoundRecord  # noqa: E402
from rayfl.rounds.rounds import RunState, simulate  # noqa: E402
from rayfl.rounds.setup import Setup  # noqa: E402
from rayfl.rounds.step_graphs import STEPS_BEFORE, CudaRecorder, StepGraphs  # noqa: E402
from rayfl.testing.executors import contents, fitting_graph, leaves, rows  # noqa: E402

FASHION = "fashion"
"""ResNet-18 with GroupNorm on Fashion-MNIST at 32x32, 100 clients, 10 a round: a model that readers use."""
RAY_WORKLOAD: dict[str, Any] = {
    "name": "w1",
    "rounds": 12,
    "seed": 1,
    "partition": "iid",
    "clients": {"count": 1000, "per_round": 50},
    "model": {"name": "convnet2", "channels": [16, 32], "hidden": [512]},
    "method": {"name": "fedavg", "lr": 0.05, "epochs": 1, "batch_size": 32},
    "evaluation": {"every": 0, "pooled": False, "own": False},
}
"""W1 with records and models, which are compared."""


@dataclass(frozen=True)
class GraphTask(Task):
    """A task of this benchmark. `actors`: Ray's, 0 for none; `method`, `root`: on `FASHION`, and the data's folder."""

    graphs: bool = False
    server_on_device: bool = False
    actors: int = 0
    method: str = "fedavg"
    root: str | None = None


def experiment(task: GraphTask) -> Experiment:
    """The experiment of a task that is not about one method's bits."""
    if task.workload == FASHION:
        return of_fashion(task)
    known = gpu_program.experiment(task).as_dict()
    return Experiment(**{**known, "runtime": runtime(task)})


# Any: tables of an experiment.
def runtime(task: GraphTask) -> dict[str, Any]:
    """The `[runtime]` table."""
    there = {"graphs": "auto"} if task.graphs and task.device == "cuda" else {}
    server = {"server_on_device": True} if task.server_on_device and task.device == "cuda" else {}
    return {**gpu_program.runtime(task), **there, **server}


def of_fashion(task: GraphTask) -> Experiment:
    """Ten of a hundred clients train ResNet-18; with a smaller scale a small model and few images stand for it."""
    tables: dict[str, Any] = {
        "name": f"{FASHION}-{task.method}",
        "rounds": 1 + (task.rounds or 3),
        "seed": task.seed,
        "data": {"name": "fashion-mnist", "padding": 2, "root": task.root},
        "partition": {"name": "dirichlet-client", "alpha": 0.3},
        "clients": {"count": 100, "per_round": 10},
        "model": "resnet18",
        "method": {"name": task.method, "lr": 0.05, "batch_size": 64},
        "evaluation": {"every": 1, "pooled": True, "own": False},
        "runtime": runtime(task),
        "output": {"report": False, "save_models": False},
    }
    if task.method == "dispfl":
        # All peers train: ten steps each.
        tables |= {"clients": {"count": 100}, "topology": {"name": "random", "degree": 10}}
        tables["method"] = {"name": "dispfl", "lr": 0.05, "batch_size": 64, "steps": 10}
        tables["evaluation"] = {"every": 0, "pooled": False, "own": False}
    if task.scale < 1:
        tables["data"] = {"name": "synthetic", "shape": [1, 8, 8], "num_groups": 100, "samples_per_group": 8}
        tables |= {"model": {"name": "mlp", "hidden": [8]}, "partition": "natural"}
    return Experiment(**tables)


# Any: tables of an experiment.
def with_method(name: str, runtime: dict[str, Any]) -> Experiment:
    """Three rounds of a method on six unequal clients of digits, in batches of 20."""
    kind = named(Method)[name]
    can, default = kind.capabilities, kind.Hyper.model_fields.get("batch_size")
    tables: dict[str, Any] = {
        "rounds": 3,
        "seed": 5,
        "data": "digits",
        "partition": {"name": "dirichlet-class", "alpha": 1.0},
        "clients": {"count": 6},
        "model": {"name": "mlp", "hidden": [12]},
        "method": {"name": name, **({"batch_size": 20} if default is not None and default.default else {})},
        "runtime": runtime,
    }
    if can.uses_graph or (kind.gather and issubclass(kind, PeerHalf)):
        tables["topology"] = fitting_graph(can)
    if can.in_pairs:
        tables["schedule"] = {"name": "gossip", "partners": 1}
    if name in ("hetlora", "flexlora", "flora"):
        tables["adapters"] = {"layers": ["*1"], "rank": 4, "trained": ["*.bias"], "merged": name == "flora"}
    return Experiment(**tables)


def with_graphs(setup: Setup, graphs: bool, steps_before: int = STEPS_BEFORE) -> Setup:
    """The setup with graphs of its own, which can be asked; on a CPU they are played."""
    setup = replace(setup)
    if graphs:
        recorder = CudaRecorder() if setup.device.type == "cuda" else CpuRecorder()
        vars(setup)["step_graphs"] = StepGraphs(recorder, setup.device, steps_before)
    return setup


def play(task: GraphTask) -> dict[str, Any]:
    """Run a workload: seconds, memory, bytes, the digest of what it leaves, and what was captured."""
    setup = with_graphs(prepare(experiment(task)), task.graphs)
    executor = InlineExecutor(setup)
    executor.num_workers = task.workers
    records: list[RoundRecord] = []
    last: list[RunState] = []

    def rounds(finished: Callable[[], None]) -> None:
        def keep(record: RoundRecord, run_state: RunState) -> None:
            records.append(record)
            last[:] = [run_state]
            finished()

        simulate(setup, executor, keep, None, setup.rounds)

    figures = measured(task, rounds, 1 if task.workload == FASHION else warmup(task))
    of_rows = repr(rows(records))
    return {
        **figures,
        "digest": digest(leaves("server", last[0].server))[:8] + hashlib.sha256(of_rows.encode()).hexdigest()[:8],
        "width": setup.work_width,
        "uplink_bytes": statistics.fmean(record.row.uplink_bits / 8 for record in records),
        "downlink_bytes": statistics.fmean(record.row.downlink_bits / 8 for record in records),
        "means": {name: value for name, value in records[-1].means.items() if "accuracy" in name},
        **captured(setup),
    }


def captured(setup: Setup) -> dict[str, Any]:
    """How often a graph was replayed, and why some stages have none."""
    graphs = vars(setup).get("step_graphs")
    return {"replays": graphs.num_replays, "reasons": graphs.reasons} if graphs else {}


def of_method(task: GraphTask) -> dict[str, Any]:
    """Play a method on six clients of digits: without graphs, and with them for calls of 1, 2 and 4 workers."""
    found: dict[str, Any] = {**asdict(task), "same": True, "replays": 0, "reasons": {}}
    begun = time.perf_counter()
    for engine in ("vmap", "loop"):
        digests: dict[str, str] = {}
        for graphs, workers in ((False, 1), (True, 1), (True, 2), (True, 4))[: 4 if engine == "vmap" else 2]:
            width = 4 if engine == "vmap" else None
            table = {"executor": "inline", "device": task.device, "engine": engine, "stack_width": width}
            setup = with_graphs(prepare(with_method(task.workload, table)), graphs, 1)
            executor = InlineExecutor(setup)
            executor.num_workers = workers
            kept: list[tuple[RoundRecord, RunState]] = []
            simulate(setup, executor, lambda *both, kept=kept: kept.append(both), None, setup.rounds)
            left = contents(executor, kept[-1][1])
            of_rows = repr(rows([record for record, _ in kept]))
            digests[f"{'graphs' if graphs else 'none'} {workers}"] = (
                digest(left) + hashlib.sha256(of_rows.encode()).hexdigest()
            )
            told = captured(setup)
            found["replays"] += told.get("replays", 0)
            found["reasons"] |= {f"{engine} {stage}": why for stage, why in told.get("reasons", {}).items()}
        if len({*digests.values()}) > 1:
            found |= {"same": False, engine: digests}
    return {**found, "seconds": [time.perf_counter() - begun]}


def through_ray(task: GraphTask) -> dict[str, Any]:
    """Run W1 by the command, on Ray or inline: the digest of its records and models, and its seconds a round."""
    import pyarrow.parquet as pq
    import tomli_w

    examples = max(2, round(2223 * task.scale))
    count = max(8, round(1000 * task.scale))
    tables = {
        **RAY_WORKLOAD,
        "data": {"name": "synthetic", "shape": [1, 28, 28], "num_groups": 30, "samples_per_group": examples},
        "clients": {"count": count, "per_round": min(50, count)},
        "rounds": task.rounds or RAY_WORKLOAD["rounds"],
        "output": {"report": False, "save_models": True},
    }
    where = ["--actors", str(task.actors)] if task.actors else ["--inline"]
    if task.device == "cuda":
        where += [f"runtime.num_gpus={round(1 / task.actors - 0.0005, 3) if task.actors > 1 else 1}"]
        where += ["runtime.graphs=auto"] * task.graphs + ["runtime.server_on_device=true"] * task.server_on_device
    with tempfile.TemporaryDirectory(prefix="graphs") as scratch:
        run, file = Path(scratch, "run"), Path(scratch, "w1.toml")
        file.write_text(tomli_w.dumps(tables))
        command = [sys.executable, "-m", "rayfl", "run", str(file), "--output", str(run), *where]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError((done.stdout + done.stderr)[-600:])
        checksum = hashlib.sha256()
        walls: list[float] = []
        for table in ("rounds", "clients", "metrics"):
            for row in pq.read_table(run / "records" / f"{table}.parquet").to_pylist():
                walls += [row["wall_s"]] if table == "rounds" else []
                checksum.update(repr({key: value for key, value in row.items() if key != "wall_s"}).encode())
        for path in sorted((run / "models").glob("**/*.safetensors")):
            checksum.update(path.read_bytes())
    return {**asdict(task), "seconds": walls[2:] or walls, "first_s": walls[0], "digest": checksum.hexdigest()[:16]}


PROGRAMS: dict[str, Callable[[GraphTask], dict[str, Any]]] = {
    "rayfl": play,
    "bare": bare,
    "codec": codec,
    "method": of_method,
    "ray": through_ray,
}


def main(given: str) -> None:
    """Do the tasks that a JSON list describes in turn, and print the figures of each; "error" if one fails."""
    tasks = [GraphTask(**table) for table in json.loads(given)]
    known = [task for task in tasks if task.workload in (*GPU_WORKLOADS, *MODELS, FASHION) and task.program != "ray"]
    with keeping_datasets({repr(source): source for source in (experiment(task).data for task in known)}.values()):
        for task in tasks:
            if task.device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.set_per_process_memory_fraction(0.9 / task.part)
            try:
                figures = PROGRAMS[task.program](task)
            # Whatever fails, the others go on.
            except Exception as error:  # noqa: BLE001
                figures = {**asdict(task), "error": f"{type(error).__name__}: {str(error)[-600:]}"}
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

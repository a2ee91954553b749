"""One process of `python -m benchmarks gpu`, which runs on one device without Ray: it prints its figures as JSON.

`python -m benchmarks.gpu_program '[{"program": "rayfl", "workload": "W1"}]'` plays a workload on the CPU; `Task` has
the other settings. It prints a line for each task, as soon as it is done.
"""

import gc
import hashlib
import json
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim

from benchmarks.workloads import WORKLOADS, Workload
from rayfl.compress.base import Compressor
from rayfl.compress.natural import NaturalCompression
from rayfl.compress.quantize import QSGD, TernGrad
from rayfl.compress.sign import OneBit, ScaledSign
from rayfl.compress.sparse import TopK
from rayfl.compress.ternary import Ternary
from rayfl.data.datasets import cropped, draw_crops
from rayfl.data.device import upload
from rayfl.data.loading import keeping_datasets
from rayfl.determinism.torch_flags import fixed
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.methods.shared.local_training import LocalTraining
from rayfl.models.base import laid_out
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.ledger import RoundRecord
from rayfl.rounds.rounds import RunState, simulate
from rayfl.rounds.setup import Setup
from rayfl.task import NetworkTask

R18 = Workload(
    "R18",
    "100 clients of 500 colour images of 32x32, 10 a round, batch 64, crop and flip, ResNet-18",
    {"count": 100, "per_round": 10},
    {"name": "resnet18"},
    {"epochs": 1, "batch_size": 64},
    rounds=5,
    warmup=1,
)
GPU_WORKLOADS = {**{name: WORKLOADS[name] for name in ("W1", "W2", "W3")}, "R18": R18}
"""The workloads of this benchmark, on synthetic images of the same sizes, which need no download."""

MODELS: dict[str, tuple[dict[str, object], list[int]]] = {
    "logistic": ({}, [1, 28, 28]),
    "mlp": ({}, [1, 28, 28]),
    "convnet2": ({}, [1, 28, 28]),
    "emnist-cnn": ({"dropout": [0.0, 0.0]}, [1, 28, 28]),
    "resnet20": ({}, [3, 32, 32]),
    "alexnet-mcepl": ({}, [3, 32, 32]),
    "vgg11": ({}, [3, 32, 32]),
    "resnet18": ({}, [3, 32, 32]),
}
"""Architectures that can be stacked, their options and the shapes of their images."""

CODECS: dict[str, Compressor] = {
    "topk": TopK(keep_ratio=0.1),
    "stc": Ternary(keep_ratio=0.1),
    "sign": ScaledSign(),
    "onebit": OneBit(),
    "qsgd": QSGD(),
    "terngrad": TernGrad(),
    "natural": NaturalCompression(),
}
"""Compressors whose encoding is measured on a tensor of the device; topk and sign encode on the device itself."""

CLIENTS = 64
"""Clients in the measurement of an architecture, all in every round."""


@dataclass(frozen=True)
class Task:
    """The work of a process. `program`: rayfl, bare or codec; `workload`: of `GPU_WORKLOADS`, `MODELS` or `CODECS`.

    `scale`: share of the workload's examples. `part`: number of processes that share the participants. `workers`:
    number of workers among which the participants are divided into calls.
    """

    program: str
    workload: str = ""
    device: str = "cpu"
    engine: str = "auto"
    precision: str = "fp32"
    rounds: int | None = None
    scale: float = 1.0
    part: int = 1
    workers: int = 1
    seed: int = 1
    entries: int = 0


@dataclass
class Watched:
    """Use and power of the GPU during the rounds: a number every 0.2 seconds, from nvidia-smi."""

    busy_percent: list[float] = field(default_factory=list)
    watts: list[float] = field(default_factory=list)

    def read(self, output: str) -> None:
        """Read lines of a percentage and a power, as `nvidia-smi --format=csv,noheader,nounits` writes them."""
        for line in output.splitlines():
            for numbers, value in zip((self.busy_percent, self.watts), line.split(","), strict=False):
                # A GPU that cannot measure its power writes words.
                if value.strip().replace(".", "", 1).isdigit():
                    numbers.append(float(value))

    def figures(self, seconds: float) -> dict[str, float | None]:
        """The share of time with a kernel running, and the energy; None if nvidia-smi is missing or does not know."""
        busy, watts = (statistics.fmean(each) if each else None for each in (self.busy_percent, self.watts))
        return {"busy": None if busy is None else busy / 100, "joules": None if watts is None else watts * seconds}


@contextmanager
def watching(device: str) -> Iterator[Watched]:
    """Context manager: ask nvidia-smi during the block."""
    watched = Watched()
    program = shutil.which("nvidia-smi") if device == "cuda" else None
    if program is None:
        yield watched
        return
    query = [program, "--query-gpu=utilization.gpu,power.draw", "--format=csv,noheader,nounits", "--loop-ms=200"]
    with subprocess.Popen([*query, "--id=0"], stdout=subprocess.PIPE, text=True) as asking:
        try:
            yield watched
        finally:
            asking.terminate()
            watched.read(asking.communicate()[0])


def experiment(task: Task) -> Experiment:
    """The workload, or an architecture's measurement, on synthetic images."""
    if task.workload in MODELS:
        return of_model(task)
    workload = GPU_WORKLOADS[task.workload]
    rounds = task.rounds or workload.rounds
    clients = dict(workload.clients)
    clients["per_round"] = max(1, clients.get("per_round", clients["count"]) // task.part)
    colour = task.workload == "R18"
    examples = (50_000 if colour else 60_000) * task.scale / 0.9
    data = {
        "name": "synthetic",
        "shape": [3, 32, 32] if colour else [1, 28, 28],
        "augment": colour,
        "num_groups": 30,
        "samples_per_group": max(2, round(examples / 30), -(-2 * clients["count"] // 30)),
    }
    table = {
        **workload.experiment().as_dict(),
        "rounds": workload.warmup + rounds,
        "seed": task.seed,
        "data": data,
        "partition": "iid",
        "clients": clients,
        "runtime": runtime(task),
    }
    return Experiment(**table)


def of_model(task: Task) -> Experiment:
    """Four batches of 32 images (times the scale) for each of `CLIENTS` clients, all in every round."""
    options, shape = MODELS[task.workload]
    examples = samples_of_client(task.scale)
    # Any: tables of an experiment.
    tables: dict[str, Any] = {
        "name": task.workload,
        "rounds": 1 + (task.rounds or 3),
        "data": {"name": "synthetic", "shape": shape, "num_groups": CLIENTS, "samples_per_group": examples},
        "partition": "natural",
        "clients": {"count": CLIENTS},
        "model": {"name": task.workload, **options},
        "method": {"name": "fedavg", "lr": 0.01, "epochs": 1, "batch_size": 32},
        "evaluation": {"every": 0, "pooled": False, "own": False},
        "runtime": runtime(task),
        "output": {"report": False, "save_models": False},
    }
    return Experiment(**tables)


def samples_of_client(scale: float) -> int:
    """Images per client in the measurement of an architecture; nine tenths are for training."""
    return max(2, round(4 * 32 * scale / 0.9))


def runtime(task: Task) -> dict[str, object]:
    """The `[runtime]` table."""
    return {"executor": "inline", "device": task.device, "engine": task.engine, "precision": task.precision}


def play(task: Task) -> dict[str, Any]:
    """Run rayfl: the times of rounds, the final model's digest, and the width of stacks."""
    setup = prepare(experiment(task))
    executor = InlineExecutor(setup)
    executor.num_workers = task.workers
    last: list[RunState] = []

    def rounds(finished: Callable[[], None]) -> None:
        def keep(record: RoundRecord, run_state: RunState) -> None:
            last[:] = [run_state]
            finished()

        simulate(setup, executor, keep, None, setup.rounds)

    figures = measured(task, rounds, warmup(task))
    by_rule = replace(setup, engine_name="auto").work_width
    widths = {"width": setup.work_width, "rule_width": by_rule}
    return {**figures, "digest": digest(last[0].server["params"]), **widths}


def bare(task: Task) -> dict[str, Any]:
    """Run the bare loop: one client after another on the same device, without a simulator, with all data there."""
    setup = prepare(experiment(task))
    loop = Bare(setup)

    def rounds(finished: Callable[[], None]) -> None:
        with fixed(1 if task.device == "cuda" else setup.threads, setup.device, setup.precision):
            for round_number in range(setup.rounds):
                loop.round(round_number)
                finished()

    return measured(task, rounds, warmup(task))


def warmup(task: Task) -> int:
    """The number of rounds that are not measured."""
    return 1 if task.workload in MODELS else GPU_WORKLOADS[task.workload].warmup


class Bare:
    """A bare loop: parameters in place, torch's SGD, batches gathered and augmented on the device."""

    def __init__(self, setup: Setup) -> None:
        hyper, task = setup.method.hyper, setup.method.task
        assert isinstance(hyper, LocalTraining) and isinstance(task, NetworkTask)
        self.setup, self.hyper, self.task = setup, hyper, task
        data = setup.device_data
        self.augment = setup.dataset.augment
        self.normalise = data.normalise
        self.inputs, self.labels = data.train.inputs, data.train.labels
        if not self.augment:
            self.inputs = laid_out(data.normalise(self.inputs), task.network.memory_format)
        self.net = task.network.build().to(setup.device)
        self.parameters = list(self.net.parameters())
        self.model = [parameter.detach().clone() for parameter in self.parameters]
        self.draw = np.random.default_rng(0)

    def round(self, round_number: int) -> None:
        """One round of federated averaging."""
        total, examples = [torch.zeros_like(each) for each in self.model], 0
        for client in self.setup.population.sample_round(round_number).selected:
            count = self.train(client)
            examples += count
            with torch.no_grad():
                for each, parameter in zip(total, self.parameters, strict=True):
                    each.add_(parameter, alpha=count)
        self.model = [each / examples for each in total]

    def train(self, client: int) -> int:
        """Train a client from the global model; return the number of its examples."""
        rows = self.setup.partition.train[client]
        with torch.no_grad():
            for parameter, received in zip(self.parameters, self.model, strict=True):
                parameter.copy_(received)
        optimizer = optim.SGD(self.parameters, lr=self.hyper.lr)
        size = self.hyper.batch_size or len(rows)
        order = upload(rows[self.draw.permutation(len(rows))], self.setup.device)
        crops = upload(draw_crops(len(rows), self.draw), self.setup.device) if self.augment else None
        starts = range(0, len(rows), size)[: self.hyper.steps]
        for start in starts:
            chosen = order[start : start + size]
            inputs = self.inputs[chosen]
            if crops is not None:
                inputs = self.normalise(cropped(inputs, crops[:, start : start + size]))
                inputs = laid_out(inputs, self.task.network.memory_format)
            optimizer.zero_grad()
            self.loss(inputs, self.labels[chosen]).backward()
            optimizer.step()
        return len(rows)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy, under autocast if rayfl uses it."""
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self.setup.precision == "bf16"):
            logits = self.net(inputs)
        return nn.functional.cross_entropy(logits.float(), labels)


def codec(task: Task) -> dict[str, Any]:
    """Encode a vector on the device and decode it in main memory; also whether the bytes are those of main memory."""
    here = {"w": torch.from_numpy(np.random.default_rng(0).standard_normal(task.entries).astype(np.float32))}
    x = {"w": here["w"].to(task.device)}
    compressor = CODECS[task.workload]
    decoding: list[float] = []

    def rounds(finished: Callable[[], None]) -> None:
        for _ in range(1 + (task.rounds or 20)):
            packet, _ = compressor.encode(x, {}, np.random.default_rng(0))
            begun = time.perf_counter()
            packet.decode()
            decoding.append(time.perf_counter() - begun)
            finished()

    with fixed(1, torch.device(task.device)):
        figures = measured(task, rounds, 1)
        digests = {digest(compressor.encode(values, {}, np.random.default_rng(0))[0].parts) for values in (x, here)}
    return {**figures, "decoding": decoding[1:], "same_bytes": len(digests) == 1}


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of all arrays in the order of their names."""
    checksum = hashlib.sha256()
    for _, array in sorted(arrays.items()):
        checksum.update(np.ascontiguousarray(array).tobytes())
    return checksum.hexdigest()


def measured(task: Task, rounds: Callable[[Callable[[], None]], None], warmup: int) -> dict[str, Any]:
    """Time, memory, utilisation and energy of the rounds after the first `warmup`; first_s: of the very first one."""
    begun: list[float] = []
    on_gpu = task.device == "cuda"

    def finished() -> None:
        if on_gpu:
            torch.cuda.synchronize()
        begun.append(time.perf_counter())

    finished()
    with watching(task.device) as watched:
        rounds(finished)
    seconds = np.diff(begun)[warmup:].tolist()
    peak = torch.cuda.max_memory_reserved() if on_gpu else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    first_s = begun[1] - begun[0]
    return {**asdict(task), "seconds": seconds, "first_s": first_s, "peak_bytes": peak, **watched.figures(sum(seconds))}


PROGRAMS: dict[str, Callable[[Task], dict[str, Any]]] = {"rayfl": play, "bare": bare, "codec": codec}


def main(given: str) -> None:
    """Do the tasks that a JSON list describes in turn, and print the figures of each. Equal data are made once."""
    tasks = [Task(**table) for table in json.loads(given)]
    sources = {repr(source): source for source in (experiment(task).data for task in tasks if task.program != "codec")}
    with keeping_datasets(sources.values()):
        for task in tasks:
            if task.device == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.set_per_process_memory_fraction(0.9 / task.part)
            print(json.dumps(PROGRAMS[task.program](task)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

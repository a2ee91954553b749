"""The whole way of a run on a GPU that is pretended below torch's Python: from the settings to finished rounds."""

import ast
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.client_actors import client_actors
from rayfl.experiment.prepare import prepare
from rayfl.experiment.runtime import Runtime
from rayfl.limits.memory import tensor_fraction
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.step_graphs import CudaRecorder
from tests.actors.quarter_of_gpu import OnAQuarter
from tests.actors.toys import assert_same_bits, experiment, played
from tests.pretended_gpu import MEMORY, PretendedGpu

ROOT = Path(__file__).parents[2]

Device = torch.device | str | int | None

CALLS: Mapping[str, Callable[[Device], object]] = {
    "init": lambda device: torch.cuda.init(),
    "current_device": lambda device: torch.cuda.current_device(),
    "default_generators": lambda device: len(torch.cuda.default_generators),
    "device_count": lambda device: torch.cuda.device_count(),
    "get_device_name": torch.cuda.get_device_name,
    "get_device_properties": torch.cuda.get_device_properties,
    "get_per_process_memory_fraction": lambda device: torch.cuda.get_per_process_memory_fraction(
        torch.device(device).index if isinstance(device, str) else None
    ),
    "is_available": lambda device: torch.cuda.is_available(),
    "is_initialized": lambda device: torch.cuda.is_initialized(),
    "empty_cache": lambda device: torch.cuda.empty_cache(),
    "max_memory_allocated": lambda device: torch.cuda.max_memory_allocated(),
    "max_memory_reserved": lambda device: torch.cuda.max_memory_reserved(),
    "reset_peak_memory_stats": lambda device: torch.cuda.reset_peak_memory_stats(),
    "set_per_process_memory_fraction": lambda device: torch.cuda.set_per_process_memory_fraction(0.5),
    "synchronize": lambda device: torch.cuda.synchronize(device),
    "graph_pool_handle": lambda device: torch.cuda.graph_pool_handle(),
    "current_stream": lambda device: torch.cuda.current_stream(),
    "set_stream": lambda device: torch.cuda.set_stream(torch.cuda.current_stream()),
    "CUDAGraph": lambda device: torch.cuda.CUDAGraph(),
    "graph": lambda device: CudaRecorder().record(lambda: None)(),
}
"""Every function of torch.cuda that rayfl calls, as it calls it."""


@functools.cache
def called() -> set[str]:
    """The names of torch.cuda in the sources."""
    files = [file for room in ("rayfl", "actors", "jobs", "benchmarks") for file in (ROOT / room).rglob("*.py")]
    texts = [text for file in files if "torch.cuda" in (text := file.read_text(encoding="utf-8"))]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.cuda"}


@pytest.mark.parametrize("visible", [None, "1", "0,1"])
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_torch_s_python_takes_every_call_of_ours(visible: str | None, device: str, monkeypatch: pytest.MonkeyPatch):
    assert called() == {*CALLS}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with PretendedGpu(count=2):
        found = {name: call(device) for name, call in CALLS.items()}
    assert found["device_count"] == (1 if visible == "1" else 2)
    assert found["get_device_name"] == f"pretended {'1' if visible == '1' else '0'}"
    assert found["is_available"] and not torch.cuda.is_available()


CHILD = """
import json
import warnings
from tests.pretended_gpu import PretendedGpu, with_autograd
with_autograd()
from benchmarks.gpu_program import main
from rayfl.determinism.platform import describe
from rayfl.determinism.torch_flags import fixed
from rayfl.experiment.prepare import prepare
from rayfl.rounds.executor import InlineExecutor
from rayfl.testing.executors import assert_same_bits, contents
from rayfl.testing.executors import play
from tests.actors.toys import experiment

warnings.simplefilter("error")


def end(device, method, model, engine):
    runtime = {"executor": "inline", "device": device, "engine": engine}
    clients = {"count": 2}
    given = {"name": method, "batch_size": 8, "steps": 2}
    setup = prepare(experiment(method, rounds=2, clients=clients, model=model, method=given, runtime=runtime))
    with fixed(1, setup.device):
        records, states = play(setup)
    return contents(InlineExecutor(setup), states[-1]), [record.metrics for record in records]


# The programs of `python -m benchmarks gpu`, on small parts of their work.
for given in (
    {"program": "codec", "workload": "topk", "entries": 2000},
    {"program": "rayfl", "workload": "W1", "scale": 0.01, "part": 2},
    {"program": "bare", "workload": "W1", "scale": 0.01},
):
    with PretendedGpu():
        main(json.dumps([{**given, "rounds": 1, "device": "cuda"}]))
for method, model, engine in [
    ("fedavg", "mlp", "auto"),
    ("scaffold", "mlp", "loop"),
    ("fedavg", "emnist-cnn", "loop"),
]:
    wanted, metrics = end("cpu", method, model, "vmap" if engine == "auto" else engine)
    with PretendedGpu(count=3) as gpu:
        found, others = end("cuda", method, model, engine)
        platform = describe(1, "cuda")
    assert_same_bits(found, wanted)
    assert others == metrics
    # But for the constants of the normalisation, in a process's first batch.
    assert gpu.uploads and gpu.downloads and sum(gpu.unpinned) <= 8, gpu.unpinned
    assert [platform[name] for name in ("gpu", "gpu_processors", "gpu_threads_percent")] == ["pretended 1", 132, "50"]
"""


def test_a_run_on_a_gpu_has_the_bits_of_main_memory_with_real_gradients():
    """Beside the benchmark's programs, in a process of its own, which sees the second and the third of three GPUs."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "1,2", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    codec, rayfl, bare = map(json.loads, done.stdout.splitlines())
    # Half of the fifty clients of a round.
    assert codec["same_bytes"] and rayfl["width"] == 25
    # What the pretended allocator says.
    assert {found["peak_bytes"] for found in (codec, rayfl, bare)} == {2 * 10**6}


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_a_quarter_of_a_gpu_from_the_settings_to_finished_rounds(monkeypatch: pytest.MonkeyPatch):
    """Only torch's C code is pretended, and only in the actor; its rounds have the bits of main memory."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    shape = {"num_gpus": 0.25, "stack_width": 4}
    plain = prepare(experiment(rounds=2, runtime={"executor": "inline", "engine": "vmap", "stack_width": 4}))
    setup = prepare(experiment(rounds=2, runtime=shape))
    setup = replace(setup, method=OnAQuarter(setup.method.task, setup.method.hyper))
    assert (setup.device_name, setup.work_width) == ("cuda", 4)
    _, wanted = played(plain, InlineExecutor(plain))
    with client_actors(setup, Runtime(actors=1, num_gpus=0.25, num_cpus=0.5)) as executor:
        records, run_state = played(setup, executor)
    assert_same_bits(run_state, wanted)
    # The four actors that such a GPU holds, less a context each.
    assert records[-1].means["gpu/fraction"] == pytest.approx(tensor_fraction(0.25, MEMORY))
    assert records[-1].means["gpu/tensors"] == 1.0

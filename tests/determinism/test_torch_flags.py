"""The settings of torch, as they are set for a GPU: they can be set and read without one."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

import rayfl
from rayfl.determinism import torch_flags
from rayfl.determinism.process import ArithmeticPrecision


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    deterministic, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    torch.backends.cudnn.benchmark = benchmark
    torch.use_deterministic_algorithms(deterministic)


@pytest.mark.parametrize(("precision", "on"), [("fp32", False), ("tf32", True), ("bf16", False)])
def test_tf32_is_on_where_it_is_asked_for_and_algorithms_stay_deterministic(precision: ArithmeticPrecision, on: bool):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not on
    torch.backends.cudnn.benchmark = True
    with torch_flags.fixed(torch.get_num_threads(), torch.device("cuda"), precision):
        assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (on, on)
        assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
        assert not torch_flags._filling.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch_flags._filling.fill_uninitialized_memory and torch.backends.cudnn.benchmark


def test_on_a_cpu_nothing_but_the_threads_is_set():
    torch.backends.cudnn.allow_tf32 = True
    torch.use_deterministic_algorithms(False)
    torch_flags.fix(torch.get_num_threads(), torch.device("cpu"))
    assert torch.backends.cudnn.allow_tf32 and not torch.are_deterministic_algorithms_enabled()


@contextmanager
def callers_flags() -> Iterator[None]:
    """Flags that decide bits, set as a program that uses torch may set them."""
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"), torch.no_grad(), ExitStack() as restored:
        for one in torch_flags._precisions():
            restored.callback(setattr, one, "fp32_precision", one.fp32_precision)
        restored.callback(torch.set_default_dtype, torch.float32)
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("medium")
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def seen() -> tuple[object, ...]:
    """The flags that decide bits."""
    precisions = tuple(one.fp32_precision for one in torch_flags._precisions())
    precisions += torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    return torch.get_default_dtype(), torch.get_default_device(), precisions, grad, autocast


def test_a_run_in_a_program_with_flags_of_its_own_is_the_plain_run(tmp_path: Path):
    settings = {
        "data": "digits",
        "partition": "iid",
        "clients": {"count": 3},
        "model": {"name": "mlp", "hidden": [512, 512]},
        "method": {"name": "fedavg", "lr": 0.1},
        "rounds": 2,
        "runtime": {"executor": "inline"},
        "output": {"report": False},
    }
    plain = rayfl.run(directory=tmp_path / "plain", progress=False, **settings)
    with callers_flags():
        before = seen()
        own = rayfl.run(directory=tmp_path / "own", progress=False, **settings)
        assert seen() == before
    assert own.arrow.metrics.equals(plain.arrow.metrics)
    models = [(tmp_path / name / "models" / "global.safetensors").read_bytes() for name in ("plain", "own")]
    assert models[0] == models[1]


@pytest.mark.parametrize("mixed", [False, True])
def test_the_precision_of_products_can_be_read_within(mixed: bool):
    """torch raises if settings by its old and its new names contradict each other: recurrent models read the old."""
    with ExitStack() as restored:
        for one in torch_flags._precisions() if mixed else ():
            restored.callback(setattr, one, "fp32_precision", one.fp32_precision)
            one.fp32_precision = "ieee"
        before = [one.fp32_precision for one in torch_flags._precisions()]
        with torch_flags.own_flags():
            assert torch.get_float32_matmul_precision() == "highest" and torch.backends.cudnn.allow_tf32
            assert not torch.backends.cuda.matmul.allow_tf32
        assert [one.fp32_precision for one in torch_flags._precisions()] == before

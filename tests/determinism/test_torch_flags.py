"""The settings of torch, as they are set for a GPU: they can be set and read without one."""

from collections.abc import Iterator

import pytest
import torch

from rayfl.determinism import torch_flags
from rayfl.determinism.process import Precision


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    deterministic, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    torch.backends.cudnn.benchmark = benchmark
    torch.use_deterministic_algorithms(deterministic)


@pytest.mark.parametrize(("precision", "on"), [("fp32", False), ("tf32", True), ("bf16", False)])
def test_tf32_is_on_where_it_is_asked_for_and_algorithms_stay_deterministic(precision: Precision, on: bool):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not on
    with torch_flags.fixed(torch.get_num_threads(), torch.device("cuda"), precision):
        assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (on, on)
        assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark


def test_on_a_cpu_nothing_but_the_threads_is_set():
    torch.backends.cudnn.allow_tf32 = True
    torch.use_deterministic_algorithms(False)
    torch_flags.fix(torch.get_num_threads(), torch.device("cpu"))
    assert torch.backends.cudnn.allow_tf32 and not torch.are_deterministic_algorithms_enabled()

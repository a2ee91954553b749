"""What counts waiting operations finds those that wait, under vmap too, and no others."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rayfl.errors import ClientError
from rayfl.methods.base import Carry, Stage
from rayfl.methods.server.fedavg import FedAvg
from rayfl.rounds import engines
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.waiting import Counting, no_stage_waits_for_a_gpu
from tests.methods.reference import setup_of


@pytest.mark.parametrize(
    ("waits", "name"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: bool((x > 0).all()), "_local_scalar_dense"),
        (lambda x: float(x[0]), "_local_scalar_dense"),
        (lambda x: x[x > 0], "nonzero"),
        (lambda x: torch.equal(x, x), "equal"),
        (lambda x: torch.nonzero(x), "nonzero"),
        (lambda x: torch.where(x > 0, x, -x), None),
        (lambda x: x.index_select(0, torch.tensor([1, 0])), None),
        (lambda x: torch.vmap(lambda one: one * 2)(x), None),
    ],
)
def test_what_waits_is_found(waits: Callable[[Tensor], object], name: str | None):
    x = torch.arange(4.0)
    with Counting() as counting:
        waits(x)
    assert set(counting.found) - {""} == ({name} if name else set())


def made(method: type[FedAvg]) -> Setup:
    plain = setup_of("fedavg", {"batch_size": 4}, rounds=1)
    return replace(plain, method=method(plain.method.task, plain.method.hyper), engine_name="vmap")


def test_a_stage_that_waits_is_seen(monkeypatch: pytest.MonkeyPatch):
    plain = engines.run_stage

    def waits(method: Any, carry: Carry, batches: Any, stage: Stage) -> Carry:
        carry = plain(method, carry, batches, stage)
        if carry["loss"].device.type == "cpu":
            bool(carry["loss"].isfinite().all())
        return carry

    no_stage_waits_for_a_gpu(made(FedAvg))
    monkeypatch.setattr(engines, "run_stage", waits)
    with pytest.raises(AssertionError) as raised:
        no_stage_waits_for_a_gpu(made(FedAvg))
    assert "_local_scalar_dense" in str(raised.value)


class Mixing(FedAvg):
    """Adds a tensor of main memory, several numbers long, to the model."""

    # Any: a Batch, or a tuple of them.
    def step(self, carry: Carry, batch: Any, *, stage: Stage) -> Carry:
        carry = super().step(carry, batch, stage=stage)
        params = {name: tensor + torch.zeros(tensor.shape) for name, tensor in carry["params"].items()}
        return {**carry, "params": params}


class Asking(FedAvg):
    """Needs a number of its batch before the step."""

    # Any: a Batch, or a tuple of them.
    def step(self, carry: Carry, batch: Any, *, stage: Stage) -> Carry:
        labels = torch._C._functorch.get_unwrapped(batch.labels)  # pyright: ignore[reportAttributeAccessIssue]
        if labels.max().item() < 0:
            return carry
        return super().step(carry, batch, stage=stage)


@pytest.mark.parametrize("method", [Mixing, Asking])
def test_a_step_with_tensors_of_main_memory_or_numbers_of_the_device_fails(method: type[FedAvg]):
    play(made(method))
    with pytest.raises((RuntimeError, NotImplementedError, ClientError), match="meta"):
        no_stage_waits_for_a_gpu(made(method))

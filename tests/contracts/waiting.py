"""Operations for which a program waits until a GPU has done all that came before; counted here on a CPU."""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from rayfl.data.device import DeviceData
from rayfl.data.stacks import StackBatches
from rayfl.methods.base import Carry, Method, Stage
from rayfl.rounds import engines
from rayfl.rounds.setup import Setup
from rayfl.rounds.step_graphs import WAITING, by_mask
from rayfl.testing.executors import play

WITHOUT_RULE = ("view.dtype", "scatter_add_.default", "unbind_copy.int", "_fused_rms_norm.default")
"""Operators of aten that have a rule under vmap, but not in torch 2.6, the oldest version that pyproject.toml allows.

Those that `torch._C._dispatch_get_registrations_for_dispatch_key("FuncTorchBatched")` lists for 2.13 alone."""


class Counting(TorchDispatchMode):
    """Counts the waiting operations and those without a rule, and all others under ""."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    # Any: torch's own signature.
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if by_mask(func, args):
            name = "nonzero"
        if str(func).removeprefix("aten.") in WITHOUT_RULE:
            name = str(func)
        self.found[name if name in (*WAITING, str(func)) else ""] += 1
        return func(*args, **(kwargs or {}))


class Ends(StackBatches):
    """The first and the last of a stage's steps: all steps between them call the same code."""

    def __init__(self, batches: StackBatches) -> None:
        vars(self).update(vars(batches))
        self._steps = sorted({0, batches.num_steps - 1})
        self.num_steps = len(self._steps)

    def active(self, step: int) -> Tensor | None:
        """As `StackBatches.active`."""
        return super().active(self._steps[step])

    def numbers(self, step: int) -> tuple[Tensor | None, ...]:
        """As `StackBatches.numbers`."""
        return super().numbers(self._steps[step])


def elsewhere(batches: StackBatches) -> StackBatches:
    """The same batches on torch's device "meta", whose tensors have shapes and no numbers."""
    twin, device = copy.copy(batches), torch.device("meta")
    twin.store = DeviceData(batches.store.dataset, device)
    examples = twin.examples = copy.copy(batches.examples)
    examples.device = examples.home = device
    for each in (twin, examples):
        vars(each).update({name: one.to(device) for name, one in vars(each).items() if isinstance(one, torch.Tensor)})
    return twin


@contextmanager
def counting_in_stages() -> Iterator[Counter[str]]:
    """Count the waiting operations in stages of stacked clients, as long as this lasts.

    The first and the last step of each stage are also played on the device "meta". Everything fails there that needs a
    number, or that combines tensors of the device with others: RuntimeError and NotImplementedError.
    """
    plain, counting = engines.run_stage, Counting()

    def counted(method: Method, carry: Carry, batches: StackBatches, stage: Stage) -> Carry:
        ends = Ends(batches)
        plain(method, tree_map(lambda leaf: leaf.to("meta"), carry), elsewhere(ends), stage)
        with counting:
            plain(method, carry, ends, stage)
        return plain(method, carry, batches, stage)

    engines.run_stage = counted
    try:
        yield counting.found
    finally:
        engines.run_stage = plain


def no_stage_waits_for_a_gpu(stacked: Setup) -> None:
    """Of stacked clients: from its first step to its last, a stage needs no number that was computed on the device.

    Nor does it need a rule under vmap that the oldest torch lacks."""
    with counting_in_stages() as found:
        play(stacked)
    others = found.pop("", 0)
    assert others or not stacked.plan(0).stages
    assert not found, f"a stage waits for the device, or lacks a rule under vmap, by {dict(found)}"

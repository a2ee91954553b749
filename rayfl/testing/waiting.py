"""Operations for which a program waits until a GPU has done all that came before; counted here on a CPU."""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from rayfl.data.device import DeviceData
from rayfl.data.stacks import StackBatches
from rayfl.methods.base import Carry, Method, Stage
from rayfl.rounds import engines

WAITING = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive")
"""Operators of aten whose result, or its size, the processor needs: `item()`, `bool(tensor)`, `tolist()`, and masks."""


class Counting(TorchDispatchMode):
    """Counts the waiting operations, and all others under ""."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    # Any: torch's own signature.
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in ("index", "index_put", "index_put_", "_unsafe_index") and _by_mask(args[1]):
            name = "nonzero"
        self.found[name if name in WAITING else ""] += 1
        return func(*args, **(kwargs or {}))


def _by_mask(indices: Sequence[Any]) -> bool:
    """Whether a tensor is indexed by a mask, whose entries have to be counted first."""
    return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


def elsewhere(batches: StackBatches) -> StackBatches:
    """The same batches on torch's device "meta", whose tensors have shapes and no numbers."""
    twin, device = copy.copy(batches), torch.device("meta")
    twin.store = DeviceData(batches.store.dataset, device)
    samples = twin.samples = copy.copy(batches.samples)
    samples.device = samples.home = device
    for each in (twin, samples):
        moved = {name: one.to(device) for name, one in vars(each).items() if isinstance(one, torch.Tensor)}
        vars(each).update(moved)
    return twin


@contextmanager
def counting_in_stages() -> Iterator[Counter[str]]:
    """Waiting operations in stages of stacked clients, as long as this lasts.

    Each stage is played on the device "meta" too, where everything fails that needs a number, or that combines tensors
    of the device with others. RuntimeError and NotImplementedError where something does.
    """
    plain, counting = engines.run_stage, Counting()

    def counted(method: Method, carry: Carry, batches: StackBatches, stage: Stage) -> Carry:
        plain(method, tree_map(lambda leaf: leaf.to("meta"), carry), elsewhere(batches), stage)
        with counting:
            return plain(method, carry, batches, stage)

    engines.run_stage = counted
    try:
        yield counting.found
    finally:
        engines.run_stage = plain

"""CUDA graphs played on a CPU: operations are recorded below autograd and vmap, and done again on the same memory.

What Python sees at the capture is frozen, as in a graph: numbers, and which memory is read and written. A capture does
nothing: what it wrote to memory from before is undone, and the memory that it made is filled with NaN.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from rayfl.rounds.step_graphs import WAITING, by_mask


class Recording(TorchDispatchMode):
    """Records the operations as long as it lasts, and then undoes them."""

    def __init__(self) -> None:
        super().__init__()
        # Any: an operation, its arguments, its keyword arguments and its results.
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._made: dict[int, Tensor] = {}
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    # Any: torch's own signature.
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func.overloadpacket.__name__ in WAITING or by_mask(func, args):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        names = [argument.name for argument in func._schema.arguments]
        for argument, given in zip(func._schema.arguments, [*args, *[None] * len(names)], strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(tree_leaves(kwargs.get(argument.name, given)))
        result = func(*args, **kwargs)
        outputs = [_below(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        known = {_place(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        self._made.update({_place(tensor): tensor for tensor in outputs if _place(tensor) not in known})
        self.operations.append((func, tree_map(_below, args), tree_map(_below, kwargs), outputs))
        return result

    def _keep(self, written: Sequence[Any]) -> None:
        """Keep the bytes of memory from before the capture that is about to be written."""
        for tensor in written:
            if isinstance(tensor, Tensor) and _place(tensor) not in self._made and _place(tensor) not in self._before:
                whole = _bytes(tensor)
                self._before[_place(tensor)] = (whole, whole.clone())

    def undo(self) -> None:
        """Leave the memory as a capture does."""
        for tensor in self._made.values():
            _bytes(tensor).fill_(255)
        for whole, before in self._before.values():
            whole.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        """Do all operations again."""
        for func, args, kwargs, outputs in self.operations:
            if func.is_view:
                continue
            results = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for output, result in zip(outputs, results, strict=True):
                if _place(output) != _place(result):
                    output.copy_(result)


class CpuRecorder:
    """See `rayfl.rounds.step_graphs.StepRecorder`. `captured`: how many recordings there are."""

    def __init__(self) -> None:
        self.captured = 0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `StepRecorder`."""
        recording = Recording()
        try:
            with recording:
                work()
        finally:
            recording.undo()
        self.captured += 1
        return recording.replay


# Any: an argument, or a part of it.
def _below(value: Any) -> Any:
    """A tensor without its place in autograd's graph, on the same memory."""
    return value.detach() if isinstance(value, Tensor) else value


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> Tensor:
    """All memory that a tensor is a part of."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage())

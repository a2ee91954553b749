"""Tensors that say that they lie on a GPU, and are computed in main memory: for code that asks where tensors lie.

As on a GPU, an operation that combines them with tensors of main memory fails, and so does numpy; what travels is
counted. There is no autograd for them: torch's CPU build has no streams of a GPU.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("cuda", 0)


class OnGpu(Tensor):
    """A tensor of the pretended GPU; `own` has its numbers."""

    @staticmethod
    def __new__(cls, own: Tensor) -> "OnGpu":
        return torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, own.size(), strides=own.stride(), storage_offset=own.storage_offset(), dtype=own.dtype, device=GPU
        )

    def __init__(self, own: Tensor) -> None:
        self.own = own

    # torch's own bindings of these ask for a guard of the device, which the CPU's build does not have.
    # Any: indices and numbers of all kinds.
    def nonzero(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return OnGpu(self.own.nonzero())

    def __getitem__(self, places: Any) -> Tensor:
        return OnGpu(self.own[_mapped(places)])

    def __setitem__(self, places: Any, values: Tensor) -> None:
        assert isinstance(values, OnGpu)
        self.own[_mapped(places)] = values.own

    def index_copy_(self, dim: int, places: Tensor, values: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert isinstance(places, OnGpu) and isinstance(values, OnGpu)
        self.own.index_copy_(dim, places.own, values.own)
        return self

    # Any: numbers in lists.
    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    # Any: torch's own signature.
    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        raise RuntimeError(f"{func} on a pretended GPU outside `with PretendedGpu()`")


class PretendedGpu(TorchDispatchMode):
    """As long as it lasts, device "cuda" can be computed on; it keeps each copy's bytes, from and to main memory."""

    def __init__(self) -> None:
        super().__init__()
        self.downloads: list[int] = []
        self.uploads: list[int] = []
        self._begins = patch.object(torch.cuda, "_lazy_init", lambda: None)
        self._pins = patch.object(Tensor, "pin_memory", lambda tensor: tensor)

    def __enter__(self) -> "PretendedGpu":
        self._before = torch.are_deterministic_algorithms_enabled()
        self._begins.start()
        self._pins.start()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        # Whoever works on a GPU turns them on, and leaves them on.
        torch.use_deterministic_algorithms(self._before)
        self._pins.stop()
        self._begins.stop()

    # Any: torch's own signature.
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = func.overloadpacket.__name__, dict(kwargs or {})
        tensors = [*_tensors(args), *_tensors(kwargs.values())]
        there = [isinstance(tensor, OnGpu) for tensor in tensors]
        wanted = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        if any(there) and name != "_to_copy":
            alone = [tensor for tensor, one in zip(tensors, there, strict=True) if not one and tensor.dim()]
            if alone:
                raise RuntimeError(f"Expected all tensors to be on the same device: {func} has {len(alone)} elsewhere")
        if wanted is not None:
            kwargs["device"] = torch.device("cpu")
        result = func(*_mapped(args), **{name: _mapped(value) for name, value in kwargs.items()})
        if any(there) and wanted is not None and wanted.type == "cpu":
            self.downloads.append(result.nbytes)
            return result
        if tensors and name == "_to_copy" and not any(there) and wanted is not None and wanted.type == "cuda":
            self.uploads.append(result.nbytes)
        if name.endswith("_") and not name.endswith("__") and there[0]:
            return args[0]
        if not any(there) and (wanted is None or wanted.type == "cpu"):
            return result
        return _mapped(result, OnGpu)


# Any: an operation's arguments and its results.
def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors among values, and in tuples and lists of them. torch's own trees take ten times as long."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


# Any: an operation's arguments and its results.
def _mapped(value: Any, change: Callable[[Tensor], Tensor] = lambda tensor: getattr(tensor, "own", tensor)) -> Any:
    """A value with all tensors in it changed, by default to those that have the numbers."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(each, change) for each in value)
    return value


def on_gpu(tensor: Tensor) -> Tensor:
    """A copy on the pretended GPU."""
    return OnGpu(tensor.clone())

"""A GPU that is pretended below torch's Python: its tensors are computed in main memory, and say that they lie on it.

What torch's Python calls in C is pretended (`torch._C._cuda_*`, the allocator's statistics, and every operation, by a
dispatch mode); torch's Python and rayfl's own code run as they are. As on a GPU, an operation that combines tensors of
the GPU with tensors of main memory fails, and so does numpy; a copy that nobody waits for from the GPU has no numbers
until somebody does; what travels, and what a GPU would launch, is counted.

torch's CPU build has no streams of a GPU, so there is no autograd for these tensors, unless the process calls
`with_autograd` before its first gradient: they then lie on a device of torch's that Python may play.
"""

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rayfl.tree import private

GPU = torch.device("cuda", 0)
MEMORY = 80 * 10**9
"""Bytes of each pretended GPU."""

_below = [GPU]
"""Where torch's C code thinks that the tensors lie."""


def with_autograd() -> None:
    """Let this process have gradients of tensors on the pretended GPU. Nothing undoes it: use a process of its own."""
    below = ModuleType("torch.below")
    vars(below).update(
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
        current_device=lambda: 0,
        device_count=lambda: 1,
        is_available=lambda: True,
        is_initialized=lambda: True,
        manual_seed_all=lambda seed: None,
    )

    class Hooks(private._C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return True

        def has_primary_context(self, dev_id: int) -> bool:
            return True

        def is_built(self) -> bool:
            return True

    class Guard(private._C._acc.DeviceGuard):
        # Any: an enumeration of torch's C code.
        def type_(self) -> Any:
            return private._C._autograd.DeviceType.PrivateUse1

    private.utils.rename_privateuse1_backend("below")
    torch._register_device_module("below", below)
    private._C._acc.register_python_privateuseone_hook(Hooks())
    private._C._acc.register_python_privateuseone_device_guard(Guard())
    _below[:] = [torch.device("below", 0)]


class OnGpu(Tensor):
    """A tensor of the pretended GPU; `own` has its numbers."""

    @staticmethod
    def __new__(cls, own: Tensor) -> "OnGpu":
        return torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            own.size(),
            strides=own.stride(),
            storage_offset=own.storage_offset(),
            dtype=own.dtype,
            device=_below[0],
        )

    def __init__(self, own: Tensor) -> None:
        self.own = own

    @property
    def device(self) -> torch.device:
        return GPU

    @property
    def is_cuda(self) -> bool:
        return True

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


class Streams:
    """torch's streams and graphs, by names: work runs on "0", captures on "side". `calls` has what graphs are asked."""

    def __init__(self) -> None:
        self.current, self.calls = "0", list[str]()

    def set(self, stream: str) -> None:
        """Work on a stream from now on."""
        self.current = stream

    @contextmanager
    def using(self, stream: str) -> Iterator[None]:
        """Work on a stream. As torch does, an error leaves it in place."""
        self.current = stream
        yield
        self.current = "0"

    def graph(self) -> SimpleNamespace:
        """A graph, which does nothing when it is replayed."""
        return SimpleNamespace(
            capture_begin=lambda *pool, **options: self.calls.append(f"begin in pool {pool[0]}"),
            capture_end=lambda: self.calls.append("end"),
            replay=lambda: self.calls.append("replay"),
        )

    # Any: functions of all kinds.
    def functions(self) -> dict[str, Any]:
        """By their names in torch.cuda."""
        return {
            "CUDAGraph": self.graph,
            "Stream": lambda: "side",
            "stream": self.using,
            "current_stream": lambda device=None: self.current,
            "set_stream": self.set,
            "graph_pool_handle": lambda: 7,
        }


class Driver:
    """The C functions below torch's Python, with `count` GPUs, of which CUDA_VISIBLE_DEVICES shows some, by number."""

    def __init__(self, count: int, synchronized: Callable[[], None]) -> None:
        self.count, self.synchronized = count, synchronized
        self.current, self.fractions = 0, dict.fromkeys(range(count), 1.0)
        self.streams = Streams()

    @property
    def visible(self) -> list[int]:
        """The numbers of the GPUs that this process sees."""
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        return list(range(self.count)) if given is None else [int(one) for one in given.split(",") if one]

    def exchange(self, device: int) -> int:
        """Work on another GPU; returns the one before. torch says -1 for "no other"."""
        before = self.current
        self.current = device if device >= 0 else before
        return before

    def begin(self) -> None:
        """What torch's C code leaves in `torch.cuda` when it begins."""
        assert self.visible, "no CUDA-capable device is detected"
        private.cuda.__dict__.update(
            _get_device_properties=self.properties,
            default_generators=tuple(torch.Generator() for _ in self.visible),
        )

    def properties(self, index: int) -> SimpleNamespace:
        """torch's C code takes a number, of a visible GPU."""
        assert type(index) is int and 0 <= index < len(self.visible), index
        name = f"pretended {self.visible[index]}"
        return SimpleNamespace(name=name, total_memory=MEMORY, multi_processor_count=132, major=9, minor=0)

    def set_fraction(self, fraction: float, index: int) -> None:
        assert type(index) is int and 0 < fraction <= 1
        self.fractions[index] = fraction

    def fraction(self, index: int) -> float:
        assert type(index) is int, "torch's C code takes a number"
        return self.fractions[index]

    # Any: nested numbers.
    def statistics(self, index: int) -> dict[str, Any]:
        """Of the allocator, by pool."""
        one = {"current": 10**6, "peak": 2 * 10**6, "allocated": 0, "freed": 0}
        return {"reserved_bytes": {"all": one}, "allocated_bytes": {"all": one}}

    # Any: functions of all kinds.
    def functions(self) -> dict[str, Any]:
        """By their names in torch._C."""
        return {
            "_cuda_getDeviceCount": lambda: len(self.visible),
            "_cuda_init": self.begin,
            "_cuda_getDevice": lambda: self.current,
            "_cuda_setDevice": self.exchange,
            "_cuda_setMemoryFraction": self.set_fraction,
            "_cuda_getMemoryFraction": self.fraction,
            "_cuda_memoryStats": self.statistics,
            "_cuda_emptyCache": lambda: None,
            "_cuda_resetPeakMemoryStats": lambda index: None,
            "_cuda_synchronize": self.synchronized,
            "_host_emptyCache": lambda: None,
        }

    def installed(self) -> ExitStack:
        """As long as it lasts, torch finds these functions, and has not begun."""
        patched = ExitStack()
        for name, function in self.functions().items():
            patched.enter_context(patch.object(torch._C, name, function, create=True))
        fresh = {
            # In a build with CUDA these are C functions too.
            "_exchange_device": self.exchange,
            "_maybe_exchange_device": self.exchange,
            "_cudart": SimpleNamespace(),
            "_initialized": False,
            "_queued_calls": [],
            "_cached_device_count": None,
            "default_generators": (),
            "_get_device_properties": None,
        }
        for name, value in {**fresh, **self.streams.functions()}.items():
            patched.enter_context(patch.object(torch.cuda, name, value, create=True))
        patched.enter_context(patch.object(torch.cuda.graph, "default_capture_stream", None))
        return patched


class CurrentDevice(TorchFunctionMode):
    """Names the current GPU where a device "cuda" has no index, for which torch's C code asks a guard of its own."""

    # Any: torch's own signature.
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = {name: self.indexed(value) for name, value in (kwargs or {}).items()}
        return func(*map(self.indexed, args), **named)

    # Any: an argument.
    def indexed(self, value: Any) -> Any:
        return GPU if isinstance(value, str | torch.device) and str(value) == "cuda" else value


class PretendedGpu(TorchDispatchMode):
    """As long as it lasts, device "cuda" can be computed on.

    It keeps each copy's bytes, from and to main memory, those of copies from pageable memory, and the names of the
    operations on the GPU that make or change numbers: the others are views.
    """

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.downloads: list[int] = []
        self.uploads: list[int] = []
        self.unpinned: list[int] = []
        self.launched: list[str] = []
        self.driver = Driver(count, self.synchronized)
        self._under_way: list[tuple[Tensor, Tensor]] = []
        self._pinned = dict[int, Tensor]()

    def __enter__(self) -> "PretendedGpu":
        # torch's compiler, which some modules load, looks for drivers of its own where it finds a GPU.
        importlib.import_module("torch._inductor.config")
        self._before = torch.are_deterministic_algorithms_enabled()
        self._installed = self.driver.installed()
        self._installed.enter_context(CurrentDevice())
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        # Whoever works on a GPU turns them on, and leaves them on.
        torch.use_deterministic_algorithms(self._before)
        self._installed.close()

    def synchronized(self) -> None:
        """Do the copies that nobody has waited for."""
        for here, there in self._under_way:
            here.copy_(there)
        self._under_way.clear()

    # Any: torch's own signature.
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = func.overloadpacket.__name__, dict(kwargs or {})
        tensors = [*_tensors(args), *_tensors(kwargs.values())]
        there = [isinstance(tensor, OnGpu) for tensor in tensors]
        wanted = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        if any(there) and name == "copy_" and not there[0]:
            return self._copied_down(*args, **kwargs)
        if any(there) and name not in ("_to_copy", "copy_"):
            alone = [tensor for tensor, one in zip(tensors, there, strict=True) if not one and tensor.dim()]
            if alone:
                raise RuntimeError(f"Expected all tensors to be on the same device: {func} has {len(alone)} elsewhere")
        if wanted is not None:
            kwargs["device"] = torch.device("cpu")
        pins = kwargs.pop("pin_memory", False) or "pin_memory" in name
        if name == "is_pinned":
            return tensors[0].untyped_storage().data_ptr() in self._pinned
        if "pin_memory" in name:
            func, kwargs = torch.ops.aten.clone.default, {}
        result = func(*_mapped(args), **{name: _mapped(value) for name, value in kwargs.items()})
        if pins:
            # The memory lives as long as the mode, so that no other tensor gets its place.
            self._pinned[result.data_ptr()] = result
        if (any(there) or (wanted is not None and wanted.type != "cpu")) and not func.is_view:
            self.launched.append(name)
        if any(there) and wanted is not None and wanted.type == "cpu":
            self.downloads.append(result.nbytes)
            return result
        if tensors and name == "_to_copy" and not any(there) and wanted is not None and wanted.type != "cpu":
            self.uploads.append(result.nbytes)
            if result.dim() and tensors[0].untyped_storage().data_ptr() not in self._pinned:
                self.unpinned.append(result.nbytes)
        if name.startswith("_foreach_") and name.endswith("_"):
            return None
        if name.endswith("_") and not name.endswith("__") and there and there[0]:
            return args[0]
        if not any(there) and (wanted is None or wanted.type == "cpu"):
            return result
        return _mapped(result, OnGpu)

    def _copied_down(self, here: Tensor, there: OnGpu, non_blocking: bool = False) -> Tensor:
        """A copy into main memory. If nobody waits for it, it is done once somebody does."""
        self.launched.append("copy_")
        self.downloads.append(here.nbytes)
        if non_blocking:
            self._under_way.append((here, there.own.clone()))
        else:
            here.copy_(there.own)
        return here


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

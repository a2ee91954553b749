"""Steps of local training as CUDA graphs: a step is captured once and then replayed, so that a GPU gets one order in
place of hundreds.

A graph does the same operations on the same memory at each replay, with the Python numbers of the capture. So the carry
lies in buffers that the graph updates in place, what differs from step to step is copied to buffers before each replay,
and a stage that differs in anything (its learning rate, say) has graphs of its own. A replayed step therefore gives the
bits of the step itself. The first steps of each graph run as they are; the last of these is watched, and a step that a
graph cannot repeat is never captured: a line says why.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from rayfl.determinism.global_draws import drawn_by, is_watched
from rayfl.errors import error_text, log_once
from rayfl.methods.base import Carry, Stage
from rayfl.tree import private

Numbers = tuple[torch.Tensor | None, ...]
"""What differs from step to step beside the carry: which examples a batch has, and which clients have this step."""
# A tree of tensors by name.
Step: TypeAlias = Callable[[Carry, Numbers], Carry]
"""A step of local training as a pure function of tensors."""

STEPS_BEFORE = 4
"""Steps of a graph that run as they are. To capture a step takes about as long as to run it: a stage that never comes
again and has fewer steps is not captured."""
MOST_GRAPHS = 64
"""Graphs that a process keeps, those that were used last."""
WAITING = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive")
"""Operators of aten whose result, or its size, the processor needs: `item()`, `bool(tensor)`, `tolist()`, and masks."""
ALIGNED = 16
"""Memory begins at a multiple of these bytes, or kernels may add in another order."""
COPIES = ("_to_copy", "copy_")
"""Operators of aten that copy between devices."""


class StepRecorder(Protocol):
    """Records operations on a device."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record the operations of `work` without doing them; returns what does them, on the same memory."""
        ...


class CudaRecorder:
    """Records CUDA graphs. All of them share the memory of their intermediate tensors, as one runs after another."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `StepRecorder`."""
        stream = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                work()
        finally:
            # torch leaves its own stream in place if a capture fails.
            torch.cuda.set_stream(stream)
        return graph.replay


class Watching(TorchDispatchMode):
    """Finds operations that a graph cannot repeat, and keeps the memory that others read: of constants, for example.

    `made`: tensors whose memory is not kept.
    """

    def __init__(self, device: torch.device, made: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.reason = ""
        self.kept: dict[int, torch.UntypedStorage] = {}
        self._device = device
        self._made = {tensor.untyped_storage().data_ptr() for tensor in made}

    # Any: torch's own signature.
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        nested = (args, kwargs), result
        given, returned = ([leaf for leaf in tree_leaves(x) if isinstance(leaf, torch.Tensor)] for x in nested)
        name = func.overloadpacket.__name__
        is_on_device = any(tensor.device.type == self._device.type for tensor in given)
        # torch copies the numbers of `torch.tensor(numbers, device="cuda")` without an operator of its own.
        is_made_there = name == "lift_fresh" and given[0].is_cuda
        changes_device = name in COPIES and len({tensor.device.type for tensor in (*given, *returned)}) > 1
        reasons = {
            "it copies between main memory and the GPU": is_made_there or changes_device,
            f"it needs a number, or a number of entries, that the GPU has computed ({name})": (
                is_on_device and (name in WAITING or by_mask(func, args))
            ),
            f"it draws random numbers ({name})": torch.Tag.nondeterministic_seeded in func.tags,
        }
        self.reason = next((reason for reason, holds in reasons.items() if holds), self.reason)
        storages = (tensor.untyped_storage() for tensor in given)
        self.kept |= {storage.data_ptr(): storage for storage in storages if storage.data_ptr() not in self._made}
        self._made.update(tensor.untyped_storage().data_ptr() for tensor in returned)
        return result


# Any: an operator of aten, and its arguments.
def by_mask(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operator indexes a tensor by a mask, whose entries have to be counted first."""
    is_index = func.overloadpacket.__name__ in ("index", "index_put", "index_put_", "_unsafe_index")
    return is_index and any(
        isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )


# Any: a carry, or a part of it.
def shape_of(carry: Any, of_tensor: Callable[[torch.Tensor], Hashable] = lambda x: (x.shape, x.dtype)) -> Hashable:
    """The names of all leaves, each with its shape and type, or with what `of_tensor` returns."""
    if isinstance(carry, torch.Tensor):
        return of_tensor(carry)
    if isinstance(carry, dict):
        return tuple((name, shape_of(part, of_tensor)) for name, part in carry.items())
    return tuple(shape_of(part, of_tensor) for part in carry)


def layout_of(carry: Carry) -> Hashable:
    """Names, shapes, types, strides and alignment of all tensors."""
    return shape_of(carry, lambda x: (x.shape, x.dtype, x.stride(), x.device, is_aligned(x)))


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether kernels treat a tensor as one in memory of its own."""
    return tensor.data_ptr() % ALIGNED == 0


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same entries of the same memory."""
    return (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())


def memory_like(tensor: torch.Tensor) -> torch.Tensor:
    """New memory with the shape and the strides of a tensor."""
    return tensor.new_empty_strided(tensor.shape, tensor.stride())


def copy(into: Iterable[torch.Tensor], tensors: Iterable[torch.Tensor]) -> None:
    """Copy tensors, which may have repeated entries, to others with the same strides."""
    private._foreach_copy_(*([_unrepeated(tensor) for tensor in several] for several in (into, tensors)))


def _unrepeated(tensor: torch.Tensor) -> torch.Tensor:
    strides = tensor.stride()
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)] if 0 in strides else tensor


class CarryBuffers:
    """The memory in which graphs have a carry of one layout."""

    def __init__(self, carry: Carry, layout: int) -> None:
        """`carry`: any carry of the layout, which has a number."""
        tensors, self._spec = tree_flatten(carry)
        self.layout = layout
        self._tensors = [*map(memory_like, tensors)]
        self._loaded: list[torch.Tensor] = []
        self._changed: set[int] = set()
        self.carry = tree_unflatten(self._tensors, self._spec)

    def load(self, carry: Carry) -> None:
        """Copy a carry to the buffers."""
        self._loaded, self._changed = tree_leaves(carry), set()
        copy(self._tensors, self._loaded)

    def update(self, carry: Carry, source: "CarryBuffers") -> set[int]:
        """Copy to the buffers what a step has made of `source.carry`; returns which tensors it has changed."""
        memory = {tensor.untyped_storage().data_ptr() for tensor in self._tensors}
        made = tree_leaves(carry)
        changed = {index for index, tensor in enumerate(made) if not same_memory(tensor, source._tensors[index])}
        copied = sorted(changed) if self is source else range(len(made))
        # A new tensor may lie in another buffer, which would be overwritten before it is read.
        safe = [x.clone() if x.untyped_storage().data_ptr() in memory else x for x in (made[index] for index in copied)]
        if safe:
            copy([self._tensors[index] for index in copied], safe)
        return changed

    def note(self, changed: set[int], source: "CarryBuffers") -> None:
        """Note that a replay has changed tensors of `source.carry`, and that the new carry is here."""
        self._changed, self._loaded = source._changed | changed, source._loaded
        if source is not self:
            source._loaded = []

    def taken(self) -> Carry:
        """The carry, in memory that nothing overwrites."""
        pairs = enumerate(zip(self._loaded, self._tensors, strict=True))
        tensors = [memory_like(buffer) if index in self._changed else x for index, (x, buffer) in pairs]
        copy([tensors[index] for index in self._changed], [self._tensors[index] for index in self._changed])
        self._loaded = []
        return tree_unflatten(tensors, self._spec)


class StepGraph:
    """A step of one stage and one set of shapes.

    steps: how often it ran as it is. source, target: where its carries lie before and after it, once it is captured;
    these are the same buffers unless the step changes strides, as the first one may.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.source: CarryBuffers | None = None
        self.kept: Mapping[int, torch.UntypedStorage] = {}
        """Other memory that the step reads, which must not be freed."""

    def capture(
        self, recorder: StepRecorder, source: CarryBuffers, target: CarryBuffers, step: Step, numbers: Numbers
    ) -> None:
        """Record the step. `numbers`: any of the same shapes."""
        inputs: Numbers = tuple(None if number is None else number.clone() for number in numbers)
        self._inputs = [number for number in inputs if number is not None]
        changed: set[int] = set()

        @torch.no_grad()
        def work() -> None:
            changed.update(target.update(step(source.carry, inputs), source))

        self._replay, self._changed = recorder.record(work), changed
        self.source, self.target = source, target

    def advance(self, numbers: Numbers) -> CarryBuffers:
        """Replay the step with other numbers; returns where the carry is."""
        assert self.source is not None
        private._foreach_copy_(self._inputs, [number for number in numbers if number is not None])
        self._replay()
        self.target.note(self._changed, self.source)
        return self.target


class StepGraphs:
    """Captures and replays the steps of a process, which are those of one method."""

    def __init__(self, recorder: StepRecorder, device: torch.device, steps_before: int = STEPS_BEFORE) -> None:
        self._recorder: StepRecorder | None = recorder
        self._device, self._steps_before = device, steps_before
        self._layouts: dict[Hashable, int] = {}
        self._graphs: OrderedDict[Hashable, StepGraph] = OrderedDict()
        self._buffers: WeakValueDictionary[int, CarryBuffers] = WeakValueDictionary()
        self.reasons: dict[str, str] = {}
        """Why steps run as they are, by the name of their stage."""
        self.num_replays = 0

    def takes(self, stage: Stage, is_resident: bool) -> bool:
        """Whether `run` may run a stage. `is_resident`: whether the examples lie on the device."""
        if not is_resident:
            self.refuse(stage, "the examples do not fit on the GPU")
        elif not is_watched():
            # A graph would repeat the numbers that numpy or Python draws in its capture.
            self.refuse(stage, "the method or its model draws random numbers")
        return stage.name not in self.reasons and self._recorder is not None

    def run(self, stage: Stage, width: int, step: Step, carry: Carry, numbers: Iterable[Numbers]) -> Carry:
        """The carry after a step for each of `numbers`; `width`: of the stack, 0 for a client alone."""
        layout, inside = self._layout(carry), None
        for given in numbers:
            graph = self._graph((stage, width, layout, tuple(None if x is None else x.shape for x in given)))
            if inside is not None and graph.source is not inside:
                carry, inside = inside.taken(), None
            if graph.source is None:
                carry = self._run_eager(graph, stage, step, carry, given)
                layout = self._layout(carry)
                continue
            if inside is None:
                graph.source.load(carry)
            inside = graph.advance(given)
            layout = inside.layout
            self.num_replays += 1
        return carry if inside is None else inside.taken()

    def refuse(self, stage: Stage, reason: str) -> None:
        """Run the steps of a stage as they are from now on, and say why once."""
        if stage.name not in self.reasons:
            self.reasons[stage.name] = reason
            log_once(
                logging.WARNING, f"runtime.graphs: stage {stage.name!r} runs without CUDA graphs, because {reason}"
            )

    def _layout(self, carry: Carry) -> int:
        """The number of a carry's layout: to hash a number takes less time."""
        return self._layouts.setdefault(layout_of(carry), len(self._layouts))

    def _graph(self, key: Hashable) -> StepGraph:
        graph = self._graphs.setdefault(key, StepGraph())
        self._graphs.move_to_end(key)
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)
        return graph

    def _run_eager(self, graph: StepGraph, stage: Stage, step: Step, carry: Carry, numbers: Numbers) -> Carry:
        """The carry after the step itself; the graph is captured if it is time."""
        graph.steps += 1
        if graph.steps != self._steps_before or stage.name in self.reasons or self._recorder is None:
            return step(carry, numbers)
        tensors = tree_leaves(carry)
        watching = Watching(self._device, (tensor for tensor in (*tensors, *numbers) if tensor is not None))

        def watched() -> Carry:
            with watching:
                return step(carry, numbers)

        advanced, drawn = drawn_by(watched)
        reason = "it draws random numbers" if drawn else watching.reason
        if not all(map(is_aligned, tensors)):
            reason = reason or "its carry has tensors that begin inside of others"
        if reason:
            self.refuse(stage, reason)
            return advanced
        graph.kept = watching.kept
        try:
            graph.capture(self._recorder, self._buffers_of(carry), self._buffers_of(advanced), step, numbers)
        # A driver may refuse for any reason, and a step is then still possible.
        except Exception as error:  # noqa: BLE001
            self._recorder = None
            self.refuse(stage, f"its capture failed ({error_text(error)}); no other stage is captured either")
        return advanced

    def _buffers_of(self, carry: Carry) -> CarryBuffers:
        layout = self._layout(carry)
        buffers = self._buffers[layout] = self._buffers.get(layout) or CarryBuffers(carry, layout)
        return buffers

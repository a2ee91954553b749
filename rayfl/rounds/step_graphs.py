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


class Recorder(Protocol):
    """Records operations on a device."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record the operations of `work` without doing them; returns what does them, on the same memory."""
        ...


class CudaRecorder:
    """Records CUDA graphs. All of them share the memory of their intermediate tensors, as one runs after another."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Recorder`."""
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
        given, returned = ([leaf for leaf in tree_leaves(x) if isinstance(leaf, torch.Tensor)] for x in (args, result))
        name = func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.reason = f"it draws random numbers ({name})"
        if any(tensor.device.type == self._device.type for tensor in given) and (
            name in WAITING or by_mask(func, args)
        ):
            self.reason = f"it needs a number, or a number of entries, that the GPU has computed ({name})"
        # torch copies the numbers of `torch.tensor(numbers, device="cuda")` without an operator of its own.
        is_made_there = name == "lift_fresh" and given[0].is_cuda
        if is_made_there or (name in COPIES and len({tensor.device.type for tensor in (*given, *returned)}) > 1):
            self.reason = "it copies between main memory and the GPU"
        for tensor in given:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._made:
                self.kept[storage.data_ptr()] = storage
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
def layout_of(carry: Any) -> Hashable:
    """Names, shapes, types, strides and alignment of all tensors."""
    if isinstance(carry, torch.Tensor):
        return carry.shape, carry.dtype, carry.stride(), carry.device, is_aligned(carry)
    if isinstance(carry, Mapping):
        return tuple((name, layout_of(part)) for name, part in carry.items())
    return tuple(map(layout_of, carry))


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether kernels treat a tensor as one in memory of its own."""
    return tensor.data_ptr() % ALIGNED == 0


def memory_like(tensor: torch.Tensor) -> torch.Tensor:
    """New memory with the shape and the strides of a tensor."""
    return tensor.new_empty_strided(tensor.shape, tensor.stride())


def copy(into: Iterable[torch.Tensor], tensors: Iterable[torch.Tensor]) -> None:
    """Copy tensors, which may have repeated entries, to others with the same strides."""
    private._foreach_copy_(*([_unrepeated(tensor) for tensor in several] for several in (into, tensors)))


def _unrepeated(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


class Buffers:
    """The memory of a carry that graphs update in place."""

    def __init__(self, carry: Carry) -> None:
        """`carry`: any carry of the same layout."""
        tensors, self._spec = tree_flatten(carry)
        self._own = [*map(memory_like, tensors)]
        self._loaded: list[torch.Tensor] = []
        self.carry = tree_unflatten(self._own, self._spec)
        self.changed: set[int] = set()
        """Which tensors steps have changed since `load`."""

    def load(self, carry: Carry) -> None:
        """Copy a carry to the buffers."""
        self._loaded, self.changed = tree_leaves(carry), set()
        copy(self._own, self._loaded)

    def update(self, carry: Carry) -> set[int]:
        """Copy to the buffers what a step has made of `self.carry`; returns which tensors those are."""
        memory = {tensor.untyped_storage().data_ptr() for tensor in self._own}
        made = {
            index: tensor
            for index, (own, tensor) in enumerate(zip(self._own, tree_leaves(carry), strict=True))
            if (own.data_ptr(), own.shape) != (tensor.data_ptr(), tensor.shape)
        }
        # A new tensor may lie in another buffer, which would be overwritten before it is read.
        safe = [x.clone() if x.untyped_storage().data_ptr() in memory else x for x in made.values()]
        if made:
            copy([self._own[index] for index in made], safe)
        return {*made}

    def taken(self) -> Carry:
        """The carry, in memory that nothing overwrites."""
        tensors = [memory_like(x) if index in self.changed else x for index, x in enumerate(self._loaded)]
        copy([tensors[index] for index in self.changed], [self._own[index] for index in self.changed])
        self._loaded = []
        return tree_unflatten(tensors, self._spec)


class StepGraph:
    """A step of one stage and one set of shapes.

    steps: how often it ran as it is; buffers: None until its capture.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.buffers: Buffers | None = None
        self._changed: set[int] = set()

    def capture(
        self,
        recorder: Recorder,
        buffers: Buffers,
        step: Step,
        numbers: Numbers,
        kept: Mapping[int, torch.UntypedStorage],
    ) -> None:
        """Record the step on `buffers`. `numbers`: any of the same shapes; `kept`: other memory that the step reads."""
        inputs: Numbers = tuple(None if number is None else number.clone() for number in numbers)
        self._inputs = [number for number in inputs if number is not None]

        @torch.no_grad()
        def work() -> None:
            self._changed = buffers.update(step(buffers.carry, inputs))

        self._replay, self._kept = recorder.record(work), kept
        self.buffers = buffers

    def advance(self, numbers: Numbers) -> None:
        """Replay the step with other numbers."""
        assert self.buffers is not None
        private._foreach_copy_(self._inputs, [number for number in numbers if number is not None])
        self._replay()
        self.buffers.changed |= self._changed


class StepGraphs:
    """Captures and replays the steps of a process, which are those of one method."""

    def __init__(self, recorder: Recorder, device: torch.device, steps_before: int = STEPS_BEFORE) -> None:
        self._recorder: Recorder | None = recorder
        self._device, self._steps_before = device, steps_before
        self._layouts: dict[Hashable, int] = {}
        self._graphs: OrderedDict[Hashable, StepGraph] = OrderedDict()
        self._buffers: WeakValueDictionary[int, Buffers] = WeakValueDictionary()
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
            if inside is not None and graph.buffers is not inside:
                carry, inside = inside.taken(), None
            if graph.buffers is None:
                carry = self._run_eager(graph, stage, step, carry, given)
                layout = self._layout(carry)
                continue
            if inside is None:
                inside = graph.buffers
                inside.load(carry)
            graph.advance(given)
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
        layout = self._layout(carry)
        # A step that changes strides is followed by one of another layout, which has graphs of its own.
        if layout != self._layout(advanced):
            return advanced
        reason = "it draws random numbers" if drawn else watching.reason
        if not all(map(is_aligned, tensors)):
            reason = reason or "its carry has tensors that begin inside of others"
        if reason:
            self.refuse(stage, reason)
            return advanced
        buffers = self._buffers.get(layout) or Buffers(carry)
        self._buffers[layout] = buffers
        try:
            graph.capture(self._recorder, buffers, step, numbers, watching.kept)
        # A driver may refuse for any reason, and a step is then still possible.
        except Exception as error:  # noqa: BLE001
            self._recorder = None
            self.refuse(stage, f"its capture failed ({error_text(error)}); no other stage is captured either")
        return advanced

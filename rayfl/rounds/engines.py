"""Engines of local work: they train the carries of clients, one client after another or a stack under vmap.

`run_loop` finishes one client before the next begins, so only one carry is in memory. `run_vmap` advances a stack of
clients at once: it pads unequal batches with weight 0, and clients without steps left keep their carry, so both engines
compute the same up to rounding. A stack always has its full width, and a batch its full size, so that a client's bits
do not depend on the other clients of its stack. Full-batch training is an exception: batches are padded to the largest
one in the stack. Models of several widths are another (`run_vmap`).

`choose` decides which engine a run has, and `width` how many clients a stack has at most.
"""

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from rayfl import tree
from rayfl.data.batches import Batch, ClientData, Order, amount
from rayfl.data.stacks import StackBatches
from rayfl.data.transfer import stack, to_device, to_memory, unstack
from rayfl.determinism import seeding
from rayfl.determinism.global_draws import drawn_by, keyed
from rayfl.errors import HookError, RayflError
from rayfl.methods.base import Carry, Method, Stage, Work
from rayfl.models import flops
from rayfl.rounds.check_hooks import checked_hook
from rayfl.rounds.step_graphs import Numbers, Step, StepGraphs, shape_of


@dataclass(frozen=True)
class LocalTask:
    """One client's local work: how it begins, its examples, its stages, and the key of its random draws."""

    client: int
    round: int
    seed: int
    begin: Callable[[], Carry]
    data: ClientData
    stages: tuple[Stage, ...]
    device: torch.device
    purpose: str = "train"
    share: float = 1.0
    """Share of the steps that the client does in every stage on its train split; it measures on all examples."""
    on_device: bool = False
    """Whether the trained carry stays on the device (`Setup.hooks_on_device`)."""
    graphs: StepGraphs | None = None
    """Captures the steps and replays them (`Setup.step_graphs`)."""
    is_flight: bool = False
    """Whether other clients may be in the stack when this work is done again: a resumed run trains again only the
    flights that are still under way."""

    def planned(self, stage: Stage) -> Work:
        """The amount of work in a stage; none in a free one."""
        return Work() if stage.free else Work(*self._amount(stage))

    def order(self, stage: Stage, draws: np.random.Generator | None = None) -> Order:
        """The order of the stage's batches for this (seed, round, client); only the first if `share` is below 1.

        `draws`: the generator of their draws; None: make it."""
        return self.data.order(stage.split, **self._drawn(stage, draws))

    def batches(self, stage: Stage) -> Iterator[Batch | tuple[Batch, ...]]:
        """Yield the batches of `order`."""
        return self.data.batches(stage.split, **self._drawn(stage))

    def _amount(self, stage: Stage) -> tuple[int, int]:
        """Steps and examples."""
        return amount(
            stage.num_examples(self.data.num_examples(stage.split)),
            epochs=stage.epochs,
            steps=stage.steps,
            batch_size=stage.batch_size,
            batches_per_step=stage.batches_per_step,
            share=self._share(stage),
        )

    def _share(self, stage: Stage) -> float:
        return self.share * stage.share if stage.split == "train" and not stage.free else 1.0

    def graphs_for(self, stage: Stage) -> StepGraphs | None:
        """What captures the steps of a stage; None if they run as they are."""
        is_resident = self.data.store.split(stage.split).is_resident
        return self.graphs if self.graphs is not None and self.graphs.takes(stage, is_resident) else None

    # Any: arguments of `ClientData.order`.
    def _drawn(self, stage: Stage, draws: np.random.Generator | None = None) -> dict[str, Any]:
        return {
            "epochs": stage.epochs,
            "steps": stage.steps,
            "batch_size": stage.batch_size,
            "batches_per_step": stage.batches_per_step,
            "generator": draws
            or seeding.generator(self.seed, self.round, self.client, f"{self.purpose}/{stage.name}/batches"),
            "num_steps": self._amount(stage)[0] if self._share(stage) < 1 else None,
            "num_examples": stage.num_examples(self.data.num_examples(stage.split)),
        }


Engine = Callable[[Method, Sequence[LocalTask], int], Iterator[tuple[Carry, dict[str, Work]]]]
"""Trains the clients of some tasks, in stacks of a width; yields each one's carry and its work by stage name, in the
order of the tasks."""


def run_loop(method: Method, tasks: Sequence[LocalTask], width: int = 1) -> Iterator[tuple[Carry, dict[str, Work]]]:
    """Train one client after another; `width` is ignored."""
    one_step = checked_hook(method.step)
    for task in tasks:
        carry = to_device(task.begin(), task.device)
        work: dict[str, Work] = {}
        with keyed(task.seed, task.round, task.client, f"{task.purpose}/dropout"):
            for stage in task.stages:
                carry = _ended(method, _looped(one_step, carry, task, stage), stage, task)
                work[stage.name] = task.planned(stage)
        yield carry if task.on_device else to_memory(carry, task.device), work


def _looped(one_step: Callable[..., Carry], carry: Carry, task: LocalTask, stage: Stage) -> Carry:
    """One client's carry after all steps of a stage; `one_step`: `Method.step`."""
    graphs = task.graphs_for(stage)
    if graphs is None:
        for batch in task.batches(stage):
            carry = one_step(carry, batch, stage=stage)
        return carry
    batch_of, group = task.data.batch_of, stage.batches_per_step

    def step(carry: Carry, numbers: Numbers) -> Carry:
        batches = tuple(batch_of(stage.split, numbers[first : first + 2]) for first in range(0, 2 * group, 2))
        return one_step(carry, batches[0] if group == 1 else batches, stage=stage)

    singles = task.data.numbers(stage.split, task.order(stage))
    steps = (tuple(itertools.chain(*parts)) for parts in zip(*[singles] * group, strict=True))
    return graphs.run(stage, 0, step, carry, steps)


def run_vmap(method: Method, tasks: Sequence[LocalTask], width: int = 1) -> Iterator[tuple[Carry, dict[str, Work]]]:
    """Train one stack of clients at once under torch.vmap.

    Clients with other stages, or whose carries differ in shape (other candidates, other layers), form separate stacks.
    A stack of fewer clients than `width` is filled with copies of its first carry, whose results are dropped; if models
    differ in width, up to the next power of two, so that several widths do not cost several full stacks. Not so in
    flights, whose stacks may have other clients when a run is resumed.
    """
    twin = method.with_task(method.task.functional())
    alike: dict[Hashable, dict[int, Carry]] = {}
    for row, task in enumerate(tasks):
        carry = task.begin()
        alike.setdefault((shape_of(carry), task.stages), {})[row] = carry
    firsts = [next(iter(carries.values())) for carries in alike.values()]
    are_narrow = len({shape_of(first.get("params", {})) for first in firsts}) > 1 and not tasks[0].is_flight
    done: dict[int, tuple[Carry, dict[str, Work]]] = {}
    for carries in alike.values():
        filled = min(width, 1 << (len(carries) - 1).bit_length()) if are_narrow else width
        if max(filled, len(carries)) > 1:
            trained = _together(twin, [tasks[row] for row in carries], list(carries.values()), filled)
        else:
            # There is nothing to stack, and torch rejects GroupNorm on images under a vmap over one client.
            ((row, carry),) = carries.items()
            trained = run_loop(method, [replace(tasks[row], begin=lambda carry=carry: carry)])
        done |= zip(carries, trained, strict=True)
    yield from (done[row] for row in range(len(tasks)))


def _together(
    method: Method, tasks: Sequence[LocalTask], carries: list[Carry], width: int
) -> list[tuple[Carry, dict[str, Work]]]:
    """Run all stages of clients whose carries have the same shape."""
    device = tasks[0].device
    width = max(width, len(tasks))
    work: list[dict[str, Work]] = [{} for _ in tasks]
    stages = tasks[0].stages
    if not stages:
        return list(zip(carries, work, strict=True))

    def rows() -> list[Carry]:
        return unstack(carry if tasks[0].on_device else to_memory(carry, device), len(tasks))

    carry = stack(carries, width, device)
    for number, stage in enumerate(stages, 1):
        carry = advanced(method, tasks, carry, stage, width)
        for task, done in zip(tasks, work, strict=True):
            done[stage.name] = task.planned(stage)
        if type(method).end_stage is not Method.end_stage:
            ended = [_end_stage(method, carry, stage, task) for carry, task in zip(rows(), tasks, strict=True)]
            if number == len(stages):
                return list(zip(ended, work, strict=True))
            carry = stack(ended, width, device)
    return list(zip(rows(), work, strict=True))


def advanced(method: Method, tasks: Sequence[LocalTask], carry: Carry, stage: Stage, width: int) -> Carry:
    """The stacked carry [width, ...] of `tasks` after all steps of a stage; `method` has the functional form of its
    task."""
    rounds, clients = zip(*((task.round, task.client) for task in tasks), strict=True)
    draws = seeding.generators(tasks[0].seed, rounds, clients, f"{tasks[0].purpose}/{stage.name}/batches")
    orders = [task.order(stage, own_draws) for task, own_draws in zip(tasks, draws, strict=True)]
    batches = stage_batches(tasks, stage, orders, width)

    def run() -> Carry:
        graphs = tasks[0].graphs_for(stage)
        if graphs is None:
            return run_stage(method, carry, batches, stage)
        steps = ((*batches.numbers(index), batches.active(index)) for index in range(batches.num_steps))
        return graphs.run(stage, width, stack_step(method, batches, stage), carry, steps)

    return _undrawn(method, run)


def stage_batches(tasks: Sequence[LocalTask], stage: Stage, orders: Sequence[Order], width: int) -> StackBatches:
    """The batches of a stage for a stack; their size does not depend on the clients in the stack, but for full batches
    in rounds, whose stacks are always the same."""
    data = tasks[0].data
    most = stage.num_examples(data.most_examples(stage.split))
    size = min(stage.batch_size or most, most) if stage.batch_size or tasks[0].is_flight else None
    return StackBatches(
        data.store, stage.split, orders, width=width, size=size, batches_per_step=stage.batches_per_step
    )


def run_stage(method: Method, carry: Carry, batches: StackBatches, stage: Stage) -> Carry:
    """Run all steps of one stage on a stacked carry [width, ...], without waiting for the device."""
    numbers = ((*batches.numbers(index), batches.active(index)) for index in range(batches.num_steps))
    return reduce(stack_step(method, batches, stage), numbers, carry)


def stack_step(method: Method, batches: StackBatches, stage: Stage) -> Step:
    """A step of a stacked carry. Its numbers are those of the batches, and which clients are active."""
    one_step = checked_hook(method.step)

    def step(carry: Carry, numbers: Numbers) -> Carry:
        *of_batches, active = numbers
        batch = batches.batch_of(of_batches)
        advanced = torch.vmap(lambda carry, batch: one_step(carry, batch, stage=stage), in_dims=(0, _stacked(batch)))(
            carry, batch
        )
        return advanced if active is None else _where(active, advanced, carry)

    return step


def _undrawn(method: Method, run: Callable[[], Carry]) -> Carry:
    """The carry of `run`. Raise HookError if a step has drawn random numbers: numpy would draw once for the stack."""
    try:
        advanced, drawn = drawn_by(run)
    except HookError as error:
        if "randomness error mode" not in str(error.__cause__):
            raise
        drawn = ["torch's"]
    if drawn:
        raise HookError(
            f"{method.title}.step, or the model in it, draws from {' and '.join(drawn)} global "
            "generator, which a stack of clients cannot do: set runtime.engine='loop'"
        )
    return advanced


def _ended(method: Method, carry: Carry, stage: Stage, task: LocalTask) -> Carry:
    """One client's carry after a stage. `end_stage` gets it on the same device as the other hooks."""
    if type(method).end_stage is Method.end_stage:
        return carry
    if task.on_device:
        return _end_stage(method, carry, stage, task)
    return to_device(_end_stage(method, to_memory(carry, task.device), stage, task), task.device)


def _end_stage(method: Method, carry: Carry, stage: Stage, task: LocalTask) -> Carry:
    with keyed(task.seed, task.round, task.client, f"{task.purpose}/{stage.name}/end"):
        return checked_hook(method.end_stage)(carry, stage=stage)


def _where(active: torch.Tensor, new: Carry, old: Carry) -> Carry:
    """The new carry of clients that are active, bool [width], and the old one of the others."""
    return tree_map(lambda a, b: torch.where(active.reshape(-1, *[1] * (a.dim() - 1)), a, b), new, old)


def _stacked(batch: Batch | tuple[Batch, ...]) -> Any:
    """The dimension along which vmap maps each field: the first, or None for absent weights."""
    if isinstance(batch, Batch):
        return Batch(0, 0, None if batch.weights is None else 0)  # type: ignore[arg-type]
    return tuple(_stacked(part) for part in batch)


MOST_STACKED = 64
"""The widest stack that the rule chooses on a GPU."""
MOST_ENTRIES = 1 << 25
"""Parameters of a stack on a GPU, at most: 128 MB of float32, and as much again for each gradient and moment."""
LARGE_CONVOLUTIONS = 100_000_000
"""A client is trained alone on a GPU if the convolutions of one example's forward pass need this number of operations.

Under vmap convolutions become grouped convolutions, which are slower if a single one keeps the GPU busy. The number was
chosen from the operations of known models (resnet20: 81 million, vgg11: 306), not from measurements."""
ON_CPU = 16
"""Clients of a stack on a CPU, where clients are stacked only with `engine = "vmap"`."""


def choose(name: str, method: Method, device: torch.device, params: tree.Tree) -> Engine:
    """The engine of a run: "loop", "vmap" or "auto". `params`: the shapes of one client's model.

    "auto" is vmap on a GPU, because small models alone leave it idle, and the loop on a CPU, because vmap makes
    convolutions slower there. It is the loop also for models that cannot run under vmap (LSTM, or random numbers in
    training, as for dropout), and for models that would be slower in stacks (large convolutions, and models of which
    fewer than two fit into a stack). Raise RayflError if "vmap" is impossible.
    """
    vmappable = method.task.vmappable
    if name == "vmap" and not vmappable:
        raise RayflError(
            "engine='vmap' cannot run a model with dropout or other random numbers in training, recurrent layers, "
            "buffers that other layers than BatchNorm change, or steps that depend on a batch's numbers (.item()); use "
            "engine='loop'"
        )
    stacks = name == "auto" and device.type == "cuda" and vmappable and _fits(method, params) > 1
    return run_vmap if name == "vmap" or stacks else run_loop


def width(method: Method, device: torch.device, params: tree.Tree) -> int:
    """The most clients in a stack, which depends only on the model and the device.

    On a GPU: as many clients as `MOST_ENTRIES` parameters allow, from 2 to `MOST_STACKED`. On a CPU: `ON_CPU`.
    """
    return max(2, _fits(method, params)) if device.type == "cuda" else ON_CPU


def convolution_flops(method: Method, params: tree.Tree) -> int:
    """Operations of the convolutions in one example's forward pass; 0 if unknown."""
    uses = {name: times for name, times in method.task.weight_uses.items() if params[name].dim() > 2}
    return flops.forward_flops(flops.Uses(uses), params=params)


def _fits(method: Method, params: tree.Tree) -> int:
    """Number of clients in one stack on a GPU; 1 if stacks would be slower."""
    if convolution_flops(method, params) >= LARGE_CONVOLUTIONS:
        return 1
    return max(1, min(MOST_STACKED, MOST_ENTRIES // max(1, tree.num_entries(params))))

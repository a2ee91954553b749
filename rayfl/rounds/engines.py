"""Local work: carries go in, trained carries come out, one client after another or stacked under vmap.

`run_loop` finishes one client before the next begins, so memory is one carry. `run_vmap` advances a stack of clients at
once: unequal batches are padded with weight 0 and clients that have no step left keep their carry, so both engines
compute the same up to rounding. A stack always has its full width, and a batch its full size, so that a client's bits
do not depend on the others of its stack (but for full batches, which are padded to the largest of them).
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path, tree_map

from rayfl.data.batches import Batch, ClientData, amount, pad
from rayfl.determinism import seeding
from rayfl.methods.base import Carry, Method, Stage, Work


class Engine(Protocol):
    """Trains clients; yields each one's carry and its work by stage name, in the order of `tasks`."""

    def __call__(
        self, method: Method, tasks: Sequence["LocalTask"], width: int = 1
    ) -> Iterator[tuple[Carry, dict[str, Work]]]:
        """`width`: clients of a full stack."""
        ...


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
    """Share of every stage's steps that the client does."""

    def planned(self, stage: Stage) -> Work:
        """The work that a stage is."""
        return Work(
            *amount(
                self.data.num_examples(stage.split),
                epochs=stage.epochs,
                steps=stage.steps,
                batch_size=stage.batch_size,
                batches_per_step=stage.batches_per_step,
                share=self.share,
            )
        )

    def batches(self, stage: Stage) -> Iterator[Batch | tuple[Batch, ...]]:
        """The stage's batches in the order that this (seed, round, client) gives; the first ones for a `share`."""
        batches = self._all_batches(stage)
        return islice(batches, self.planned(stage).num_steps) if self.share < 1 else batches

    def _all_batches(self, stage: Stage) -> Iterator[Batch | tuple[Batch, ...]]:
        generator = seeding.generator(self.seed, self.round, self.client, f"{self.purpose}/{stage.name}/batches")
        return self.data.batches(
            stage.split,
            epochs=stage.epochs,
            steps=stage.steps,
            batch_size=stage.batch_size,
            batches_per_step=stage.batches_per_step,
            generator=generator,
            device=self.device,
        )


def run_loop(method: Method, tasks: Sequence[LocalTask], width: int = 1) -> Iterator[tuple[Carry, dict[str, Work]]]:
    """One client after another, whatever the width."""
    for task in tasks:
        carry = _to(task.begin(), task.device)
        work: dict[str, Work] = {}
        with _forked(method, task):
            for stage in task.stages:
                num_steps = num_examples = 0
                for batch in task.batches(stage):
                    carry = method.step(carry, batch, stage=stage)
                    num_steps += 1
                    num_examples += _size(batch)
                carry = method.end_stage(carry, stage=stage)
                work[stage.name] = Work(num_steps, num_examples)
        yield _to(carry, torch.device("cpu")), work


def run_vmap(method: Method, tasks: Sequence[LocalTask], width: int = 1) -> Iterator[tuple[Carry, dict[str, Work]]]:
    """One stack of clients at once, under torch.vmap; all must have the same stages.

    Clients whose carries differ in shape (other candidates, other layers) are stacked apart. A stack of fewer clients
    than `width` is filled with copies of its first carry, whose results are thrown away.
    """
    twin = method.with_task(method.task.functional())
    alike: dict[Hashable, dict[int, Carry]] = {}
    for row, task in enumerate(tasks):
        carry = task.begin()
        alike.setdefault(_shape(carry), {})[row] = carry
    done: dict[int, tuple[Carry, dict[str, Work]]] = {}
    for carries in alike.values():
        if max(width, len(carries)) > 1:
            found = _together(twin, [tasks[row] for row in carries], list(carries.values()), width)
        else:
            # Nothing to stack, and torch refuses GroupNorm on images under a vmap over one client.
            ((row, carry),) = carries.items()
            found = run_loop(method, [replace(tasks[row], begin=lambda carry=carry: carry)])
        done |= zip(carries, found, strict=True)
    yield from (done[row] for row in range(len(tasks)))


def _together(
    method: Method, tasks: Sequence[LocalTask], carries: list[Carry], width: int
) -> list[tuple[Carry, dict[str, Work]]]:
    """All stages of clients whose carries have the same shape."""
    device, missing = tasks[0].device, max(0, width - len(tasks))
    work: list[dict[str, Work]] = [{} for _ in tasks]
    for stage in tasks[0].stages:
        filled = [*carries, *[carries[0]] * missing]
        stacked = _to(tree_map(lambda *leaves: torch.stack(leaves), *filled), device)
        stacked, done = _stage(method, stacked, tasks, stage, missing)
        carries = [method.end_stage(_row(stacked, row), stage=stage) for row in range(len(tasks))]
        for row, did in enumerate(done):
            work[row][stage.name] = did
    return list(zip(carries, work, strict=True))


def _stage(
    method: Method, stacked: Carry, tasks: Sequence[LocalTask], stage: Stage, missing: int
) -> tuple[Carry, list[Work]]:
    """All steps of one stage on stacked carries [width, ...], the last `missing` of which are copies of the first."""
    schedules = [list(task.batches(stage)) for task in tasks]
    work = [Work(len(batches), sum(_size(batch) for batch in batches)) for batches in schedules]
    schedules += [schedules[0]] * missing
    size = stage.batch_size and min(stage.batch_size, tasks[0].data.most_examples(stage.split))
    num_steps = max(len(schedule) for schedule in schedules)
    for index in range(num_steps):
        active = torch.tensor([index < len(schedule) for schedule in schedules], device=tasks[0].device)
        batches = [schedule[min(index, len(schedule) - 1)] for schedule in schedules]
        batch = _padded(batches, size)
        step = torch.vmap(lambda carry, batch: method.step(carry, batch, stage=stage), in_dims=(0, _stacked(batch)))
        advanced = step(stacked, batch)
        stacked = advanced if bool(active.all()) else _where(active, advanced, stacked)
    return stacked, work


def choose(name: str, method: Method, device: torch.device) -> Engine:
    """The engine of a run: "loop", "vmap" or "auto".

    The rule of "auto": vmap on a GPU, where small models leave it idle otherwise; the loop on a CPU, where vmap makes
    convolutions slower; the loop for what cannot run under vmap (LSTM, dropout).
    """
    if name == "vmap" and not method.task.vmappable:
        raise ValueError("engine='vmap' cannot run a model with dropout or recurrent layers; use engine='loop'")
    if name == "vmap" or (name == "auto" and device.type == "cuda" and method.task.vmappable):
        return run_vmap
    return run_loop


@contextmanager
def _forked(method: Method, task: LocalTask) -> Iterator[None]:
    """Models that draw random numbers do so from a forked torch state keyed by the client's round."""
    if not method.task.stochastic:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seeding.torch_seed(task.seed, task.round, task.client, f"{task.purpose}/dropout"))
        yield


def _to(carry: Carry, device: torch.device) -> Carry:
    if device.type == "cpu" and not torch.cuda.is_available():
        return carry
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, carry)


def _shape(carry: Carry) -> Hashable:
    """Names, shapes and types of all leaves."""
    return tuple((path, leaf.shape, leaf.dtype) for path, leaf in tree_flatten_with_path(carry)[0])


def _row(stacked: Carry, row: int) -> Carry:
    """One client's carry, in memory of its own."""
    return tree_map(lambda leaf: leaf[row].cpu().clone(), stacked)


def _where(active: Tensor, new: Carry, old: Carry) -> Carry:
    def choose_leaf(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(active.reshape(-1, *[1] * (a.dim() - 1)), a, b)

    return tree_map(choose_leaf, new, old)


def _size(batch: Batch | tuple[Batch, ...]) -> int:
    if isinstance(batch, Batch):
        return len(batch.labels)
    return sum(len(part.labels) for part in batch)


def _stacked(batch: Batch | tuple[Batch, ...]) -> Any:
    """Along which dimension vmap maps each field: the first, but for absent weights."""
    if isinstance(batch, Batch):
        return Batch(0, 0, None if batch.weights is None else 0)  # type: ignore[arg-type]
    return tuple(_stacked(part) for part in batch)


# Any: all batches, or all tuples of as many batches.
def _padded(batches: Sequence[Any], size: int | None) -> Batch | tuple[Batch, ...]:
    if isinstance(batches[0], Batch):
        return pad(batches, size)
    return tuple(pad(parts, size) for parts in zip(*batches, strict=True))

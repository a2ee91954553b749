"""Both engines do every client's stages in order, count the work, and agree."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from rayfl.data.batches import Batch, ClientData
from rayfl.data.datasets import Dataset, Examples
from rayfl.data.partition import Partition, Shards
from rayfl.determinism import seeding
from rayfl.methods.base import Carry, Context, Finished, Method, Plan, Stage, Work
from rayfl.rounds.engines import Engine, LocalTask, run_loop, run_vmap
from rayfl.task import BoundTask
from rayfl.tree import State
from tests.bound_tasks import classification
from tests.contracts.seams.quadratic import Quadratic
from tests.refusals import refused

ENGINES = pytest.mark.parametrize("engine", [run_loop, run_vmap])
SIZES = (5, 3, 4)
CPU = torch.device("cpu")


def data() -> tuple[Dataset, Partition]:
    """Sample k of all is (k + 1, 1): a client's sum of its inputs says which examples it saw."""
    inputs = np.stack([np.arange(1, 13), np.ones(12)], axis=1).astype(np.float32)
    examples = Examples(inputs, np.arange(12) % 2)
    train = Shards.of(np.split(np.arange(12), np.cumsum(SIZES)[:-1]))
    empty = Shards.empty(3)
    return Dataset("lines", examples, examples, 2, "vector"), Partition(train, train, empty, empty)


def tasks(begin: Callable[[int], Carry], *stages: Stage, seed: int = 1, round: int = 0) -> list[LocalTask]:
    dataset, partition = data()
    return [
        LocalTask(
            client,
            round,
            seed,
            lambda client=client: begin(client),
            ClientData(dataset, partition, client),
            stages,
            CPU,
        )
        for client in range(3)
    ]


class Summing(Method):
    """Adds up the inputs that it sees, and after each stage notes how many steps there were."""

    def plan(self, round_number: int, coin: float) -> Plan:
        return Plan(())

    def begin(self, state: State, received: object, ctx: Context) -> Carry:
        return zero(0)

    def step(self, carry: Carry, batch: Batch | tuple[Batch, ...], *, stage: Stage) -> Carry:
        for part in (batch,) if isinstance(batch, Batch) else batch:
            weights = torch.ones(len(part.inputs)) if part.weights is None else part.weights
            carry = {**carry, "sum": carry["sum"] + (weights[:, None] * part.inputs).sum(dim=0)}
        return {**carry, "steps": carry["steps"] + 1}

    def end_stage(self, carry: Carry, *, stage: Stage) -> Carry:
        return {**carry, f"after {stage.name}": carry["steps"].clone()}

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        return Finished({}, None)


def zero(client: int) -> Carry:
    return {"params": {}, "sum": torch.zeros(2), "steps": torch.zeros(())}


@ENGINES
def test_every_sample_is_seen_once_an_epoch_and_counted(engine: Engine):
    # Batches of 2 over 5, 3 and 4 examples: 3, 2 and 2 steps an epoch. Two epochs, then one step.
    stages = (Stage("train", epochs=2, batch_size=2), Stage("more", steps=1, batch_size=1))
    done = list(engine(Summing(Quadratic()), tasks(zero, *stages), 1))
    assert [work["train"] for _, work in done] == [Work(6, 10), Work(4, 6), Work(4, 8)]
    assert [work["more"] for _, work in done] == [Work(1, 1)] * 3
    assert [carry["after train"].item() for carry, _ in done] == [6, 4, 4]
    assert [carry["after more"].item() for carry, _ in done] == [7, 5, 5]
    # Examples 1..5, 6..8 and 9..12 twice, and one of them again.
    for (carry, _), twice, own in zip(done, (30, 42, 84), (range(1, 6), range(6, 9), range(9, 13)), strict=True):
        total, count = carry["sum"].tolist()
        assert total - twice in own
        assert count == 2 * len(own) + 1


@ENGINES
def test_a_stage_may_come_twice_and_none_may_come(engine: Engine):
    stage = Stage("train", steps=2, batch_size=1)
    done = list(engine(Summing(Quadratic()), tasks(zero, stage, stage), 1))
    assert [carry["after train"].item() for carry, _ in done] == [4, 4, 4]
    assert [(carry["steps"].item(), work) for carry, work in engine(Summing(Quadratic()), tasks(zero), 1)] == [
        (0, {})
    ] * 3


@ENGINES
def test_a_step_may_take_three_batches(engine: Engine):
    # 3 steps of 3 batches, each the whole split: nine times the sums 1..5, 6..8 and 9..12.
    stage = Stage("train", steps=3, batch_size=None, batches_per_step=3)
    done = list(engine(Summing(Quadratic()), tasks(zero, stage), 1))
    assert [work["train"] for _, work in done] == [Work(3, 9 * size) for size in SIZES]
    assert [carry["sum"].tolist() for carry, _ in done] == [[9 * 15, 9 * 5], [9 * 21, 9 * 3], [9 * 42, 9 * 4]]


@ENGINES
def test_other_keys_give_another_order(engine: Engine):
    stage = Stage("train", steps=2, batch_size=1)

    def sums(**key: int) -> list[float]:
        return [carry["sum"][0].item() for carry, _ in engine(Summing(Quadratic()), tasks(zero, stage, **key), 1)]

    assert sums() == sums()
    # Three clients with at least six ordered pairs each: the chance of equal sums for five keys is small, and fixed.
    assert len({tuple(sums(seed=seed)) for seed in range(5)}) > 1
    assert len({tuple(sums(round=round)) for round in range(5)}) > 1


def test_the_loop_holds_one_carry():
    begun: list[int] = []

    def begin(client: int) -> Carry:
        begun.append(client)
        return zero(client)

    results = run_loop(Summing(Quadratic()), tasks(begin, Stage(epochs=1)))
    next(results)
    assert begun == [0]
    next(results)
    assert begun == [0, 1]


def test_clients_of_other_shapes_are_stacked_apart_and_come_in_order():
    def begin(client: int) -> Carry:
        return {**zero(client), "extra": {f"candidate{i}": torch.zeros(2) for i in range(client % 2)}}

    stage = Stage("train", epochs=1, batch_size=2)
    looped, stacked = (list(engine(Summing(Quadratic()), tasks(begin, stage))) for engine in (run_loop, run_vmap))
    assert [len(carry["extra"]) for carry, _ in stacked] == [0, 1, 0]
    for (a, work), (b, other) in zip(looped, stacked, strict=True):
        assert (a["sum"].tolist(), work) == (b["sum"].tolist(), other)


def test_stacked_clients_get_memory_of_their_own():
    done = [carry for carry, _ in run_vmap(Summing(Quadratic()), tasks(zero, Stage(epochs=1)))]
    for carry in done:
        assert carry["sum"].untyped_storage().nbytes() == 8
    done[0]["sum"].add_(100)
    assert done[1]["sum"].tolist() == [21, 3]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2))


def normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 1), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 2))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 50), nn.Dropout(0.5), nn.Linear(50, 2))


class Descending(Summing):
    """Gradient steps."""

    def step(self, carry: Carry, batch: Batch, *, stage: Stage) -> Carry:
        gradient = self.task.grad(carry["params"], batch)
        return {"params": {name: tensor - 0.1 * gradient[name] for name, tensor in carry["params"].items()}}

    def end_stage(self, carry: Carry, *, stage: Stage) -> Carry:
        return carry


def trained(task: BoundTask, engine: Engine, **key: int) -> list[torch.Tensor]:
    params = task.init(0)
    work = tasks(lambda client: {"params": params}, Stage("train", epochs=2, batch_size=2), **key)
    return [
        torch.cat([t.flatten() for t in carry["params"].values()]) for carry, _ in engine(Descending(task), work, 1)
    ]


def test_the_engines_agree_on_unequal_clients():
    looped, stacked = (trained(classification(network), engine) for engine in (run_loop, run_vmap))
    for a, b in zip(looped, stacked, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(looped[0], looped[1], atol=1e-3)


@pytest.mark.parametrize("build", [network, lambda: nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 2))])
def test_a_stacked_client_has_the_same_bits_whoever_shares_its_stack(build: Callable[[], nn.Module]):
    # Clients of 5, 3 and 4 examples in batches of 2, so unequal steps and partial batches.
    task = classification(build)
    params, stage = task.init(0), Stage("train", epochs=2, batch_size=2)
    work = tasks(lambda client: {"params": params}, stage)

    def trained_in(*clients: int) -> dict[int, list[torch.Tensor]]:
        done = run_vmap(Descending(task), [work[client] for client in clients], width=4)
        return {client: list(carry["params"].values()) for client, (carry, _) in zip(clients, done, strict=True)}

    together = trained_in(0, 1, 2)
    for fewer in ((0,), (1,), (2,), (0, 2), (1, 2)):
        for client, tensors in trained_in(*fewer).items():
            assert all(torch.equal(a, b) for a, b in zip(tensors, together[client], strict=True))


class Evaluating(Summing):
    """Adds up the losses of what it sees, without a gradient, as a gate on validation examples does."""

    def step(self, carry: Carry, batch: Batch, *, stage: Stage) -> Carry:
        losses = self.task.losses(carry["params"], batch)[0]
        return {**carry, "loss": carry["loss"] + (losses if batch.weights is None else losses * batch.weights).sum()}

    def end_stage(self, carry: Carry, *, stage: Stage) -> Carry:
        return carry


@pytest.mark.parametrize("together", [1, 2])
def test_images_through_group_norm_by_one_client_and_by_two(together: int):
    images = Examples(np.random.default_rng(0).standard_normal((12, 2, 2, 2)).astype(np.float32), np.arange(12) % 2)
    dataset, (_, partition) = Dataset("squares", images, images, 2, "vector"), data()
    task = classification(normed)
    params, first = task.init(0), torch.zeros(())
    work = tasks(lambda client: {"params": params, "loss": first}, Stage("gate", epochs=1, batch_size=3))[:together]
    work = [replace(task, data=ClientData(dataset, partition, task.client)) for task in work]
    looped, stacked = ([float(c["loss"]) for c, _ in engine(Evaluating(task), work)] for engine in (run_loop, run_vmap))
    assert stacked == pytest.approx(looped, rel=1e-5)


def test_dropout_is_drawn_by_seed_round_and_client():
    task = classification(dropping)
    before = torch.random.get_rng_state()
    first = trained(task, run_loop)
    torch.manual_seed(99)
    assert all(torch.equal(a, b) for a, b in zip(first, trained(task, run_loop), strict=True))
    torch.random.set_rng_state(before)
    assert not torch.equal(first[0], trained(task, run_loop, round=1)[0])
    assert not torch.equal(first[0], trained(task, run_loop, seed=2)[0])
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_client_trains_on_one_sequence_of_torch_draws():
    """Of the key (seed, round, client, "train/dropout"): the masks of dropout are what torch draws from this seed."""
    task = classification(dropping)
    params = task.init(0)
    work = tasks(lambda client: {"params": params}, Stage("train", epochs=2, batch_size=2), round=4, seed=7)
    looped = [carry["params"] for carry, _ in run_loop(Descending(task), work)]
    for one, found in zip(work, looped, strict=True):
        (stage,), carry = one.stages, one.begin()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seeding.torch_seed(7, 4, one.client, "train/dropout"))
            for batch in one.batches(stage):
                assert isinstance(batch, Batch)
                carry = Descending(task).step(carry, batch, stage=stage)
        assert all(torch.equal(found[name], tensor) for name, tensor in carry["params"].items())


def test_dropout_does_not_follow_the_order_of_clients():
    task = classification(dropping)
    params = task.init(0)
    work = tasks(lambda client: {"params": params}, Stage("train", epochs=1, batch_size=2))
    forth = [carry["params"]["0.weight"] for carry, _ in run_loop(Descending(task), work)]
    back = [carry["params"]["0.weight"] for carry, _ in run_loop(Descending(task), work[::-1])]
    assert all(torch.equal(a, b) for a, b in zip(forth, back[::-1], strict=True))


@ENGINES
def test_an_empty_split_names_the_client(engine: Engine):
    with refused(names=["client 0", "heldout"]):
        list(engine(Summing(Quadratic()), tasks(zero, replace(Stage(epochs=1), split="heldout")), 1))

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.data import batches as batches_module
from rayfl.data.batches import Batch, ClientData, amount, examples_by_batch, schedule, steps_within
from rayfl.data.partition import Partition, Shards
from rayfl.determinism.seeding import generator
from tests.data.toys import numbered_images
from tests.refusals import refused


def plan(num_examples: int, *, epochs=None, steps=None, batch_size=None, batches_per_step=1, seed=0):
    return schedule(
        num_examples,
        epochs=epochs,
        steps=steps,
        batch_size=batch_size,
        batches_per_step=batches_per_step,
        generator=generator(seed),
    )


def client_data(num_train: int = 10, shape=(1, 1, 2), augment: bool = False) -> ClientData:
    """One client with every even train example, the last two test examples and nothing for validation."""
    labels = np.arange(num_train) % 3
    dataset = numbered_images(labels, np.array([0, 1, 2, 0]), shape, augment)
    empty = Shards.empty(1)
    return ClientData(
        dataset, Partition(Shards.of([np.arange(0, num_train, 2)]), empty, empty, Shards.of([np.array([2, 3])])), 0
    )


def singles(data: ClientData, split: str = "train", seed: int = 0, **given) -> list[Batch]:
    """The batches of a call with one batch a step."""
    taken = list(data.batches(split, generator=generator(seed), **given))
    return [batch for batch in taken if isinstance(batch, Batch)]


def groups(data: ClientData, **given) -> list[tuple[Batch, ...]]:
    """The batches of a call with several batches a step."""
    taken = list(data.batches("train", generator=generator(0), **given))
    return [group for group in taken if not isinstance(group, Batch)]


def numbers(batch: Batch) -> list[int]:
    """Which examples a batch of `numbered_images` holds: the grey value times 255."""
    return torch.round(batch.inputs[:, 0, 0, 0] * 255).int().tolist()


def test_an_epoch_keeps_the_partial_last_batch():
    order = plan(7, epochs=1, batch_size=3)
    assert [len(batch) for batch in order] == [3, 3, 1]
    assert sorted(np.concatenate(order).tolist()) == list(range(7))


def test_every_epoch_is_a_fresh_permutation():
    order = plan(50, epochs=2, batch_size=50)
    assert sorted(order[0].tolist()) == sorted(order[1].tolist()) == list(range(50))
    assert order[0].tolist() != order[1].tolist()


def test_steps_go_on_through_reshuffled_epochs():
    order = plan(5, steps=4, batch_size=2)
    assert [len(batch) for batch in order] == [2, 2, 1, 2]
    assert sorted(np.concatenate(order[:3]).tolist()) == list(range(5))
    # The same draws as by epochs: how a pass is counted changes no batch.
    for by_steps, by_epochs in zip(order, plan(5, epochs=2, batch_size=2), strict=False):
        assert by_steps.tolist() == by_epochs.tolist()


def test_an_incomplete_group_is_completed_from_a_further_permutation():
    order = plan(7, epochs=1, batch_size=2, batches_per_step=3)
    # One epoch is 4 batches, so two steps of 3: the 2 that are missing begin a second permutation.
    assert [len(batch) for batch in order] == [2, 2, 2, 1, 2, 2]
    assert sorted(np.concatenate(order[:4]).tolist()) == list(range(7))
    assert len(set(np.concatenate(order[4:]).tolist())) == 4


def test_steps_count_groups():
    assert len(plan(7, steps=2, batch_size=2, batches_per_step=3)) == 6


def test_the_full_batch_is_in_order_and_draws_nothing():
    draw = generator(0)
    order = schedule(4, epochs=None, steps=3, batch_size=None, batches_per_step=1, generator=draw)
    assert [batch.tolist() for batch in order] == [[0, 1, 2, 3]] * 3
    assert draw.random() == generator(0).random()


def test_a_batch_larger_than_the_data_is_the_data():
    assert [len(batch) for batch in plan(3, epochs=2, batch_size=100)] == [3, 3]


def test_the_seed_decides():
    first, again, other = (np.concatenate(plan(30, epochs=1, batch_size=8, seed=seed)) for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"epochs": 1, "steps": 1}, ["epochs=1", "steps=1"]),
        ({}, ["epochs=None", "steps=None"]),
    ],
)
def test_impossible_schedules_are_refused(given, names):
    with refused(names=names):
        plan(5, **given)


def test_batches_hold_the_samples_of_the_client():
    data = client_data()
    assert (data.num_examples("train"), data.num_examples("test"), data.num_examples("heldout")) == (5, 2, 0)
    taken = singles(data, epochs=1, batch_size=2)
    order = plan(5, epochs=1, batch_size=2)
    assert [numbers(batch) for batch in taken] == [(2 * positions).tolist() for positions in order]
    for batch in taken:
        assert batch.labels.tolist() == [number % 3 for number in numbers(batch)]
        assert (batch.inputs.dtype, batch.labels.dtype, batch.weights) == (torch.float32, torch.int64, None)


def test_the_test_split_indexes_the_test_samples():
    batch = client_data().all("test")
    assert numbers(batch) == [253, 252]
    assert batch.labels.tolist() == [2, 0]


def test_all_is_in_order():
    assert numbers(client_data().all("train")) == [0, 2, 4, 6, 8]


def test_several_batches_a_step_come_as_tuples():
    steps = groups(client_data(), epochs=1, batch_size=2, batches_per_step=2)
    assert [[len(batch.labels) for batch in step] for step in steps] == [[2, 2], [1, 2]]
    one_by_one = singles(client_data(), steps=4, batch_size=2)
    assert [numbers(batch) for step in steps for batch in step] == [numbers(batch) for batch in one_by_one]


def test_an_empty_split_names_the_client():
    with refused(names=["client 0", "validation"]):
        client_data().batches("validation", epochs=1, generator=generator(0))
    with refused(names=["client 0", "heldout"]):
        client_data().all("heldout")


def test_normalising_once_or_by_batch_gives_the_same_bits(monkeypatch):
    def run() -> list[torch.Tensor]:
        return [batch.inputs for batch in singles(client_data(200, shape=(3, 5, 7)), epochs=2, batch_size=32)]

    at_once = run()
    monkeypatch.setattr(batches_module, "NORMALISED_BYTES", 0)
    assert all(torch.equal(one, other) for one, other in zip(at_once, run(), strict=True))


@pytest.mark.parametrize("steps", [1, 50])
def test_inputs_own_their_memory(steps):
    for batch in singles(client_data(shape=(1, 3, 3)), steps=steps, batch_size=2):
        assert batch.inputs.untyped_storage().nbytes() == 4 * batch.inputs.numel()
        assert batch.inputs.data_ptr() % 16 == 0


def test_only_training_is_augmented():
    data = client_data(20, shape=(1, 8, 8), augment=True)
    train = torch.cat([batch.inputs for batch in singles(data, epochs=1, batch_size=4)])
    # The images are flat, so the only thing a crop can bring in is black.
    grey = train.amax(dim=(1, 2, 3))
    assert ((train == 0.0) | (train == grey[:, None, None, None])).all()
    assert (train[grey > 0] == 0.0).any()
    (test,) = singles(data, "test", epochs=1, batch_size=4)
    assert (test.inputs > 0.9).all()
    assert torch.equal(data.all("train").inputs.amin(dim=(1, 2, 3)), data.all("train").inputs.amax(dim=(1, 2, 3)))


def test_augmentation_is_seeded():
    def run(seed: int) -> torch.Tensor:
        data = client_data(20, shape=(1, 8, 8), augment=True)
        return torch.cat([batch.inputs for batch in singles(data, seed=seed, epochs=1, batch_size=4)])

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))


def test_read_only_arrays_are_never_written():
    data = client_data()
    for examples in (data.dataset.train, data.dataset.test):
        examples.inputs.flags.writeable = examples.labels.flags.writeable = False
    (batch,) = singles(data, epochs=1)
    batch.inputs.add_(1.0)
    assert numbers(data.all("train")) == [0, 2, 4, 6, 8]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.booleans(), st.integers(1, 12) | st.none(), st.integers(1, 3))
def test_work_is_known_before_it_is_done(n: int, number: int, by_epochs: bool, batch_size: int | None, group: int):
    kind: dict[str, Any] = {"epochs": number, "steps": None} if by_epochs else {"epochs": None, "steps": number}
    kind |= {"batch_size": batch_size, "batches_per_step": group}
    drawn = schedule(n, **kind, generator=np.random.default_rng(0))
    assert amount(n, **kind) == (len(drawn) // group, sum(map(len, drawn)))
    for share in (0.01, 0.3, 0.5, 0.99):
        num_steps, num_examples = amount(n, **kind, share=share)
        assert num_steps == max(1, int(share * (len(drawn) // group) + 0.5))
        assert num_examples == sum(map(len, drawn[: num_steps * group]))
        of_each = tuple(sum(map(len, drawn[place : num_steps * group : group])) for place in range(group))
        assert examples_by_batch(n, num_steps, batch_size=batch_size, batches_per_step=group) == of_each


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 12) | st.none(), st.integers(1, 3), st.integers(0, 400))
def test_only_whole_steps_count(n: int, number: int, batch_size: int | None, group: int, limit: int):
    kind: dict[str, Any] = {"batch_size": batch_size, "batches_per_step": group}
    drawn = schedule(n, epochs=None, steps=number, **kind, generator=np.random.default_rng(0))
    seen = np.cumsum([len(batch) for batch in drawn])[group - 1 :: group]
    assert min(number, steps_within(limit, n, **kind)) == int((seen <= limit).sum())

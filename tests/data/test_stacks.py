"""The batches of a stack: those of its clients, padded, whatever the device that they are made on."""

import numpy as np
import pytest
import torch

from rayfl.data.batches import Batch, ClientData, Order
from rayfl.data.device import RESIDENT_SHARE, DeviceData, DeviceExamples
from rayfl.data.partition import Partition, Shards
from rayfl.data.stacks import ALIGNED, StackBatches
from rayfl.determinism.seeding import generator
from tests.data.toys import numbered_images
from tests.pretended_gpu import GPU, MEMORY, PretendedGpu

SIZES = (5, 3, 4)


def clients(shape=(1, 1, 2), augment: bool = False) -> list[ClientData]:
    """Three clients with examples 0 to 4, 5 to 7 and 8 to 11."""
    dataset = numbered_images(np.arange(12) % 3, np.array([0, 1]), shape, augment)
    shards, empty = Shards.of(np.split(np.arange(12), np.cumsum(SIZES)[:-1])), Shards.empty(3)
    store = DeviceData(dataset, torch.device("cpu"))
    return [ClientData(dataset, Partition(shards, empty, empty, empty), client, store) for client in range(3)]


def batch_at(batches: StackBatches, step: int) -> Batch | tuple[Batch, ...]:
    """The batch of a step, or a tuple of batches if a step takes several."""
    return batches.batch_of(batches.numbers(step))


def orders(data: list[ClientData], **given) -> list[Order]:
    return [one.order("train", generator=generator(0, 0, one.client), **given) for one in data]


def looped(data: list[ClientData], **given) -> list[list[Batch]]:
    made = [list(one.batches("train", generator=generator(0, 0, one.client), **given)) for one in data]
    return [[batch for batch in batches if isinstance(batch, Batch)] for batches in made]


def test_every_row_has_its_client_s_batches_and_padding_weighs_nothing():
    data = clients(shape=(3, 8, 8), augment=True)
    given = {"epochs": 2, "batch_size": 2}
    batches, wanted = (
        StackBatches(data[0].store, "train", orders(data, **given), width=3, size=2),
        looped(data, **given),
    )
    # Five examples are 3 batches an epoch, three and four are 2.
    assert (batches.num_steps, [len(one) for one in wanted]) == (6, [6, 4, 4])
    for step in range(6):
        batch, active = batch_at(batches, step), batches.active(step)
        assert isinstance(batch, Batch) and batch.weights is not None
        assert (batch.inputs.shape, batch.labels.shape, batch.weights.shape) == ((3, 2, 3, 8, 8), (3, 2), (3, 2))
        assert (active is None) == (step < 4)
        for row, own in enumerate(wanted):
            taken, count = own[min(step, len(own) - 1)], len(own[min(step, len(own) - 1)].labels)
            assert torch.equal(batch.inputs[row, :count], taken.inputs)
            assert batch.labels[row, :count].tolist() == taken.labels.tolist()
            assert batch.weights[row].tolist() == [1.0] * count + [0.0] * (2 - count)
            assert batch.inputs[row].isfinite().all()
            assert active is None or active[row].item() == (step < len(own))


def test_missing_clients_are_the_first_one_again():
    data = clients()
    batches = StackBatches(data[0].store, "train", orders(data[:2], epochs=1, batch_size=2), width=4, size=2)
    for step in range(batches.num_steps):
        batch, active = batch_at(batches, step), batches.active(step)
        assert isinstance(batch, Batch)
        for row in (2, 3):
            assert torch.equal(batch.inputs[row], batch.inputs[0]) and torch.equal(batch.labels[row], batch.labels[0])
            assert active is None or active[row] == active[0]


def test_full_batches_have_weights_where_they_are_unequal():
    data = clients()
    given = {"steps": 2, "batch_size": None}
    unequal = batch_at(StackBatches(data[0].store, "train", orders(data, **given), width=3), 1)
    equal = batch_at(StackBatches(data[0].store, "train", orders(data[:1], **given), width=2), 1)
    assert isinstance(unequal, Batch) and isinstance(equal, Batch) and unequal.weights is not None
    assert unequal.weights.sum(dim=1).tolist() == list(SIZES)
    assert equal.weights is None and equal.inputs.shape == (2, 5, 1, 1, 2)


def test_a_step_of_several_batches_is_a_tuple():
    data = clients()
    given = {"epochs": 1, "batch_size": 2, "batches_per_step": 2}
    batches = StackBatches(data[0].store, "train", orders(data, **given), width=3, size=2, batches_per_step=2)
    wanted = [list(one.batches("train", generator=generator(0, 0, one.client), **given)) for one in data]
    assert batches.num_steps == max(map(len, wanted)) == 2
    for step in range(2):
        parts = batch_at(batches, step)
        assert not isinstance(parts, Batch) and len(parts) == 2
        for row, own in enumerate(wanted):
            last = own[min(step, len(own) - 1)]
            assert not isinstance(last, Batch)
            for part, taken in zip(parts, last, strict=True):
                assert torch.equal(part.inputs[row, : len(taken.labels)], taken.inputs)


@pytest.mark.parametrize("shape", [(1, 3, 3), (3, 5, 7)])
def test_inputs_own_their_memory_and_weights_are_aligned(shape: tuple[int, ...]):
    data = clients(shape)
    batches = StackBatches(data[0].store, "train", orders(data, epochs=1, batch_size=2), width=3, size=2)
    for step in range(batches.num_steps):
        batch = batch_at(batches, step)
        assert isinstance(batch, Batch) and batch.weights is not None
        assert batch.inputs.untyped_storage().nbytes() == 4 * batch.inputs.numel()
        assert batch.weights.data_ptr() % (4 * ALIGNED) == 0


def test_a_split_that_is_too_large_stays_in_main_memory_and_gives_the_same():
    examples = clients()[0].dataset.train
    size = examples.inputs.nbytes + examples.labels.nbytes
    cpu, rows = torch.device("cpu"), np.array([7, 0, 7])
    found = {}
    for most in (size, size - 1):
        held = DeviceExamples(examples, torch.device("meta") if most < size else cpu, most)
        found[most] = held
    assert (found[size].home, found[size - 1].home) == (cpu, cpu)
    assert (found[size].device, found[size - 1].device) == (cpu, torch.device("meta"))
    inputs, labels = found[size].take(found[size].order(rows))
    assert inputs[:, 0, 0, 0].tolist() == [7, 0, 7] and labels.tolist() == [1, 0, 1]


@pytest.mark.parametrize("resident", [True, False])
def test_batches_of_a_gpu_are_those_of_main_memory_and_their_steps_wait_for_nothing(
    resident: bool,
):
    """Raw examples lie there once, or come with each step from pinned memory where they are too large."""
    data, given = clients(shape=(3, 8, 8), augment=True), {"epochs": 2, "batch_size": 2}
    wanted = StackBatches(data[0].store, "train", orders(data, **given), width=4, size=2)
    with PretendedGpu() as gpu:
        # A part of the GPU in which nothing fits.
        torch.cuda.set_per_process_memory_fraction(1.0 if resident else 4 / MEMORY)
        store = DeviceData(data[0].dataset, GPU)
        batches = StackBatches(store, "train", orders(data, **given), width=4, size=2)
        # The constants of the normalisation travel with a process's first batch.
        batch_at(batches, 0)
        before = len(gpu.uploads)
        kept = [(batch_at(batches, step), batches.active(step)) for step in range(batches.num_steps)]
        assert len(gpu.uploads) - before == (0 if resident else 2 * batches.num_steps)
        assert gpu.downloads == []
        for step, (batch, active) in enumerate(kept):
            plain, plainly = batch_at(wanted, step), wanted.active(step)
            assert isinstance(batch, Batch) and isinstance(plain, Batch)
            for one, other in ((batch.inputs, plain.inputs), (batch.labels, plain.labels)):
                assert one.device == GPU and torch.equal(one.cpu(), other)
            assert batch.weights is not None and plain.weights is not None
            assert torch.equal(batch.weights.cpu(), plain.weights)
            assert (active is None) == (plainly is None)
            assert active is None or plainly is None or torch.equal(active.cpu(), plainly)


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_gpu_holds_what_fits_into_the_share_of_its_memory(device: str):
    data = clients()[0].dataset
    size = data.train.inputs.nbytes + data.train.labels.nbytes
    for fits in (True, False):
        with PretendedGpu():
            torch.cuda.set_per_process_memory_fraction((size if fits else size - 4) / (RESIDENT_SHARE * MEMORY))
            assert DeviceData(data, torch.device(device)).train.home.type == ("cuda" if fits else "cpu")


def test_a_process_holds_the_samples_once_and_sends_them_to_nobody():
    data = clients()
    assert data[0].store.split("train") is data[1].store.split("heldout") is data[0].store.train
    assert data[0].store.split("test") is data[0].store.test
    held = data[0].store.split("train")
    assert held.inputs.data_ptr() == data[0].dataset.train.inputs.ctypes.data, "on a CPU nothing is copied"

import numpy as np
import pytest
import torch

from rayfl.data.batches import Batch, ClientData
from rayfl.data.partitions.plain import Iid
from rayfl.data.sources.cifar import CIFAR10, CIFAR100
from rayfl.data.torchvision import torchvision
from rayfl.determinism.seeding import generator
from tests.data.files import write_cifar
from tests.refusals import refused


@pytest.mark.parametrize(("source", "num_train", "num_classes"), [(CIFAR10, 10, 10), (CIFAR100, 2, 100)])
def test_the_published_files_in_a_root(tmp_path, monkeypatch, source, num_train, num_classes):
    write_cifar(tmp_path, monkeypatch, source.kind)
    dataset = source(root=tmp_path).load()
    assert (dataset.train.inputs.dtype, dataset.train.inputs.shape) == (np.uint8, (num_train, 3, 32, 32))
    assert dataset.train.inputs[:, 0, 0, 0].tolist() == list(range(num_train))
    # Red, green and blue stay apart, and rows stay rows.
    assert dataset.test.inputs[1, :, 0, 5].tolist() == [101, 200, 201]
    assert (dataset.test.inputs[1, :, 1:] == 101).all()
    assert (dataset.train.labels.dtype, dataset.test.labels.tolist()) == (np.int64, [0, 1])
    assert (dataset.name, dataset.num_classes, dataset.kind) == (source.name, num_classes, "image")


def test_batches_are_normalised_by_channel(tmp_path, monkeypatch):
    write_cifar(tmp_path, monkeypatch, "CIFAR10")
    dataset = CIFAR10(root=tmp_path).load()
    pixel = dataset.prepare(dataset.test.inputs[1:])[0, :, 0, 5]
    expected = [(101 / 255 - 0.4914) / 0.2470, (200 / 255 - 0.4822) / 0.2435, (201 / 255 - 0.4465) / 0.2616]
    torch.testing.assert_close(pixel, torch.tensor(expected))


def test_train_batches_are_cropped_and_flipped_by_the_clients_generator_unless_told_otherwise(tmp_path, monkeypatch):
    write_cifar(tmp_path, monkeypatch, "CIFAR10")

    def batch(augment: bool, seed: int) -> torch.Tensor:
        dataset = CIFAR10(root=tmp_path, augment=augment).load()
        data = ClientData(dataset, Iid().split(dataset, 1, generator(0)), 0)
        # The full batch comes in order, so the generator draws nothing but crops and flips.
        batch = next(iter(data.batches("train", steps=1, generator=np.random.default_rng(seed))))
        assert isinstance(batch, Batch)
        return batch.inputs

    assert torch.equal(batch(True, 3), batch(True, 3))
    assert not torch.equal(batch(True, 3), batch(True, 4))
    assert torch.equal(batch(False, 3), batch(False, 4))


def test_a_changed_file_is_not_opened(tmp_path, monkeypatch):
    write_cifar(tmp_path, monkeypatch, "CIFAR10")
    path = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    path.write_bytes(path.read_bytes() + b"!")
    monkeypatch.setattr("pickle.load", lambda *_, **__: pytest.fail("opened a pickle of unknown origin"))
    with refused(names=["cifar10", "cifar-10-batches-py", "published"]):
        CIFAR10(root=tmp_path).load()


def test_a_root_without_them_is_told_what_to_fetch(tmp_path):
    with refused(names=["cifar100", "folder", "cifar-100-python", "data.root"]):
        CIFAR100(root=tmp_path).load()


def test_an_impossible_download_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision().datasets.CIFAR10, "url", (tmp_path / "nowhere.tar.gz").as_uri())
    with refused(names=["cifar10", "downloaded", "data.root"]) as error:
        CIFAR10(cache=tmp_path / "cache").load()
    assert "\n" not in str(error.value)

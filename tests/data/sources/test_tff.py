"""Federated EMNIST and Shakespeare from the HDF5 files of TensorFlow Federated."""

import sys

import numpy as np
import pytest

from rayfl.data.partitions.plain import Natural
from rayfl.data.sources.tff import (
    BEGIN,
    CHARACTERS,
    END,
    NUM_TOKENS,
    PAD,
    FedCIFAR100,
    FederatedEMNIST,
    Shakespeare,
    read_tff,
    tokens,
    windows,
)
from rayfl.determinism.seeding import generator
from tests.data.files import write_tff as write
from tests.refusals import refused


def images(*greys: float) -> np.ndarray:
    return np.array(greys, np.float32)[:, None, None].repeat(28, 1).repeat(28, 2) / np.float32(255)


def test_clients_come_in_the_order_of_their_names_with_the_features_asked_for(tmp_path):
    write(tmp_path / "a.h5", {"b": {"x": [1], "y": [2], "id": "?"}, "a": {"x": [3], "y": [4]}})
    found = [(name, [values.tolist() for values in arrays]) for name, arrays in read_tff(tmp_path / "a.h5", "y", "x")]
    assert found == [("a", [[4], [3]]), ("b", [[2], [1]])]


def test_each_writer_is_a_client(tmp_path):
    train = {"f1": {"pixels": images(51, 102), "label": np.array([0, 61], np.int32)}}
    train["f0"] = {"pixels": images(255), "label": np.array([9], np.int32)}
    test = {name: {"pixels": images(7), "label": np.array([10], np.int32)} for name in ("f0", "f1")}
    write(tmp_path / "fed_emnist_train.h5", train)
    write(tmp_path / "fed_emnist_test.h5", test)
    dataset = FederatedEMNIST(root=tmp_path, cache=tmp_path / "cache").load()
    partition = Natural(min_samples=1).split(dataset, 2, generator(0))
    assert dataset.train.labels[partition.train[1]].tolist() == [0, 61]
    assert dataset.train.inputs[partition.train[1], 0, 3, 3].tolist() == [51, 102]
    assert dataset.test.inputs[:, 0, 0, 0].tolist() == [7, 7]


def test_each_role_is_a_client(tmp_path):
    write(
        tmp_path / "shakespeare_train.h5",
        {"ROMEO": {"snippets": [b"But soft!", b"Ay\nme"]}, "NURSE": {"snippets": [b"I"]}},
    )
    write(tmp_path / "shakespeare_test.h5", {"ROMEO": {"snippets": [b"O"]}, "NURSE": {"snippets": [b"He"]}})
    dataset = Shakespeare(root=tmp_path, cache=tmp_path / "cache").load()
    partition = Natural().split(dataset, 2, generator(0))
    # One label a character and one for the end of each snippet.
    assert partition.train.sizes.tolist() == [2, 10 + 6]
    assert dataset.train.labels[partition.train[1]].tolist() == [*tokens("But soft!"), END, *tokens("Ay\nme"), END]
    assert partition.test.sizes.tolist() == [3, 2]


def test_a_file_without_the_features_is_named(tmp_path):
    for split in ("train", "test"):
        write(tmp_path / f"shakespeare_{split}.h5", {"ROMEO": {"lines": [b"O"]}})
    with refused(names=["shakespeare_train.h5", "HDF5", "examples/CLIENT/snippets"]):
        Shakespeare(root=tmp_path, cache=tmp_path / "cache").load()
    (tmp_path / "shakespeare_train.h5").write_bytes(b"not HDF5")
    with refused(names=["shakespeare_train.h5", "HDF5"]):
        Shakespeare(root=tmp_path, cache=tmp_path / "cache").load()


@pytest.mark.parametrize(
    ("spoil", "facts"),
    [
        (lambda h5py, file: h5py.ExternalLink("secret.h5", "/examples"), ["/examples", "link"]),
        (lambda h5py, file: h5py.SoftLink("/elsewhere"), ["/examples", "link"]),
    ],
    ids=["external", "soft"],
)
def test_examples_that_are_a_link_are_refused(tmp_path, spoil, facts):
    h5py = pytest.importorskip("h5py")
    write(tmp_path / "secret.h5", {"w": {"x": [7]}})
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["examples"] = spoil(h5py, file)
    with refused(names=["a.h5", *facts]):
        list(read_tff(tmp_path / "a.h5", "x"))


def _external_storage(h5py, group, secret):
    group.create_dataset("x", (4,), np.uint8, external=[(str(secret.with_suffix(".txt")), 0, h5py.h5f.UNLIMITED)])


def _virtual(h5py, group, secret):
    layout = h5py.VirtualLayout((1,), np.int64)
    layout[:] = h5py.VirtualSource(str(secret), "examples/w/x", (1,))
    group.create_virtual_dataset("x", layout)


def _soft_over_external(h5py, group, secret):
    group.file["door"] = h5py.ExternalLink(str(secret), "/examples")
    group["x"] = h5py.SoftLink("/door/w/x")


def _link(kind, *to):
    def put(h5py, group, secret):
        group["x"] = getattr(h5py, kind)(*(str(secret) if one is None else one for one in to))

    return put


def _group(h5py, group, secret):
    group.create_group("x")


@pytest.mark.parametrize(
    ("put", "facts"),
    [
        (_external_storage, ["other files"]),
        (_virtual, ["other files"]),
        (_soft_over_external, ["link"]),
        (_link("ExternalLink", None, "/examples/w/x"), ["link"]),
        (_link("ExternalLink", "/dev/zero", "/"), ["link"]),
        (_link("SoftLink", "/examples"), ["link"]),
        (_link("SoftLink", "/nowhere"), ["link"]),
        (_group, ["group", "dataset"]),
    ],
    ids=["storage", "virtual", "soft over external", "external", "device", "to a group", "dangling", "group"],
)
@pytest.mark.parametrize("deeper", [False, True], ids=["feature", "client"])
def test_what_lies_in_other_files_or_is_no_dataset_is_refused(tmp_path, put, facts, deeper):
    h5py = pytest.importorskip("h5py")
    secret = tmp_path / "secret.h5"
    write(secret, {"w": {"x": [7]}})
    secret.with_suffix(".txt").write_bytes(b"mine")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = file.create_group("examples") if deeper else file.create_group("examples/c")
        put(h5py, group, secret)
    if deeper and put is _group:
        facts = ["examples/CLIENT/x"]
    elif deeper and facts == ["other files"]:
        facts = ["dataset", "group"]
    with refused(names=["a.h5", "/examples/x" if deeper and facts[0] == "link" else "examples/", *facts]):
        list(read_tff(tmp_path / "a.h5", "x"))


def test_without_h5py_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    for split in ("train", "test"):
        (tmp_path / f"fed_emnist_{split}.h5").touch()
    with refused(names=["h5py", "pip install 'rayfl[tff]'"]):
        FederatedEMNIST(root=tmp_path, cache=tmp_path / "cache").load()


def test_windows_end_before_their_label():
    inputs, labels = windows("ab")
    a, b = tokens("ab")
    assert inputs.shape == (3, 80) and (inputs[:, :77] == PAD).all()
    assert inputs[:, 77:].tolist() == [[PAD, PAD, BEGIN], [PAD, BEGIN, a], [BEGIN, a, b]]
    assert labels.tolist() == [a, b, END]
    text = "x" * 79 + "yz"
    inputs, labels = windows(text)
    # The last label is the end, after the last 80 characters.
    assert inputs[-1].tolist() == tokens(text[1:]).tolist() and inputs[80].tolist() == tokens(text[:80]).tolist()


def colours(*reds: int) -> np.ndarray:
    images = np.zeros((len(reds), 32, 32, 3), np.uint8)
    images[..., 0] = np.array(reds)[:, None, None]
    images[:, 5, 7, 2] = 9
    return images


def test_fed_cifar100_has_clients_to_train_and_others_to_test(tmp_path):
    train = {"1": {"image": colours(3, 4), "label": np.array([0, 99])}, "0": {"image": colours(5), "label": [7]}}
    write(tmp_path / "fed_cifar100_train.h5", train)
    write(tmp_path / "fed_cifar100_test.h5", {"0": {"image": colours(6, 8), "label": np.array([1, 2])}})
    dataset = FedCIFAR100(root=tmp_path, cache=tmp_path / "cache").load()
    partition = Natural(min_samples=1).split(dataset, 2, generator(0))
    assert (dataset.input_shape, dataset.num_classes) == ((3, 32, 32), 100)
    assert dataset.train.labels[partition.train[1]].tolist() == [0, 99]
    # Channels first: the reds, and the one blue pixel at row 5, column 7.
    assert dataset.train.inputs[partition.train[1], 0, 0, 0].tolist() == [3, 4]
    assert np.argwhere(dataset.train.inputs[0, 2] == 9).tolist() == [[5, 7]]
    # Test client "0" is not train client "0".
    assert dataset.test.labels.tolist() == [1, 2] and partition.test.sizes.tolist() == [0, 0]


def test_fed_cifar100_of_other_files_gets_a_sentence(tmp_path):
    with refused(names=["fed-cifar100", "fed_cifar100_train.h5", "fed_cifar100.tar.bz2"]):
        FedCIFAR100(root=tmp_path).load()
    write(tmp_path / "fed_cifar100_train.h5", {"0": {"image": colours(1)[:, :8], "label": [0]}})
    write(tmp_path / "fed_cifar100_test.h5", {"0": {"image": colours(1), "label": [0]}})
    with refused(names=["client '0'", "uint8", "[1, 8, 32, 3]"]):
        FedCIFAR100(root=tmp_path, cache=tmp_path / "cache").load()


@pytest.mark.parametrize(
    ("pixels", "labels", "names"),
    [
        (np.ones((1, 783), np.float32), [0], ["(1, 783)", "[n, 28, 28]"]),
        (images(256), [0], ["grey values", "[0, 1]", "row 0"]),
        (images(1), [62], ["label 62", "row 0", "0 to 61"]),
        (images(1, 1), [3, 3.5], ["label 3.5", "row 1", "whole numbers"]),
        (images(1, np.nan), [3, 3], ["grey values", "[0, 1]", "row 1"]),
    ],
)
def test_what_is_no_image_of_a_character_is_refused(tmp_path, pixels, labels, names):
    for split in ("train", "test"):
        write(tmp_path / f"fed_emnist_{split}.h5", {"w": {"pixels": pixels, "label": labels}})
    with refused(names=["fed_emnist_train.h5", "writer 'w'", *names]):
        FederatedEMNIST(root=tmp_path, cache=tmp_path / "cache").load()


def test_every_grey_value_is_found_again(tmp_path):
    ramp = np.zeros((1, 784))
    ramp[0, :256] = np.arange(256) / 255
    for split in ("train", "test"):
        write(tmp_path / f"fed_emnist_{split}.h5", {"w": {"pixels": ramp, "label": [0]}})
    found = FederatedEMNIST(root=tmp_path, cache=tmp_path / "cache").load().train.inputs
    assert found.ravel()[:256].tolist() == list(range(256))


def test_the_86_characters_have_tokens_of_their_own():
    assert (len(CHARACTERS), NUM_TOKENS) == (86, 90)
    assert tokens(CHARACTERS).tolist() == list(range(1, 87))
    assert tokens("~>}`\0\x7f\x80\u00e9\u20ac\U0001d11e").tolist() == [87] * 10


def test_a_split_without_samples_is_refused(tmp_path):
    write(tmp_path / "shakespeare_train.h5", {"ROMEO": {"snippets": [b"O"]}})
    write(tmp_path / "shakespeare_test.h5", {})
    with refused(names=["shakespeare", "no clients"]):
        Shakespeare(root=tmp_path, cache=tmp_path / "cache").load()


@pytest.mark.parametrize("source", [FederatedEMNIST, Shakespeare])
def test_what_to_fetch_and_where_to_put_it_is_said(tmp_path, source):
    with refused(names=["tff-datasets-public", f"{tmp_path}/{source.name}"]):
        source(cache=tmp_path).load()

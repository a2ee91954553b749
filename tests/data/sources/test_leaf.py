"""Federated EMNIST and Shakespeare from LEAF's JSON files."""

import numpy as np
import pytest

from rayfl.data.partitions.natural import Natural
from rayfl.data.sources.femnist import FederatedEMNIST
from rayfl.data.sources.shakespeare import CHARACTERS, NUM_TOKENS, Shakespeare, tokens
from rayfl.determinism.seeding import generator
from tests.data.files import role, write_leaf
from tests.refusals import refused

TEXT = "\n".join(f"{number}. Two households, both alike in dignity!" for number in range(6))


def grey(value: int) -> list[float]:
    return [value / 255] * 784


def write_writers(folder):
    write_leaf(folder, "train", "a_0.json", {"f1": ([grey(51), grey(102)], [0, 61])})
    write_leaf(folder, "train", "a_1.json", {"f0": ([grey(255)] * 3, [9, 10, 36])})
    write_leaf(folder, "test", "a_0.json", {"f0": ([grey(7)], [11]), "f1": ([grey(8)], [12])})


def test_each_writer_is_a_client_with_the_train_and_test_images_of_the_files(tmp_path):
    write_writers(tmp_path)
    dataset = FederatedEMNIST(root=tmp_path, cache=tmp_path / "cache").load()
    assert (dataset.train.inputs.dtype, dataset.train.inputs.shape) == (np.uint8, (5, 1, 28, 28))
    assert (dataset.num_classes, dataset.train.labels.dtype) == (62, np.int64)
    partition = Natural().split(dataset, 2, generator(0))
    labels = [dataset.train.labels[partition.train[client]].tolist() for client in range(2)]
    # Writers in the order of their names, though f1 comes first in the files.
    assert labels == [[9, 10, 36], [0, 61]]
    assert dataset.train.inputs[partition.train[1], 0, 4, 4].tolist() == [51, 102]
    assert dataset.test.inputs[partition.test[0], 0, 4, 4].tolist() == [7]
    assert dataset.test.labels[partition.test[1]].tolist() == [12]


def test_every_grey_value_of_leaf_is_found_again(tmp_path):
    ramp = [value / 255 for value in range(256)] + [0.0] * (784 - 256)
    write_leaf(tmp_path, "train", "a.json", {"w": ([ramp], [0])})
    write_leaf(tmp_path, "test", "a.json", {"w": ([ramp], [0])})
    assert FederatedEMNIST(root=tmp_path, cache=tmp_path / "cache").load().train.inputs.ravel()[:256].tolist() == list(
        range(256)
    )


@pytest.mark.parametrize(
    ("x", "y", "names"),
    [
        ([grey(1)[1:]], [0], ["(1, 783)", "[n, 28, 28]"]),
        ([grey(256)], [0], ["grey values", "[0, 1]", "row 0"]),
        ([grey(1)], [62], ["label 62.0", "row 0", "0 to 61"]),
        ([grey(1), grey(1)], [3, 3.5], ["label 3.5", "row 1", "whole numbers"]),
        ([grey(1), [float("nan")] * 784], [3, 3], ["grey values", "[0, 1]", "row 1"]),
        ([[10**400] * 784], [0], ["images", "no numbers"]),
        ([["ink"] * 784], [0], ["images", "no numbers"]),
    ],
)
def test_what_is_no_image_of_a_character_is_refused(tmp_path, x, y, names):
    write_leaf(tmp_path, "train", "a.json", {"w": (x, y)})
    write_leaf(tmp_path, "test", "a.json", {"w": ([grey(1)], [0])})
    with refused(names=["a.json", "writer 'w'", *names]):
        FederatedEMNIST(root=tmp_path, cache=tmp_path / "cache").load()


def test_a_file_that_is_not_leafs_is_named(tmp_path):
    write_writers(tmp_path)
    path = tmp_path / "train" / "a_1.json"
    path.write_text('{"users": ["f0"], "num_samples": [3]}')
    with refused(names=["a_1.json", "JSON", "LEAF", "user_data"]):
        FederatedEMNIST(root=tmp_path, cache=tmp_path / "cache").load()
    path.write_text(path.read_text()[:20])
    with refused(names=["a_1.json", "JSON", "LEAF", "line 1"]):
        FederatedEMNIST(root=tmp_path, cache=tmp_path / "cache").load()
    path.write_text('{"users": ["f0"], "num_samples": [3], "user_data": {"f0": {"x": [1], "y": [1]}}}')
    with refused(names=["a_1.json", "'f0'", "1 x and 1 y", "num_samples says 3"]):
        FederatedEMNIST(root=tmp_path, cache=tmp_path / "cache").load()


def test_the_86_characters_have_tokens_of_their_own():
    assert (len(CHARACTERS), NUM_TOKENS) == (86, 90)
    assert tokens(CHARACTERS).tolist() == list(range(1, 87))
    assert tokens("~>}`\0\x7f\x80é€𝄞").tolist() == [87] * 10


def test_each_role_is_a_client_whose_samples_are_80_characters_and_the_next(tmp_path):
    write_leaf(tmp_path, "train", "a.json", {"PLAY_ROMEO": role(TEXT), "PLAY_JULIET": role(TEXT[:90])})
    write_leaf(tmp_path, "test", "a.json", {"PLAY_ROMEO": role(TEXT[7:100]), "PLAY_JULIET": ([], [])})
    dataset = Shakespeare(root=tmp_path, cache=tmp_path / "cache").load()
    assert (dataset.kind, dataset.input_shape, dataset.num_classes) == ("text", (80,), 90)
    partition = Natural().split(dataset, 2, generator(0))
    assert partition.train.sizes.tolist() == [10, len(TEXT) - 80]
    assert partition.test.sizes.tolist() == [0, 13]
    romeo = partition.train[1]
    assert np.array_equal(dataset.train.inputs[romeo[5]], tokens(TEXT[5:85]))
    assert dataset.train.labels[romeo].tolist() == tokens(TEXT[80:]).tolist()
    assert np.array_equal(dataset.test.inputs[0], tokens(TEXT[7:87]))
    assert {dataset.train.inputs.dtype, dataset.train.labels.dtype} == {np.dtype(np.int64)}


@pytest.mark.parametrize(("x", "y"), [(["short"], ["a"]), (["a" * 80], ["ab"]), ([80], ["a"])])
def test_samples_of_another_length_are_refused(tmp_path, x, y):
    write_leaf(tmp_path, "train", "a.json", {"PLAY_ROMEO": (x, y)})
    write_leaf(tmp_path, "test", "a.json", {"PLAY_ROMEO": role(TEXT)})
    with refused(names=["a.json", "PLAY_ROMEO", "80 characters"]):
        Shakespeare(root=tmp_path, cache=tmp_path / "cache").load()


def test_a_split_without_samples_is_refused(tmp_path):
    write_leaf(tmp_path, "train", "a.json", {"PLAY_ROMEO": role(TEXT)})
    write_leaf(tmp_path, "test", "a.json", {"PLAY_ROMEO": ([], [])})
    with refused(names=["shakespeare", "no test samples"]):
        Shakespeare(root=tmp_path, cache=tmp_path / "cache").load()


@pytest.mark.parametrize("source", [FederatedEMNIST, Shakespeare])
def test_what_to_fetch_and_where_to_put_it_is_said(tmp_path, source):
    with refused(names=["LEAF", f"{tmp_path}/{source.name}"]):
        source(cache=tmp_path).load()
    with refused(names=["train/*.json", ".h5", "preprocess"]):
        source(root=tmp_path, cache=tmp_path / "cache").load()

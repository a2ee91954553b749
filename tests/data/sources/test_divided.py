"""Data that are already divided: LEAF's JSON, PFLlib's .npz files, and pickles that are read without being run."""

import collections
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayfl.choices.kinds import make
from rayfl.data.datasets import Dataset, Source
from rayfl.data.loading import checked_dataset
from rayfl.data.sources.pickled_data import values_of
from rayfl.data.sources.tff import tokens
from tests.data.files import write_image
from tests.refusals import refused

SENTENCE = "to be or not to be " * 6


def load(name: str, path: Path, **options: Any) -> Dataset:
    return checked_dataset(make(Source, {"name": name, "path": str(path), **options}).load())


def write_leaf(folder: Path, x: Callable[[int], Any], y: Callable[[int], Any], num_users: int = 3) -> Path:
    """`num_users` users with 4 train examples and 1 test example each, in two files of each split."""
    for split, count in (("train", 4), ("test", 1)):
        (folder / split).mkdir(parents=True)
        for part, users in enumerate((range(1), range(1, num_users))):
            data = {f"f_{user:03d}": {"x": [*map(x, range(count))], "y": [*map(y, range(count))]} for user in users}
            content = {"users": [*data], "num_samples": [count] * len(data), "user_data": data}
            (folder / split / f"all_data_{part}_niid_0_keep_0_{split}_9.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("x", "y", "options", "shape", "kind"),
    [
        (lambda i: [0.5, i, 2.0], lambda i: i % 2, {}, (3,), "vector"),
        (lambda i: [i / 8] * 784, lambda i: i % 2, {"kind": "image"}, (1, 28, 28), "image"),
        (lambda i: SENTENCE[i : i + 80], lambda i: SENTENCE[i + 80], {}, (80,), "text"),
        (lambda i: f"I am {i} happy", lambda i: i % 2, {"vocabulary": 5, "length": 6}, (6,), "text"),
        (lambda i: ["id", f"I am {i} happy"], lambda i: i % 2, {"entry": 1, "vocabulary": 9}, (256,), "text"),
    ],
)
def test_leaf_has_a_client_for_each_user(
    tmp_path: Path, x: Callable, y: Callable, options: dict, shape: tuple, kind: str
):
    dataset = load("leaf", write_leaf(tmp_path / "leaf", x, y), **options)
    assert (dataset.input_shape, dataset.kind) == (shape, kind)
    for examples, count in ((dataset.train, 4), (dataset.test, 1)):
        assert examples.groups is not None and np.bincount(examples.groups).tolist() == [count] * 3
    if shape == (80,):
        np.testing.assert_array_equal(dataset.train.inputs[1], tokens(SENTENCE[1:81]))
        assert dataset.train.labels[1] == tokens(SENTENCE[81])[0] and dataset.num_classes == 90
    if kind == "image":
        assert dataset.train.inputs[2].max() == round(255 * 2 / 8)


def test_leaf_names_images_in_a_folder(tmp_path: Path):
    for number in range(4):
        write_image(tmp_path / "faces" / f"{number}.png", np.full((5, 6, 3), 60 * number + 40, np.uint8))
    home = write_leaf(tmp_path / "leaf", lambda i: f"{i}.png", lambda i: i % 2)
    dataset = load("leaf", home, image_folder=str(tmp_path / "faces"), channels=1)
    assert dataset.train.inputs[:4, 0, 0, 0].tolist() == [40, 100, 160, 220] and dataset.input_shape == (1, 5, 6)
    one_file = next((home / "train").iterdir())
    assert len(load("leaf", one_file, image_folder=str(tmp_path / "faces"), test_share=0.25).test) >= 1


@pytest.mark.parametrize(
    ("content", "options", "names"),
    [
        ({"users": ["a"]}, {}, ["a.json", "user_data"]),
        ({"user_data": {"a": {"x": [1]}}}, {}, ["'a'", "x and y"]),
        ({"user_data": {"a": {"x": [1], "y": [0, 1]}}}, {}, ["'a'", "1 x", "2 y"]),
        ({"user_data": {"a": {"x": [[1], [2, 3]], "y": [0, 1]}}}, {}, ["a.json has x", "one shape"]),
        ({"user_data": {"a": {"x": [[2], [3]], "y": [0, 1]}}}, {"kind": "image"}, ["2 to 3", "data.kind='vector'"]),
        ({"user_data": {"a": {"x": [["t"], ["u"]], "y": [0, 1]}}}, {"kind": "words"}, ["['t']", "data.entry"]),
        ({"user_data": {"a": {"x": ["t", "uv"], "y": ["a", "b"]}}}, {}, ["one length", "data.kind"]),
        ({"user_data": {"a": {"x": [[1]], "y": [0]}}}, {"side": 3}, ["side=3", "image_folder"]),
        ({"user_data": {"a": {"x": [[1]], "y": [0]}}}, {"kind": "vector", "length": 3}, ["length=3", "words"]),
        ({"user_data": {}}, {}, ["no examples", "LEAF"]),
    ],
)
def test_what_is_not_leaf(tmp_path: Path, content: dict, options: dict, names: list[str]):
    (tmp_path / "a.json").write_text(json.dumps(content))
    with refused(names=names):
        load("leaf", tmp_path / "a.json", **options)


@pytest.mark.parametrize("form", ["pickled", "plain", "one split"])
def test_a_file_per_client(tmp_path: Path, form: str):
    folder = tmp_path / "MNIST"
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
        for client in (0, 1, 2, 10):
            arrays: dict[str, Any] = {"x": np.full((4, 1, 3, 3), client, np.float32), "y": np.arange(4) % 2}
            with open(folder / split / f"{client}.npz", "wb") as file:
                if form == "pickled":
                    np.savez_compressed(file, data=np.array(arrays, object))
                else:
                    np.savez_compressed(file, x=arrays["x"], y=arrays["y"])
    (folder / "config.json").write_text("{}")
    with refused(names=["train and test", "data.path", str(folder)]):
        load("client-files", tmp_path)
    dataset = load("client-files", folder / "train" if form == "one split" else folder)
    assert dataset.input_shape == (1, 3, 3) and dataset.train.groups is not None
    assert np.unique(np.stack([dataset.train.groups, dataset.train.inputs[:, 0, 0, 0]]), axis=1).T.tolist() == [
        [0, 0],
        [1, 1],
        [2, 2],
        [3, 10],
    ]


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("evil"),)


@pytest.mark.parametrize(
    ("arrays", "names"),
    [
        ({"x": np.zeros((3, 2))}, ["0.npz has 'x'", "labels"]),
        ({"x": np.zeros((3, 2)), "y": np.zeros(2)}, ["0.npz", "3 inputs", "2 labels"]),
        ({"data": {"x": [[1], [2, 3]], "y": [0, 1]}}, ["0.npz", "'x'", "one shape"]),
        ({"data": {"x": Evil(), "y": [0, 1]}}, ["0.npz", "it calls", "numpy.savez"]),
    ],
)
def test_client_files_that_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrays: dict[str, Any], names: list[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clients").mkdir()
    np.savez(tmp_path / "clients" / "0.npz", **arrays)
    with refused(names=names):
        load("client-files", tmp_path / "clients")
    assert not (tmp_path / "evil").exists()
    with refused(names=["nowhere", ".npz"]):
        load("client-files", tmp_path / "nowhere")
    (tmp_path / "clients" / "0.npz").write_bytes(b"no archive")
    with refused(names=["0.npz", "damaged"]):
        load("client-files", tmp_path / "clients")


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_pickle_of_plain_values_is_read_without_being_run(protocol: int):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    value: dict[Any, Any] = {
        "list": [1, 2.5, "a", None, True, 2**70, -3, b"xy", b""],
        "tables": [collections.OrderedDict(a=1), collections.defaultdict(list, {0: [1]}), {}],
        "arrays": [array, np.asfortranarray(array), np.arange(3, dtype=">i2"), np.array(["a", "bc"]), np.empty((0, 3))],
        "scalar": np.float64(3.5),
        3: (1, (2, 3)),
    }
    value["again"] = value["arrays"]
    result = values_of(pickle.dumps(value, protocol=protocol))
    assert result["list"] == value["list"] and result["tables"] == [{"a": 1}, {0: [1]}, {}]
    assert result["scalar"] == 3.5 and result[3] == [1, [2, 3]] and result["again"][0] is result["arrays"][0]
    for actual, expected in zip(result["arrays"], value["arrays"], strict=True):
        np.testing.assert_array_equal(actual, expected)
        assert actual.dtype == expected.dtype


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (pickle.dumps(Evil()), "it calls"),
        (pickle.dumps([Evil()], protocol=2), "it calls"),
        (b"cos\nsystem\n(S'touch evil'\ntR.", "it calls os.system"),
        (pickle.dumps(object()), "NEWOBJ"),
        (pickle.dumps(np.zeros(2, dtype=[("a", int)])), "records"),
        (pickle.dumps([1, 2, 3])[:-4], "exhausted"),
        (b"", "exhausted"),
        (b"\x80\x04.", "not enough"),
    ],
)
def test_other_pickles_are_refused(content: bytes, reason: str):
    with pytest.raises(ValueError, match=reason):
        values_of(content)

"""Data without code: arrays, tables, folders of images and Hugging Face datasets on disk."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import csv, parquet

from rayfl.choices.kinds import make
from rayfl.data.check import checked_dataset
from rayfl.data.datasets import Dataset, Source
from rayfl.data.sources.arrays import Arrays
from rayfl.errors import RayflError
from rayfl.experiment.experiment import Experiment, read
from rayfl.experiment.prepare import prepare

GENERATOR = np.random.default_rng(3)
VECTORS = GENERATOR.standard_normal((20, 3))
LABELS = np.arange(20) % 4


SMALL: dict[str, Any] = {"rounds": 1, "partition": "iid", "clients": {"count": 2}, "model": "mlp", "method": "fedavg"}


def load(name: str, **options: Any) -> Dataset:
    return make(Source, {"name": name, **options}).load()


@pytest.mark.parametrize("form", ["npz", "folder", "memory"])
def test_arrays_with_a_test_split_and_owners(tmp_path: Path, form: str):
    arrays = {"inputs": VECTORS, "labels": LABELS, "owners": np.repeat([7, 3], 10)}
    arrays |= {"test_inputs": VECTORS[:5], "test_labels": LABELS[:5], "test_owners": np.full(5, 3)}
    if form == "memory":
        found = Arrays(**arrays).load()
    elif form == "npz":
        np.savez(tmp_path / "mine.npz", **arrays)
        found = load("arrays", path=str(tmp_path / "mine.npz"))
    else:
        for name, array in arrays.items():
            np.save(tmp_path / f"{name}.npy", array)
        found = load("arrays", path=str(tmp_path))
    assert (found.kind, found.num_classes, found.input_shape, len(found.test)) == ("vector", 4, (3,), 5)
    np.testing.assert_array_equal(found.train.inputs, VECTORS.astype(np.float32))
    assert found.train.groups is not None and found.train.groups.tolist() == [1] * 10 + [0] * 10
    assert found.test.groups is not None and found.test.groups.tolist() == [0] * 5


def test_a_share_is_held_out_and_the_same_every_time():
    one, other = Arrays(VECTORS, LABELS, test_share=0.25).load(), Arrays(VECTORS, LABELS, test_share=0.25).load()
    assert (len(one.train), len(one.test)) == (15, 5)
    np.testing.assert_array_equal(one.test.inputs, other.test.inputs)
    together = np.concatenate([one.train.inputs, one.test.inputs])
    assert sorted(map(tuple, together)) == sorted(map(tuple, VECTORS.astype(np.float32)))


def test_images_tokens_and_names_of_classes():
    images = GENERATOR.integers(0, 256, (10, 4, 5, 3), dtype=np.uint8)
    found = Arrays(images, np.array(["cat", "dog"] * 5)).load()
    assert (found.kind, found.input_shape, found.num_classes, len(found.mean)) == ("image", (3, 4, 5), 2, 3)
    assert found.prepare(found.train.inputs).mean().abs() < 1e-5, "inputs are normalised by the moments of train"
    assert Arrays(images[..., 0], LABELS[:10]).load().input_shape == (1, 4, 5)
    tokens = Arrays(GENERATOR.integers(0, 9, (10, 6)), LABELS[:10]).load()
    assert tokens.kind == "text" and tokens.train.inputs.dtype == np.int64


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"inputs": VECTORS}, "has no labels; it has inputs"),
        ({}, "has no inputs; it has none of inputs, labels"),
        ({"X": VECTORS, "y": LABELS}, "has no inputs; it has X and y, and the names that count are inputs, labels, "),
        ({"inputs": VECTORS, "y": LABELS}, "has no labels; it has inputs and y, and the names that count are"),
        (
            {"inputs": VECTORS, "labels": np.eye(4)[LABELS % 4]},
            r"has train labels of shape \[20, 4\]; give one class number for each of the 20 inputs; these look "
            r"one-hot: give labels.argmax\(1\)",
        ),
        (
            {"inputs": VECTORS, "labels": VECTORS},
            r"has train labels of shape \[20, 3\]; give one class number for each of the 20 inputs$",
        ),
        ({"inputs": VECTORS, "labels": LABELS, "test_inputs": VECTORS}, "has no test_labels; it has inputs"),
        ({"inputs": VECTORS, "labels": LABELS[:7]}, r"has 20 train inputs and labels of shape \[7\]; give one of them"),
        ({"inputs": VECTORS, "labels": LABELS, "owners": LABELS[:7]}, r"has 20 train inputs and owners of shape \[7\]"),
        ({"inputs": VECTORS, "labels": LABELS + 0.5}, "has the train label 0.5 .row 0, counted from 0.; labels are"),
        ({"inputs": VECTORS, "labels": LABELS - 1}, "has the train label -1 .row 0, counted from 0.; labels are whole"),
        (
            {"inputs": np.where(VECTORS[4, 1] == VECTORS, np.nan, VECTORS), "labels": LABELS},
            r".* NaN or infinite \(row 4, counted from 0\)",
        ),
        (
            {"inputs": VECTORS, "labels": np.where(LABELS == 3, np.inf, LABELS)},
            "has the train label inf .row 3, counted",
        ),
        (
            {"inputs": VECTORS, "labels": LABELS + 10**9},
            "has the train label 1000000000 .row 0, counted from 0.; label",
        ),
        (
            {"inputs": VECTORS[:0], "labels": LABELS[:0]},
            r"has train inputs of shape \[0, 3\]; give at least one sample",
        ),
        ({"inputs": LABELS, "labels": LABELS}, r"has train inputs of shape \[20\]; give at least one sample"),
        ({"inputs": VECTORS.astype(str), "labels": LABELS}, "has train inputs of type <U32; give numbers"),
        (
            {"inputs": VECTORS, "labels": LABELS, "test_inputs": VECTORS[:, :2], "test_labels": LABELS},
            r"has train inputs of shape \[3\] and test inputs of shape \[2\]; give both one shape",
        ),
    ],
)
def test_what_is_no_data_is_refused(tmp_path: Path, arrays: dict, sentence: str):
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(RayflError, match=f"mine.npz {sentence}") as caught:
        checked_dataset(load("arrays", path=str(tmp_path / "mine.npz")))
    assert "\n" not in str(caught.value)


def test_a_folder_of_other_names_is_refused_with_the_names_that_it_has(tmp_path: Path):
    np.save(tmp_path / "x.npy", VECTORS)
    with pytest.raises(RayflError, match="has no inputs; it has x, and the names that count are inputs, labels"):
        load("arrays", path=str(tmp_path))


def test_whole_numbers_that_are_no_tokens_are_told_of_the_kind(tmp_path: Path):
    np.savez(tmp_path / "mine.npz", inputs=LABELS.reshape(10, 2) - 2, labels=LABELS[:10])
    with pytest.raises(RayflError, match=r"give data\.kind='vector' for numbers"):
        load("arrays", path=str(tmp_path / "mine.npz"))
    assert load("arrays", path=str(tmp_path / "mine.npz"), kind="vector").kind == "vector"
    tokens = Arrays(LABELS.reshape(10, 2), LABELS[:10])
    with pytest.raises(RayflError, match=r"or give data\.kind='vector' if these are numbers"):
        prepare(Experiment(**{**SMALL, "data": tokens}))


def test_labels_without_class_0_get_a_notice(caplog: pytest.LogCaptureFixture):
    assert Arrays(VECTORS, LABELS % 3 + 1).load().num_classes == 4
    assert Arrays(VECTORS, LABELS % 3 + 1).load().num_classes == 4
    (notice,) = caplog.messages
    assert "has no sample of class 0" in notice and "its least is 1, and models get 4 outputs" in notice
    Arrays(VECTORS, LABELS % 3).load()
    assert len(caplog.messages) == 1


def test_nothing_pickled_is_read(tmp_path: Path):
    np.savez(tmp_path / "mine.npz", inputs=VECTORS, labels=np.array([{}] * 20, dtype=object))
    with pytest.raises(RayflError, match=r"mine.npz cannot be read"):
        load("arrays", path=str(tmp_path / "mine.npz"))
    for path, words in (
        (tmp_path / "min.npz", "is not there; did you mean 'mine.npz'"),
        (tmp_path / "other.txt", "is not there; give data.path an .npz file, or a folder of .npy"),
        (tmp_path / "gone" / "mine.npz", f"is not there, nor is the folder {tmp_path / 'gone'}; give"),
    ):
        with pytest.raises(RayflError, match=words):
            load("arrays", path=str(path))


CSV = "height,width,colour,species,site\n" + "".join(
    f"{i}.5,{i * i},{'red' if i % 3 else 'blue'},{'iris' if i % 2 else 'rose'},{'north' if i < 6 else 'south'}\n"
    for i in range(12)
)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_table(tmp_path: Path, ending: str):
    path = tmp_path / f"flowers.{ending}"
    (tmp_path / "flowers.csv").write_text(CSV)
    if ending == "parquet":
        parquet.write_table(csv.read_csv(tmp_path / "flowers.csv"), path)
    found = load("table", path=str(path), labels="species", owners="site", test_share=0.25, standardise=False)
    assert (found.num_classes, found.input_shape, len(found.train), len(found.test)) == (2, (2,), 9, 3)
    groups = found.train.groups
    assert groups is not None and set(groups.tolist()) == {0, 1}
    heights = found.train.inputs[:, 0] - 0.5
    np.testing.assert_array_equal(found.train.inputs[:, 1], heights**2)
    np.testing.assert_array_equal(found.train.labels, (heights % 2 == 0).astype(int))
    np.testing.assert_array_equal(groups, (heights >= 6).astype(int))
    scaled = load("table", path=str(path), labels="species", features=["width"], test_path=str(path))
    assert len(scaled.train) == len(scaled.test) == 12
    assert abs(scaled.train.inputs.mean()) < 1e-6 and scaled.train.inputs.std() == pytest.approx(1)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"labels": "specis"}, r"flowers.csv has no column 'specis': did you mean 'species'\?"),
        ({"labels": "species", "owners": "zzz"}, "has no column 'zzz': known are: "),
        ({"labels": "species", "features": ["colour"]}, "has 'blue' in column 'colour'; inputs are columns of numbers"),
        ({"labels": "height"}, "has the train label .*; labels are whole numbers from 0, or the names of classes"),
        (
            {"labels": "species", "test_path": "no.csv"},
            r"no.csv \(in .*\) is not there; give data.test_path the path of a",
        ),
        (
            {"labels": "species", "test_path": "no.xls"},
            "data.test_path='no.xls' is not allowed; it must be",
        ),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, options: dict, sentence: str):
    (tmp_path / "flowers.csv").write_text(CSV)
    with pytest.raises(RayflError, match=sentence):
        load("table", path=str(tmp_path / "flowers.csv"), **options)


def test_gaps_are_refused(tmp_path: Path):
    (tmp_path / "gap.csv").write_text("a,label\n1.0,0\n,1\n")
    with pytest.raises(RayflError, match=r"has nothing in column 'a' of row 1 \(counted from 0\); fill it, or drop"):
        load("table", path=str(tmp_path / "gap.csv"))


def pictures(folder: Path, counts: dict[str, int], side: int = 6) -> None:
    image = pytest.importorskip("PIL.Image")
    for number, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            image.fromarray(np.full((side, side, 3), 40 * number + i, np.uint8)).save(folder / name / f"{i}.png")


def test_a_folder_of_images(tmp_path: Path):
    pictures(tmp_path / "one", {"b": 3, "a": 2})
    found = load("image-folder", path=str(tmp_path / "one"), test_share=0.2)
    assert (found.num_classes, found.input_shape, len(found.train), len(found.test)) == (2, (3, 6, 6), 4, 1)
    everything = sorted([*found.train.inputs[:, 0, 0, 0].tolist(), *found.test.inputs[:, 0, 0, 0].tolist()])
    assert everything == [0, 1, 2, 40, 41]
    pictures(tmp_path / "two" / "train", {"a": 2, "b": 1})
    pictures(tmp_path / "two" / "test", {"a": 1}, side=8)
    with pytest.raises(RayflError, match="has train inputs of shape"):
        load("image-folder", path=str(tmp_path / "two"))
    found = load("image-folder", path=str(tmp_path / "two"), side=4, channels=1)
    assert (found.input_shape, found.train.labels.tolist(), found.test.labels.tolist()) == ((1, 4, 4), [0, 0, 1], [0])


def test_what_is_no_folder_of_images_is_refused(tmp_path: Path):
    with pytest.raises(RayflError, match=r"there is no folder .*none; give data.path a folder of class folders"):
        load("image-folder", path=str(tmp_path / "none"))
    with pytest.raises(RayflError, match="has no images in its class folders"):
        load("image-folder", path=str(tmp_path))
    pictures(tmp_path / "x", {"a": 1})
    pictures(tmp_path / "x" / "more", {"b": 1}, side=9)
    with pytest.raises(RayflError, match=r"0.png is 9x9 pixels and others are 6x6; set data.side to scale all"):
        load("image-folder", path=str(tmp_path / "x"))
    (tmp_path / "x" / "a" / "0.png").write_bytes(b"no image")
    with pytest.raises(RayflError, match=r"0.png cannot be read"):
        load("image-folder", path=str(tmp_path / "x"))


def test_a_hugging_face_dataset(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    rows = {"vector": VECTORS.tolist(), "label": LABELS.tolist(), "who": [f"w{i % 2}" for i in range(20)]}
    split = {"train": datasets.Dataset.from_dict(rows), "test": datasets.Dataset.from_dict(rows).select(range(4))}
    datasets.DatasetDict(split).save_to_disk(str(tmp_path / "splits"))
    split["train"].save_to_disk(str(tmp_path / "alone"))
    found = load("huggingface", path=str(tmp_path / "splits"), inputs="vector", owners="who")
    assert (found.num_classes, found.input_shape, len(found.train), len(found.test)) == (4, (3,), 20, 4)
    assert found.train.groups is not None and found.train.groups.tolist() == [0, 1] * 10
    assert len(load("huggingface", path=str(tmp_path / "alone"), inputs="vector").test) == 4
    for options, words in (
        ({"inputs": "vectors"}, r"has no column 'vectors': did you mean 'vector'\?"),
        ({"inputs": "vector", "train": "trian"}, r"has no split 'trian': did you mean 'train'\?"),
    ):
        with pytest.raises(RayflError, match=words):
            load("huggingface", path=str(tmp_path / "splits"), **options)
    with pytest.raises(RayflError, match="is no dataset on disk"):
        load("huggingface", path=str(tmp_path))


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(RayflError, match=r"needs the package datasets: pip install 'rayfl\[huggingface\]'$"):
        load("huggingface", path=str(tmp_path))


def test_paths_are_relative_to_the_experiments_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "flowers.csv").write_text(CSV)
    (tmp_path / "mine" / "own.toml").write_text(
        'rounds = 1\nmodel = "logistic"\nmethod = "fedavg"\npartition = "natural"\nclients = {count = 2}\n'
        'data = {name = "table", path = "flowers.csv", labels = "species", owners = "site"}\n'
    )
    monkeypatch.chdir(tmp_path)
    setup = prepare(read(Path("mine/own.toml")))
    assert setup.dataset.num_classes == 2 and setup.num_clients == 2


def test_arrays_in_memory_are_the_data_of_an_experiment():
    tables: dict[str, Any] = {"rounds": 1, "partition": "iid", "model": "logistic", "method": "fedavg"}
    one = Experiment(**tables, clients={"count": 2}, data=Arrays(VECTORS, LABELS))  # type: ignore[arg-type]
    assert prepare(one).dataset.num_classes == 4
    written = one.as_dict()
    assert written["data"]["name"] == "in memory: data of 20 arrays"
    with pytest.raises(RayflError, match=r"^data: data of 20 arrays was given from Python and cannot be imported"):
        Experiment(**written)

"""Data without code: arrays, tables and folders of images."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import csv, parquet

from rayfl.choices.kinds import make
from rayfl.data.datasets import Dataset, Source
from rayfl.data.loading import checked_dataset
from rayfl.data.sources.arrays import Arrays
from rayfl.experiment.experiment import Experiment, read
from rayfl.experiment.prepare import prepare
from tests.refusals import check_sentence, mentions, refused

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
    ("arrays", "names"),
    [
        ({"inputs": VECTORS}, ["labels", "inputs"]),
        ({}, ["labels", "inputs"]),
        ({"X": VECTORS, "y": LABELS}, ["inputs", "labels"]),
        ({"inputs": VECTORS, "y": LABELS}, ["labels", "inputs", "names"]),
        ({"inputs": VECTORS, "labels": VECTORS.astype(str)}, ["labels", "[20, 3]", "<U32"]),
        ({"inputs": VECTORS, "labels": LABELS, "test_inputs": VECTORS}, ["test_labels", "inputs"]),
        ({"inputs": VECTORS, "labels": LABELS[:7]}, ["20 train inputs", "labels", "[7]"]),
        ({"inputs": VECTORS, "labels": LABELS, "owners": LABELS[:7]}, ["20 train inputs", "owners", "[7]"]),
        ({"inputs": VECTORS, "labels": LABELS + 0.5}, ["0.5", "row 0"]),
        ({"inputs": VECTORS, "labels": LABELS - 1}, ["label -1", "row 0"]),
        (
            {"inputs": np.where(VECTORS[4, 1] == VECTORS, np.nan, VECTORS), "labels": LABELS},
            ["NaN", "row 4"],
        ),
        (
            {"inputs": VECTORS, "labels": np.where(LABELS == 3, np.inf, LABELS)},
            ["row 3"],
        ),
        (
            {"inputs": VECTORS, "labels": LABELS + 10**9},
            ["1000000000", "row 0"],
        ),
        (
            {"inputs": VECTORS[:0], "labels": LABELS[:0]},
            ["[0, 3]", "train", "inputs"],
        ),
        ({"inputs": LABELS, "labels": LABELS}, ["[20]", "train", "inputs"]),
        ({"inputs": VECTORS.astype(str), "labels": LABELS}, ["<U32", "train", "inputs"]),
        (
            {"inputs": VECTORS, "labels": LABELS, "test_inputs": VECTORS[:, :2], "test_labels": LABELS},
            ["[3]", "[2]", "both"],
        ),
    ],
)
def test_what_is_no_data_is_refused(tmp_path: Path, arrays: dict, names: list[str]):
    np.savez(tmp_path / "mine.npz", **arrays)
    with refused(names=["mine.npz", *names]):
        checked_dataset(load("arrays", path=str(tmp_path / "mine.npz")))


def test_a_folder_of_other_names_is_refused_with_the_names_that_it_has(tmp_path: Path):
    np.save(tmp_path / "x.npy", VECTORS)
    with refused(names=["labels", "inputs", "names"]):
        load("arrays", path=str(tmp_path))


def test_whole_numbers_that_are_no_tokens_are_told_of_the_kind(tmp_path: Path):
    np.savez(tmp_path / "mine.npz", inputs=LABELS.reshape(10, 2) - 2, labels=LABELS[:10])
    with refused(names=["data.kind='vector'", "numbers"]):
        load("arrays", path=str(tmp_path / "mine.npz"))
    assert load("arrays", path=str(tmp_path / "mine.npz"), kind="vector").kind == "vector"
    tokens = Arrays(LABELS.reshape(10, 2), LABELS[:10])
    with refused(names=["data.kind='vector'", "numbers"]):
        prepare(Experiment(**{**SMALL, "data": tokens}))


def test_labels_without_class_0_get_a_notice(caplog: pytest.LogCaptureFixture):
    assert Arrays(VECTORS, LABELS % 3 + 1).load().num_classes == 4
    assert Arrays(VECTORS, LABELS % 3 + 1).load().num_classes == 4
    (notice,) = caplog.messages
    check_sentence(notice, ["class 0", "1", "4 outputs"])
    Arrays(VECTORS, LABELS % 3).load()
    assert len(caplog.messages) == 1


def test_nothing_pickled_is_read(tmp_path: Path):
    np.savez(tmp_path / "mine.npz", inputs=VECTORS, labels=np.array([{}] * 20, dtype=object))
    with refused(names=["mine.npz", "Python objects"]):
        load("arrays", path=str(tmp_path / "mine.npz"))
    for path, names in (
        (tmp_path / "min.npz", ["mine.npz"]),
        (tmp_path / "other.txt", ["data.path", ".npz", ".npy"]),
        (tmp_path / "gone" / "mine.npz", [f"folder {tmp_path / 'gone'}"]),
    ):
        with refused(names=[path, *names]):
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
    ("options", "names"),
    [
        ({"labels": "specis"}, ["flowers.csv", "specis", "species"]),
        ({"labels": "species", "owners": "zzz"}, ["zzz", "colour, height, site, species, width"]),
        ({"labels": "species", "features": ["colour"]}, ["flowers.csv", "blue", "column 'colour'", "numbers"]),
        ({"labels": "height"}, ["flowers.csv", "train label 0.5", "row 0"]),
        (
            {"labels": "species", "test_path": "no.csv"},
            ["no.csv", "data.test_path", ".parquet"],
        ),
        (
            {"labels": "species", "test_path": "no.xls"},
            ["data.test_path='no.xls'", ".csv", ".parquet"],
        ),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, options: dict, names: list[str]):
    (tmp_path / "flowers.csv").write_text(CSV)
    with refused(names=names):
        load("table", path=str(tmp_path / "flowers.csv"), **options)


def test_gaps_are_refused(tmp_path: Path):
    (tmp_path / "gap.csv").write_text("a,label\n1.0,0\n,1\n")
    with refused(names=["gap.csv", "column 'a'", "row 1"]):
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
    with refused(names=["[3, 6, 6]", "[3, 8, 8]"]):
        load("image-folder", path=str(tmp_path / "two"))
    found = load("image-folder", path=str(tmp_path / "two"), side=4, channels=1)
    assert (found.input_shape, found.train.labels.tolist(), found.test.labels.tolist()) == ((1, 4, 4), [0, 0, 1], [0])


def owners_and_labels(found: Dataset) -> list[tuple[int, int, int]]:
    """Red, owner and label of each train image."""
    assert found.train.groups is not None
    reds = found.train.inputs[:, 0, 0, 0].tolist()
    return list(zip(reds, found.train.groups.tolist(), found.train.labels.tolist(), strict=True))


def test_images_in_folders_of_their_owners(tmp_path: Path):
    pictures(tmp_path / "train", {"zoe/b": 1, "amy/b": 1, "amy/a": 1})
    pictures(tmp_path / "test", {"amy/b": 1, "bob/a": 1})
    found = load("image-folder", path=str(tmp_path), owners="folder")
    # Owners by name: amy 0, bob 1, zoe 2; amy has both classes.
    assert owners_and_labels(found) == [(80, 0, 0), (40, 0, 1), (0, 2, 1)]
    assert found.test.groups is not None and found.test.groups.tolist() == [0, 1]
    pictures(tmp_path / "test", {"bob/c": 1})
    with refused(names=["'c'", tmp_path / "test"]):
        load("image-folder", path=str(tmp_path), owners="folder")


def test_the_advice_to_name_the_owners_of_images_can_be_followed(tmp_path: Path):
    for owner in ("amy", "bob"):
        pictures(tmp_path / owner, {"a": 6, "b": 6})
    table = {**SMALL, "partition": "natural", "data": {"name": "image-folder", "path": str(tmp_path)}}
    with refused(names=["'natural'", "data.owners", "image folders"]):
        prepare(Experiment(**table))
    table["data"]["owners"] = "folder"
    setup = prepare(Experiment(**table))
    assert setup.partition.train.sizes.sum() == len(setup.dataset.train) and setup.dataset.train.groups is not None


def test_what_is_no_folder_of_images_is_refused(tmp_path: Path):
    with refused(names=["folder", "data.path"]):
        load("image-folder", path=str(tmp_path / "none"))
    with refused(names=["no images", "data.path"]):
        load("image-folder", path=str(tmp_path))
    pictures(tmp_path / "x", {"a": 1})
    pictures(tmp_path / "x" / "more", {"b": 1}, side=9)
    with refused(names=["0.png", "9x9 pixels", "6x6", "data.side"]):
        load("image-folder", path=str(tmp_path / "x"))
    (tmp_path / "x" / "a" / "0.png").write_bytes(b"no image")
    with refused(names=[tmp_path / "x" / "a" / "0.png"]):
        load("image-folder", path=str(tmp_path / "x"))


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
    assert mentions(written["data"]["name"], "20 arrays")
    with refused(names=["20 arrays", "from Python", "file", "module"]):
        Experiment(**written)

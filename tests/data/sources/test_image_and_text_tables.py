"""Tables of images and of texts: Hugging Face's files, and lists of images such as FLamby's and NVFlare's."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from rayfl.choices.kinds import make
from rayfl.data.datasets import Dataset, Source
from rayfl.data.loading import checked_dataset
from tests.refusals import refused

CLASSES = {b"huggingface": json.dumps({"info": {"features": {"label": {"names": ["cat", "dog"]}}}}).encode()}
OWNERS = ["a", "b", "c", "d"] * 5


def load(name: str, path: Path, **options: Any) -> Dataset:
    return checked_dataset(make(Source, {"name": name, "path": str(path), **options}).load())


def png(value: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((4, 5, 3), value, np.uint8)).save(stream, "png")
    return stream.getvalue()


@pytest.mark.parametrize("form", ["struct", "bytes"])
def test_images_in_a_column(tmp_path: Path, form: str):
    images = [png(10 * row) for row in range(20)]
    column: list[Any] = [{"bytes": image, "path": None} for image in images] if form == "struct" else images
    table = pa.table({"image": column, "label": [0, 1] * 10, "writer": OWNERS}).replace_schema_metadata(CLASSES)
    parquet.write_table(table, tmp_path / "a.parquet")
    dataset = load("image-table", tmp_path / "a.parquet", owners="writer", channels=1, test_share=0.25)
    assert dataset.input_shape == (1, 4, 5) and list(dataset.classes) == ["cat", "dog"]
    assert dataset.train.groups is not None
    rows = dataset.train.inputs[:, 0, 0, 0] // 10
    np.testing.assert_array_equal(rows % 4, dataset.train.groups)
    with refused(names=["a.parquet", "'image-table'", "data.features"]):
        load("table", tmp_path / "a.parquet")


def test_names_of_images_in_a_column(tmp_path: Path):
    (tmp_path / "images").mkdir()
    for row in range(8):
        (tmp_path / "images" / f"{row}.png").write_bytes(png(10 * row))
    # FLamby's names lack the ending.
    lines = [f"{row},{row % 2},{row % 3},{'train' if row < 6 else 'test'}\n" for row in range(8)]
    (tmp_path / "fold.csv").write_text("image,target,center,fold\n" + "".join(lines))
    options: dict[str, Any] = {"image_folder": str(tmp_path / "images"), "labels": "target"}
    dataset = load("image-table", tmp_path / "fold.csv", owners="center", split="fold", **options)
    assert [len(dataset.train), len(dataset.test)] == [6, 2]
    rows = [{"image": f"{row}.png", "label": row % 2} for row in range(8)]
    for site in ("site-1", "site-2"):
        (tmp_path / "sites").mkdir(exist_ok=True)
        (tmp_path / "sites" / f"{site}.json").write_text(json.dumps({"training": rows[:6], "validation": rows[6:]}))
    options["labels"] = "label"
    dataset = load("image-table", tmp_path / "sites", owners="file", side=3, **options)
    assert [len(dataset.train), len(dataset.test)] == [12, 4] and dataset.input_shape == (3, 3, 3)
    (tmp_path / "images" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert len(load("image-table", tmp_path / "images", test_share=0.25).train) == 6
    with refused(names=["'image'", "data.image_folder", "'0'"]):
        load("image-table", tmp_path / "fold.csv", labels="target")
    with refused(names=["sites/0", "does not exist"]):
        load("image-table", tmp_path / "fold.csv", labels="target", image_folder=str(tmp_path / "sites"))
    with refused(names=["fold.csv", "0", "'center'", "data.split", "train", "test"]):
        load("image-table", tmp_path / "fold.csv", split="center", **{**options, "labels": "target"})


@pytest.mark.parametrize(
    ("column", "options", "names"),
    [
        ([b"no image"] * 4, {}, ["a.parquet, row 0", "no image"]),
        ([{"bytes": None, "path": "a.png"}] * 4, {}, ["'image'", "data.image_folder", "a.png"]),
        ([{"bytes": png(9)}, {"bytes": None}] * 2, {}, ["'image'", "row 1", "bytes"]),
        ([1, 2, 3, 4], {}, ["'image'", "int64", "data.image"]),
        ([png(9)] * 4, {"image_folder": "images"}, ["data.image_folder", "remove"]),
        ([png(9)] * 4, {"image": "picture"}, ["picture", "image"]),
    ],
)
def test_columns_without_images(tmp_path: Path, column: list, options: dict, names: list[str]):
    parquet.write_table(pa.table({"image": column, "label": [0, 1] * 2}), tmp_path / "a.parquet")
    with refused(names=names):
        load("image-table", tmp_path / "a.parquet", **options)


def test_texts_in_a_column_become_words(tmp_path: Path):
    lines = [
        f'"Good, {"great" if row % 2 else "bad"} film {row}",{"pos" if row % 2 else "neg"},u{row % 3}\n'
        for row in range(20)
    ]
    (tmp_path / "a.csv").write_text("text,label,user\n" + "".join(lines))
    dataset = load("text-table", tmp_path / "a.csv", owners="user", vocabulary=6, length=5)
    assert dataset.kind == "text" and dataset.input_shape == (5,) and dataset.num_tokens == 6
    assert list(dataset.classes) == ["neg", "pos"] and dataset.train.groups is not None
    # "film" and "good" are in every text, and so they are the tokens 2 and 3; numbers are unknown, and 0 is padding.
    assert {*dataset.train.inputs[:, 0].tolist()} == {3} and {*dataset.train.inputs[:, 2].tolist()} == {2}
    assert {*dataset.train.inputs[:, 3].tolist()} == {1} and {*dataset.train.inputs[:, 4].tolist()} == {0}
    # The words are numbered by the train examples alone.
    (tmp_path / "test.csv").write_text("text,label,user\nunheard film,pos,u1\n")
    tested = load("text-table", tmp_path / "a.csv", test_path=str(tmp_path / "test.csv"))
    assert tested.test.inputs[0, :3].tolist() == [1, 2, 0]
    with refused(names=["sentence", "text"]):
        load("text-table", tmp_path / "a.csv", text="sentence")
    parquet.write_table(pa.table({"text": [1, 2] * 4, "label": [0, 1] * 4}), tmp_path / "a.parquet")
    with refused(names=["'text'", "int64", "data.text"]):
        load("text-table", tmp_path / "a.parquet")

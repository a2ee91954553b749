"""Tables as people have them: names that look like numbers, numbers that are written as texts, headers, identifiers."""

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

ROWS = 20


def load(folder: Path, *files: str, **options: Any) -> Dataset:
    """The dataset of a table with these lines; a second one is the test file."""
    for name, lines in zip(("mine.csv", "test.csv"), files, strict=False):
        (folder / name).write_text(lines)
    options |= {"test_path": str(folder / "test.csv")} if len(files) > 1 else {}
    return checked_dataset(make(Source, {"name": "table", "path": str(folder / "mine.csv"), **options}).load())


def table(*columns: object, header: str = "a,b,label", end: str = "") -> str:
    """A CSV text of `ROWS` rows, in which each of the columns repeats its values."""
    rows = [",".join(str(column[row % len(column)]) for column in columns) for row in range(ROWS)]  # pyright: ignore
    return "".join(f"{line}\n" for line in [header, *(f"{row}{end}" for row in rows)])


NUMBERS = 0.5, 1.5, -2.5
NAMED = {"named_labels": True}


@pytest.mark.parametrize(
    ("files", "options", "classes"),
    [
        ([table(NUMBERS, NUMBERS, ["007", "7"])], {}, ("007", "7")),
        ([table(NUMBERS, NUMBERS, ["00", "01", "02"])], {}, ()),
        ([table(NUMBERS, NUMBERS, [-1, 1])], NAMED, ("-1", "1")),
        ([table(NUMBERS, NUMBERS, [1001, 2005])], NAMED, ("1001", "2005")),
        ([table(NUMBERS, NUMBERS, ["1.0", "2.0"]), table(NUMBERS, NUMBERS, [1, 2])], NAMED, ("1", "2")),
        ([table(NUMBERS, NUMBERS, [1, 2, "A"]), table(NUMBERS, NUMBERS, [2, 1])], {}, ("1", "2", "A")),
        ([table(NUMBERS, NUMBERS, [0, 1], end=",")], {}, ()),
        (["sep=;\n" + table(NUMBERS, NUMBERS, [0, 1]).replace(",", ";")], {}, ()),
    ],
)
def test_labels_are_what_the_file_means(
    tmp_path: Path, files: list[str], options: dict[str, bool], classes: tuple[str, ...]
):
    dataset = load(tmp_path, *files, **options)
    assert dataset.classes == classes and dataset.columns["inputs"] == ["a", "b"]
    assert len({*dataset.train.labels.tolist()}) == dataset.num_classes


@pytest.mark.parametrize(
    ("lines", "options", "words"),
    [
        (table(NUMBERS, NUMBERS, [-1, 1]), {}, ["-1", "'label'", "row 0", "named_labels=true", "targets=['label']"]),
        (table(NUMBERS, NUMBERS, NUMBERS), {}, ["0.5", "'label'", "row 0", "targets=['label']"]),
        (table(NUMBERS, NUMBERS, [0, 1]), {"targets": ["label"], "named_labels": True}, ["named_labels", "targets"]),
        (table(NUMBERS, NUMBERS, [0, 1]), {"header": ["a", "b", "label"]}, ["has a header", "remove data.header"]),
        (table(NUMBERS, NUMBERS, [0, 1]), {"header": "numbered", "labels": "2"}, ["has a header", "data.header"]),
        (table(NUMBERS, NUMBERS, [0, 1], header="0.5,0.5,1"), {"labels": "1"}, ["first row", "data.header"]),
        (table(NUMBERS, NUMBERS, [0, 1], header="3,3,1"), {"labels": "1"}, ["first row", "'numbered'"]),
    ],
)
def test_what_is_no_label_and_no_header_is_refused(
    tmp_path: Path, lines: str, options: dict[str, Any], words: list[str]
):
    refused(lambda: load(tmp_path, lines, **options), names=words)


def test_columns_that_are_counted_are_a_header(tmp_path: Path):
    dataset = load(tmp_path, table(NUMBERS, NUMBERS, [0, 1], header="0,1,2"), labels="2")
    assert dataset.columns["inputs"] == ["0", "1"]


def test_numbers_of_rows_are_no_inputs(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    ids = [*range(1, ROWS + 1)]
    shuffled = [*np.random.default_rng(0).permutation(ids)]
    lines = table(ids, [*reversed(ids)], shuffled, NUMBERS, [0, 1], header="n,a,PassengerId,fluid,label")
    dataset = load(tmp_path, lines)
    assert dataset.columns["inputs"] == ["n", "a", "fluid"] and ["PassengerId"] in dataset.columns.values()
    assert "'n' is an input and counts the rows" in caplog.text
    assert load(tmp_path, lines, features=["PassengerId"]).columns["inputs"] == ["PassengerId"]


def test_a_first_column_that_tells_rows_apart_is_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    numbers = [*np.random.default_rng(0).permutation(range(1_000_000, 1_000_060))]
    numbers[-1] = numbers[0]
    load(
        tmp_path,
        "".join(f"{number},{row},{row % 2}\n" for row, number in enumerate(numbers)),
        header="numbered",
        labels="2",
    )
    assert [text for text in caplog.messages if "'0' is an input" in text and "data.features" in text]
    caplog.clear()
    load(tmp_path, "".join(f"{row % 30},{row},{row % 2}\n" for row in range(60)), header="numbered", labels="2")
    assert not caplog.messages


@pytest.mark.parametrize(
    ("values", "first"),
    [
        ([*map(str, range(ROWS - 1)), "unknown"], "'unknown' in row 19"),
        (['"1,000"', '"2,500.5"'], "'1,000' in row 0"),
        (["$5", "$6"], "'$5' in row 0"),
        (["12%", "3%"], "'12%' in row 0"),
        (["A/5", "12"], ""),
    ],
)
def test_numbers_that_are_written_as_texts_are_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, values: list[str], first: str
):
    dataset = load(tmp_path, table(values, NUMBERS, [0, 1]))
    assert dataset.columns["inputs"] == ["b"]
    assert (first in caplog.text) if first else ("'a'" not in caplog.text)


def test_columns_of_splits_and_classes_that_differ_in_capitals_are_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    load(tmp_path, table(NUMBERS, ["Train", "TEST"], ["yes", "Yes", "no"], header="a,part,label"))
    assert "data.split='part'" in caplog.text and "'Yes' and 'yes'" in caplog.text


def test_categories_that_are_texts_in_one_file_are_texts_in_both(tmp_path: Path):
    train, test = (table(values, NUMBERS, [0, 1]) for values in ([1, 2, "A"], [2, 1]))
    assert load(tmp_path, train, test, categories=["a"]).input_shape == (4,)


def test_class_names_decide_where_test_numbers_classes_in_another_order(tmp_path: Path):
    for split, names in (("train", ["ant", "bee"]), ("test", ["bee", "ant"])):
        rows = pa.table({"a": [0.0, 1.0, 2.0, 3.0], "label": [names.index(name) for name in ("ant", "bee") * 2]})
        noted = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        parquet.write_table(
            rows.replace_schema_metadata({"huggingface": json.dumps(noted)}), tmp_path / f"{split}.parquet"
        )
    dataset = checked_dataset(make(Source, {"name": "table", "path": str(tmp_path)}).load())
    assert dataset.classes == ("ant", "bee")
    assert dataset.test.labels.tolist() == dataset.train.labels.tolist() == [0, 1, 0, 1]


def test_a_text_that_is_not_utf_8_is_refused_with_its_row(tmp_path: Path):
    (tmp_path / "sms.csv").write_bytes(b"text,label\nhello,0\nWIN \xa35,1\n")
    source = make(Source, {"name": "text-table", "path": str(tmp_path / "sms.csv")})
    refused(source.load, names=["row 2", "data.encoding", "latin-1"])


@pytest.mark.parametrize("ending", ["mat", "xlsx", "arff", "npz"])
def test_other_formats_are_refused_with_a_way(tmp_path: Path, ending: str):
    (tmp_path / f"mine.{ending}").write_bytes(b"x")
    source = make(Source, {"name": "table", "path": str(tmp_path / f"mine.{ending}")})
    refused(
        source.load, names=[f"mine.{ending}", {"mat": "arrays", "npz": "arrays", "xlsx": ".csv", "arff": "CSV"}[ending]]
    )


@pytest.mark.parametrize("form", ["names", "paths", "paths without bytes"])
def test_images_may_be_named_only(tmp_path: Path, form: str):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for grey in range(4):
        Image.fromarray(np.full((4, 4), 50 * grey, np.uint8)).save(folder / f"{grey}.png")
    names = [f"{grey}.png" for grey in (3, 1, 2, 0)]
    column: list[Any] = names
    if form != "names":
        column = [{"path": name, **({"bytes": None} if form.endswith("bytes") else {})} for name in names]
    kind = {
        "names": pa.string(),
        "paths": pa.struct([("path", pa.string())]),
        "paths without bytes": pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    }[form]
    rows = pa.table({"image": pa.array(column, kind), "label": [0, 1, 0, 1]})
    parquet.write_table(rows, tmp_path / "rows.parquet")
    table = {"name": "image-table", "path": str(tmp_path / "rows.parquet"), "channels": 1, "test_share": 0.25}
    dataset = checked_dataset(make(Source, {**table, "image_folder": str(folder)}).load())
    greys = np.concatenate([split.inputs[:, 0, 0, 0] for split in (dataset.train, dataset.test)])
    assert sorted(greys) == [0, 50, 100, 150]
    refused(make(Source, table).load, names=["data.image_folder", "3.png"])


def test_a_test_file_without_labels_is_named(tmp_path: Path):
    train, test = table(NUMBERS, NUMBERS, [0, 1]), table(NUMBERS, NUMBERS, header="a,b")
    refused(lambda: load(tmp_path, train, test), names=["test split", "test.csv", "'label'", "data.test_share"])


def test_files_of_unlike_widths_are_no_numbered_columns(tmp_path: Path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "X_train.txt").write_text("0.5 1.5\n2.5 3.5\n")
    (tmp_path / "train" / "y_train.txt").write_text("1\n2\n")
    source = make(Source, {"name": "table", "path": str(tmp_path), "header": "numbered", "labels": "0"})
    refused(source.load, names=["X_train.txt", "y_train.txt", "data.header='numbered'"])


@pytest.mark.parametrize(("inputs", "labels"), [("x_train", "y_train"), ("train_images", "train_labels")])
def test_archives_have_names_of_others(tmp_path: Path, inputs: str, labels: str):
    rows = np.random.default_rng(0).normal(size=(ROWS, 3))
    path = tmp_path / "mine.npz"
    # Class numbers [n, 1], as Keras and MedMNIST write them.
    classes = (np.arange(ROWS) % 3)[:, None].astype(np.uint8)
    tested = {inputs.replace("train", "test"): rows, labels.replace("train", "test"): classes}
    np.savez(path, **{inputs: rows, labels: classes}, **tested)
    dataset = checked_dataset(make(Source, {"name": "arrays", "path": str(path)}).load())
    assert dataset.num_classes == 3 and dataset.has_classes and dataset.input_shape == (3,)
    assert dataset.test.labels.shape == (ROWS,)
    np.savez(path, X=rows, y=np.arange(ROWS))
    refused(make(Source, {"name": "arrays", "path": str(path)}).load, names=["'X'", "'y'", "inputs", "labels"])


@pytest.mark.parametrize(("name", "word"), [("one.npy", "labels"), ("one.mat", "loadmat")])
def test_files_that_are_no_archives_are_refused_with_a_way(tmp_path: Path, name: str, word: str):
    with open(tmp_path / name, "wb") as file:
        np.save(file, np.zeros((3, 2)))
    refused(make(Source, {"name": "arrays", "path": str(tmp_path / name)}).load, names=[name, word])

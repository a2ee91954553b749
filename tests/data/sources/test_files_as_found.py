"""Files with what people and programs leave in them: notes, footers, leftovers of a Mac, packed and shifted rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rayfl.choices.kinds import make
from rayfl.data.datasets import Source
from tests.refusals import refused

COLUMNS = {"a": [0.5, 1.5, 2.5, 3.5, 4.5], "label": [0, 1, 0, 1, 1]}


def table(path: Path, content: str, **settings: Any) -> Source:
    path.write_text(content)
    return make(Source, {"name": "table", "path": str(path), "standardise": False, **settings})


def values(source: Source) -> dict[float, int]:
    dataset = source.load()
    parts = (dataset.train, dataset.test)
    return {float(row[0]): int(label) for part in parts for row, label in zip(part.inputs, part.labels, strict=True)}


EXPECTED = dict(zip(COLUMNS["a"], COLUMNS["label"], strict=True))
BY_ROW = {str(row): {name: column[row] for name, column in COLUMNS.items()} for row in range(5)}
BY_COLUMN = {
    "a": {str(row): COLUMNS["a"][row] for row in range(5)},
    "label": {str(row): COLUMNS["label"][row] for row in (3, 0, 4, 1, 2)},
}
SPLIT = {"columns": ["a", "label"], "index": [*range(5)], "data": [[*row] for row in EXPECTED.items()]}
ROWS = "".join(f"{a},{label}\n" for a, label in EXPECTED.items())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("index.json", json.dumps(BY_ROW)),
        ("columns.json", json.dumps(BY_COLUMN)),
        ("split.json", json.dumps(SPLIT)),
        ("semicolon.csv", f"; exported by hand\na,label\n{ROWS}"),
        ("slashes.csv", f"// exported by hand\na,label\n{ROWS}"),
        ("index.csv", ";a;label\n" + "".join(f"{i};{row.replace(',', ';')}\n" for i, row in enumerate(ROWS.split()))),
    ],
)
def test_rows_are_those_of_the_file(tmp_path: Path, name: str, content: str):
    assert values(table(tmp_path / name, content)) == EXPECTED


@pytest.mark.parametrize(
    ("name", "content", "settings", "names"),
    [
        # 1,5 is one number here, so that each row has a field more than the header.
        ("decimal.csv", "a,b,label\n" + "1,5,2,0\n1,7,3,1\n" * 3, {}, ["3 names", "4 fields", "decimal mark"]),
        ("note.csv", f"a,label\n{ROWS}# a note\n", {}, ["note.csv", "# a note", "notes"]),
        ("mixed.json", '[{"a": 1, "label": 0}, {"a": 2, "label": "1"}]', {}, ["mixed.json", "one type"]),
        ("packed.csv.xz", "", {}, ["packed.csv.xz", "unpack"]),
        ("gap.csv", "a,b\n1,2\n2,\n", {"targets": ["b"], "missing": "mean"}, ["'b'", "row 1", "data.missing='drop'"]),
        ("words.csv", "a,label\n1.0.0,0\n2.0.0,1\n", {}, ["'a' is text", "data.categories"]),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_way_on(
    tmp_path: Path, name: str, content: str, settings: dict[str, Any], names: list[str]
):
    refused(table(tmp_path / name, content, **settings).load, names=names)


def test_a_class_that_stands_for_a_gap_is_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    content = "a,label\n" + "".join(f"{a},{'EU' if label else '?'}\n" for a, label in EXPECTED.items())
    assert table(tmp_path / "gaps.csv", content).load().classes == ("?", "EU")
    assert "'?'" in caplog.text and "data.missing='drop'" in caplog.text


@pytest.mark.parametrize("twin", ["cafe\u0301", "caf\u00e9\u200b", "CAF\u00c9"], ids=ascii)
def test_classes_that_look_alike_are_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture, twin: str):
    table(tmp_path / "names.csv", "a,label\n" + f"1,caf\u00e9\n2,{twin}\n" * 4).load()
    assert "write both alike" in caplog.text


def test_numbers_with_a_printed_minus_are_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    table(tmp_path / "minus.csv", "a,b,label\n" + "".join(f"\u2212{a},1,{y}\n" for a, y in EXPECTED.items())).load()
    assert "'a' is text" in caplog.text


def test_classes_that_are_truth_values_in_one_file_are_names_in_both(tmp_path: Path):
    rows = [
        f"{a},{name}\n" for a, name in zip(COLUMNS["a"], ("True", "False", "Unknown", "True", "False"), strict=True)
    ]
    (tmp_path / "test.csv").write_text("a,label\n" + "".join(rows[:2]))
    source = table(tmp_path / "train.csv", "a,label\n" + "".join(rows), test_path=str(tmp_path / "test.csv"))
    dataset = source.load()
    assert (dataset.classes, dataset.test.labels.tolist()) == (("False", "True", "Unknown"), [1, 0])


def test_names_of_images_that_windows_wrote(tmp_path: Path):
    (tmp_path / "pictures").mkdir()
    for number in range(5):
        Image.fromarray(np.full((4, 4), 90, np.uint8)).save(tmp_path / "pictures" / f"{number}.png")
    (tmp_path / "rows.csv").write_text("image,label\n" + "".join(f"pictures\\{i}.png,{i % 2}\n" for i in range(5)))
    table = {"name": "image-table", "path": str(tmp_path / "rows.csv"), "image_folder": str(tmp_path)}
    assert len(make(Source, table).load().train) == 4


def test_what_a_mac_leaves_in_folders_is_left_out(tmp_path: Path):
    for home in (tmp_path / "cat", tmp_path / "dog", tmp_path / "__MACOSX" / "cat"):
        home.mkdir(parents=True)
        for number in range(3):
            Image.fromarray(np.full((4, 4), 90, np.uint8)).save(home / f"{number}.png")
            (home / f"._{number}.png").write_bytes(b"\0\5\26\7")
    dataset = make(Source, {"name": "image-folder", "path": str(tmp_path)}).load()
    assert (dataset.classes, len(dataset.train) + len(dataset.test)) == (("cat", "dog"), 6)


@pytest.mark.parametrize(
    ("name", "names"),
    [("mine.h5", ["HDF5", "numpy.savez"]), ("mine.csv", ["table"]), ("objects.npz", ["Python objects", "astype(str)"])],
)
def test_what_is_no_archive_of_arrays_names_the_way_on(tmp_path: Path, name: str, names: list[str]):
    if name == "objects.npz":
        np.savez(tmp_path / name, inputs=np.zeros((2, 1)), labels=np.array(["a", "b"], object))
    refused(make(Source, {"name": "arrays", "path": str(tmp_path / name)}).load, names=names)

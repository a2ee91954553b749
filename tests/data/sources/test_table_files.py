"""Tables in all the forms in which people have them: CSV files of any dialect, JSON, Feather, folders of files."""

import bz2
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from rayfl.choices.kinds import make
from rayfl.data.datasets import Dataset, Examples, Source
from rayfl.data.loading import checked_dataset
from tests.refusals import check_sentence, refused

FRAME = pd.DataFrame({"a": np.arange(20.0), "label": [0, 1] * 10, "site": ["u", "v"] * 10})
NAMES = b"huggingface", json.dumps({"info": {"features": {"label": {"names": ["cat", "dog", "fox"]}}}}).encode()


def load(path: Path, **options: Any) -> Dataset:
    return checked_dataset(make(Source, {"name": "table", "path": str(path), **options}).load())


def owners(examples: Examples) -> np.ndarray:
    assert examples.groups is not None
    return examples.groups


def rows(line: Callable[[int], str], count: int = 20) -> str:
    return "".join(line(number) for number in range(count))


def records(count: int = 20) -> list[dict[str, Any]]:
    return FRAME.head(count).to_dict("records")


FILLED = {"missing": "mean"}
BLANKS = "a, b, label\n" + rows(lambda i: f"{i}, {'  ?' if i == 3 else i / 2}, {i % 2}\n")
COMMAS = "a; b; label\n" + rows(lambda i: f"{i}; {'? ' if i == 3 else '2,5'}; {i % 2}\n")
MPG = rows(lambda i: f'18.{i}   8   307.0      {"?" if i == 3 else 130}   {i % 3}\t"chevrolet chevelle {i}"\n')


@pytest.mark.parametrize(
    ("name", "content", "options", "inputs"),
    [
        ("a.csv", "a;label\n" + rows(lambda i: f"{i};{i % 2}\n"), {}, ["a"]),
        ("a.csv", "a;b;label\n" + rows(lambda i: f"{i};Austin, TX;{i % 2}\n"), {}, ["a"]),
        ("a.csv", "a;label\n" + rows(lambda i: f"1,{i};{i % 2}\n"), {}, ["a"]),
        ("a.tsv", "a\tlabel\n" + rows(lambda i: f"{i}\t{i % 2}\n"), {}, ["a"]),
        ("a.csv", "a:label\n" + rows(lambda i: f"{i}:{i % 2}\n"), {"separator": ":"}, ["a"]),
        ("a.CSV", "a, label\n" + rows(lambda i: f"{i}, {i % 2}\n"), {}, ["a"]),
        ("a.csv", '"t", a, label\n' + rows(lambda i: f'"hi, you\nthere",{i},{i % 2}\n'), {}, ["a"]),
        ("a.csv", "# a,b,label\n" + rows(lambda i: f"{i},2,{i % 2}\n"), {}, ["a", "b"]),
        ("a.csv", "# made by me\na,b,label\n" + rows(lambda i: f"{i},2,{i % 2}\n"), {}, ["a", "b"]),
        (
            "a.csv",
            "a, b, label\n" + rows(lambda i: f"{i}, {'  ?' if i == 3 else i / 2}, {i % 2}\n"),
            FILLED,
            ["a", "b"],
        ),
        ("a.csv", "a; b; label\n" + rows(lambda i: f"{i}; {'? ' if i == 3 else '2,5'}; {i % 2}\n"), FILLED, ["a", "b"]),
        ("a.txt", "a label\n" + rows(lambda i: f'"{i + 1}" {i} {i % 2}\n'), {}, ["a"]),
        ("a.data", rows(lambda i: f"{i},3.5,{'xy'[i % 2]}\n"), {"header": "numbered", "labels": "2"}, ["0", "1"]),
        ("a.data", rows(lambda i: f"{i},3,{i % 2}\n"), {"header": ["a", "b", "label"]}, ["a", "b"]),
        ("mpg.data", MPG, {"header": "numbered", "labels": "4", "missing": "mean"}, ["0", "1", "2", "3"]),
        ("german.data-numeric", rows(lambda i: f"  {i}   {i % 2} \n"), {"header": "numbered", "labels": "1"}, ["0"]),
        ("a.csv.gz", gzip.compress(b"a,label\n" + b"1,0\n2,1\n" * 9, mtime=0), {}, ["a"]),
        ("a.tsv.bz2", bz2.compress(b"a\tlabel\n" + b"1\t0\n2\t1\n" * 9), {}, ["a"]),
        (
            "a.csv",
            ("a,label\n" + "1,Z\u00fcrich\n2,Malm\u00f6\n" * 9).encode("latin-1"),
            {"encoding": "latin-1"},
            ["a"],
        ),
        (
            "a.csv",
            ("gr\u00f6\u00dfe,label\n" + "1,0\n2,1\n" * 9).encode("utf-16"),
            {"encoding": "utf-16"},
            ["gr\u00f6\u00dfe"],
        ),
        ("a.jsonl", "\n".join(map(json.dumps, records())), {}, ["a"]),
        ("a.json", "\n".join(map(json.dumps, records())), {}, ["a"]),
        ("a.json", json.dumps(records()), {"owners": "site"}, ["a"]),
        ("a.json", FRAME.to_json(), {}, ["a"]),
        ("a.json", json.dumps({"name": "x", "training": records(), "validation": records(4)}), {}, ["a"]),
    ],
)
def test_a_file_is_read_as_it_is_written(tmp_path: Path, name: str, content: str | bytes, options: dict, inputs: list):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    dataset = load(tmp_path / name, **options)
    assert dataset.columns["inputs"] == inputs and dataset.num_classes in (2, 3)
    assert np.ptp(dataset.train.inputs[:, 0]) > 0


@pytest.mark.parametrize(
    ("name", "content", "options", "names"),
    [
        ("a.csv", "a:b:label\n1:2:0\n", {}, ['"label"', "'a:b:label'", "data.separator"]),
        ("a.csv", "5.1,3.5,x\n4.9,3.0,y\n", {}, ['"label"', "'5.1'", "data.header", "'numbered'"]),
        ("a.csv", "1,2\n", {"header": ["a", "b", "label"]}, ["data.header", "3 columns", "a.csv has 2"]),
        ("a.csv", "a,label\n1,Malm\u00f6\n".encode("latin-1"), {}, ["'label'", "row 0", "data.encoding", "UTF-8"]),
        ("a.csv", "gr\u00f6\u00dfe,label\n1,0\n".encode("latin-1"), {}, ["row 0", "data.encoding", "UTF-8"]),
        ("a.csv", "a,label\n1,\u00f6\n".encode("latin-1"), {"encoding": "ascii"}, ["ascii", "row 1", "data.encoding"]),
        ("a.csv", "a,label\n1,0\n".encode("utf-16"), {}, ["data.encoding='utf-16'"]),
        ("a.csv", "a,label\n1,0\n", {"encoding": "utf-99"}, ["data.encoding='utf-99'", "latin-1"]),
        ("a.csv", "a,b,label\n1,2,0\n1,2,3,1\n", {}, ["#3", "Expected 3", "got 4"]),
        ("a.csv", "a,label\n", {}, ["no rows"]),
        ("a.csv", "PK\x03\x04", {}, ["zip", "unpack"]),
        ("a.xlsx", "PK\x03\x04", {}, ["data.path", ".csv", ".parquet", ".json"]),
        ("a.jsonl", "{}\n", {"separator": ";"}, ["data.separator", "no CSV"]),
        ("a.json", "[1, 2]", {}, ["1 is", "objects"]),
        ("a.json", '[{"a": 99999999999999999999999, "label": 0}]', {}, ["a.json", "too large"]),
        ("a.json", '{"a": 1}', {}, ["one object", "data"]),
        ("a.jsonl", '{"a": 1, "label": 0}\n{"a": "x", "label": 1}\n', {}, ["/a", "number", "string"]),
        ("a.feather", "xx", {}, ["a.feather", "cannot be read"]),
        ("a.csv.gz", "\x1f\x00", {}, ["a.csv.gz"]),
    ],
)
def test_what_cannot_be_read_gets_a_sentence(tmp_path: Path, name: str, content: Any, options: dict, names: list):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with refused(names=names):
        load(tmp_path / name, **options)


def test_the_type_of_a_column_is_that_of_all_its_rows(tmp_path: Path):
    # More than the megabyte by which pyarrow takes the first column for whole numbers.
    (tmp_path / "a.csv").write_text("a,label\n" + "100000,0\n200000,1\n" * 70_000 + "0.5,1\n")
    dataset = load(tmp_path / "a.csv", standardise=False, test_path=str(tmp_path / "a.csv"))
    assert dataset.train.inputs[-1].tolist() == [0.5]


def write(path: Path, frame: pd.DataFrame) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(path, index=False)


def test_a_gap_in_a_folder_is_named_by_its_file(tmp_path: Path):
    for number, name in enumerate(("ann", "bob")):
        write(tmp_path / f"{name}.csv", FRAME.head(5 + number))
    (tmp_path / "cem.csv").write_text("a,label,site\n1,0,u\n,1,v\n")
    with refused(names=["column 'a'", "row 1 of cem.csv", "data.missing"]):
        load(tmp_path, owners="file")


def test_folders_have_splits_owners_and_parts(tmp_path: Path):
    for shard in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        write(tmp_path / "shards" / f"{shard}.csv", FRAME)
    assert [len(part) for part in (load(tmp_path / "shards").train, load(tmp_path / "shards").test)] == [40, 20]
    for number, owner in enumerate("abc"):
        for split in ("train", "test"):
            write(tmp_path / "files" / f"{owner}_{split}.csv", FRAME.head(5 + number))
            write(tmp_path / "folders" / owner / f"{split}.csv", FRAME.head(5 + number))
            write(tmp_path / "halves" / split / f"{owner}.csv", FRAME.head(5 + number))
        write(tmp_path / "alone" / f"{owner}.csv", FRAME.head(5 + number))
    for form in ("files", "folders", "halves"):
        dataset = load(tmp_path / form, owners="file")
        assert [np.bincount(owners(part)).tolist() for part in (dataset.train, dataset.test)] == [[5, 6, 7]] * 2, form
    alone = load(tmp_path / "alone", owners="file")
    assert (np.bincount(owners(alone.train)) + np.bincount(owners(alone.test))).tolist() == [5, 6, 7]
    FRAME.to_parquet(tmp_path / "hive", partition_cols=["site"])
    hive = load(tmp_path / "hive", owners="site")
    assert len(hive.train) == 16 and len(np.unique(owners(hive.train))) == 2
    (tmp_path / "empty").mkdir()
    with refused(names=["empty", ".csv", "data.path"]):
        load(tmp_path / "empty")
    write(tmp_path / "mixed" / "a.csv", FRAME)
    write(tmp_path / "mixed" / "b.csv", FRAME.assign(a="x"))
    with refused(names=["b.csv", "a.csv", "double vs string"]):
        load(tmp_path / "mixed")


def test_what_datasets_save_to_disk_has_splits_and_class_names(tmp_path: Path):
    table = pa.table({"a": range(20), "label": [0, 1] * 10}).replace_schema_metadata(dict([NAMES]))
    for split in ("train", "test"):
        home = tmp_path / "saved" / split
        home.mkdir(parents=True)
        with (
            pa.OSFile(str(home / "data-00000-of-00001.arrow"), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as out,
        ):
            out.write_table(table)
        for name in ("state.json", "dataset_info.json"):
            (home / name).write_text("{}")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    dataset = load(tmp_path / "saved")
    assert [len(dataset.train), len(dataset.test)] == [20, 20] and list(dataset.classes) == ["cat", "dog"]
    assert len(load(tmp_path / "saved" / "train").train) == 16


GAPS = "a,ward,label\n" + rows(lambda i: f"{'' if i % 4 == 0 else i},{'NA' if i % 5 == 0 else 'AB'[i % 2]},{i % 2}\n")


def test_gaps_are_dropped_filled_or_a_category(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "a.csv").write_text(GAPS)
    options: dict[str, Any] = {"categories": ["ward"], "test_path": str(tmp_path / "a.csv"), "standardise": False}
    with refused(names=["a.csv", "'a'", "row 0", "data.missing", "'drop'", "'mean'"]):
        load(tmp_path / "a.csv", **options)
    dropped = load(tmp_path / "a.csv", missing="drop", **options)
    complete = [i for i in range(20) if i % 4 and i % 5]
    assert dropped.train.inputs[:, 0].tolist() == complete
    check_sentence(caplog.messages[0], ["a.csv", "8 of 20 rows", "data.missing='drop'"])
    mean = np.mean([i for i in range(20) if i % 4])
    filled = load(tmp_path / "a.csv", missing="mean", **options)
    np.testing.assert_allclose(filled.train.inputs[:, 0], np.array([i if i % 4 else mean for i in range(20)]))
    assert filled.input_names == ["a", "ward=A", "ward=B", "ward=?"]
    assert filled.test.inputs[:, 3].tolist() == [float(i % 5 == 0) for i in range(20)]
    marked = load(tmp_path / "a.csv", missing="category", **options)
    assert marked.input_names == ["a", "ward=A", "ward=B", "ward=?", "a=?"]
    assert marked.train.inputs[:, 4].tolist() == [float(i % 4 == 0) for i in range(20)]
    # Without a test split the mean is that of the rows that are left to train.
    held = load(tmp_path / "a.csv", missing="mean", standardise=False)
    values, counts = np.unique(held.train.inputs[:, 0], return_counts=True)
    given = np.array([value for value in held.train.inputs[:, 0] if value == round(value) and value % 4])
    assert np.float32(given.mean(dtype=np.float64)) in values and counts.max() > 1
    (tmp_path / "b.csv").write_text(GAPS.replace(",1\n", ",\n"))
    with refused(names=["b.csv", "'label'", "row 1", "data.missing='drop'"]):
        load(tmp_path / "b.csv", missing="mean")


def test_lists_decimals_and_bytes(tmp_path: Path):
    table = pa.table(
        {
            "e": pa.array([[1.0, 2.0, i] for i in range(20)], pa.list_(pa.float32(), 3)),
            "v": [[1] * (1 + i % 2) for i in range(20)],
            "d": pa.array(range(20), pa.decimal128(10, 2)),
            "label": [b"x", b"y"] * 10,
            "tags": [["x"], ["x", "y"]] * 10,
            "bad": [b"\xff"] * 20,
        }
    )
    parquet.write_table(table, tmp_path / "t.parquet")
    dataset = load(tmp_path / "t.parquet")
    assert dataset.input_names == ["e[0]", "e[1]", "e[2]", "d"] and list(dataset.classes) == ["x", "y"]
    tagged = load(tmp_path / "t.parquet", targets=["tags"])
    assert list(tagged.classes) == ["x", "y"] and tagged.train.labels.sum(axis=0)[0] == len(tagged.train)
    assert load(tmp_path / "t.parquet", targets=["e"]).train.labels.shape == (16, 3)
    for options, names in (
        ({"labels": "v"}, ["'v'", "list<element: int64>", "data.targets=['v']"]),
        ({"owners": "v"}, ["'v'", "list<element: int64>"]),
        ({"features": ["v"]}, ["'v'", "list<element: int64>", "one length"]),
        ({"categories": ["v"]}, ["'v'", "list<element: int64>"]),
        ({"labels": "bad"}, ["'bad'", "row 0", "UTF-8"]),
    ):
        with refused(names=["t.parquet", *names]):
            load(tmp_path / "t.parquet", **options)


def test_owners_that_are_numbers_in_one_file_are_names_in_both(tmp_path: Path):
    (tmp_path / "train.csv").write_text("x,site,label\n" + rows(lambda i: f"{i},0{i % 3},{i % 2}\n"))
    (tmp_path / "test.csv").write_text("x,site,label\n" + rows(lambda i: f"{i},{['00', '01', 'X'][i % 3]},{i % 2}\n"))
    dataset = load(tmp_path / "train.csv", test_path=str(tmp_path / "test.csv"), owners="site")
    assert [np.unique(owners(part)).tolist() for part in (dataset.train, dataset.test)] == [[0, 1, 2], [0, 1, 3]]

"""Files of one folder that are written unlike: columns are matched by their names, and unlike meanings are refused."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from rayfl.choices.kinds import make
from rayfl.data.datasets import Source
from tests.refusals import refused

FORMS = ("csv", "jsonl", "parquet", "feather")
ONE = pd.DataFrame({"a": [1.0, 2, 3, 4], "b": [10.0, 20, 30, 40], "label": ["x", "y", "x", "y"]})


def folder(home: Path, form: str, *frames: pd.DataFrame) -> Source:
    for number, frame in enumerate(frames):
        file = home / f"train-{number:05d}-of-00002.{form}"
        if form == "csv":
            frame.to_csv(file, index=False)
        elif form == "jsonl":
            frame.to_json(file, orient="records", lines=True)
        else:
            getattr(frame, f"to_{form}")(file)
    return make(Source, {"name": "table", "path": str(home), "standardise": False, "test_share": 0.25})


@pytest.mark.parametrize("form", FORMS)
def test_columns_in_another_order_are_matched_by_names(tmp_path: Path, form: str):
    dataset = folder(tmp_path, form, ONE, ONE.assign(a=[5, 6, 7, 8]).reindex(columns=["label", "b", "a"])).load()
    rows = zip(dataset.train.inputs.tolist(), dataset.train.labels.tolist(), strict=True)
    assert {a: (b, label) for (a, b), label in rows}.items() <= {
        number + more: (10.0 * number, (number + 1) % 2) for number in range(1, 5) for more in (0.0, 4.0)
    }.items()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("changed", "column"), [({"label": [0, 1, 0, 1]}, "label"), ({"a": list("pqrs")}, "a"), ({"b": True}, "b")], ids=str
)
def test_other_types_are_refused_with_both_files(tmp_path: Path, form: str, changed: dict[str, Any], column: str):
    source = folder(tmp_path, form, ONE, ONE.assign(**changed))
    refused(source.load, names=["train-00001", "train-00000", f"Field {column} has incompatible types"])


def test_a_column_that_a_file_lacks_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    source = folder(tmp_path, "csv", ONE, ONE.drop(columns="b"))
    refused(source.load, names=["'b'", "row 0", "train-00001-of-00002.csv"])
    assert "train-00001-of-00002.csv has no column 'b'" in caplog.text


LABEL = pa.array([0, 1, 0, 1])
SINGLE, LISTED = {"names": ["ant", "bee"]}, {"feature": {"names": ["ant", "bee"]}}
TURNED, LISTED_TURNED = {"names": ["bee", "ant"]}, {"feature": {"names": ["bee", "ant"]}}


@pytest.mark.parametrize(
    ("files", "column", "values", "first", "second", "settings"),
    [
        (["train-0", "train-1"], "label", LABEL, SINGLE, TURNED, {}),
        (["train", "test"], "label", LABEL, SINGLE, TURNED, {"named_labels": True}),
        (["train", "test"], "ward", LABEL, SINGLE, TURNED, {"owners": "ward"}),
        (["train", "test"], "ward", LABEL, SINGLE, TURNED, {"categories": ["ward"]}),
        (["train", "test"], "tags", pa.array([[0], [1], [0, 1], []]), LISTED, LISTED_TURNED, {"targets": ["tags"]}),
    ],
    ids=["shards", "named labels", "owners", "categories", "several labels"],
)
def test_class_names_in_another_order_are_refused(
    tmp_path: Path, files: list[str], column: str, values: pa.Array, first: object, second: object, settings: Any
):
    for file, names in zip(files, (first, second), strict=True):
        columns = {"a": [0.0, 1.0, 2.0, 3.0], "label": LABEL, column: values}
        noted = json.dumps({"info": {"features": {column: names}}})
        parquet.write_table(
            pa.table(columns).replace_schema_metadata({"huggingface": noted}), tmp_path / f"{file}.parquet"
        )
    source = make(Source, {"name": "table", "path": str(tmp_path), **settings})
    refused(source.load, names=[column, "['bee', 'ant']", "['ant', 'bee']", "one order"])


def test_folders_with_values_keep_zeros_blanks_and_gaps(tmp_path: Path):
    for number, site in enumerate(["7", "007", "New%20York", "__HIVE_DEFAULT_PARTITION__"]):
        (tmp_path / f"site={site}").mkdir()
        ONE.assign(a=number).to_parquet(tmp_path / f"site={site}" / "rows.parquet")
    source = make(Source, {"name": "table", "path": str(tmp_path), "labels": "site", "missing": "drop"})
    assert source.load().classes == ("007", "7", "New York")

"""Tables: which columns are inputs, and what is refused."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from rayfl.choices.kinds import make
from rayfl.data.datasets import Dataset, Source
from rayfl.data.loading import checked_dataset
from rayfl.data.sources.arrays import Arrays
from tests.jobs.commands import rayfl
from tests.refusals import check_sentence, refused

PATIENTS = "age,smokes,ward,outcome,hospital\n" + "".join(
    f"{20 + i % 7},{str(i % 2 == 0).lower()},{'ABC'[i % 3]},{i % 2},{'north' if i < 6 else 'south'}\n"
    for i in range(12)
)
CONFIG = """
rounds = {rounds}
data = {{name = "table", path = "{path}"}}
partition = "iid"
clients = {{count = 2}}
model = "logistic"
method = {{name = "fedavg", lr = 0.5, epochs = 5, batch_size = 32}}
output = {{report = false, save_models = false}}
"""


def load(path: Path, **options: Any) -> Dataset:
    return checked_dataset(make(Source, {"name": "table", "path": str(path), **options}).load())


def noise_sorted_by_label(rows: int = 400) -> pd.DataFrame:
    """Two columns of noise, of which some are dropped: pandas keeps the index, which tells the label."""
    frame = pd.DataFrame(np.random.default_rng(0).standard_normal((rows, 2)), columns=["a", "b"])
    frame["label"] = np.arange(rows) // (rows // 2)
    frame.iloc[::10, 0] = np.nan
    return frame.dropna()


@pytest.mark.parametrize("form", ["parquet", "named.parquet", "csv", "again.csv"])
def test_the_index_of_a_filtered_frame_is_no_input(tmp_path: Path, form: str):
    frame, path = noise_sorted_by_label(), tmp_path / f"noise.{form}"
    if form.startswith("named"):
        frame = frame.rename_axis("patient")
    if form.startswith("again"):
        frame.to_csv(path)
        frame = pd.read_csv(path)
        frame.to_csv(path, index=False)
    elif path.suffix == ".csv":
        frame.to_csv(path)
    else:
        frame.to_parquet(path)
    found = load(path)
    assert found.input_shape == (2,) and found.columns["inputs"] == ["a", "b"]
    (index,) = found.columns["pandas' index"]
    assert (
        index
        == {"parquet": "__index_level_0__", "named.parquet": "patient", "csv": "", "again.csv": "Unnamed: 0"}[form]
    )
    assert load(path, features=["a", index]).columns["inputs"] == ["a", index]


def test_noise_cannot_be_learned_from_its_index(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "rayfl")
    noise_sorted_by_label().to_parquet(tmp_path / "noise.parquet")
    (tmp_path / "noise.toml").write_text(CONFIG.format(rounds=5, path="noise.parquet"))
    result = rayfl("run", tmp_path / "noise.toml", "--inline", "--output", tmp_path / "run")
    assert result.exit_code == 0, result.output
    accuracy = pd.read_parquet(tmp_path / "run" / "records" / "metrics.parquet").query("name == 'pooled/accuracy'")
    assert accuracy["value"].iloc[-1] < 0.65
    assert "inputs: 'a', 'b'" in caplog.text and "no inputs (pandas' index): '__index_level_0__'" in caplog.text


def test_every_column_has_a_use_and_rayfl_data_tells_it(tmp_path: Path):
    header, *rows = PATIENTS.splitlines()
    text = "\n".join([f"{header},seen,gone", *(f"{row},2020-01-0{i % 9 + 1}," for i, row in enumerate(rows))])
    (tmp_path / "patients.csv").write_text(text)
    found = load(tmp_path / "patients.csv", labels="outcome", owners="hospital")
    assert found.columns == {
        "inputs": ["age", "smokes"],
        "text, and not in data.categories": ["ward"],
        "labels": ["outcome"],
        "owners": ["hospital"],
        "of type date32[day]": ["seen"],
        "empty": ["gone"],
    }
    assert load(tmp_path / "patients.csv", labels="outcome", features=["age"]).columns == {
        "inputs": ["age"],
        "not in data.features": ["smokes", "ward", "hospital", "seen", "gone"],
        "labels": ["outcome"],
    }
    toml = tmp_path / "patients.toml"
    toml.write_text(CONFIG.format(rounds=1, path="patients.csv"))
    result = rayfl("data", toml, "data.labels=outcome")
    assert result.exit_code == 0, result.output
    assert "inputs: 'age', 'smokes'\n" in result.output
    assert "no inputs (text, and not in data.categories): 'ward', 'hospital'\n" in result.output


def test_categories_become_an_input_per_value(tmp_path: Path):
    (tmp_path / "patients.csv").write_text(PATIENTS)
    options: dict[str, Any] = {"labels": "outcome", "test_path": str(tmp_path / "patients.csv")}
    found = load(tmp_path / "patients.csv", categories=["ward", "smokes"], features=["age"], **options)
    assert found.input_shape == (6,) and found.columns["inputs"] == ["age", "smokes", "ward"]
    np.testing.assert_array_equal(found.train.inputs[:3, 1:], [[0, 1, 1, 0, 0], [1, 0, 0, 1, 0], [0, 1, 0, 0, 1]])
    assert abs(found.train.inputs[:, 0].mean()) < 1e-6, "numbers are standardised, categories are not"
    np.testing.assert_array_equal(found.train.inputs, found.test.inputs)
    assert load(tmp_path / "patients.csv", categories=["ward"], **options).input_shape == (5,)
    (tmp_path / "new.csv").write_text(PATIENTS.replace(",B,", ",Z,"))
    with refused(names=["new.csv", "'Z'", "column 'ward'"]):
        load(tmp_path / "patients.csv", categories=["ward"], labels="outcome", test_path=str(tmp_path / "new.csv"))
    for options, names in (
        ({"categories": ["wards"]}, ['"wards"', "'ward'"]),
        ({"categories": ["outcome"]}, ["'outcome'", "labels"]),
        ({"features": ["age", "outcome"]}, ["'outcome'", "labels"]),
    ):
        with refused(names=["patients.csv", *names]):
            load(tmp_path / "patients.csv", labels="outcome", **options)


def test_wide_tables_take_time_that_grows_with_their_columns(tmp_path: Path):
    columns, path = 20_000, tmp_path / "wide.csv"
    rows = "".join("1.5," * columns + f"{i % 2}\n" for i in range(5))
    path.write_text(",".join([f"c{i}" for i in range(columns)]) + ",label\n" + rows)
    begun = time.process_time()
    assert load(path).input_shape == (columns,)
    # 8,000 columns took 39 s when each was looked up among all names.
    assert time.process_time() - begun < 5


@pytest.mark.parametrize(
    ("content", "options", "names"),
    [
        ("a,site,label\n1,x,0\n2,,1\n3,y,0\n", {"owners": "site"}, ["'site'", "row 1"]),
        ("a,site,label\n1,7,0\n2,,1\n3,8,0\n", {"owners": "site"}, ["'site'", "row 1"]),
        ("a,label\n1,cat\n2,\n3,dog\n", {}, ["'label'", "row 1"]),
        ("a,ward,label\n1,A,1\n2,,0\n", {"categories": ["ward"]}, ["'ward'", "row 1"]),
        ("a,a,label\n1,2,0\n1,2,1\n", {}, ['"a" exists 2 times', "rename"]),
        ("label,a,label\n1,2,0\n1,2,1\n", {}, ['"label" exists 2 times', "rename"]),
        ("a,gone,label\n1,,0\n2,,1\n", {"features": ["a", "gone"]}, ["'gone'", "row 0"]),
    ],
)
def test_gaps_and_columns_of_one_name_are_refused(tmp_path: Path, content: str, options: dict, names: list[str]):
    (tmp_path / "a.csv").write_text(content)
    with refused(names=["a.csv", *names]):
        load(tmp_path / "a.csv", test_share=0.4, **options)


def test_owners_that_are_nan_are_no_client():
    vectors, labels = np.ones((4, 2)), np.array([0, 1, 0, 1])
    for owners in ([1.0, np.nan, np.nan, 2.0], np.array(["x", None, "y", "y"], object), ["x", "", "y", "y"]):
        with refused(names=["no owner", "train", "row 1"]):
            Arrays(vectors, labels, owners=owners).load()
    with refused(names=["no label", "train", "row 1"]):
        Arrays(vectors, np.array(["x", None, "y", "y"], object)).load()


def test_names_and_numbers_are_no_labels_together(tmp_path: Path):
    (tmp_path / "train.csv").write_text("a,label\n1,0\n2,1\n3,2\n")
    (tmp_path / "test.csv").write_text("a,label\n1,cat\n2,dog\n")
    for one, other in (("train", "test"), ("test", "train")):
        with refused(names=[f"{one}.csv", "train labels", "test labels", "numbers", "names", "'cat'"]):
            load(tmp_path / f"{one}.csv", test_path=str(tmp_path / f"{other}.csv"))


def test_large_numbers_are_standardised_before_they_are_rounded(tmp_path: Path):
    rows, minutes = 80, 60 * np.arange(80)
    columns = {"time": 1_700_000_000 + minutes, "serial": 10**15 + np.arange(rows), "share": 0.1 * np.arange(rows)}
    frame = pd.DataFrame({**columns, "same": 0.1, "label": np.arange(rows) % 2})
    frame.to_csv(tmp_path / "sensors.csv", index=False)
    found = load(tmp_path / "sensors.csv", test_path=str(tmp_path / "sensors.csv"))
    assert found.train.inputs.dtype == np.float32
    # Equal steps: (i - 39.5) / sqrt((80^2 - 1) / 12), whatever the first value and the step are.
    wanted = (np.arange(rows) - 39.5) / np.sqrt((rows**2 - 1) / 12)
    for column in range(3):
        np.testing.assert_allclose(found.train.inputs[:, column], wanted, rtol=1e-6)
        assert len(np.unique(found.train.inputs[:, column])) == rows
    assert not found.train.inputs[:, 3].any(), "a column with one value is 0, and not a rounding error / another"
    np.testing.assert_array_equal(found.train.inputs, found.test.inputs)
    assert found.mean[1] == pytest.approx(10**15 + 39.5) and found.std[3] == 1.0


def test_a_test_row_beside_a_constant_column_stays_small(tmp_path: Path):
    (tmp_path / "train.csv").write_text("a,b,label\n" + "".join(f"0.1,{i},{i % 2}\n" for i in range(10)))
    (tmp_path / "test.csv").write_text("a,b,label\n0.2,1,0\n")
    found = load(tmp_path / "train.csv", test_path=str(tmp_path / "test.csv"))
    assert found.test.inputs[0, 0] == pytest.approx(0.1)


def test_numbers_that_float32_holds_are_scaled_with_the_same_bits_as_ever(tmp_path: Path):
    draws = np.random.default_rng(5)
    frame = pd.DataFrame({"a": draws.integers(0, 1000, 300), "b": draws.standard_normal(300).astype(np.float32)})
    frame["label"] = draws.integers(0, 2, 300)
    frame.to_parquet(tmp_path / "a.parquet")
    found = load(tmp_path / "a.parquet", test_path=str(tmp_path / "a.parquet"))
    inputs = frame[["a", "b"]].to_numpy(np.float32).astype(np.float64)
    wanted = ((inputs - inputs.mean(axis=0)) / inputs.std(axis=0)).astype(np.float32)
    np.testing.assert_array_equal(found.train.inputs, wanted)


def test_numbers_beyond_the_floats_are_refused(tmp_path: Path):
    for first, named in ((2**60, True), (2**52, False)):
        frame = pd.DataFrame({"id": first + np.arange(20), "label": np.arange(20) % 2})
        frame.to_parquet(tmp_path / "ids.parquet")
        if named:
            with refused(names=["ids.parquet", "'id'", "2^53"]):
                load(tmp_path / "ids.parquet")
    assert len(np.unique(load(tmp_path / "ids.parquet", test_share=0.5).train.inputs)) == 10
    (tmp_path / "huge.csv").write_text("a,label\n" + "".join(f"{i}e307,{i % 2}\n" for i in range(1, 10)))
    with refused(names=["huge.csv", "infinite"]):
        load(tmp_path / "huge.csv")


@pytest.mark.parametrize("source", ["table", "arrays"])
def test_numbers_that_float32_mixes_up_get_a_notice(tmp_path: Path, caplog: pytest.LogCaptureFixture, source: str):
    times = 1_700_000_000 + 60.0 * np.arange(80)
    if source == "arrays":
        np.savez(tmp_path / "times.npz", inputs=np.stack([times % 7, times], axis=1), labels=np.arange(80) % 2)
        make(Source, {"name": "arrays", "path": str(tmp_path / "times.npz")}).load()
    else:
        pd.DataFrame({"time": times, "label": np.arange(80) % 2}).to_csv(tmp_path / "times.csv", index=False)
        load(tmp_path / "times.csv", standardise=False)
    check_sentence(caplog.messages[0], [f"input {int(source == 'arrays')}", "float32"])
    assert all("float32" in message for message in caplog.messages)

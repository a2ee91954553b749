"""Labels of a user's files: classes that only the test has, gaps, columns of class numbers, names that are kept."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

import rayfl
from rayfl.choices.kinds import make
from rayfl.data.datasets import Dataset, Examples, Source
from rayfl.data.loading import checked_dataset, read_dataset
from rayfl.data.sources.arrays import Arrays
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.report.partition_table import table
from tests.jobs.commands import rayfl as command
from tests.refusals import check_sentence, line_with, refused

# Any: rayfl looks its functions up when they are asked for.
API: Any = rayfl
VECTORS = np.random.default_rng(3).standard_normal((24, 3))
CLASSES = np.arange(24) % 3
NAMES = np.array(["ape", "bee", "cat"])[CLASSES]
SMALL: dict[str, Any] = {"rounds": 1, "partition": "iid", "clients": {"count": 2}, "model": "mlp", "method": "fedavg"}


def load(name: str, **options: Any) -> Dataset:
    return checked_dataset(make(Source, {"name": name, **options}).load())


def written(folder: Path, form: str, labels: np.ndarray, test_labels: np.ndarray) -> Dataset:
    """The dataset of train and test labels that stand in files of a form."""
    given = {"inputs": VECTORS, "labels": labels, "test_inputs": VECTORS[: len(test_labels)]}
    given["test_labels"] = test_labels
    if form == "memory":
        return checked_dataset(Arrays(**given).load())
    if form == "npz":
        np.savez(folder / "mine.npz", **given)
        return load("arrays", path=str(folder / "mine.npz"))
    for split, values in (("train", labels), ("test", test_labels)):
        rows = pa.table({"a": VECTORS[: len(values), 0], "label": values})
        if form == "parquet":
            parquet.write_table(rows, folder / f"{split}.parquet")
        else:
            rows.to_pandas().to_csv(folder / f"{split}.{form}", index=False)
    return load("table", path=str(folder / f"train.{form}"), test_path=str(folder / f"test.{form}"))


@pytest.mark.parametrize("form", ["memory", "npz", "csv", "parquet"])
@pytest.mark.parametrize(
    ("labels", "strange"),
    [(NAMES, "cat."), (NAMES, "Ape"), (NAMES, "dog"), (CLASSES, 3), (CLASSES * 2, 1), (CLASSES.astype(float), 5.0)],
)
def test_a_test_label_that_no_train_sample_has_is_refused(tmp_path: Path, form: str, labels: Any, strange: Any):
    test_labels = labels[:5].astype(object)
    test_labels[3] = strange
    test_labels = np.array(test_labels.tolist())
    shown = repr(strange) if isinstance(strange, str) else f"label {strange:g}"
    with refused(names=[shown, "row 3", "no train example"]):
        written(tmp_path, form, labels, test_labels)
    found = written(tmp_path, form, labels, labels[:5])
    assert found.test.labels.tolist() == found.train.labels[:5].tolist()


def test_a_class_of_images_that_has_only_an_empty_train_folder_is_refused(tmp_path: Path):
    image = pytest.importorskip("PIL.Image")
    for folder in ("train/a", "train/b", "test/a", "test/b"):
        (tmp_path / folder).mkdir(parents=True)
        image.fromarray(np.full((4, 4), 99, np.uint8)).save(tmp_path / folder / "1.png")
    (tmp_path / "train" / "b" / "1.png").unlink()
    with refused(names=["'b'", "no train example"]):
        load("image-folder", path=str(tmp_path))


class Rare(Source):
    """Class 2 has test examples alone."""

    def load(self) -> Dataset:
        train, test = (Examples(VECTORS[:4].astype(np.float32), np.array([0, 1, 0, last])) for last in (1, 2))
        return Dataset("rare things", train, test, 3, "vector", classes=("ape", "bee", "cat"))


def test_a_source_of_ones_own_with_such_a_class_gets_a_notice(caplog: pytest.LogCaptureFixture):
    assert read_dataset(Rare()).num_classes == 3
    (notice,) = caplog.messages
    check_sentence(notice, ["rare things", "'cat'", "no train example"])


def test_a_drawn_test_split_with_such_a_class_gets_a_notice(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    # The examples that the fixed draw holds out have a class of their own.
    chosen = np.random.default_rng(0).permutation(24)[:6]
    labels = CLASSES.copy()
    labels[chosen[0]] = 3
    np.savez(tmp_path / "drawn.npz", inputs=VECTORS, labels=labels)
    assert load("arrays", path=str(tmp_path / "drawn.npz"), test_share=0.25).num_classes == 4
    (notice,) = caplog.messages
    check_sentence(notice, ["'3'", "no train example"])


def test_owners_are_names_or_numbers_in_both_splits():
    given = {"inputs": VECTORS, "labels": CLASSES, "test_inputs": VECTORS, "test_labels": CLASSES}
    with refused(names=["train owners", "test owners", "numbers", "names", "'07a'"]):
        Arrays(**given, owners=CLASSES, test_owners=np.array(["07a"] * 24)).load()
    found = Arrays(**given, owners=np.array([1, "x"] * 12, object), test_owners=["x"] * 24).load()
    assert found.train.groups is not None and found.train.groups.tolist() == [0, 1] * 12
    found = Arrays(**given, owners=np.array([10, 9] * 12, object), test_owners=[10] * 24).load()
    assert found.train.groups is not None and found.train.groups.tolist() == [1, 0] * 12, "in the order of numbers"


def test_gaps_in_labels_get_a_notice_and_many_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    gaps = np.array([0, 3, 29])[CLASSES]
    np.savez(tmp_path / "gaps.npz", inputs=VECTORS, labels=gaps)
    assert load("arrays", path=str(tmp_path / "gaps.npz")).num_classes == 30
    (notice,) = caplog.messages
    check_sentence(notice, ["gaps.npz", "class 1, 2, 4, 5, 6 and 22 more", "0 to 29", "30 outputs"])
    # 31 outputs are more than 10 times 3 classes.
    for labels in (gaps + (gaps == 29), np.array([0, 3, 40])[CLASSES], CLASSES + 2000, np.full(24, 10)):
        with refused(names=["outputs", f"{len(np.unique(labels))} classes", f"{labels.max() + 1}"]):
            Arrays(VECTORS, labels).load()


@pytest.mark.parametrize(("dtype", "width"), [(np.uint8, 1), (np.int64, 1), (np.int32, 2), (np.uint16, 9)])
def test_class_numbers_in_a_column_are_no_numbers_to_predict(tmp_path: Path, dtype: Any, width: int):
    labels = np.stack([CLASSES * 4] * width, axis=1).astype(dtype)
    np.savez(tmp_path / "mine.npz", inputs=VECTORS, labels=labels)
    options = {**SMALL, "data": {"name": "arrays", "path": str(tmp_path / "mine.npz")}}
    facts = ["mine.npz", f"[n, {width}]", "task='regression'"]
    with refused(names=[*facts, *(["labels[:, 0]"] if width == 1 else [])]):
        prepare(Experiment(**options))
    assert prepare(Experiment(**options, task="regression")).dataset.num_classes == width
    file = tmp_path / "own.toml"
    file.write_text(
        'rounds = 1\ndata = {name = "arrays", path = "mine.npz"}\nmodel = "mlp"\npartition = "iid"\n'
        'clients = {count = 2}\nmethod = "fedavg"\n'
    )
    refused(command("data", file), names=facts)
    assert command("data", file, "task=regression").exit_code == 0


@pytest.mark.parametrize("labels", [CLASSES[:, None] > 0, (CLASSES[:, None] > 0).astype(np.uint8)])
def test_yes_or_no_in_a_column_stays_a_task_of_its_own(labels: np.ndarray):
    task = prepare(Experiment(**{**SMALL, "data": Arrays(VECTORS, labels)})).method.task
    assert task.task.name == "multilabel"  # type: ignore[attr-defined]


CSV = "age,ward,label\n" + "".join(f"{20 + i},{'AB'[i % 2]},{['2', '10', 'n/a [b]'][i % 3]}\n" for i in range(30))


def test_names_of_classes_and_inputs_are_kept(tmp_path: Path):
    (tmp_path / "mine.csv").write_text(CSV)
    data = {"name": "table", "path": str(tmp_path / "mine.csv"), "categories": ["ward"]}
    found = load(**data)
    # Texts are sorted as texts: "10" is class 0.
    assert list(found.classes) == ["10", "2", "n/a [b]"] and list(found.input_names) == ["age", "ward=A", "ward=B"]
    played = API.run(
        directory=tmp_path / "run",
        progress=False,
        **{**SMALL, "rounds": 2},
        data=data,
        evaluation={"metrics": ["accuracy", "recall", "confusion"]},
        runtime={"executor": "inline"},
    )
    names = {*played.metrics["name"]}
    for part in ("recall/10", "recall/2", "recall/n%2Fa [b]", "confusion/n%2Fa [b]/10"):
        assert f"pooled/{part}" in names
    assert "pooled/recall/0" not in names
    raw = np.array([[20 + i, i % 2 == 0, i % 2 == 1] for i in range(30)], float)
    numbers = played.model()(torch.tensor(raw)).argmax(1).numpy()
    assert played.predict(raw).tolist() == [found.classes[number] for number in numbers]
    kept = json.loads((tmp_path / "run" / "models" / "inputs.json").read_text())
    assert kept["classes"] == list(found.classes) and kept["columns"] == list(found.input_names)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "n%2Fa [b]" in page and "Recall: 10" in page


def test_rayfl_data_names_the_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text(CSV)
    Path("own.toml").write_text(
        'rounds = 1\ndata = {name = "table", path = "mine.csv"}\nmodel = "mlp"\npartition = "iid"\n'
        'clients = {count = 2}\nmethod = "fedavg"\n'
    )
    result = command("data", "own.toml")
    assert result.exit_code == 0, result.output
    counts = {label: int((load("table", path="mine.csv").train.labels == label).sum()) for label in range(3)}
    line_with(result.output, ["all", f"10:{counts[0]}", f"2:{counts[1]}", f"n/a [b]:{counts[2]}"])
    line_with(result.output, ["an input", "[1]"])


def test_the_targets_of_a_table_name_its_outputs(tmp_path: Path):
    rows = "".join(f"{i},{i % 2},{i % 3 == 0:d}\n" for i in range(20))
    (tmp_path / "mine.csv").write_text("a,ill,old\n" + rows)
    data = {"name": "table", "path": str(tmp_path / "mine.csv"), "targets": ["ill", "old"]}
    setup = prepare(Experiment(**SMALL, data=data, task="multilabel", evaluation={"metrics": ["recall"]}))
    assert list(setup.metric_facts) == ["recall", "recall/ill", "recall/old"]
    assert table(setup.dataset, setup.partition).row_count == 2

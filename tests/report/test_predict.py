"""A run's final models take inputs as the data's files have them, in another process and without the data."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import rayfl
from rayfl.data.datasets import Dataset, Examples
from rayfl.data.sources.idx import Digits
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.models.predictor import Predictor
from rayfl.run_directory.saved_models import read_model_inputs, write_model_inputs
from tests.refusals import refused

# Any: rayfl looks its functions up when they are asked for.
API: Any = rayfl
SETTINGS: dict[str, Any] = {
    "rounds": 4,
    "data": "digits",
    "partition": {"name": "dirichlet-client", "alpha": 0.3},
    "clients": {"count": 6},
    "model": "logistic",
    "method": {"name": "fedavg_ft", "lr": 0.1},
    "runtime": {"executor": "inline"},
    "output": {"report": False},
}
TEST = Digits().load().test


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return API.run(directory=tmp_path_factory.mktemp("run") / "run", progress=False, **SETTINGS)


def test_raw_pixels_give_the_accuracy_of_the_run(played: Any):
    wanted = played.summary["final"]["pooled/accuracy"]
    assert (played.predict(TEST.inputs) == TEST.labels).mean() == pytest.approx(wanted)
    # The network alone takes what the run normalised.
    model = played.model()
    bare = model.network(torch.tensor(TEST.inputs).float()).argmax(1).numpy()
    assert (bare == TEST.labels).mean() < wanted
    assert torch.equal(model(torch.tensor(TEST.inputs)), model.network(model.data.prepare(TEST.inputs)))


def test_a_tables_numbers_are_scaled_as_in_the_run(tmp_path: Path):
    draws = np.random.default_rng(1)
    ill = draws.integers(0, 2, 300)
    numbers, wards = 1000 + 300 * (ill + 0.3 * draws.normal(size=300)), draws.choice(["x", "y"], 300)
    lines = [f"{a},{ward},{b}" for a, ward, b in zip(numbers, wards, ill, strict=True)]
    file = tmp_path / "patients.csv"
    file.write_text("\n".join(["a,ward,ill", *lines]))
    data = {"name": "table", "path": str(file), "labels": "ill", "categories": ["ward"], "test_path": str(file)}
    changed = {"data": data, "partition": "iid", "method": {"name": "fedavg", "lr": 0.5}}
    played = API.run(directory=tmp_path / "run", progress=False, **{**SETTINGS, **changed})
    raw = np.stack([numbers, wards == "x", wards == "y"], 1)
    right = (played.predict(raw) == ill).mean()
    assert right == pytest.approx(played.summary["final"]["pooled/accuracy"]) and right > 0.9


def test_a_clients_model_gives_the_accuracy_that_was_recorded_for_it(played: Any):
    # Fine-tuned models, which were made for an evaluation and thrown away.
    tests = prepare(Experiment(**SETTINGS)).partition.test
    last = played.metrics[(played.metrics["round"] == 3) & (played.metrics["name"] == "own/accuracy")]
    recorded = last.dropna().set_index("client")["value"]
    assert len(recorded) == 6
    for client, accuracy in recorded.items():
        rows = tests[client]
        right = played.predict(TEST.inputs[rows], client=client) == TEST.labels[rows]
        assert right.mean() == pytest.approx(accuracy)


def test_images_may_come_in_the_forms_in_which_data_do(played: Any):
    wanted = played.predict(TEST.inputs[:9])
    assert np.array_equal(played.predict(TEST.inputs[:9, 0]), wanted)
    assert np.array_equal(played.predict(TEST.inputs[:9].transpose(0, 2, 3, 1)), wanted)
    assert np.array_equal(played.predict(TEST.inputs[:9].tolist()), wanted)
    assert played.predict(TEST.inputs[:0]).shape == (0,)


def test_what_is_no_raw_input_is_refused(played: Any):
    with refused(names=["float32", "whole numbers", "pixels from 0 to 16"]):
        played.predict(TEST.inputs / np.float32(16))
    with refused(names=["[2, 8, 9]", "['n', 1, 8, 8]"]):
        played.predict(TEST.inputs.reshape(-1)[: 2 * 72].reshape(2, 8, 9))
    with refused(names=["client 6", "another client"]):
        played.predict(TEST.inputs[:1], client=6)


def test_pixels_deeper_than_8_bits_are_refused(played: Any):
    for deep, facts in ((TEST.inputs.astype(np.uint16) * 257, ["4112"]), (TEST.inputs.astype(int) - 1, ["-1"])):
        with refused(names=["8 bits", *facts]):
            played.predict(deep)
    assert np.array_equal(played.predict(TEST.inputs[:5].astype(np.int64)), played.predict(TEST.inputs[:5]))


def test_large_numbers_of_a_table_are_scaled_before_they_are_rounded():
    none = Examples(np.zeros((1, 1), np.float32), np.zeros(1, int))
    data = Dataset("sensors", none, none, 2, "vector", (10.0**15,), (2.0,))
    model = Predictor(torch.nn.Identity(), data)
    assert model(torch.tensor([[10**15 + 4], [10**15 - 1]])).tolist() == [[2.0], [-0.5]]


@pytest.mark.parametrize("given", ["abc", None, [["a"]]])
def test_what_is_no_number_is_refused(played: Any, given: Any):
    with refused(names=["inputs", "not numbers"]):
        played.predict(given)


def test_the_callers_flags_change_nothing(played: Any):
    inputs = np.zeros((2, 1, 8, 8), dtype=np.uint8)
    before = played.predict(inputs)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        assert played.predict(inputs).tolist() == before.tolist()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device("cpu")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layout_and_precision_are_those_of_the_run(precision: str, tmp_path: Path):
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 3, 300)
    inputs = (draw.integers(0, 150, (300, 16, 16, 3)) + 50 * labels[:, None, None, None]).astype(np.uint8)
    test = {"test_inputs": inputs[200:], "test_labels": labels[200:]}
    np.savez(tmp_path / "data.npz", inputs=inputs[:200], labels=labels[:200], **test)
    settings = {
        **SETTINGS,
        "rounds": 2,
        "data": {"name": "arrays", "path": str(tmp_path / "data.npz")},
        "partition": "iid",
        "model": "convnet2",
        "runtime": {"executor": "inline", "precision": precision},
    }
    results = API.run(directory=tmp_path / "run", progress=False, **settings)
    logits = results.model()(torch.tensor(inputs[200:]))
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels[200:])).item()
    assert loss == pytest.approx(results.frame["pooled/loss"].iloc[-1], rel=1e-6)


PROGRAM = """
import sys
import numpy as np
import rayfl

results = rayfl.load(sys.argv[1])
inputs = np.load(sys.argv[2])
print(*results.predict(inputs), *results.predict(inputs, client=3))
print(results.personal_model(3).network)
"""


@pytest.mark.slow
def test_another_process_needs_no_data(tmp_path: Path):
    path, raw = tmp_path / "data.npz", tmp_path / "raw.npy"
    pixels = np.repeat(np.repeat(TEST.inputs, 2, axis=2), 2, axis=3) * np.uint8(15)
    np.savez(path, inputs=pixels, labels=TEST.labels)
    (tmp_path / "mine.py").write_text(
        "import torch\n\n\nclass Mine(torch.nn.Sequential):\n    def __init__(self, num_classes):\n"
        "        super().__init__(torch.nn.Flatten(), torch.nn.Linear(256, num_classes))\n"
    )
    model = {"name": f"{tmp_path}/mine.py:Mine"}
    given = {**SETTINGS, "rounds": 1, "data": {"name": "arrays", "path": str(path)}, "model": model}
    results = API.run(directory=tmp_path / "run", progress=False, **given)
    np.save(raw, pixels[:20])
    wanted = [*results.predict(pixels[:20]), *results.predict(pixels[:20], client=3)]
    digest = results.settings["data"]["digest"]
    path.unlink()
    (tmp_path / "mine.py").unlink()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "run"), str(raw)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert list(map(int, first.split())) == wanted and rest[0] == "Mine("
    inputs = (tmp_path / "run/models/inputs.json").read_text()
    assert digest and all(value in inputs for value in digest.values())


def test_damaged_inputs_are_refused(played: Any, tmp_path: Path):
    run = shutil.copytree(played.directory, tmp_path / "run")
    (run / "models/inputs.json").unlink()
    with refused(names=["inputs.json"]):
        API.load(run).model()
    for content, names in {
        "[": ["inputs.json", "no JSON"],
        "{}": ["inputs.json", "dataset"],
    }.items():
        (run / "models/inputs.json").write_text(content)
        with refused(names=names):
            API.load(run).model()


def test_sources_may_have_numbers_of_numpy(tmp_path: Path):
    data, colours = Digits().load(), Examples(np.empty((0, 3, 8, 8), np.uint8), np.empty(0))
    odd: dict[str, Any] = {
        "num_classes": np.int64(10),
        "mean": np.array([0.5], np.float32),
        "std": (np.float32(0.25),),
        "white": np.uint8(16),
    }
    write_model_inputs(tmp_path, replace(data, **odd), "fp32")
    read = read_model_inputs(tmp_path).without_samples()
    assert (read.num_classes, read.mean, read.std, read.white) == (10, (0.5,), (0.25,), 16)
    wanted = replace(data, mean=(0.5,), std=(0.25,))
    assert torch.equal(read.prepare(TEST.inputs), wanted.prepare(TEST.inputs))
    # One deviation for all channels, and a mean that nothing uses.
    for odd in ({"kind": "vector", "std": ()}, {"kind": "image", "train": colours, "std": (0.5,)}):
        write_model_inputs(tmp_path, replace(data, mean=(0.5,), **odd), "fp32")
        assert read_model_inputs(tmp_path).num_classes == 10


def test_numbers_and_tokens():
    numbers, none = torch.zeros(2, 3, dtype=torch.float64), Examples(np.empty((0, 3)), np.empty(0))
    of_vectors = Dataset("toy", none, none, num_classes=3, kind="vector")
    assert Predictor(torch.nn.Identity(), of_vectors)(numbers).dtype == torch.float32
    of_tokens = replace(of_vectors, kind="text")
    with refused(names=["float64", "tokens"]):
        Predictor(torch.nn.Identity(), of_tokens)(numbers)
    assert Predictor(torch.nn.Identity(), of_tokens)(numbers.to(torch.uint16)).tolist() == [[0.0] * 3] * 2


def test_a_data_frame_gives_a_tables_inputs_by_name(tmp_path: Path):
    draws = np.random.default_rng(1)
    ill = draws.integers(0, 2, 100)
    frame = pd.DataFrame({"age": 40 + 9 * ill + draws.normal(size=100), "code": draws.integers(1, 4, 100), "ill": ill})
    frame["ward"] = draws.choice(["x", "y=1"], 100)
    frame.loc[3, "age"] = np.nan
    file = tmp_path / "patients.csv"
    frame.to_csv(file, index=False)
    data = {"name": "table", "path": str(file), "test_path": str(file), "labels": "ill", "missing": "category"}
    settings = {**SETTINGS, "data": {**data, "categories": ["ward", "code"]}, "partition": "iid", "method": "fedavg"}
    results = API.run(directory=tmp_path / "run", progress=False, **settings)
    shuffled = frame[["ward", "ill", "age", "code"]].astype({"code": float})
    assert (results.predict(shuffled) == ill).mean() == pytest.approx(results.summary["final"]["pooled/accuracy"])
    for wrong, names in (
        (frame.drop(columns="age"), ["no column 'age'", "ward"]),
        (frame.drop(columns="ward").rename(columns={"age": "Age"}), ["no column 'age'", "did you mean 'Age'"]),
        (frame.assign(ward="z"), ["'z'", "'ward'", "row 0", "x, y=1"]),
        (frame.assign(age="old"), ["'age'", "numbers"]),
        (np.zeros((2, 6)), ["[2, 6]", "'age=?' has no number", "age, code=1, code=2", "data frame"]),
        (np.zeros((2, 8)), ["[2, 8]", "nothing follows 'age=?'"]),
    ):
        with refused(names=names):
            results.predict(wrong)

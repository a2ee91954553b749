"""Examples with several inputs, a tuple or a dictionary of arrays, and models with several outputs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rayfl
from rayfl.data.batches import first_two
from rayfl.data.datasets import Dataset, Examples, Source
from rayfl.data.loading import checked_dataset
from rayfl.data.sources.arrays import ArrayFiles, Arrays
from rayfl.data.sources.several_inputs import InputLayout
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.rounds.setup import Setup
from rayfl.testing.contracts import examples_are_evaluated_one_by_one, loop_and_vmap_agree
from tests.refusals import refused

MINE = """
import torch
from torch import nn

from rayfl.metrics.accuracy import Accuracy
from rayfl.metrics.loss import Loss
from rayfl.tasks.base import Task


class Named(nn.Module):
    def __init__(self, input_shape, num_classes):
        super().__init__()
        (length,) = input_shape["meta"]
        self.image, self.meta, self.words = nn.LazyLinear(8), nn.Linear(length, 8), nn.Embedding(9, 8)
        self.out = nn.Linear(8, num_classes)

    def forward(self, image, words, meta):
        assert words.dtype == torch.int64 and image.dtype == torch.float32 and image.shape[1:] == (1, 3, 3)
        return self.out(torch.relu(self.image(image.flatten(1)) + self.meta(meta) + self.words(words).mean(1)))


class OneDictionary(Named):
    def forward(self, batch):
        return super().forward(**batch)


class Placed(nn.Module):
    def __init__(self, input_shape, num_classes):
        super().__init__()
        (self.first, self.second), self.out = (nn.Linear(size, 8) for (size,) in input_shape), nn.Linear(8, num_classes)

    def forward(self, a, b):
        return self.out(torch.relu(self.first(a) + self.second(b)))


class OneTuple(Placed):
    def forward(self, batch):
        return super().forward(*batch)


class Heads(Placed):
    def __init__(self, input_shape):
        super().__init__(input_shape, 3)
        self.value = nn.Linear(8, 1)

    def forward(self, a, b):
        hidden = torch.relu(self.first(a) + self.second(b))
        return {"classes": self.out(hidden), "value": self.value(hidden)[:, 0]}


class Both(Task):
    def loss(self, outputs, targets):
        losses = nn.functional.cross_entropy(outputs["classes"], targets[:, 0].long(), reduction="none")
        losses = losses + (outputs["value"] - targets[:, 1]).square()
        return losses, torch.ones_like(losses)

    def score(self, outputs, targets):
        return (outputs["classes"].argmax(1) == targets[:, 0]).float()

    def output_shape(self, dataset):
        return None

    def check(self, dataset, network):
        pass


class ByName(Both):
    def loss(self, outputs, targets):
        kind, value = targets["kind"], targets["value"]
        assert kind.dtype == torch.int64 and value.dtype == torch.float32
        losses = nn.functional.cross_entropy(outputs["classes"], kind, reduction="none")
        losses = losses + (outputs["value"] - value).square()
        return losses, torch.ones_like(losses)

    def score(self, outputs, targets):
        return (outputs["classes"].argmax(1) == targets["kind"]).float()


class ByPlace(ByName):
    def loss(self, outputs, targets):
        return super().loss(outputs, dict(zip(("kind", "value"), targets)))

    def score(self, outputs, targets):
        return super().score(outputs, {"kind": targets[0]})


class Predicting(Both):
    def predictions(self, outputs):
        return outputs["value"][:, None].expand(-1, 2)


class Auxiliary(Placed):
    def forward(self, a, b):
        logits = super().forward(a, b)
        return (logits, 2 * logits) if self.training else logits


class Sum(Task):
    def loss(self, outputs, targets):
        several = outputs if isinstance(outputs, tuple) else (outputs,)
        losses = sum(nn.functional.cross_entropy(logits, targets, reduction="none") for logits in several)
        return losses, torch.ones_like(losses)

    def score(self, outputs, targets):
        return (outputs.argmax(1) == targets).float()

    def output_shape(self, dataset):
        return None

    def default_metrics(self):
        return (Loss(), Accuracy())

    def check(self, dataset, network):
        pass
"""
GENERATOR = np.random.default_rng(0)
LABELS = GENERATOR.integers(0, 3, 60)
NAMED = {
    "image": GENERATOR.random((60, 1, 3, 3)),
    "meta": GENERATOR.normal(size=(60, 2)).astype(np.float32),
    "words": GENERATOR.integers(0, 9, (60, 4)),
}
PLACED = (GENERATOR.normal(size=(60, 5)), GENERATOR.integers(0, 2, (60, 2)).astype(np.float32))
VALUES = np.stack([LABELS, PLACED[0][:, 0]], axis=1).astype(np.float32)


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    return f"{tmp_path}/mine.py"


def tables(data: Any, model: str, **more: Any) -> dict[str, Any]:
    method = {"name": "fedavg", "lr": 0.1, "batch_size": 8}
    table = {"rounds": 2, "partition": "iid", "clients": {"count": 3}, "method": method}
    return {**table, "data": data, "model": model, **more}


def prepared(data: Any, model: str, **more: Any) -> Setup:
    return prepare(Experiment(**tables(data, model, **more)))


class Own(Source):
    """A user's own source, which gives a dictionary or a tuple."""

    is_named: bool = True
    kind: str = "vector"

    def load(self) -> Dataset:
        def part(rows: slice) -> Examples:
            named, placed = {name: array[rows] for name, array in NAMED.items()}, tuple(array[rows] for array in PLACED)
            arrays: Any = named if self.is_named else placed
            return Examples(arrays, LABELS[rows])

        return Dataset("own", part(slice(40)), part(slice(40, 60)), num_classes=3, kind=self.kind)


@pytest.mark.parametrize("model", ["Named", "OneDictionary", "Placed", "OneTuple"])
@pytest.mark.parametrize("source", ["memory", "file", "own"])
def test_a_model_gets_each_input_with_its_shape_and_type(mine: str, tmp_path: Path, model: str, source: str):
    inputs: Any = NAMED if model in ("Named", "OneDictionary") else PLACED
    data: Any = Own(is_named=inputs is NAMED) if source == "own" else Arrays(inputs, LABELS)
    if source == "file":
        named = inputs if inputs is NAMED else dict(enumerate(inputs))
        np.savez(tmp_path / "a.npz", labels=LABELS, **{f"inputs_{name}": array for name, array in named.items()})
        data = {"name": "arrays", "path": str(tmp_path / "a.npz")}
    setup = prepared(data, f"{mine}:{model}")
    assert setup.dataset.layout is not None and setup.forward_flops > 0
    assert setup.dataset.in_words(9) == [
        "an example has the inputs image [1, 3, 3], meta [2], words [4]"
        if inputs is NAMED
        else "an example has the inputs 0 [5], 1 [2]"
    ]
    loop_and_vmap_agree(setup, prepared(data, f"{mine}:{model}", runtime={"engine": "vmap"}))


def test_rows_hold_the_inputs_bit_by_bit():
    layout = InputLayout.of(NAMED)
    rows = torch.from_numpy(layout.pack("here", NAMED))
    unpacked = layout.unpack(rows[:1])
    assert isinstance(unpacked, dict) and unpacked["words"].tolist() == NAMED["words"][:1].tolist()
    for name, part in unpacked.items():
        assert np.array_equal(part.numpy(), NAMED[name][:1].astype(part.numpy().dtype)), name
        assert part.untyped_storage().nbytes() == part.nbytes, "a product's bits depend on its factors' alignment"


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: Arrays((PLACED[0], PLACED[1][:5]), LABELS).load(), ["input 1", "[5, 2]", "one row for each"]),
        (lambda: Arrays((PLACED[0], PLACED[0].astype(str)), LABELS).load(), ["input 1", "numbers"]),
        (lambda: Arrays({"a": LABELS[:, None] + 2**24}, LABELS).load(), ["input a", str(2**24), "smaller"]),
        (lambda: Arrays(PLACED, LABELS, PLACED[:1], LABELS).load(), ["0 [5]", "1 [2]", "one layout"]),
        (lambda: Arrays(PLACED, LABELS, kind="image").load(), ["kind='image'", "several"]),
        (lambda: Arrays((PLACED[0] * np.nan,), LABELS).load(), ["NaN"]),
        (lambda: Own(kind="image").load(), ["own", "several inputs", "kind='vector'"]),
        (lambda: prepared(Arrays(PLACED, LABELS), "mlp"), ["'mlp'", "one input", "0 [5], 1 [2]", "of your own"]),
    ],
)
def test_what_makes_no_rows_is_refused(make, names: list[str]):
    with refused(names=names):
        checked_dataset(made) if isinstance(made := make(), Dataset) else None


@pytest.mark.parametrize(
    ("model", "labels", "task", "metrics"),
    [
        ("Heads", VALUES, "Both", None),
        ("Heads", VALUES, "Predicting", ["loss", "mae"]),
        ("Auxiliary", LABELS, "Sum", None),
    ],
)
def test_the_task_decides_the_loss_of_several_outputs(mine: str, model: str, labels: np.ndarray, task: str, metrics):
    more: dict[str, Any] = {"task": f"{mine}:{task}", "evaluation": {"metrics": metrics} if metrics else {}}
    setup = prepared(Arrays(PLACED, labels), f"{mine}:{model}", **more)
    examples_are_evaluated_one_by_one(setup)
    vmapped = prepared(Arrays(PLACED, labels), f"{mine}:{model}", **more, runtime={"engine": "vmap"})
    loop_and_vmap_agree(setup, vmapped)
    assert "loss" in setup.metric_facts and len(setup.metric_facts) == (2 if metrics or task == "Sum" else 1)


def test_several_outputs_need_a_task_that_takes_them_and_names_the_predictions(mine: str):
    with refused(names=["Heads", "a dict in training", "regression", "output_shape is None"]):
        prepared(Arrays(PLACED, VALUES), f"{mine}:Heads")
    with refused(names=["Both", "predictions", "['loss']"]):
        prepared(Arrays(PLACED, VALUES), f"{mine}:Heads", task=f"{mine}:Both", evaluation={"metrics": ["loss", "mae"]})
    prepared(Arrays(PLACED, VALUES), f"{mine}:Heads", task=f"{mine}:Both", wrap=["elastic"])


TARGETS = {"kind": LABELS, "value": PLACED[0][:, 0].astype(np.float32)}


@pytest.mark.parametrize("source", ["memory", "npz", "own"])
def test_a_task_gets_several_targets(mine: str, tmp_path: Path, source: str):
    targets: Any = TARGETS if source != "memory" else (*TARGETS.values(),)
    data: Any = Arrays(PLACED, targets)
    if source == "npz":
        named = {f"labels_{name}": values for name, values in TARGETS.items()}
        np.savez(tmp_path / "mine.npz", inputs_0=PLACED[0], inputs_1=PLACED[1], **named)
        data = {"name": "arrays", "path": str(tmp_path / "mine.npz")}
    if source == "own":
        data = Targeted()
    task = "ByPlace" if source == "memory" else "ByName"
    setup = prepared(data, f"{mine}:Heads", task=f"{mine}:{task}")
    examples_are_evaluated_one_by_one(setup)
    vmapped = prepared(data, f"{mine}:Heads", task=f"{mine}:{task}", runtime={"engine": "vmap"})
    loop_and_vmap_agree(setup, vmapped)
    one_target = data if source == "own" else Arrays(PLACED, VALUES)
    assert [*setup.metric_facts] == ["loss"]
    if source != "own":
        # The same numbers as with both targets in one array.
        single = prepared(one_target, f"{mine}:Heads", task=f"{mine}:Both")
        losses = [part.method.task.losses(part.first_model, first_two(part.dataset))[0] for part in (setup, single)]
        assert losses[0].equal(losses[1])


class Targeted(Source):
    """A user's own source with several targets."""

    def load(self) -> Dataset:
        def part(rows: slice) -> Examples:
            targets: Any = {name: values[rows] for name, values in TARGETS.items()}
            inputs: Any = tuple(array[rows] for array in PLACED)
            return Examples(inputs, targets)

        return Dataset("own", part(slice(40)), part(slice(40, 60)), num_classes=3, kind="vector")


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({}, ["several targets", "kind []", "task of your own"]),
        ({"task": "regression"}, ["'regression'", "one target", "kind []", "task of your own"]),
        ({"task": "ByName", "evaluation": {"metrics": ["loss", "mae"]}}, ["several targets", "['loss']"]),
    ],
)
def test_several_targets_need_a_task_that_takes_them(mine: str, more: dict[str, Any], names: list[str]):
    task = {"task": f"{mine}:ByName"} if more.get("task") == "ByName" else {}
    with refused(names=names):
        prepared(Arrays(PLACED, TARGETS), f"{mine}:Heads", **{**more, **task})


def test_a_run_predicts_from_several_inputs(mine: str, tmp_path: Path):
    data = Arrays(NAMED, LABELS, NAMED, LABELS)
    ran: Any = rayfl.run(
        **tables(data, f"{mine}:Named"), runtime={"executor": "inline"}, output={"directory": str(tmp_path / "r")}
    )
    results: Any = rayfl.load(ran.directory)
    assert np.mean(results.predict(NAMED) == LABELS) == pytest.approx(results.summary["final"]["pooled/accuracy"])
    with refused(names=["0 [5]", "image [1, 3, 3]", "one layout"]):
        results.predict(PLACED)


def test_files_of_a_folder_are_several_inputs(tmp_path: Path):
    for name, array in {"inputs_b": PLACED[1], "inputs_a": PLACED[0], "labels": LABELS, "other": LABELS}.items():
        np.save(tmp_path / f"{name}.npy", array)
    source = ArrayFiles(path=str(tmp_path))
    assert [file.name for file in source.files()] == ["labels.npy", "inputs_a.npy", "inputs_b.npy"]
    assert str(source.load().layout) == "a [5], b [2]"

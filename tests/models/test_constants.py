"""Frozen parameters and buffers are constants: never trained, sent or counted, and in the saved models."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import rayfl
from rayfl.data.batches import Batch
from rayfl.models import flops
from tests.bound_tasks import classification
from tests.refusals import refused

MODELS = """
import torch
from torch import nn


class Half(nn.Module):
    '''A frozen layer of 0.125, random features that are not saved by torch, and a trained layer of 10 * 8 + 10.'''

    def __init__(self, input_shape, num_classes):
        super().__init__()
        self.first = nn.Linear(64, 8)
        nn.init.constant_(self.first.weight, 0.125)
        self.first.requires_grad_(False)
        self.register_buffer("shift", torch.randn(8), persistent=False)
        self.register_buffer("steps", torch.arange(3))
        self.head = nn.Linear(8, num_classes)

    def forward(self, inputs):
        return self.head(torch.cos(self.first(inputs.flatten(1)) + self.shift))


class Frozen(Half):
    def __init__(self, input_shape, num_classes):
        super().__init__(input_shape, num_classes)
        self.requires_grad_(False)


class Counts(Half):
    def forward(self, inputs):
        if self.training:
            self.steps += 1
        return super().forward(inputs)


class Renews(Half):
    def forward(self, inputs):
        self.shift = self.shift + 1
        return super().forward(inputs)


class Running(Half):
    def __init__(self, input_shape, num_classes):
        super().__init__(input_shape, num_classes)
        self.norm = nn.InstanceNorm1d(1, track_running_stats=True)

    def forward(self, inputs):
        return super().forward(self.norm(inputs.flatten(1)[:, None])[:, 0])


class Tail(nn.Module):
    '''Recurrent, with a frozen first layer.'''

    def __init__(self, input_shape, num_classes):
        super().__init__()
        self.lstm = nn.LSTM(8, 4, num_layers=2)
        self.lstm.weight_hh_l0.requires_grad_(False)
        self.head = nn.Linear(4, num_classes)

    def forward(self, inputs):
        return self.head(self.lstm(inputs.flatten(1, 2).permute(1, 0, 2))[0][-1])
"""
TRAINED = 10 * 8 + 10


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "my_models.py"
    path.write_text(MODELS)
    return str(path)


def settings(model: object, **others: object) -> dict:
    return {
        "data": "digits",
        "partition": "iid",
        "clients": {"count": 3},
        "model": model,
        "method": {"name": "fedavg", "lr": 0.1},
        "rounds": 2,
        "runtime": {"executor": "inline"},
        "output": {"report": False},
        "progress": False,
        **others,
    }


def test_constants_are_neither_trained_nor_sent_and_are_saved(file: str, tmp_path: Path):
    found = rayfl.run(directory=tmp_path / "run", **settings(f"{file}:Half"))
    weights = load_file(tmp_path / "run" / "models" / "global.safetensors")
    assert set(weights) == {"first.weight", "first.bias", "shift", "steps", "head.weight", "head.bias"}
    assert weights["first.weight"].eq(0.125).all() and weights["steps"].tolist() == [0, 1, 2]
    # A client also sends its number of examples, in 64 bits.
    assert set(found.clients["downlink_bits"]) == {32 * TRAINED}
    assert set(found.clients["uplink_bits"]) == {32 * TRAINED + 64}
    module, again = found.model().network, found.model().network
    assert torch.equal(module.get_buffer("shift"), weights["shift"])
    assert torch.equal(module(torch.ones(2, 1, 8, 8)), again(torch.ones(2, 1, 8, 8)))


def test_a_run_starts_from_the_weights_and_constants_of_another(file: str, tmp_path: Path):
    rayfl.run(directory=tmp_path / "run", **settings(f"{file}:Half"))
    start = str(tmp_path / "run" / "models" / "global.safetensors")
    rayfl.run(directory=tmp_path / "next", **settings({"name": f"{file}:Half", "start": start}, seed=5))
    before, after = load_file(start), load_file(tmp_path / "next" / "models" / "global.safetensors")
    assert torch.equal(before["shift"], after["shift"]) and not torch.equal(before["head.bias"], after["head.bias"])


def test_personal_models_have_the_constants_once(file: str, tmp_path: Path):
    method = {"name": "ditto", "lr": 0.1}
    found = rayfl.run(directory=tmp_path / "run", **settings(f"{file}:Half", method=method))
    weights = load_file(tmp_path / "run" / "models" / "personal.safetensors")
    assert sum(name.endswith("/shift") for name in weights) == 1
    module = found.personal_model(2).network
    assert torch.equal(module.get_buffer("shift"), weights["constants/shift"])
    assert torch.equal(module.get_parameter("head.bias"), weights["2/head.bias"])
    with refused(names=["client 7", "never selected"]):
        found.personal_model(7)


def test_both_engines_compute_the_same(file: str, tmp_path: Path):
    runs = [
        rayfl.run(
            directory=tmp_path / engine, **settings(f"{file}:Half", runtime={"executor": "inline", "engine": engine})
        )
        for engine in ("loop", "vmap")
    ]
    weights = [load_file(one.directory / "models" / "global.safetensors") for one in runs]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name])


def half() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8).requires_grad_(False), nn.Linear(8, 10))


def test_a_pickled_task_has_its_constants_and_counts_their_operations():
    task = classification(half, (1, 8, 8))
    params, batch = task.init(3), Batch(torch.ones(2, 1, 8, 8), torch.tensor([1, 2]))
    again = pickle.loads(pickle.dumps(task))  # noqa: S301 (our own)
    assert set(params) == {"2.weight", "2.bias"} and set(again.constants) == {"1.weight", "1.bias"}
    assert torch.equal(task.outputs(params, batch), again.outputs(params, batch))
    assert flops.forward_flops(task.weight_uses, params=params) == 2 * (8 * 64 + 10 * 8)
    assert flops.forward_flops(again.weight_uses, {"2.weight": torch.zeros(10, 8)}) == 2 * 8 * 64


def test_a_frozen_part_of_a_recurrent_model_stays(file: str, tmp_path: Path):
    rayfl.run(directory=tmp_path / "one", **settings(f"{file}:Tail"))
    rayfl.run(directory=tmp_path / "two", **settings(f"{file}:Tail", rounds=1))
    first, second = (load_file(tmp_path / name / "models" / "global.safetensors") for name in ("one", "two"))
    same = {name for name in first if torch.equal(first[name], second[name])}
    assert same == {"lstm.weight_hh_l0"}


def test_a_model_that_trains_nothing_is_refused_before_a_run(file: str, tmp_path: Path):
    with refused(names=["requires_grad", "no trained parameter"]):
        rayfl.run(directory=tmp_path / "run", **settings(f"{file}:Frozen"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "moving", "averaged"),
    [("Counts", {"steps"}, 0), ("Renews", {"shift"}, 8), ("Running", {"norm.running_mean", "norm.running_var"}, 2)],
)
def test_buffers_that_training_changes_are_no_constants(
    file: str, tmp_path: Path, model: str, moving: set[str], averaged: int
):
    found = rayfl.run(directory=tmp_path / "run", **settings(f"{file}:{model}", parts={"personal": ["head.bias"]}))
    first = load_file(tmp_path / "run" / "models" / "personal.safetensors")
    places = {part: {key.partition("/")[2] for key in first if key.startswith(part)} for part in ("2/", "constants/")}
    assert moving <= places["2/"] and moving.isdisjoint(places["constants/"])
    assert set(found.clients["downlink_bits"]) == {32 * (TRAINED - 10 + averaged)}
    runtime = {"executor": "inline", "engine": "vmap"}
    with refused(names=["engine='vmap'", "buffers", "loop"]):
        rayfl.run(directory=tmp_path / "stacked", **settings(f"{file}:{model}", runtime=runtime))


LATER = """
from torch import nn
import torch


class Later(nn.Module):
    def __init__(self, input_shape, num_classes):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.head = nn.Linear(64, num_classes)

    def forward(self, inputs):
        if self.training and len(inputs) > 2:
            self.steps += 1
        return self.head(inputs.flatten(1))
"""


def test_a_buffer_that_the_first_pass_left_alone_must_stay(tmp_path: Path):
    path = tmp_path / "later.py"
    path.write_text(LATER)
    with refused(names=["buffer 'steps'", "constant"], error=Exception):
        rayfl.run(directory=tmp_path / "run", **settings(f"{path}:Later"))

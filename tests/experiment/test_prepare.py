"""From an experiment to its setup, and what is refused before anything starts."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.models.base import Architecture
from rayfl.rounds.setup import Setup
from rayfl.task import NetworkTask
from tests.refusals import refused

BASE: dict[str, Any] = {
    "rounds": 2,
    "data": {"name": "synthetic", "samples_per_group": 20, "num_groups": 10, "num_classes": 4, "dim": 8},
    "partition": "iid",
    "clients": {"count": 5},
    "model": "logistic",
    "method": "fedavg",
}


def prepared(given: dict[str, Any]) -> Setup:
    values: dict[str, Any] = {**BASE, **given}
    return prepare(Experiment(**values))


def test_everything_is_in_its_place():
    runtime = {"stack_width": 3, "threads": 2, "engine": "vmap", "precision": "bf16"}
    setup = prepared({"seed": 7, "runtime": runtime, "uplink": {"name": "topk", "keep_ratio": 0.5}})
    assert (setup.seed, setup.rounds, setup.num_clients) == (7, 2, 5)
    assert (setup.stack_width, setup.threads, setup.engine_name, setup.device_name) == (3, 2, "vmap", "cpu")
    assert setup.uplink.name == "topk"
    assert isinstance(setup.method.task, NetworkTask)
    assert (setup.precision, setup.method.task.network.precision) == ("bf16", "bf16")
    # 10 groups of 20 examples, 2 of each for the test: 180 over 5 clients.
    assert setup.population.num_examples.tolist() == [36] * 5
    assert {name: tensor.shape for name, tensor in setup.initial.items()} == {"1.weight": (4, 8), "1.bias": (4,)}


def test_the_seed_decides_partition_and_parameters():
    first, again, other = (prepared({"seed": seed}) for seed in (1, 1, 2))
    for name in first.initial:
        assert torch.equal(first.initial[name], again.initial[name])
        assert not torch.equal(first.initial[name], other.initial[name])
    assert np.array_equal(first.partition.train.indices, again.partition.train.indices)
    assert not np.array_equal(first.partition.train.indices, other.partition.train.indices)


def test_a_model_travels_once_and_beside_the_setup():
    setup = prepared({"model": {"name": "mlp", "hidden": [300, 300]}})
    assert setup.initial
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(setup, protocol=5, buffer_callback=buffers.append)
    model = 4 * (8 * 300 + 300 + 300 * 300 + 300 + 300 * 4 + 4)
    assert len(content) < model / 4
    examples = sum(array.nbytes for array in (setup.dataset.train.inputs, setup.dataset.train.labels))
    assert model < sum(len(buffer.raw()) for buffer in buffers) < 1.5 * model + 4 * examples
    # Ray's buffers are read-only.
    twin = pickle.loads(content, buffers=[bytes(buffer) for buffer in buffers])  # noqa: S301 (our own)
    assert all(torch.equal(twin.initial[name], tensor) for name, tensor in setup.initial.items())


def test_splits_are_set_aside():
    setup = prepared({"splits": {"validation_ratio": 0.25, "heldout_ratio": 0.1}})
    # Of 36: 9 and round(3.6) = 4.
    assert setup.partition.validation.sizes.tolist() == [9] * 5
    assert setup.partition.heldout.sizes.tolist() == [4] * 5
    assert setup.population.num_examples.tolist() == [23] * 5


IMAGES = {"name": "synthetic", "shape": [1, 16, 16], "samples_per_group": 10}


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"data": "digits", "model": "convnet2"},
         ["convnet2", "[channels, height, width]", "at least 16x16", "[1, 8, 8]"]),
        ({"model": "convnet2"},
         ["convnet2", "[channels, height, width]", "at least 16x16", "[8]"]),
        ({"clients": {"count": 200}}, ["clients.count=200", "180", "synthetic", "lower"]),
        ({"partition": "natural", "clients": {"count": 11}}, ["clients.count=11", "synthetic", "10 owners"]),
        ({"clients": {"count": 90}, "splits": {"validation_ratio": 0.9}},
         ["client 0", "2", "validation_ratio=0.9", "heldout_ratio=0.0"]),
        ({"topology": "ring"}, ["topology", "FedAvg", "server", "remove"]),
        ({"data": {"name": "fashion-mnist", "root": "/nowhere"}}, ["/nowhere", "train-images-idx3-ubyte"]),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit(given: dict[str, Any], names: list[str]):
    with refused(names=names) as error:
        prepared(given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"clients": {"count": 10**9}}, ["clients.count=1000000000", "180"]),
        ({"model": {"name": "mlp", "hidden": [10**13]}},
         ["mlp", "model.hidden=[10000000000000]"]),
        ({"model": {"name": "mlp", "hidden": [2**62, 2**62]}},
         ["mlp", "model.hidden=[4611686018427387904, 4611686018427387904]"]),
        ({"runtime": {"engine": "vmap", "stack_width": 10**12}}, ["runtime.stack_width=1000000000000", "copies"]),
        ({"runtime": {"object_store_memory_mb": 10**9}}, ["runtime.object_store_memory_mb=1000000000", "1.0 PB"]),
    ],
)  # fmt: skip
def test_what_no_machine_has_the_memory_for(given: dict[str, Any], names: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with refused(names=names):
        prepared(given)


def test_convnet2_fits_images_of_16_by_16():
    assert prepared({"data": IMAGES, "model": "convnet2"}).initial["0.weight"].shape == (6, 1, 5, 5)


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refused(names=["runtime.device='cuda'", "GPU"]):
        prepared({"runtime": {"executor": "inline", "device": "cuda"}})
    assert prepared({"runtime": {"num_gpus": 0.5}}).device_name == "cuda", "Ray may have GPUs elsewhere"


class Extra(Architecture):
    """A linear model with one more layer."""

    name = "extra-of-this-test"
    layer: str

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        extra = nn.Dropout(0.5) if self.layer == "dropout" else nn.BatchNorm1d(8, track_running_stats=False)
        return nn.Sequential(extra, nn.Linear(8, num_classes))


def test_models_that_cannot_be_trained_so():
    assert prepared({"model": Extra(layer="dropout")}).method.task.stochastic
    with refused(names=["engine='vmap'", "dropout", "recurrent"]):
        prepared({"model": Extra(layer="dropout"), "runtime": {"engine": "vmap"}})
    with refused(names=["layer '0'", "BatchNorm1d", "GroupNorm"]):
        prepared({"model": Extra(layer="norm")})


@pytest.mark.parametrize(
    ("method", "topology", "names"),
    [
        ("dpsgd", {"name": "random", "degree": 10}, ["degree=10", "3 peers", "at most 2"]),
        (
            "dpsgd",
            {"name": "random", "degree": 1, "weights": "metropolis"},
            ["metropolis", "symmetric", "uniform"],
        ),
        ("fedavg", "ring", ["topology", "FedAvg", "server", "remove"]),
    ],
)
def test_a_graph_that_cannot_be_is_refused_before_anything_starts(method, topology, names):
    table: dict[str, Any] = {
        "rounds": 1,
        "data": "digits",
        "partition": "iid",
        "clients": {"count": 3},
        "model": "logistic",
        "method": method,
        "topology": topology,
    }
    with refused(names=names):
        prepare(Experiment(**table))


@pytest.mark.parametrize(
    ("method", "ratio", "trained"), [("fedavg", None, 29), ("lotteryfl", None, 23), ("fedavg", 0.5, 18)]
)
def test_validation_takes_the_place_of_the_test_data_and_no_method_sees_it(method, ratio, trained):
    # 36 train examples a client: 7 of them are evaluated (0.2), and lotteryfl's gate gets 0.2 of the other 29: 6.
    given: dict[str, Any] = {"method": method, "splits": {"validation_ratio": ratio}}
    plain, setup = prepared(given), prepared({**given, "evaluation": {"split": "validation"}})
    assert setup.partition.train.sizes.tolist() == [trained] * 5
    own = {"lotteryfl": 6}.get(method, 0)
    assert setup.partition.validation.sizes.tolist() == [own] * 5
    for client in range(5):
        seen = [*setup.partition.train[client], *setup.partition.validation[client]]
        mine = {*plain.partition.train[client], *plain.partition.validation[client]}
        rows = setup.partition.test[client]
        evaluated = {*map(bytes, setup.dataset.test.inputs[rows])}
        # The client's own train examples, each either seen or evaluated.
        assert evaluated | {bytes(setup.dataset.train.inputs[row]) for row in seen} == {
            bytes(plain.dataset.train.inputs[row]) for row in mine
        }
        assert len(rows) + len(seen) == 36 and len(evaluated) == len(rows)
    assert len(setup.dataset.test) == setup.partition.test.sizes.sum()
    # No sample of the test split is left.
    tests = {*map(bytes, plain.dataset.test.inputs)}
    assert not tests & {*map(bytes, setup.dataset.test.inputs)}


def test_evaluated_labels_of_attackers_are_not_flipped():
    data = {**BASE["data"], "flipped_clients": 0.4}
    setup = prepared({"data": data, "evaluation": {"split": "validation"}})
    labels = {
        bytes(row): label for row, label in zip(setup.dataset.train.inputs, setup.dataset.train.labels, strict=True)
    }
    plain = prepared({"evaluation": {"split": "validation"}})
    assert np.array_equal(setup.dataset.test.labels, plain.dataset.test.labels)
    assert any(
        labels[bytes(row)] != label
        for row, label in zip(plain.dataset.train.inputs, plain.dataset.train.labels, strict=True)
    )


def test_nothing_to_evaluate_on_is_refused():
    with refused(names=["splits.validation_ratio=0", "evaluation.split='validation'"]):
        prepared({"evaluation": {"split": "validation"}, "splits": {"validation_ratio": 0.0}})


def test_what_a_metric_of_another_library_computes_once_is_no_setting():
    kappa = {"name": "torchmetrics", "metric": "classification.MulticlassCohenKappa", "options": {"num_classes": 4}}
    (metric,) = [one for one in prepared({"evaluation": {"metrics": [kappa]}}).metrics if one.name == "torchmetrics"]
    # A cached property, which pydantic lists beside the settings once it has been read.
    assert "made" in dict(metric)

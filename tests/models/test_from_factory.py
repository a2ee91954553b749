"""A class of torch modules, or a function that makes one, is a model."""

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayfl.choices.kinds import resolve
from rayfl.experiment.experiment import Experiment, read
from rayfl.experiment.prepare import prepare
from rayfl.models.base import Architecture, FromFactory
from tests.refusals import refused

MODELS = """
from functools import partial
from math import prod

from torch import nn


class Net(nn.Module):
    def __init__(self, input_shape, num_classes, hidden=8, deep=False):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), hidden), nn.Linear(hidden, num_classes))

    def forward(self, inputs):
        return self.layers(inputs)

    @classmethod
    def small(cls, input_shape, num_classes, hidden=3):
        return cls(input_shape, num_classes, hidden)


narrow = partial(Net, hidden=3)


def net(num_classes: int, *, width: int):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, num_classes))


def number(input_shape, num_classes, **options):
    return 3


def handing(width=4, **options):
    return net(width=width, **options)


def swallowing(**options):
    return Net(**options)


def naming(**options):
    return net(num_classes=10, **options)


class Fixed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "my_models.py"
    path.write_text(MODELS)
    return str(path)


@pytest.mark.parametrize(
    ("name", "options", "shapes"),
    [
        ("Net", {"hidden": 5}, [(5, 64), (5,), (10, 5), (10,)]),
        ("Net", {}, [(8, 64), (8,), (10, 8), (10,)]),
        ("net", {"width": 3}, [(3, 64), (3,), (10, 3), (10,)]),
        ("Fixed", {}, [(10, 64), (10,)]),
        ("handing", {}, [(4, 64), (4,), (10, 4), (10,)]),
        ("swallowing", {"hidden": 5}, [(5, 64), (5,), (10, 5), (10,)]),
        ("naming", {"width": 2}, [(2, 64), (2,), (10, 2), (10,)]),
    ],
)
def test_what_is_made_is_what_the_class_makes(file: str, name: str, options: dict, shapes: list):
    made: Architecture = resolve(Architecture, {"name": f"{file}:{name}", **options})
    assert made.to_table() == {"name": f"{file}:{name}", **options}
    module = pickle.loads(pickle.dumps(made)).builder((1, 8, 8), 10)()  # noqa: S301 (our own)
    assert [tuple(one.shape) for one in module.parameters()] == shapes
    assert module(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize(
    ("table", "names"),
    [
        ({"name": "Net", "hiden": 5}, ["hiden", "hidden"]),
        ({"name": "Net", "num_classes": 5}, ["num_classes", "deep, hidden"]),
        ({"name": "swallowing", "num_classes": 5}, ["num_classes", "remove"]),
        ({"name": "net"}, ["width", "missing"]),
        ({"name": "net", "width": 3, "input_shape": [1]}, ["input_shape", "width"]),
    ],
)
def test_options_are_those_of_its_signature(file: str, table: dict, names: list[str]):
    with refused(names=names):
        resolve(Architecture, {**table, "name": f"{file}:{table['name']}"})


def experiment(model: object) -> Experiment:
    tables: dict[str, Any] = {"rounds": 1, "data": "digits", "partition": "iid", "method": "fedavg", "model": model}
    tables["clients"] = {"count": 2}
    return Experiment(**tables)


def test_what_it_raises_or_returns_is_told_before_anything_starts(file: str):
    with refused(names=["Net", "[1, 8, 8]", "10 classes", "TypeError"]):
        prepare(experiment({"name": f"{file}:Net", "hidden": "many"}))
    with refused(names=["number", "int", "torch.nn.Module"]):
        prepare(experiment({"name": f"{file}:number", "anything": 3}))


def test_a_misspelt_option_is_named_with_its_table(file: str, tmp_path: Path):
    (tmp_path / "one.toml").write_text(
        'rounds = 1\ndata = "digits"\npartition = "iid"\nclients = {count = 2}\nmethod = "fedavg"\n'
        'model = {name = "my_models.py:Net", hiden = 3}\n'
    )
    with refused(names=["model.hiden", "hidden"]):
        read(tmp_path / "one.toml")


class Here(torch.nn.Sequential):
    """A module that can be imported."""

    def __init__(self, hidden: int = 4) -> None:
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, hidden), torch.nn.Linear(hidden, 10))


def test_a_class_from_python_is_written_by_where_it_can_be_imported():
    for given in (Here, {"name": Here, "hidden": 6}):
        one = experiment(given)
        again = Experiment(**one.as_dict())
        assert again == one and one.as_dict()["model"]["name"] == f"{__name__}:Here"
        assert prepare(again).initial["1.weight"].shape == (6 if isinstance(given, dict) else 4, 64)


FORWARDS = """
import torch
from torch import nn


def few(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


def many(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12))


def colours(num_classes):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, num_classes))


def unflattened(num_classes):
    return nn.Linear(8, num_classes)


class Pair(nn.Linear):
    def __init__(self, num_classes):
        super().__init__(64, num_classes)

    def forward(self, inputs):
        logits = super().forward(inputs.flatten(1))
        return logits, logits


class Chosen(nn.Linear):
    def __init__(self, num_classes):
        super().__init__(64, num_classes)

    def forward(self, inputs):
        return super().forward(inputs.flatten(1)).argmax(-1, keepdim=True).expand(-1, 10)


class Random(nn.Linear):
    def __init__(self, num_classes):
        super().__init__(64, num_classes)
        self.dropout = nn.Dropout(0.5)

    def forward(self, inputs):
        return super().forward(self.dropout(inputs.flatten(1)) + torch.rand(len(inputs), 1))


class Words(nn.Module):
    def __init__(self, num_classes, pooled=True):
        super().__init__()
        self.embedding, self.out, self.pooled = nn.Embedding(100, 8), nn.Linear(8, num_classes), pooled

    def forward(self, tokens):
        found = self.out(self.embedding(tokens))
        return found.mean(1) if self.pooled else found
"""


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("few", ["[2, 3]"]),
        ("many", ["[2, 12]"]),
        ("unflattened", ["[2, 1, 8, 10]"]),
        ("Pair", ["tuple"]),
        ("Chosen", ["torch.int64"]),
        ("colours", ["RuntimeError: Given groups=1", "[4, 3, 3, 3]"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_data_is_refused_before_anything_starts(tmp_path: Path, name: str, names: list[str]):
    (tmp_path / "forwards.py").write_text(FORWARDS)
    with refused(names=[f"model {name!r}", "digits", "inputs [2, 1, 8, 8]", "outputs [2, 10]", *names]):
        prepare(experiment(f"{tmp_path}/forwards.py:{name}"))


def test_to_try_a_model_draws_nothing_and_leaves_it_training(tmp_path: Path):
    (tmp_path / "forwards.py").write_text(FORWARDS)
    before = torch.random.get_rng_state()
    module = prepare(experiment(f"{tmp_path}/forwards.py:Random")).method.task.network.module  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.equal(torch.random.get_rng_state(), before) and module.training


def test_a_text_model_is_tried_on_tokens(tmp_path: Path):
    (tmp_path / "forwards.py").write_text(FORWARDS)
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "text.npz", inputs=rng.integers(0, 100, (40, 6)), labels=np.arange(40) % 4)
    tables: dict[str, Any] = {"rounds": 1, "partition": "iid", "clients": {"count": 2}, "method": "fedavg"}
    tables["data"] = {"name": "arrays", "path": str(tmp_path / "text.npz"), "kind": "text"}
    model = {"name": f"{tmp_path}/forwards.py:Words"}
    assert prepare(Experiment(**tables, model=model)).dataset.kind == "text"
    with refused(names=["Words", "[2, 6]", "[2, 6, 4]", "[2, 4]"]):
        prepare(Experiment(**tables, model={**model, "pooled": False}))


def test_a_factory_may_import_torchvision_beside_any_build_of_torch():
    def resnet(num_classes: int) -> torch.nn.Module:
        from torchvision.models import resnet18

        return resnet18(num_classes=num_classes)

    assert resolve(Architecture, resnet).build((3, 32, 32), 10).fc.out_features == 10


@pytest.mark.parametrize("factory", ["narrow", "Net.small"])
def test_a_partial_and_a_classmethod_are_models_with_options(file: str, factory: str):
    name = f"{file}:{factory}"
    for options, hidden in (({}, 3), ({"hidden": 5}, 5)):
        model = pickle.loads(pickle.dumps(resolve(Architecture, {"name": name, **options})))  # noqa: S301 (our own)
        assert model.to_table() == {"name": name, **options} and model.name == factory
        assert model.build((64,), 10).layers[1].weight.shape == (hidden, 64)
    refused(lambda: resolve(Architecture, {"name": name, "hiden": 5}), names=["hiden", "hidden"])


def test_a_partial_has_the_memory_format_of_its_class():
    class Last(torch.nn.Linear):
        memory_format = "channels_last"

    assert FromFactory(factory=partial(partial(Last, 3), 4), options={}).memory_format == "channels_last"

"""Models: parameter counts from their layers, and what they refuse."""

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from rayfl.models import MLP, Architecture, ConvNet2, Logistic
from rayfl.registry import make, named
from rayfl.settings import SettingsError
from rayfl.task import Classification

IMAGE = (1, 28, 28)


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("model", "shape", "classes", "expected"),
    [
        # 784 * 10 + 10
        (Logistic(), IMAGE, 10, 7_850),
        (Logistic(), (60,), 5, 305),
        # conv 6*25+6 = 156, conv 16*(6*25)+16 = 2416, on 16*4*4 = 256: 256*120+120 = 30840, 120*84+84 = 10164, 850
        (ConvNet2(), IMAGE, 10, 44_426),
        # 16*25+16 = 416, 32*400+32 = 12832, 512*512+512 = 262656, 5130: the CNN of `rayfl bench`
        (ConvNet2(channels=(16, 32), hidden=(512,)), IMAGE, 10, 281_034),
        # 3*6*25+6 = 456, 2416, on 16*5*5 = 400: 400*120+120 = 48120, 10164, 84*100+100 = 8500
        (ConvNet2(), (3, 32, 32), 100, 69_656),
        # 784*200+200 = 157000, 2010
        (MLP(), IMAGE, 10, 159_010),
        (MLP(hidden=(4, 3)), (5,), 2, 24 + 15 + 8),
        (MLP(hidden=()), IMAGE, 10, 7_850),
        # W3 of `rayfl bench`, about 11 million: 784*3000+3000, 3000*2800+2800, 2800*10+10
        (MLP(hidden=(3000, 2800)), IMAGE, 10, 2_355_000 + 8_402_800 + 28_010),
    ],
    ids=str,
)
def test_parameters_are_counted(model: Architecture, shape: tuple[int, ...], classes: int, expected: int):
    with torch.device("meta"):
        network = model.build(shape, classes)
        logits = network(torch.empty(2, *shape))
    assert num_parameters(network) == expected
    assert logits.shape == (2, classes)


@pytest.mark.parametrize("name", sorted(named(Architecture)))
def test_every_model_goes_through_its_table_and_pickles(name: str):
    model = make(Architecture, {"name": name})
    build = pickle.loads(pickle.dumps(model.builder(IMAGE, 10)))  # noqa: S301
    task = Classification(build)
    first, again, other = task.init(3), task.init(3), task.init(4)
    assert all(bool((first[key] == again[key]).all()) for key in first)
    assert any(bool((first[key] != other[key]).any()) for key in first)
    assert {key: value.shape for key, value in first.items()} == {
        key: value.shape for key, value in task.module.named_parameters()
    }
    assert type(model)(**model.model_dump()) == model


def test_relu_between_layers_and_none_after_the_last():
    kinds = [type(layer).__name__ for layer in MLP(hidden=(3, 2)).build((4,), 2).children()]
    assert kinds == ["Flatten", "Linear", "ReLU", "Linear", "ReLU", "Linear"]
    kinds = [type(layer).__name__ for layer in ConvNet2(hidden=(8,)).build(IMAGE, 2).children()]
    assert kinds == ["Conv2d", "ReLU", "MaxPool2d"] * 2 + ["Flatten", "Linear", "ReLU", "Linear"]


@pytest.mark.parametrize("shape", [(1, 8, 8), (60,), (1, 28, 15), (80, 80)], ids=str)
def test_convnet2_needs_images_that_survive_its_pooling(shape: tuple[int, ...]):
    with pytest.raises(ValueError) as error:
        ConvNet2().build(shape, 10)
    assert str(error.value) == (
        "convnet2 needs images [channels, height, width] of at least 16x16, and the data's inputs are "
        f"{list(shape)}; choose model mlp or logistic"
    )


def test_the_smallest_image_of_convnet2():
    assert ConvNet2().build((1, 16, 16), 10)(torch.zeros(1, 1, 16, 16)).shape == (1, 10)


@pytest.mark.parametrize(
    ("name", "options"),
    [("mlp", {"hidden": [0]}), ("mlp", {"hidden": 5}), ("convnet2", {"channels": [6]}), ("logistic", {"bias": False})],
)
def test_options_out_of_range(name: str, options: dict[str, Any]):
    with pytest.raises(SettingsError, match=f"{next(iter(options))}"):
        make(Architecture, {"name": name, **options})

"""Models: parameter counts from their layers, and what they refuse."""

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from rayfl.choices.kinds import make, named
from rayfl.models.base import Architecture
from rayfl.models.convolutional import EMNISTCNN, VGG11, AlexNetMCEPL, ConvNet2, ResNet18, ResNet20
from rayfl.models.dense import MLP, Logistic
from rayfl.models.text import CharLSTM, MeanEmbedding
from rayfl.models.transformers import ViTTiny
from tests.bound_tasks import classification
from tests.models.examples import EXAMPLES, IMAGE, WITH_BUFFERS
from tests.refusals import refused

COLOUR = (3, 32, 32)


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
        # 16*25+16 = 416, 32*400+32 = 12832, 512*512+512 = 262656, 5130: the CNN of `python -m benchmarks`
        (ConvNet2(channels=(16, 32), hidden=(512,)), IMAGE, 10, 281_034),
        # 3*6*25+6 = 456, 2416, on 16*5*5 = 400: 400*120+120 = 48120, 10164, 84*100+100 = 8500
        (ConvNet2(), (3, 32, 32), 100, 69_656),
        # 784*200+200 = 157000, 2010
        (MLP(), IMAGE, 10, 159_010),
        (MLP(hidden=(4, 3)), (5,), 2, 24 + 15 + 8),
        (MLP(hidden=()), IMAGE, 10, 7_850),
        # W3 of `python -m benchmarks`, about 11 million: 784*3000+3000, 3000*2800+2800, 2800*10+10
        (MLP(hidden=(3000, 2800)), IMAGE, 10, 2_355_000 + 8_402_800 + 28_010),
        # Dis-PFL's sizes; 512 more weights and a bias for every class.
        (ResNet18(), COLOUR, 10, 11_173_962),
        (ResNet18(groups=8), COLOUR, 100, 11_173_962 + 90 * 513),
        (ResNet18(), (3, 64, 64), 200, 11_271_432),
        (VGG11(), COLOUR, 10, 9_231_114),
        (VGG11(), (3, 64, 64), 200, 9_231_114 + 190 * 513),
        # stem 3*16*9 = 432, convolutions 6*16*16*9 = 13824, (16+32*5)*32*9 = 50688, (32+64*5)*64*9 = 202752, norms
        # 2*(7*16+6*32+6*64) = 1376, linear 64*10+10 = 650.
        (ResNet20(), COLOUR, 10, 432 + 13_824 + 50_688 + 202_752 + 1_376 + 650),
        (ResNet20(), COLOUR, 10, 269_722),
        # 9*32+32 = 320, 32*64*9+64 = 18496, on 64*12*12 = 9216: 9216*128+128 = 1179776, 128*62+62 = 7998
        (EMNISTCNN(), IMAGE, 62, 1_206_590),
        # 1,227,328 weights and 192 + 10 biases.
        (AlexNetMCEPL(), COLOUR, 10, 1_227_328 + 202),
        # patches 48*192+192 = 9408, class token 192, positions 65*192 = 12480; a block: norms 4*192 = 768, attention
        # 4*(192*192+192) = 148224, MLP 192*768+768 + 768*192+192 = 295872; norm 384, head 1930.
        (ViTTiny(), COLOUR, 10, 9_408 + 192 + 12_480 + 12 * (768 + 148_224 + 295_872) + 384 + 1_930),
        (ViTTiny(patch=2, width=4, depth=1, heads=2, mlp_ratio=1.5), (1, 4, 2), 3, 20 + 4 + 12 + 16 + 80 + 58 + 8 + 15),
    ],
    ids=str,
)
def test_parameters_are_counted(model: Architecture, shape: tuple[int, ...], classes: int, expected: int):
    with torch.device("meta"):
        network = model.build(shape, classes)
        logits = network(torch.empty(2, *shape))
    assert num_parameters(network) == expected
    assert logits.shape == (2, classes)


@pytest.mark.parametrize(
    ("model", "length", "classes", "expected"),
    [
        # 90*8 = 720; layers 4*256*(8+256) + 2*1024 and 4*256*(256+256) + 2*1024; linear 256*90+90 = 23130
        (CharLSTM(), 80, 90, 720 + 272_384 + 526_336 + 23_130),
        (CharLSTM(), 80, 90, 822_570),
        (CharLSTM(vocabulary=5, embedding=2, hidden=3, layers=1), 7, 4, 10 + 4 * 3 * (2 + 3) + 24 + 16),
        # 10000*16, and one output of 16 weights and a bias.
        (MeanEmbedding(), 256, 2, 160_017),
        (MeanEmbedding(vocabulary=7, embedding=3), 5, 4, 21 + 16),
    ],
    ids=str,
)
def test_parameters_of_text_models_are_counted(model: Architecture, length: int, classes: int, expected: int):
    with torch.device("meta"):
        network = model.build((length,), classes)
        logits = network(torch.zeros(2, length, dtype=torch.int64))
    assert num_parameters(network) == expected
    assert logits.shape == (2, classes)


def test_the_weights_that_mce_pl_masks():
    with torch.device("meta"):
        network = AlexNetMCEPL().build(COLOUR, 10)
    assert sum(weight.numel() for weight in network.parameters() if weight.dim() > 1) == 1_227_328
    assert [weight.numel() for weight in network.parameters() if weight.dim() == 1] == [192, 10]


@pytest.mark.parametrize("name", sorted(named(Architecture)))
def test_every_model_goes_through_its_table_and_pickles(name: str):
    shape, num_classes = {**EXAMPLES, **WITH_BUFFERS}[name][1:]
    model = make(Architecture, {"name": name})
    build = pickle.loads(pickle.dumps(model.builder(shape, num_classes)))  # noqa: S301
    task = classification(build)
    first, again, other = task.init(3), task.init(3), task.init(4)
    assert all(bool((first[key] == again[key]).all()) for key in first)
    assert any(bool((first[key] != other[key]).any()) for key in first)
    assert {key: value.shape for key, value in first.items()} == {
        key: value.shape for key, value in task.network.module.named_parameters()
    }
    assert type(model)(**model.model_dump()) == model


def test_relu_between_layers_and_none_after_the_last():
    kinds = [type(layer).__name__ for layer in MLP(hidden=(3, 2)).build((4,), 2).children()]
    assert kinds == ["Flatten", "Linear", "ReLU", "Linear", "ReLU", "Linear"]
    kinds = [type(layer).__name__ for layer in ConvNet2(hidden=(8,)).build(IMAGE, 2).children()]
    assert kinds == ["Conv2d", "MaxPool2d", "ReLU"] * 2 + ["Flatten", "Linear", "ReLU", "Linear"]


@pytest.mark.parametrize(
    ("name", "least"),
    [("convnet2", 16), ("emnist-cnn", 6), ("vgg11", 32), ("alexnet-mcepl", 21), ("resnet18", 8), ("resnet20", 8)],
)
def test_the_smallest_image_of_a_model(name: str, least: int):
    model = make(Architecture, {"name": name})
    with torch.device("meta"):
        assert model.build((2, least, least + 3), 5)(torch.empty(2, 2, least, least + 3)).shape == (2, 5)
    for shape in ((2, least, least - 1), (2, least - 1, least), (60,)):
        with refused(names=[name, f"at least {least}x{least}", list(shape)]):
            model.build(shape, 5)


@pytest.mark.parametrize("name", ["char-lstm", "mean-embedding"])
def test_text_models_need_sequences(name: str):
    with refused(names=[name, "tokens", "[length]", "[3, 32, 32]", "convnet2"]):
        make(Architecture, {"name": name}).build((3, 32, 32), 10)


@pytest.mark.parametrize("shape", [(1, 8, 8), (60,), (1, 28, 15), (80, 80)], ids=str)
def test_convnet2_needs_images_that_survive_its_pooling(shape: tuple[int, ...]):
    with refused(names=["convnet2", "[channels, height, width]", "at least 16x16", list(shape)]):
        ConvNet2().build(shape, 10)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlp", {"hidden": [0]}),
        ("mlp", {"hidden": 5}),
        ("convnet2", {"channels": [6]}),
        ("logistic", {"bias": False}),
        ("resnet18", {"groups": 24}),
        ("vgg11", {"groups": 0}),
        ("resnet20", {"groups": 32}),
        ("emnist-cnn", {"dropout": [0.5, 1.0]}),
        ("char-lstm", {"layers": 0}),
        ("mean-embedding", {"vocabulary": 0}),
    ],
)
def test_options_out_of_range(name: str, options: dict[str, Any]):
    with refused(names=list(options)):
        make(Architecture, {"name": name, **options})


@pytest.mark.parametrize(
    ("options", "shape", "names"),
    [
        ({"patch": 5}, COLOUR, ["model.patch=5", "[32, 32]", "divisor of 32"]),
        ({"heads": 5, "width": 12}, COLOUR, ["model.heads=5", "model.width=12"]),
        ({}, (60,), ["vit-tiny", "images", "[60]"]),
    ],
)
def test_a_vision_transformer_needs_whole_patches_and_heads(options: Any, shape: tuple[int, ...], names: list[str]):
    with refused(names=names):
        ViTTiny(**options).build(shape, 10)


def test_groups_that_do_not_divide_the_channels_are_refused():
    with refused(names=["groups=32", "1, 2, 4, 8 or 16"]):
        make(Architecture, {"name": "resnet20", "groups": 32})

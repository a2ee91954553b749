"""Narrow networks written by hand: the module with fewer units, and which positions of each parameter it keeps.

The positions are those of A "list of units": all layers that write to one tensor share it. A table has, for each
parameter, what its axes are: "" for a whole axis, the name of a list, or several parts after one another.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rayfl.data.torchvision import torchvision
from rayfl.models.convolutional import LocalResponseNorm, Subsampled
from rayfl.models.text import LastState, Mean
from rayfl.models.transformers import ViTTiny

Lists = Mapping[str, np.ndarray]
"""The kept units of each list by its name."""
Part = tuple[str, int]
"""A list of units, each of which has this number of positions in a row: the pixels of a flattened channel."""
Axis = Sequence[Part]
Table = Mapping[str, Sequence[Axis]]


class ByHand(NamedTuple):
    """The widths of the lists in the full model, its table, and the module for numbers of units."""

    widths: Mapping[str, int]
    table: Table
    build: Callable[[Mapping[str, int]], nn.Module]


def positions(axis: Axis, widths: Mapping[str, int], lists: Lists, size: int) -> np.ndarray:
    """The positions that are kept along an axis of `size`, part after part."""
    if not axis:
        return np.arange(size)
    kept, start = [], 0
    for name, repeat in axis:
        kept.append((start + lists[name][:, None] * repeat + np.arange(repeat)).ravel())
        start += widths[name] * repeat
    assert start == size
    return np.concatenate(kept)


def sliced(weights: Mapping[str, Tensor], hand: ByHand, lists: Lists) -> dict[str, Tensor]:
    """The slice of all weights, axis by axis."""
    found = {}
    for name, weight in weights.items():
        for number, axis in enumerate(hand.table.get(name, ())):
            kept = positions(axis, hand.widths, lists, weight.shape[number])
            weight = weight[(*[slice(None)] * number, torch.from_numpy(kept))]
        found[name] = weight
    return found


def layers(*rows: tuple[str, str, str, int]) -> dict[str, Sequence[Axis]]:
    """The table of layers (name, list in, list out, positions of each unit of the input)."""
    table: dict[str, Sequence[Axis]] = {}
    for name, before, after, repeat in rows:
        out: Axis = [(after, 1)] if after else []
        table[f"{name}.weight"] = [out, [(before, repeat)] if before else []]
        table[f"{name}.bias"] = [out]
    return table


def dense(widths: Sequence[int], inputs: int, classes: int) -> ByHand:
    """`mlp`."""
    names = [f"h{number}" for number in range(len(widths))]
    ends = ["", *names, ""]
    rows = [(str(2 * number + 1), before, after, 1) for number, (before, after) in enumerate(pairwise(ends))]

    def build(sizes: Mapping[str, int]) -> nn.Module:
        numbers = [inputs, *(sizes[name] for name in names)]
        hidden = [part for a, b in pairwise(numbers) for part in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(numbers[-1], classes))

    return ByHand(dict(zip(names, widths, strict=True)), layers(*rows), build)


def convnet2() -> ByHand:
    def build(sizes: Mapping[str, int]) -> nn.Module:
        a, b, c, d = (sizes[name] for name in "abcd")
        return nn.Sequential(
            *(nn.Conv2d(1, a, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(a, b, 5), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(16 * b, c), nn.ReLU(), nn.Linear(c, d), nn.ReLU(), nn.Linear(d, 10)),
        )

    rows = (("0", "", "a", 1), ("3", "a", "b", 1), ("7", "b", "c", 16), ("9", "c", "d", 1), ("11", "d", "", 1))
    return ByHand({"a": 6, "b": 16, "c": 120, "d": 84}, layers(*rows), build)


def emnist_cnn() -> ByHand:
    def build(sizes: Mapping[str, int]) -> nn.Module:
        a, b, c = (sizes[name] for name in "abc")
        return nn.Sequential(
            *(nn.Conv2d(1, a, 3), nn.ReLU(), nn.Conv2d(a, b, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Dropout(0.25)),
            *(nn.Flatten(), nn.Linear(144 * b, c), nn.ReLU(), nn.Dropout(0.5), nn.Linear(c, 62)),
        )

    rows = (("0", "", "a", 1), ("2", "a", "b", 1), ("7", "b", "c", 144), ("10", "c", "", 1))
    return ByHand({"a": 32, "b": 64, "c": 128}, layers(*rows), build)


def vgg11() -> ByHand:
    stages = ((64,), (128,), (256, 256), (512, 512), (512, 512))
    widths = {f"c{number}": width for number, width in enumerate(width for stage in stages for width in stage)}
    table: dict[str, Sequence[Axis]] = {}
    place, before = 0, ""
    for stage, following in zip(stages, np.cumsum([len(stage) for stage in stages]), strict=True):
        for number in range(int(following) - len(stage), int(following)):
            table |= layers((str(place), before, f"c{number}", 1))
            table |= {f"{place + 1}.{part}": [[(f"c{number}", 1)]] for part in ("weight", "bias")}
            place, before = place + 3, f"c{number}"
        place += 1
    table |= layers((str(place + 2), before, "", 1))

    def build(sizes: Mapping[str, int]) -> nn.Module:
        parts: list[nn.Module] = []
        channels, numbers = 3, iter(sizes[name] for name in widths)
        for stage in stages:
            for _ in stage:
                after = next(numbers)
                parts += [nn.Conv2d(channels, after, 3, padding=1), nn.GroupNorm(32, after), nn.ReLU()]
                channels = after
            parts[-1:] = [nn.MaxPool2d(2), nn.ReLU()]
        return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))

    return ByHand(widths, table, build)


def alexnet() -> ByHand:
    def build(sizes: Mapping[str, int]) -> nn.Module:
        parts: list[nn.Module] = []
        channels = 3
        for name, alpha, padding in (("a", 2e-5, 0), ("b", 1e-4, 0), ("c", 1e-4, 1)):
            parts += [nn.Conv2d(channels, sizes[name], 5, padding=1, bias=False), nn.ELU()]
            parts += [LocalResponseNorm(4, alpha, beta=0.75), nn.MaxPool2d(3, stride=2, padding=padding)]
            channels = sizes[name]
        # 32, 30, 14, 12, 5, 3, 2 pixels a side: 4 positions of a channel.
        last = [nn.Linear(4 * channels, sizes["d"]), nn.ELU(), nn.Linear(sizes["d"], 10), nn.ELU()]
        return nn.Sequential(*parts, nn.Flatten(), *last)

    rows = (("0", "", "a", 1), ("4", "a", "b", 1), ("8", "b", "c", 1), ("13", "c", "d", 4), ("15", "d", "", 1))
    return ByHand({"a": 64, "b": 128, "c": 256, "d": 192}, layers(*rows), build)


def resnet18(norm: str) -> ByHand:
    """Streams s0 to s3, joined by residual sums, and the hidden channels of each block."""
    widths: dict[str, int] = {}
    table: dict[str, Sequence[Axis]] = {}

    def block(name: str, before: str, inner: str, after: str) -> None:
        table[f"{name}.conv1.weight"] = [[(inner, 1)], [(before, 1)]]
        table[f"{name}.conv2.weight"] = [[(after, 1)], [(inner, 1)]]
        normed(f"{name}.bn1", inner)
        normed(f"{name}.bn2", after)

    def normed(name: str, of_list: str) -> None:
        table.update({f"{name}.{part}": [[(of_list, 1)]] for part in ("weight", "bias", "running_mean", "running_var")})

    table["conv1.weight"] = [[("s0", 1)], []]
    normed("bn1", "s0")
    for stage, width in enumerate((64, 128, 256, 512)):
        widths |= {f"s{stage}": width, f"i{stage}0": width, f"i{stage}1": width}
        before = f"s{max(0, stage - 1)}"
        block(f"layer{stage + 1}.0", before, f"i{stage}0", f"s{stage}")
        block(f"layer{stage + 1}.1", f"s{stage}", f"i{stage}1", f"s{stage}")
        if stage:
            table[f"layer{stage + 1}.0.downsample.0.weight"] = [[(f"s{stage}", 1)], [(before, 1)]]
            normed(f"layer{stage + 1}.0.downsample.1", f"s{stage}")
    table |= layers(("fc", "s3", "", 1))

    def build(sizes: Mapping[str, int]) -> nn.Module:
        make = nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, 32)
        resnet = torchvision().models.resnet
        network = resnet.ResNet(resnet.BasicBlock, [2, 2, 2, 2], num_classes=10, norm_layer=make)
        network.conv1 = nn.Conv2d(3, sizes["s0"], 3, padding=1, bias=False)
        network.bn1, network.maxpool = make(sizes["s0"]), nn.Identity()
        for stage in range(4):
            blocks = getattr(network, f"layer{stage + 1}")
            for number, part in enumerate(blocks):
                first = stage > 0 and number == 0
                before = sizes[f"s{stage - 1 if first else stage}"]
                inner, after = sizes[f"i{stage}{number}"], sizes[f"s{stage}"]
                part.conv1 = nn.Conv2d(before, inner, 3, 2 if first else 1, 1, bias=False)
                part.conv2 = nn.Conv2d(inner, after, 3, 1, 1, bias=False)
                part.bn1, part.bn2 = make(inner), make(after)
                if first:
                    part.downsample = nn.Sequential(nn.Conv2d(before, after, 1, 2, bias=False), make(after))
        network.fc = nn.Linear(sizes["s3"], 10)
        return network

    return ByHand(widths, table, build)


def resnet20() -> ByHand:
    """The stream of a stage has the channels of the stage before first: their shortcut adds channels of zeros."""
    widths = {"p0": 16, "p1": 16, "p2": 32}
    table: dict[str, Sequence[Axis]] = {"0.weight": [[("p0", 1)], []]}
    table |= {f"1.{part}": [[("p0", 1)]] for part in ("weight", "bias")}
    streams: list[Axis] = [[(f"p{part}", 1) for part in range(stage + 1)] for stage in range(3)]
    for stage, width in enumerate((16, 32, 64)):
        for number in range(3):
            name, inner = str(3 + 3 * stage + number), f"i{stage}{number}"
            widths[inner] = width
            before = streams[stage - 1] if stage and not number else streams[stage]
            table[f"{name}.conv1.weight"] = [[(inner, 1)], before]
            table[f"{name}.conv2.weight"] = [streams[stage], [(inner, 1)]]
            table |= {f"{name}.bn1.{part}": [[(inner, 1)]] for part in ("weight", "bias")}
            table |= {f"{name}.bn2.{part}": [streams[stage]] for part in ("weight", "bias")}
    table |= {"14.weight": [[], streams[2]], "14.bias": [[]]}

    def build(sizes: Mapping[str, int]) -> nn.Module:
        block, norm = torchvision().models.resnet.BasicBlock, partial(nn.GroupNorm, 8)
        stems = np.cumsum([sizes[f"p{part}"] for part in range(3)]).tolist()
        parts: list[nn.Module] = [nn.Conv2d(3, stems[0], 3, padding=1, bias=False), norm(stems[0]), nn.ReLU()]
        before = stems[0]
        for stage, after in enumerate(stems):
            for number in range(3):
                first, inner = before != after, sizes[f"i{stage}{number}"]
                made = block(
                    before, after, 2 if first else 1, Subsampled(after - before) if first else None, norm_layer=norm
                )
                made.conv1 = nn.Conv2d(before, inner, 3, 2 if first else 1, 1, bias=False)
                made.conv2 = nn.Conv2d(inner, after, 3, 1, 1, bias=False)
                made.bn1 = norm(inner)
                parts.append(made)
                before = after
        return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))

    return ByHand(widths, table, build)


def char_lstm() -> ByHand:
    gates: Mapping[str, Axis] = {name: [(name, 1)] * 4 for name in ("h0", "h1")}
    table: dict[str, Sequence[Axis]] = {"embedding.weight": [[], [("e", 1)]]}
    for layer, below in (("h0", "e"), ("h1", "h0")):
        number = layer[1]
        table[f"lstm.weight_ih_l{number}"] = [gates[layer], [(below, 1)]]
        table[f"lstm.weight_hh_l{number}"] = [gates[layer], [(layer, 1)]]
        table |= {f"lstm.bias_{part}_l{number}": [gates[layer]] for part in ("ih", "hh")}
    table |= layers(("head", "h1", "", 1))
    return ByHand({"e": 4, "h0": 10, "h1": 10}, table, lambda sizes: LastState(12, sizes["e"], sizes["h0"], 2, 12))


def mean_embedding() -> ByHand:
    table = {"embedding.weight": [[], [("e", 1)]], **layers(("head", "e", "", 1))}
    return ByHand({"e": 4}, table, lambda sizes: Mean(12, sizes["e"], 2))


def vit_tiny() -> ByHand:
    """The stream e, and for each block the units j of each of 3 heads of queries and keys, those of values, and m."""
    widths = {"e": 12, **{f"{name}{block}": size for block in (0, 1) for name, size in (("j", 4), ("v", 4), ("m", 48))}}
    stream: Axis = [("e", 1)]
    table: dict[str, Sequence[Axis]] = {"patches.weight": [stream, [], [], []], "patches.bias": [stream]}
    table |= {"class_token": [stream], "positions": [[], stream]}
    table |= {f"norm.{part}": [stream] for part in ("weight", "bias")}
    for block in (0, 1):
        heads = {name: [(f"{name}{block}", 1)] * 3 for name in "jv"}
        name = f"blocks.{block}"
        table |= {
            f"{name}.{norm}.{part}": [stream] for norm in ("norm_attention", "norm_mlp") for part in ("weight", "bias")
        }
        for layer, of_list in (("query", "j"), ("key", "j"), ("value", "v")):
            table[f"{name}.attention.{layer}.weight"] = [heads[of_list], stream]
            table[f"{name}.attention.{layer}.bias"] = [heads[of_list]]
        table |= {f"{name}.attention.output.weight": [stream, heads["v"]], f"{name}.attention.output.bias": [stream]}
        table |= layers((f"{name}.hidden", "e", f"m{block}", 1), (f"{name}.output", f"m{block}", "e", 1))
    table |= layers(("head", "e", "", 1))

    def build(sizes: Mapping[str, int]) -> nn.Module:
        # Heads of their own width: the constructor has those of a wider stream, with other linear layers.
        network = ViTTiny(width=3 * sizes["e"], heads=3, depth=2, patch=8).build((3, 32, 32), 10)
        width = sizes["e"]
        network.patches, network.head = nn.Conv2d(3, width, 8, stride=8), nn.Linear(width, 10)
        network.class_token, network.positions = (nn.Parameter(torch.zeros(shape)) for shape in ((width,), (17, width)))
        network.norm = nn.LayerNorm(width)
        blocks: Any = network.blocks
        for number, block in enumerate(blocks):
            j, v, m = (sizes[f"{name}{number}"] for name in "jvm")
            block.norm_attention, block.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
            block.attention.query, block.attention.key = nn.Linear(width, 3 * j), nn.Linear(width, 3 * j)
            block.attention.value, block.attention.output = nn.Linear(width, 3 * v), nn.Linear(3 * v, width)
            block.hidden, block.output = nn.Linear(width, m), nn.Linear(m, width)
        return network

    return ByHand(widths, table, build)


BY_HAND: Mapping[str, Callable[[], ByHand]] = {
    "logistic": lambda: dense((), 784, 10),
    "mlp": lambda: dense((20,), 784, 10),
    "convnet2": convnet2,
    "emnist-cnn": emnist_cnn,
    "vgg11": vgg11,
    "alexnet-mcepl": alexnet,
    "resnet18": lambda: resnet18("group"),
    "resnet18-batchnorm": lambda: resnet18("batch"),
    "resnet20": resnet20,
    "char-lstm": char_lstm,
    "mean-embedding": mean_embedding,
    "vit-tiny": vit_tiny,
}

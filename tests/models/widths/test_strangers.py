"""Modules from elsewhere: layers that models often have, compared with narrow modules made by their own constructors,
and those whose widths cannot be followed."""

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rayfl.compress.slices import cut
from rayfl.methods.shared.narrow_task import NarrowTask
from rayfl.models.widths.narrow import Narrowed, widths_of
from rayfl.models.widths.slices import UnitGroup
from rayfl.network import named_weights
from tests.bound_tasks import classification
from tests.refusals import refused


class Attention(nn.Module):
    """Heads by views, as many people write them; `fused`: one matrix for queries, keys and values."""

    def __init__(self, width: int, heads: int, inner: int, fused: bool) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.ModuleList(nn.Linear(width, heads * inner) for _ in range(3))
        self.fused = nn.Linear(width, 3 * heads * inner) if fused else None
        if fused:
            self.inputs = nn.ModuleList()
        self.o = nn.Linear(heads * inner, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        if self.fused is not None:
            q, k, v = self.fused(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            y = functional.scaled_dot_product_attention(q, k, v)
        else:
            q, k, v = (layer(x).view(batch, length, self.heads, -1).transpose(1, 2) for layer in self.inputs)
            y = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1) @ v
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class Vit(nn.Module):
    def __init__(self, width: int, hidden: int, inner: int, fused: bool) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.place = nn.Parameter(torch.randn(1, 5, width))
        self.first = nn.Parameter(torch.randn(1, 1, width))
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, 4, inner, fused)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.head = nn.Linear(width, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.place
        x = x + self.attention(self.norm(x))
        return self.head((x + self.mlp(x))[:, 0])


class Encoder(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 4, hidden, batch_first=True), 2)
        self.head = nn.Linear(width, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


class Tied(nn.Module):
    """Both directions of two GRU layers, and an output layer that is the embedding."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.gru = nn.GRU(width, hidden, 2, bidirectional=True, batch_first=True)
        self.back = nn.Linear(2 * hidden, width)
        self.out = nn.Linear(width, 20, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.back(self.gru(self.embedding(tokens))[0])[:, -1])


class Blocks(nn.Module):
    """Concatenation, depthwise and transposed convolutions, squeeze and excitation, PReLU, a scale, GLU."""

    def __init__(self, a: int, b: int, c: int, gate: int, up: int, half: int) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, a, 3, padding=1), nn.Conv2d(a, b, 3, padding=1), nn.Conv2d(a + b, c, 1)
        self.depthwise, self.act = nn.Conv2d(c, c, 3, padding=1, groups=c), nn.PReLU(c)
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(c, gate, 1), nn.ReLU(), nn.Conv2d(gate, c, 1), nn.Sigmoid()
        )
        self.scale = nn.Parameter(torch.randn(c, 1, 1))
        self.up = nn.ConvTranspose2d(c, up, 2, 2)
        self.norm = nn.InstanceNorm2d(up, affine=True)
        self.flat, self.head = nn.Linear(up * 256, 2 * half), nn.Linear(half, 4)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x).relu()
        c = self.act(self.depthwise(self.c(torch.cat([a, self.b(a).relu()], 1))))
        c = self.norm(self.up(c * self.gate(c) * self.scale))
        return self.head(functional.glu(self.flat(c.flatten(1)), dim=1))


IMAGE, TEXT = (3, 8, 8), (6,)
STRANGERS: Mapping[str, tuple[Callable[..., nn.Module], Mapping[str, int], tuple[int, ...]]] = {
    "attention": (lambda **sizes: Vit(fused=False, **sizes), {"width": 16, "hidden": 32, "inner": 5}, IMAGE),
    "fused attention": (lambda **sizes: Vit(fused=True, **sizes), {"width": 16, "hidden": 32, "inner": 4}, IMAGE),
    "encoder": (Encoder, {"width": 16, "hidden": 24}, TEXT),
    "tied": (Tied, {"width": 10, "hidden": 14}, TEXT),
    "blocks": (Blocks, {"a": 8, "b": 12, "c": 10, "gate": 4, "up": 6, "half": 7}, IMAGE),
}
"""A module, the numbers of units of its lists, and the shape of an example."""


@pytest.mark.parametrize("ratio", [0.5, 0.3])
@pytest.mark.parametrize("name", STRANGERS)
def test_a_narrow_network_has_the_shapes_and_outputs_of_one_that_is_made_so(name: str, ratio: float):
    make, sizes, shape = STRANGERS[name]
    if name == "encoder" and ratio == 0.3:
        # Torch's own attention needs heads that are together as wide as its input.
        with refused(names=["encoder.layers.0.self_attn", "MultiheadAttention", 0.3, "0.5"]):
            NarrowTask(classification(lambda: make(**sizes), shape)).try_at(ratio)
        return
    torch.manual_seed(0)
    full = make(**sizes)
    widths = widths_of(lambda: make(**sizes), shape)
    weights = {key: tensor.detach() for key, tensor in named_weights(full).items()}
    part = cut(weights, widths.index([np.roll(np.arange(g.width), -2)[: g.kept(ratio)] for g in widths.groups]))
    by_constructor = make(**{key: math.ceil(ratio * size - 1e-9) for key, size in sizes.items()}).eval()
    by_constructor.load_state_dict(part, strict=name != "tied")
    narrow = Narrowed(lambda: make(**sizes), widths, widths.sizes(ratio))().eval()
    narrow.load_state_dict(part, strict=name != "tied")
    inputs = torch.randint(1, 20, (3, *shape)) if shape == TEXT else torch.randn(3, *shape)
    with torch.no_grad():
        torch.testing.assert_close(narrow(inputs), by_constructor(inputs), rtol=1e-6, atol=1e-6)


def test_without_norms_a_slice_computes_what_the_full_network_does_with_all_other_units_at_zero():
    make, sizes, shape = STRANGERS["tied"]
    full = make(**sizes)
    widths = widths_of(lambda: make(**sizes), shape)
    index = widths.index([np.array([9, 3, 4, 0, 7])[: g.kept(0.3)] for g in widths.groups])
    weights = {key: tensor.detach().clone() for key, tensor in named_weights(full).items()}
    narrow = Narrowed(lambda: make(**sizes), widths, widths.sizes(0.3))()
    narrow.load_state_dict(cut(weights, index), strict=False)
    for key, tensor in weights.items():
        for axis, kept in enumerate(index[key]):
            if kept is not None:
                others = np.setdiff1d(np.arange(tensor.shape[axis]), kept)
                tensor.index_fill_(axis, torch.from_numpy(others), 0.0)
    full.load_state_dict(weights, strict=False)
    tokens = torch.randint(0, 20, (4, 6))
    torch.testing.assert_close(full(tokens), narrow(tokens), rtol=1e-5, atol=1e-6)


class Literal(nn.Module):
    """Attention whose width is a number in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv, self.head = nn.Embedding(20, 16), nn.Linear(16, 48), nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embedding(tokens)).split(16, dim=2)
        return self.head(((q @ k.mT).softmax(-1) @ v).mean(1))


class TwoStates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(20, 6), nn.LSTM(6, 8, 2), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[1][0].sum(0))


def grouped() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=2), nn.Flatten(), nn.Linear(128, 4))


def shuffled() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.PixelShuffle(2), nn.Flatten(), nn.Linear(288, 4))


@pytest.mark.parametrize(
    ("build", "shape", "names"),
    [
        (grouped, IMAGE, ["'1'", "Conv2d", "groups=2"]),
        (shuffled, IMAGE, ["'1'", "PixelShuffle", "pixel_shuffle"]),
        (TwoStates, TEXT, ["TwoStates", "last state of LSTM"]),
        (Literal, TEXT, ["retention ratio 0.5", "its own forward", "set_width"]),
    ],
)
def test_what_cannot_be_traced_or_cut_is_refused_with_the_layer(
    build: Callable[[], nn.Module], shape: tuple[int, ...], names: list[str]
):
    with refused(names=names):
        NarrowTask(classification(build, shape)).try_at(0.5)


@pytest.mark.parametrize(
    ("width", "multiple", "ratio", "kept"),
    [(100, 1, 0.07, 7), (3, 1, 0.1, 1), (10, 1, 0.25, 3), (64, 32, 0.25, 32), (64, 32, 0.6, 64), (10, 4, 0.3, 10)],
)
def test_the_number_of_kept_units_is_rounded_up(width: int, multiple: int, ratio: float, kept: int):
    assert UnitGroup("", width, multiple).kept(ratio) == kept

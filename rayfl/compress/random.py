"""Random sparsification: k entries at random, or everything at random."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from rayfl.compress.base import Buffers, Compressor, Field, Packet, Tree, masks_of, shapes_of
from rayfl.compress.codecs import WholeTensorCodec
from rayfl.compress.sparse import (
    KeptShare,
    Scope,
    SelectedEntries,
    Sparsifier,
    kept_entries,
    kept_share,
    split_positions,
)
from rayfl.compress.values import (
    UNIT_ROUNDOFF,
    decode_values,
    encode_values,
    entries,
    scaled,
)

FLAG = "sent"
"""Name of the buffer that says whether anything was sent; buffers of a tensor have a dot in their names."""


@dataclass(frozen=True)
class UniformDraw:
    """k positions of each tensor, or of all entries, every set of k equally likely; k as `kept_entries` has it."""

    keep_ratio: float
    scope: Scope

    def __call__(self, seed: int, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
        generator = np.random.Generator(np.random.PCG64(seed))
        if self.scope == "tensor":
            return {name: draw(size, kept_entries(size, self.keep_ratio), generator) for name, size in sizes.items()}
        num_entries = sum(sizes.values())
        return split_positions(draw(num_entries, kept_entries(num_entries, self.keep_ratio), generator), sizes)


def draw(size: int, k: int, generator: np.random.Generator) -> np.ndarray:
    """Increasing int64 positions [k] in [0, size), every set of k equally likely.

    Positions are drawn with replacement, each time as many as are missing, until k are different. No step looks at a
    position's number, so no set is preferred. For more than half of the positions the left-out ones are drawn.
    """
    fewer = min(k, size - k)
    chosen = np.zeros(size, np.bool_)
    missing = fewer
    while missing:
        chosen[generator.integers(0, size, missing)] = True
        missing = fewer - np.count_nonzero(chosen)
    return np.flatnonzero(chosen if fewer == k else ~chosen)


class RandK(KeptShare, Sparsifier, on_device=True):
    """k entries drawn at random, without regard to their values; ranges and k as those of `topk`.

    `scale` true: kept values are multiplied by n / k, so that C is unbiased with omega = n / k - 1 (the largest n / k
    of any tensor with scope "tensor"). False: a contraction in expectation with delta = k / n, biased: wrap it in
    feedback. 16-bit `values` round without regard to the mean, so no omega holds for them.
    `positions` "seed": a seed of 64 bits, drawn for each packet, from which the receiver draws the same positions:
    8 bytes per packet and the values. "coded": the positions themselves, as `topk` sends them.
    Sources: Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, section 2 (unscaled); Wangni, Wang,
    Liu, Zhang, "Gradient Sparsification for Communication-Efficient Distributed Optimization", NeurIPS 2018 (scaled;
    equal probabilities are the simplest case of theirs, here with a fixed number of entries).
    """

    name = "randk"
    scale: bool = Field(default=True, description="multiply what is kept by n / k, which is unbiased")
    positions: Literal["seed", "coded"] = Field(
        default="seed", description="seed: both ends draw the same positions; coded: the positions are sent"
    )
    scope: Scope = "tensor"

    def choose(self, flats: Tree, generator: np.random.Generator) -> SelectedEntries:
        """Random positions, the same for both kinds of `positions`."""
        sizes = {name: flat.numel() for name, flat in flats.items()}
        if not sum(sizes.values()):
            return SelectedEntries({name: np.empty(0, np.int64) for name in sizes})
        seed = generator.integers(0, 1 << 64, 1, dtype=np.uint64)
        rule = UniformDraw(self.keep_ratio, self.scope)
        positions = rule(int(seed[0]), sizes)
        scales = self._scales(sizes) if self.scale else {}
        return (
            SelectedEntries(positions, scales, seed, rule)
            if self.positions == "seed"
            else SelectedEntries(positions, scales)
        )

    def omega(self, num_entries: int) -> float | None:
        """n / k - 1 if scaled, with fp32 values: an entry is kept with probability k / n, at n / k times its value."""
        if not self.scale or self.values != "fp32":
            return None
        return 1 / kept_share(num_entries, self.keep_ratio, self.scope) - 1 if num_entries else 0.0

    def expected_delta(self, num_entries: int) -> float | None:
        """(1 - u^2) k / n if not scaled, with unit roundoff u of `values`; if scaled, what follows from omega."""
        if self.scale:
            return super().expected_delta(num_entries)
        if self.values not in UNIT_ROUNDOFF or num_entries == 0:
            return None
        return kept_share(num_entries, self.keep_ratio, self.scope) * (1 - UNIT_ROUNDOFF[self.values] ** 2)

    def _scales(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """n / k of each tensor, or of all."""
        if self.scope == "tensor":
            return {name: size / kept_entries(size, self.keep_ratio) for name, size in sizes.items() if size}
        num_entries = sum(sizes.values())
        return dict.fromkeys(sizes, num_entries / kept_entries(num_entries, self.keep_ratio))


class BernoulliCodec(WholeTensorCodec):
    """Reads "sent", one uint8 (1 or 0), and if it is 1 "<name>.values", fp32, of each tensor."""

    def read(self, parts: Buffers, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if not self._sent(parts):
            return torch.zeros(shape)
        return decode_values(parts[f"{name}.values"], "fp32")

    def support(self, parts: Buffers) -> Tree:
        return masks_of(self.shapes, self._sent(parts))

    def add_to(self, parts: Buffers, total: Tree, weight: float) -> None:
        if self._sent(parts):
            super().add_to(parts, total, weight)

    def num_values(self, parts: Buffers) -> int:
        return super().num_values(parts) if self._sent(parts) else 0

    def _sent(self, parts: Buffers) -> bool:
        return bool(self.shapes) and bool(parts[FLAG][0])


class Bernoulli(Compressor, on_device=True):
    """Sends v / p with `probability` p, the whole tree at once, else nothing. Unbiased, omega = 1 / p - 1 exactly.

    Bits: a flag of one byte in every packet (a bit would do, but buffers are whole bytes), and with probability p all
    entries as fp32, so 8 + 32 d p on average. A tree without tensors has no flag.
    No single source: v times a Bernoulli variable divided by its mean. It skips messages at random, `lag` by a rule.
    """

    name = "bernoulli"
    probability: float = Field(default=0.5, gt=0, le=1, description="probability that the tree is sent, p")

    def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        """One draw. ValueError on NaN and infinity, and if v / p is sent and too large for float32."""
        flats = {name: entries(name, tensor) for name, tensor in x.items()}
        sent = bool(generator.random() < self.probability)
        parts = {FLAG: np.array([sent], np.uint8)} if x else {}
        if sent:
            for name, flat in flats.items():
                parts[f"{name}.values"] = encode_values(name, scaled(name, flat, 1 / self.probability), "fp32")
        return Packet(parts, BernoulliCodec(shapes_of(x))), memory

    def omega(self, num_entries: int) -> float | None:
        return 1 / self.probability - 1

"""Dense: every entry is sent, at 32 or 16 bits."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from rayfl import tree
from rayfl.compress.base import (
    BLOCK,
    Buffers,
    Difference,
    Field,
    Opened,
    Packet,
    Quantizer,
    Tree,
    cuts,
    device_of,
    shapes_of,
)
from rayfl.compress.codecs import WholeTensorCodec
from rayfl.compress.values import (
    UNIT_ROUNDOFF,
    ValueType,
    decode_values,
    encode_values,
    entries,
    entries_on_device,
)
from rayfl.data.transfer import to_memory
from rayfl.tree import num_entries


@dataclass(frozen=True)
class DenseCodec(WholeTensorCodec):
    """Reads one buffer a tensor, under the tensor's name."""

    dtype: ValueType

    def read(self, parts: Buffers, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return decode_values(parts[name], self.dtype)

    def pieces(self, parts: Buffers) -> Iterator[Packet]:
        """See `Divisible`."""
        for name, first, last in cuts(self.shapes):
            yield Packet({name: parts[name][first:last]}, DenseCodec(((name, (last - first,)),), self.dtype))


@dataclass(frozen=True, init=False)
class UnwrittenDense(Packet):
    """A dense fp32 packet of a tree of finite numbers on a GPU; its buffers are made only if somebody reads them.

    The tree is added up on the GPU. It must not be changed while the packet exists.
    """

    like: Tree
    """A tree of the same shapes, on the device of the packet's own tree."""

    def __init__(self, like: Tree) -> None:
        object.__setattr__(self, "codec", DenseCodec(shapes_of(like), "fp32"))
        object.__setattr__(self, "like", like)

    @property
    def is_written(self) -> bool:
        """Whether somebody has read the buffers, so that they are in memory."""
        return "parts" in self.__dict__

    def tree(self) -> Tree:
        """The tree that is sent, on its device."""
        return self.like

    def checked(self) -> Tree:
        """`tree`, whose numbers are finite. ValueError on NaN and infinity."""
        return self.like

    @cached_property
    def parts(self) -> Buffers:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The buffers. ValueError on NaN and infinity."""
        tensors = to_memory(self.tree(), device_of(self.like))
        return {name: encode_values(name, entries(name, tensor), "fp32") for name, tensor in tensors.items()}

    @property
    def num_bits(self) -> int:
        return 32 * num_entries(self.like)

    @property
    def num_values(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `Packet`; the buffers are not made for it."""
        return num_entries(self.like)

    def decode_beside(self, like: Tree) -> Tree:
        """See `Packet`; if `like` lies on the same GPU, nothing is copied, and NaN is not looked for."""
        device = device_of(like)
        return self.tree() if device.type != "cpu" and self.can_be_added_on(device) else super().decode_beside(like)

    def add_to(self, total: Tree, weight: float) -> None:
        if self.can_be_added_on(device_of(total)):
            tree.private._foreach_add_(
                tree.tensors(total, self.like), list(tree.scale(self.checked(), weight).values())
            )
        else:
            super().add_to(total, weight)

    def times(self, weight: float) -> Tree:
        if self.is_written:
            return super().times(weight)
        products = tree.scale(self.checked(), weight)
        tree.private._foreach_add_(list(products.values()), 0.0)
        return products

    def can_be_added_on(self, device: torch.device) -> bool:
        """Whether the tree lies on this device, and its buffers have not been made yet."""
        return not self.is_written and device_of(self.like) == device

    def written(self) -> Packet:
        return Packet(self.parts, self.codec)

    def opened(self) -> Packet:
        return OpenedDense(self.tree())

    # Any: what pickle asks for.
    def __reduce__(self) -> tuple[Any, ...]:
        return Packet, (self.parts, self.codec)


@dataclass(frozen=True, init=False)
class OpenedDense(UnwrittenDense, Opened):
    """The same, decoded where its tree lies, for several clients that read it there; never sent."""

    @cached_property
    def _decoded(self) -> Tree:
        return tree.unwritten(self.like)


@dataclass(frozen=True, init=False)
class DenseDifference(UnwrittenDense):
    """The packet of the difference of two trees; it holds the two trees until its buffers are made.

    `add_to` and `times` subtract, check, multiply and add a block at a time: one pass over the memory where a tree of
    differences would take four. On a GPU each of these is one operation for the whole tree.
    """

    difference: Difference

    def __init__(self, difference: Difference) -> None:
        super().__init__(difference.a)
        object.__setattr__(self, "difference", difference)

    def tree(self) -> Tree:
        return self.difference.tree()

    def checked(self) -> Tree:
        difference = self.tree()
        refuse_infinite(difference)
        return difference

    def add_to(self, total: Tree, weight: float) -> None:
        """See `Packet`. ValueError on NaN and infinity; `total` is then useless."""
        if tree.at_once(total):
            super().add_to(total, weight)
        elif plain(total) and self.can_be_added_on(device_of(total)):
            self._go_through(total, weight, lambda block, products: block.add_(products))
        else:
            Packet.add_to(self, total, weight)

    def times(self, weight: float) -> Tree:
        """See `Packet`. ValueError on NaN and infinity."""
        if self.is_written or tree.at_once(self.like):
            return super().times(weight)
        total = tree.map(torch.empty_like, self.difference.a)
        self._go_through(total, weight, lambda block, products: torch.add(products, 0.0, out=block))
        return total

    def _go_through(
        self, total: Tree, weight: float, take: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> None:
        """Call `take` with each block of `total` and the block's products, weight times difference, rounded.

        ValueError at the end if a difference is NaN or infinite.
        """
        most = min(BLOCK, max((tensor.numel() for tensor in total.values()), default=0))
        kept = torch.empty(most)
        check = torch.zeros(())
        for name, tensor in total.items():
            trees = (tensor, self.difference.a[name], self.difference.b[name])
            for block, left, right in zip(*map(blocks, trees), strict=True):
                products = torch.sub(left, right, out=kept.narrow(0, 0, block.numel()))
                check += products.sum()
                take(block, products.mul_(weight))
        if not math.isfinite(check):
            refuse_infinite(self.difference.tree())


def blocks(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The entries of a contiguous tensor, row by row, BLOCK at a time."""
    flat = tensor.view(-1)
    return (flat,) if flat.numel() <= BLOCK else flat.split(BLOCK)


def plain(x: Tree) -> bool:
    """Whether all tensors are float32, row by row, and lie together in main memory or on a GPU."""
    device = device_of(x)
    return device.type in ("cpu", "cuda") and all(
        tensor.dtype == torch.float32 and tensor.device == device and tensor.is_contiguous() for tensor in x.values()
    )


def refuse_infinite(x: Tree) -> None:
    """Raise ValueError if a tree holds NaN or infinity; on a GPU it is waited for once."""
    if x and not math.isfinite(torch.stack(list(tree.private._foreach_norm(list(x.values()), 1))).sum()):
        # One of finite numbers may overflow.
        for name, tensor in x.items():
            entries_on_device(name, tensor)


class Dense(Quantizer, on_device=True):
    """All entries as fp32, or rounded to nearest even as fp16 or bf16. float64 input is sent as float32.

    fp32 copies nothing: the packet refers to the tensors, which must not be changed while it exists. Tensors
    on a GPU stay there until somebody reads the buffers.
    The constants hold for numbers that are normal in float32 (|x| >= 2^-126) or zero.
    """

    name = "dense"
    dtype: ValueType = Field(default="fp32", description="type of the numbers that are sent")

    def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        """One buffer a tensor. ValueError on NaN, infinity and numbers too large for `dtype`."""
        if self.dtype == "fp32" and device_of(x).type == "cuda" and plain(x):
            refuse_infinite(x)
            return UnwrittenDense(x), memory
        parts = {name: encode_values(name, entries_on_device(name, tensor), self.dtype) for name, tensor in x.items()}
        return Packet(parts, DenseCodec(shapes_of(x), self.dtype)), memory

    def encode_difference(self, x: Difference, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        """As fp32 nothing is subtracted until somebody reads the packet."""
        if self.dtype == "fp32" and plain(x.a) and plain(x.b) and device_of(x.a) == device_of(x.b):
            return DenseDifference(x), memory
        return super().encode_difference(x, memory, generator)

    def omega(self, num_entries: int) -> float | None:
        return 0.0 if self.dtype == "fp32" else None

    def delta(self, num_entries: int) -> float | None:
        return 1 - UNIT_ROUNDOFF[self.dtype] ** 2 if self.dtype in UNIT_ROUNDOFF else None

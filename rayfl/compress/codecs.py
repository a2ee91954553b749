"""What most codecs share: packets that send every entry, or values at positions; a subclass reads the buffers."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rayfl.compress.base import Buffers, Shapes, add_decoded, masks_of, zeros_of
from rayfl.tree import Tree


@dataclass(frozen=True)
class WholeTensorCodec(ABC):
    """A codec whose packets send every entry; a subclass reads the tensors one by one."""

    shapes: Shapes

    @abstractmethod
    def read(self, parts: Buffers, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The decoded tensor `name`, with its entries row by row in any shape."""

    def decode(self, parts: Buffers) -> Tree:
        return {name: self.read(parts, name, shape).view(shape) for name, shape in self.shapes}

    def support(self, parts: Buffers) -> Tree:
        """True everywhere."""
        return masks_of(self.shapes, True)

    def num_values(self, parts: Buffers) -> int:
        return sum(math.prod(shape) for _, shape in self.shapes)

    def add_to(self, parts: Buffers, total: Tree, weight: float) -> None:
        add_decoded(self.decode(parts), total, weight)


@dataclass(frozen=True, eq=False)
class PositionedCodec(ABC):
    """A codec whose packets send values at positions; a subclass reads them."""

    shapes: Shapes

    @abstractmethod
    def read(self, parts: Buffers) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Each tensor's name, int64 positions [count] without repetition, and float32 values [count]."""

    def decode(self, parts: Buffers) -> Tree:
        decoded = zeros_of(self.shapes)
        for name, positions, values in self.read(parts):
            decoded[name].view(-1).scatter_(0, positions, values)
        return decoded

    def support(self, parts: Buffers) -> Tree:
        masks = masks_of(self.shapes, False)
        for name, positions, _ in self.read(parts):
            masks[name].view(-1)[positions] = True
        return masks

    def num_values(self, parts: Buffers) -> int:
        return sum(positions.numel() for _, positions, _ in self.read(parts))

    def add_to(self, parts: Buffers, total: Tree, weight: float) -> None:
        """Add at the sent positions only; every tensor of `total` must be contiguous."""
        for name, positions, values in self.read(parts):
            tensor = total[name]
            tensor.view(-1).index_add_(0, positions.to(tensor.device), (values * weight).to(tensor))

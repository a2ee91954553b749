"""Error feedback: a compressor's error is remembered and added to the next message."""

from typing import Annotated, Self

import numpy as np
import torch

from rayfl.choices.kinds import TO_TABLE, from_table
from rayfl.compress.base import Compressor, Field, Packet, RayflError, Tree, entries_on_device
from rayfl.compress.sparse import TopK


class Around(Compressor):
    """A compressor around another one, `inner`; by default its memory is that of `inner`."""

    inner: Annotated[Compressor, from_table(Compressor), TO_TABLE] = Field(
        default=TopK(), description="the compressor inside, by name or table"
    )

    def keeping(self, ratio: float) -> Self | None:
        inner = self.inner.keeping(ratio)
        return None if inner is None else self.model_copy(update={"inner": inner})

    def init(self, like: Tree) -> Tree:
        return self.inner.init(like)


class ErrorFeedback(Around, on_device=True):
    """p = x + e; C(p) is sent; e = p - C(p), with the inner compressor C and the memory e.

    If C has a memory of its own, it is kept together with e. In an experiment:
    `{name = "feedback", inner = {name = "topk", keep_ratio = 0.1}}`.
    """

    name = "feedback"

    def init(self, like: Tree) -> Tree:
        """e = 0, float32 in main memory, and C's memory. RayflError if C remembers errors too, under tensors' names."""
        if self.inner.init(like).keys() & like.keys():
            raise RayflError(f"feedback around {self.inner.name!r} would count every error twice; give it alone")
        return {**self.inner.init(like), **{name: torch.zeros(tensor.shape) for name, tensor in like.items()}}

    def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        """Encodes x + e; the new e, on the device of x, is the part of it that the receiver does not see."""
        flats = {name: entries_on_device(name, tensor) for name, tensor in x.items()}
        corrected = {
            name: (flat + entries_on_device(name, memory[name]).to(flat.device)).view(x[name].shape)
            for name, flat in flats.items()
        }
        packet, kept = self.inner.encode(corrected, {name: memory[name] for name in memory if name not in x}, generator)
        # A dense packet is a view of `corrected`, so the error is computed in a copy.
        error = {name: tensor.clone() for name, tensor in corrected.items()}
        packet.add_to(error, -1.0)
        return packet, {**kept, **error}

"""Error feedback: a compressor's error is remembered and added to the next message."""

from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field, field_validator

from rayfl.choices.kinds import TO_TABLE, from_table
from rayfl.compress.base import Compressor, Packet
from rayfl.compress.sparse import TopK
from rayfl.compress.values import entries_on_device
from rayfl.errors import RayflError
from rayfl.tree import Tree


class ErrorFeedback(Compressor, on_device=True):
    """p = x + e; C(p) is sent; e = p - C(p), with the inner compressor C and the memory e.

    In an experiment: `{name = "feedback", inner = {name = "topk", keep_ratio = 0.1}}`.
    """

    name: ClassVar[str] = "feedback"
    inner: Annotated[Compressor, from_table(Compressor), TO_TABLE] = Field(
        default=TopK(), description="the compressor whose error is added next time"
    )

    @field_validator("inner")
    @classmethod
    def _once(cls, inner: Compressor) -> Compressor:
        if isinstance(inner, ErrorFeedback):
            raise RayflError("feedback around feedback would count every error twice; give the inner compressor itself")
        return inner

    def keeping(self, ratio: float) -> "ErrorFeedback | None":
        inner = self.inner.keeping(ratio)
        return None if inner is None else self.model_copy(update={"inner": inner})

    def init(self, like: Tree) -> Tree:
        """e = 0, float32 in main memory. ValueError around a compressor with a memory of its own."""
        if self.inner.init(like):
            raise RayflError(f"feedback cannot wrap {self.inner.name!r}, which has a memory of its own")
        return {name: torch.zeros(tensor.shape) for name, tensor in like.items()}

    def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        """Encodes x + memory; the new memory, on the device of x, is the part of it that the receiver does not see."""
        flats = {name: entries_on_device(name, tensor) for name, tensor in x.items()}
        wanted = {
            name: (flat + entries_on_device(name, memory[name]).to(flat.device)).view(x[name].shape)
            for name, flat in flats.items()
        }
        packet, _ = self.inner.encode(wanted, {}, generator)
        # A dense packet looks at `wanted`, so the error is taken from a copy.
        error = {name: tensor.clone() for name, tensor in wanted.items()}
        packet.add_to(error, -1.0)
        return packet, error

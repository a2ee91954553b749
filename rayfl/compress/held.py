"""HeldCodec: reads packets of differences, which their receivers add to a tree that they hold."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from rayfl.compress.base import Codec, Shapes, WholeTensorCodec, masks_of
from rayfl.tree import Tree


@dataclass(frozen=True, eq=False)
class HeldCodec:
    """Adds what `inner` decodes to `held`, the float32 arrays that all receivers have; `held` is not billed."""

    shapes: Shapes
    held: Mapping[str, np.ndarray]
    inner: Codec

    def decode(self, parts: Mapping[str, np.ndarray]) -> Tree:
        """held + difference: what the receivers hold from then on."""
        found = self.inner.decode(parts)
        return {name: torch.from_numpy(self.held[name]) + found[name] for name, _ in self.shapes}

    def support(self, parts: Mapping[str, np.ndarray]) -> Tree:
        """True everywhere, as the receivers then have every entry."""
        return masks_of(self.shapes, True)

    def num_values(self, parts: Mapping[str, np.ndarray]) -> int:
        """Entries of the difference that were sent."""
        return self.inner.num_values(parts)

    add_to = WholeTensorCodec.add_to

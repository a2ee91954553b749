"""Hard thresholding: the entries whose magnitude reaches a threshold, however many they are."""

import numpy as np
import torch
from pydantic import Field, model_validator

from rayfl.compress.base import UNIT_ROUNDOFF, RayflError, Tree
from rayfl.compress.largest import at_least
from rayfl.compress.sparse import SelectedEntries, Sparsifier


class Threshold(Sparsifier, on_device=True):
    """Entries with |v_i| >= `threshold` and v_i != 0; the others are dropped, and possibly nothing is sent at all.

    `relative`: the threshold is `threshold`, in (0, 1], times the largest magnitude of each tensor, so at least one
    entry of a tensor is kept unless all are zero. Both are compared as float32 numbers.
    Bits: values and positions as those of `topk`; none for a tensor that is dropped whole. An absolute threshold t
    bounds the error, ||C(v) - v||^2 < d t^2, but is not a contraction: smaller tensors are dropped whole. Biased: wrap
    it in feedback.
    Source: Sahu, Dutta, Abdelmoniem, Banerjee, Canini, Kalnis, "Rethinking Gradient Sparsification as Total Error
    Minimization", NeurIPS 2021 (the hard-threshold sparsifier).
    """

    name = "threshold"
    threshold: float = Field(default=0.01, gt=0, description="least magnitude of what is sent")
    relative: bool = Field(default=False, description="the threshold is a share of each tensor's largest magnitude")

    @model_validator(mode="after")
    def _reachable(self) -> "Threshold":
        if self.relative and self.threshold > 1:
            raise RayflError(
                f"={self.threshold} is above 1, which no entry reaches; give one in (0, 1]", key=("threshold",)
            )
        return self

    def choose(self, flats: Tree, generator: np.random.Generator) -> SelectedEntries:
        """The positions of the entries that reach the threshold; draws nothing."""
        return SelectedEntries({name: self._positions(flat) for name, flat in flats.items()})

    def most_kept(self, num_entries: int) -> int:
        return num_entries

    def delta(self, num_entries: int) -> float | None:
        """(1 - u^2) / (1 + (n - 1) t^2) for a relative threshold t, with unit roundoff u of `values`.

        The worst tensor has one entry M and n - 1 just below t M: what is dropped is below (n - 1) t^2 M^2, and what is
        kept at least M^2. None for an absolute threshold.
        """
        if not self.relative or self.values not in UNIT_ROUNDOFF or num_entries == 0:
            return None
        # t M is rounded to float32, and no float32 below it exceeds float32(t) M.
        limit = float(np.float32(self.threshold))
        return (1 - UNIT_ROUNDOFF[self.values] ** 2) / (1 + (num_entries - 1) * limit**2)

    def _positions(self, flat: torch.Tensor) -> np.ndarray:
        limit = np.float32(self.threshold)
        numbers = flat.numpy()
        if self.relative and flat.numel():
            low, high = torch.aminmax(flat)
            limit *= np.float32(max(-low.item(), high.item()))
        # Where the limit vanishes in float32 (a tensor of zeros, or of the smallest numbers) zeros are left out still.
        return np.flatnonzero(at_least(numbers, limit) if limit > 0 else numbers != 0)

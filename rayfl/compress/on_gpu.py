"""What selecting and encoding take time for, on tensors of a GPU: only the encoded bytes travel to main memory.

The layout of buffers is that of `positions` and `values`; here are the operations alone, and their results are the
bytes of the ones in main memory. What sums in floating point (norms, scales) is not here: another order of additions
would be other bytes.
"""

import numpy as np
import torch
from torch import Tensor

from rayfl.compress.positions import ESCAPE, Places


def on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor's entries are selected and encoded where they lie. On a CPU numpy is faster."""
    return tensor.device.type == "cuda"


def largest(flat: Tensor, k: int) -> Tensor:
    """Boolean [n] with exactly k True: the largest |entries|, ties to the lowest position."""
    if k == 0 or k >= flat.numel():
        return torch.full_like(flat, k > 0, dtype=torch.bool)
    magnitudes = flat.abs()
    threshold = torch.topk(magnitudes, k, sorted=False).values.min()
    above, tied = magnitudes > threshold, magnitudes == threshold
    return above | (tied & (tied.cumsum(0) <= k - above.sum()))


class TensorPlaces(Places):
    """The True entries of a boolean tensor [n] as places to encode."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        # One by one, in order: it waits for the device, which has to count them.
        self.chosen = mask.nonzero().flatten()
        super().__init__(self.chosen.numel(), mask.numel())

    def positions(self) -> np.ndarray:
        return self.chosen.cpu().numpy()

    def bitmap(self) -> np.ndarray:
        return packed_bits(self.mask)

    def int32(self) -> np.ndarray:
        return self.chosen.to(torch.int32).cpu().numpy().view(np.uint8)

    def num_escapes(self) -> int:
        return int((self._gaps // ESCAPE).sum())

    def gaps(self) -> np.ndarray:
        if self.most_gap < ESCAPE:
            return self._gaps.to(torch.uint8).cpu().numpy()
        ends = torch.cumsum(self._gaps // ESCAPE + 1, 0)
        body = torch.full((int(ends[-1]),), ESCAPE, dtype=torch.uint8, device=ends.device)
        return body.index_copy_(0, ends - 1, (self._gaps % ESCAPE).to(torch.uint8)).cpu().numpy()

    @property
    def _gaps(self) -> Tensor:
        return torch.diff(self.chosen, prepend=self.chosen.new_full((1,), -1)) - 1

    @property
    def most_gap(self) -> int:
        return int(self._gaps.max())


def packed_bits(mask: Tensor) -> np.ndarray:
    """uint8 [ceil(n / 8)] of a boolean tensor, as `tree.pack_bits` has it; packed where the tensor lies."""
    flat = torch.nn.functional.pad(mask.reshape(-1).to(torch.uint8), (0, -mask.numel() % 8))
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8).to(flat.device)
    return (flat.view(-1, 8) * weights).sum(dim=1, dtype=torch.uint8).cpu().numpy()

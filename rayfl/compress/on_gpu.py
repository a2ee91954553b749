"""What selecting and encoding take time for, on tensors of a GPU: only the encoded bytes travel to main memory.

The layout of buffers is that of `positions`, `values` and `bits`; here are the operations alone, and their results are
the bytes of the ones in main memory. Random numbers are numpy's, and travel to the GPU. Sums in floating point (norms,
scales) are another number in another order of additions, so a sum that was made on a GPU is taken only where every
order is rounded to the same float32: `rounded`.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from rayfl.compress.bits import TRITS_PER_BYTE, num_bytes
from rayfl.compress.positions import ESCAPE, Places
from rayfl.data.device import upload
from rayfl.tree import Tree, pack_bits

BITS = np.array([128, 64, 32, 16, 8, 4, 2, 1], np.uint8)
TRITS = np.array([1, 3, 9, 27, 81], np.uint8)
"""The values of a byte's binary and ternary digits, in the order in which it holds entries."""


def on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor's entries are selected and encoded where they lie. On a CPU numpy is faster."""
    return tensor.device.type == "cuda"


def any_on_gpu(x: Tree) -> bool:
    """Whether a tree's entries are selected and encoded where they lie."""
    return any(on_gpu(tensor) for tensor in x.values())


def there(array: np.ndarray, tensor: Tensor) -> Tensor:
    """The array on a tensor's device."""
    return upload(array, tensor.device)


def rounded(sums: Tensor, num_added: int, finish: Callable[[np.ndarray], np.ndarray]) -> np.ndarray | None:
    """finish(sums), float32, where any order of additions gives it; None where one might give another number.

    `sums`: float64 [n], each of at most `num_added` numbers of one sign; `finish`: a monotone function that divides, or
    takes roots, and rounds to float32. By Higham, "Accuracy and Stability of Numerical Algorithms", section 4.2, two
    orders differ by less than 2 num_added u / (1 - num_added u), u = 2^-53.
    """
    margin = (num_added + 4) * 2.0**-52 * (1 + 2.0**-20)
    found = sums.cpu().numpy()
    low, high = finish(found * (1 - margin)), finish(found * (1 + margin))
    return low if np.array_equal(low, high) else None


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


def bits_of(mask: Tensor) -> np.ndarray:
    """`tree.pack_bits` of a boolean tensor, packed where it lies."""
    return packed_bits(mask) if on_gpu(mask) else pack_bits(mask)


def packed_bits(mask: Tensor) -> np.ndarray:
    """uint8 [ceil(n / 8)] of a boolean tensor, as `tree.pack_bits` has it, from operations of a GPU."""
    flat = torch.nn.functional.pad(mask.detach().reshape(-1).to(torch.uint8), (0, -mask.numel() % 8))
    return (flat.view(-1, 8) * there(BITS, flat)).sum(dim=1, dtype=torch.uint8).cpu().numpy()


def packed(codes: Tensor, width: int) -> np.ndarray:
    """`bits.pack` of integers [n] below 2^width, for a width up to 16, from operations of a GPU."""
    if width > 8:
        low, high = (codes & 0xFF).to(torch.uint8), codes >> 8
        return np.concatenate([low.cpu().numpy(), packed(high, width - 8)])
    eights = torch.nn.functional.pad(codes.to(torch.int64), (0, -codes.numel() % 8)).view(-1, 8)
    shifts = torch.arange(8, device=codes.device)
    # Eight codes side by side in a word, whose bytes are those of the buffer.
    words = (eights << (width * shifts)).sum(dim=1)
    wide = (words[:, None] >> (8 * shifts[:width])) & 0xFF
    return wide.to(torch.uint8).flatten()[: num_bytes(codes.numel(), width)].cpu().numpy()


def packed_trits(digits: Tensor) -> np.ndarray:
    """`bits.pack_trits` of integers [n] below 3, from operations of a GPU."""
    flat = torch.nn.functional.pad(digits.to(torch.uint8), (0, -digits.numel() % TRITS_PER_BYTE))
    planes = flat.view(TRITS_PER_BYTE, -1) * there(TRITS, flat)[:, None]
    return planes.sum(dim=0, dtype=torch.uint8).cpu().numpy()

"""Slices of a tree: some positions along each axis of its tensors, and packets of them that decode to full shape.

Both ends know the positions, or draw them from a seed that the packet carries.
"""

from dataclasses import dataclass

import numpy as np
import torch

from rayfl.compress.base import Buffers, Codec, Packet, Shapes, Tree, masks_of, zeros_of
from rayfl.tree import Index

EXTRA = "slice/"
"""The beginning of the names of a packet's buffers that say which positions it has; the others are those of `inner`."""


@dataclass(frozen=True, eq=False)
class SliceCodec:
    """Reads the slice at `index` by `inner`; all entries of the slice count as sent, whatever `inner` leaves out."""

    shapes: Shapes
    index: Index
    inner: Codec

    def slice(self, parts: Buffers) -> Tree:
        """The decoded slice, in its own shapes."""
        return self.inner.decode(_of_inner(parts))

    def decode(self, parts: Buffers) -> Tree:
        decoded = zeros_of(self.shapes)
        self.add_to(parts, decoded, 1.0)
        return decoded

    def support(self, parts: Buffers) -> Tree:
        masks = masks_of(self.shapes, False)
        for name, axes in self.index.items():
            masks[name][place(axes, masks[name])] = True
        return masks

    def num_values(self, parts: Buffers) -> int:
        return self.inner.num_values(_of_inner(parts))

    def add_to(self, parts: Buffers, total: Tree, weight: float) -> None:
        for name, tensor in self.slice(parts).items():
            at = place(self.index[name], total[name])
            total[name][at] += (tensor * weight).to(total[name])


def _of_inner(parts: Buffers) -> dict[str, np.ndarray]:
    return {name: part for name, part in parts.items() if not name.startswith(EXTRA)}


def sliced(packet: Packet, index: Index, shapes: Shapes, extra: Buffers | None = None) -> Packet:
    """The packet of a slice as one that decodes to `shapes`.

    extra: further buffers, from which the receiver knows the index, by names that begin with EXTRA.
    """
    return Packet({**packet.parts, **(extra or {})}, SliceCodec(shapes, index, packet.codec))


def slice_of(packet: Packet) -> Tree:
    """The slice that a packet of `sliced` has, in its own shapes."""
    assert isinstance(packet.codec, SliceCodec)
    return packet.codec.slice(packet.parts)


def cut(x: Tree, index: Index) -> Tree:
    """The slice of `x` at `index`, in new tensors."""
    return {
        name: x[name][place(axes, x[name])].clone(memory_format=torch.contiguous_format) for name, axes in index.items()
    }


def replaced(x: Tree, index: Index, part: Tree) -> Tree:
    """`x` with the entries at `index` replaced by those of the slice `part`, in new tensors."""
    new = {name: tensor.clone() for name, tensor in x.items()}
    for name, axes in index.items():
        new[name][place(axes, new[name])] = part[name]
    return new


def place(axes: tuple[np.ndarray | None, ...], tensor: torch.Tensor) -> tuple[slice | torch.Tensor, ...]:
    """The key of the positions in a tensor's square brackets: a view where positions follow each other."""
    runs = [slice(None) if kept is None else _run(kept) for kept in axes]
    if all(run is not None for run in runs):
        return tuple(run for run in runs if run is not None)
    last = len(axes) - 1
    numbers = (
        torch.arange(size, device=tensor.device) if kept is None else torch.from_numpy(kept).to(tensor.device)
        for kept, size in zip(axes, tensor.shape, strict=True)
    )
    return tuple(number.reshape(-1, *[1] * (last - axis)) for axis, number in enumerate(numbers))


def _run(positions: np.ndarray) -> slice | None:
    """The slice of positions that follow each other; None if they do not."""
    first, last = int(positions[0]), int(positions[-1])
    follow = last - first + 1 == len(positions) and bool((np.diff(positions) == 1).all())
    return slice(first, last + 1) if follow else None

"""Single numbers beside the tensors of a message: a count or a float64 in 8 bytes, a float32 in 4."""

import numpy as np
import torch

from rayfl.compress.base import Buffers, Packet, encode_values, entries
from rayfl.compress.codecs import WholeTensorCodec
from rayfl.compress.dense import DenseCodec


class CountCodec(WholeTensorCodec):
    """Reads one int64 or float64; decodes to a float64 tensor of shape [], which holds sums of counts exactly."""

    def read(self, parts: Buffers, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(float(parts[name][0]), dtype=torch.float64)

    def num_values(self, parts: Buffers) -> int:
        """0: papers count the numbers of models and updates, not how many examples a client has."""
        return 0


def count_packet(name: str, count: int) -> Packet:
    """64 bits; decodes to {name: float64 []}, so `int(packet.decode()[name])` is the count; sums are exact to 2^53."""
    return Packet({name: np.array([count], np.int64)}, CountCodec(((name, ()),)))


def exact_packet(name: str, value: float) -> Packet:
    """64 bits; decodes to {name: float64 []}, the same number."""
    return Packet({name: np.array([value], np.float64)}, CountCodec(((name, ()),)))


def scalar_packet(name: str, value: float) -> Packet:
    """32 bits, rounded to float32; decodes to {name: float32 []}. ValueError on NaN and infinity."""
    flat = entries(name, torch.tensor([value], dtype=torch.float64))
    return Packet({name: encode_values(name, flat, "fp32")}, DenseCodec(((name, ()),), "fp32"))

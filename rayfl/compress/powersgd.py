"""PowerSGD: approximates a matrix by the product of two thin ones, with one power iteration a message, warm-started."""

import numpy as np
import torch

from rayfl.compress.base import (
    Buffers,
    Compressor,
    Field,
    Packet,
    Tree,
    decode_values,
    encode_values,
    entries,
    shapes_of,
)
from rayfl.compress.codecs import WholeTensorCodec


class PowerCodec(WholeTensorCodec):
    """Reads one fp32 buffer a tensor, under its name: P [n, r] and then Q [m, r], or all entries of the tensor."""

    def read(self, parts: Buffers, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        buffer = decode_values(parts[name], "fp32")
        columns = torch.Size(shape[1:]).numel()
        if buffer.numel() == torch.Size(shape).numel():
            return buffer
        left, right = buffer.double().view(shape[0] + columns, -1).split([shape[0], columns])
        return (left @ right.T).float()


class PowerSGD(Compressor, on_device=True):
    """P Q^T with P = orth(M Q) and then Q = M^T P, for each tensor as a matrix M [n, m]: first dimension by the others.

    orth: QR in float64, the diagonal of R positive. `rank`: r, the columns of P [n, r] and Q [m, r]. The memory is Q,
    with which the next message begins; the first message, and a column that is 0, begin with standard normal numbers.
    Bits: 32 r (n + m) per matrix. A tensor of one dimension or none, or with r (n + m) >= n m / 2, is sent whole.
    ||C(M) - M||^2 = ||M||^2 - ||P^T M||^2 up to float32. So a matrix of rank r arrives unchanged, and if M is the same
    in every message, the error falls to that of the best approximation of rank r. No constant is stated, because M may
    be orthogonal to a Q that comes from another matrix. Biased: wrap it in feedback, whose error is kept beside Q.
    Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", NeurIPS 2019, Algorithm 1. There all workers share one Q and average P before orth, which takes two
    exchanges per round; here each client has its own. Its Algorithm 2, error feedback, is the compressor feedback.
    """

    name = "powersgd"
    rank: int = Field(default=2, ge=1, description="columns of the two factors, r")

    def init(self, like: Tree) -> Tree:
        """Q = 0 of every tensor that is sent as factors, under "<name>.factor"."""
        return {
            f"{name}.factor": torch.zeros(tensor.shape[1:].numel(), self.rank)
            for name, tensor in like.items()
            if self._is_large(tensor)
        }

    def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        """The factors, and Q as the new memory. ValueError on NaN, infinity, and factors too large for float32."""
        parts = {}
        factors = {**(memory or self.init(x))}
        for name, tensor in x.items():
            flat = entries(name, tensor)
            if self._is_large(tensor):
                matrix = flat.double().view(len(tensor), -1)
                left = _left_factor(matrix, factors[f"{name}.factor"].cpu().double(), generator).float()
                factors[f"{name}.factor"] = entries(name, matrix.T @ left.double()).view(-1, self.rank)
                flat = torch.cat([left, factors[f"{name}.factor"]]).view(-1)
            parts[name] = encode_values(name, flat, "fp32")
        return Packet(parts, PowerCodec(shapes_of(x))), factors

    def _is_large(self, tensor: torch.Tensor) -> bool:
        """Whether the factors have fewer than half of the entries."""
        return 2 * self.rank * (tensor.shape[:1].numel() + tensor.shape[1:].numel()) < tensor.numel()


def _left_factor(matrix: torch.Tensor, start: torch.Tensor, generator: np.random.Generator) -> torch.Tensor:
    """P [n, r] of M [n, m] and a Q [m, r], float64. Columns of Q that are 0 are drawn; those of P that are rounding
    noise, shorter than 1e-12 ||M||, become 0."""
    start = start.where(start.norm(dim=0) > 0, torch.from_numpy(generator.standard_normal(tuple(start.shape))))
    # The columns get length 1, so that the lengths of columns of M Q can be compared with ||M||.
    left, upper = torch.linalg.qr(matrix @ (start / start.norm(dim=0)))
    return left * upper.diagonal().sign() * (upper.diagonal().abs() >= 1e-12 * matrix.norm())

"""Turns the entries of a tensor into a buffer of fp32, fp16 or bf16, and back."""

import math
from typing import Literal

import numpy as np
import torch

from rayfl.errors import NotFinite, RayflError
from rayfl.tree import tensor_over

ValueType = Literal["fp32", "fp16", "bf16"]

OVERFLOW = {"fp16": 65520.0, "bf16": (2 - 2**-8) * 2.0**127}
"""The smallest magnitudes that round to infinity: half a step beyond the largest finite number."""

UNIT_ROUNDOFF = {"fp32": 0.0, "bf16": 2.0**-8}
"""The largest relative error |C(x) - x| / |x| of normal numbers. fp16 has none: below 2^-14 its error is absolute."""


def entries(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The entries of a floating point tensor, row by row, as float32 [numel] in main memory; a view if it already is.

    float64 is rounded to float32. ValueError on NaN, infinity, a float64 too large for float32, and other types.
    """
    return entries_on_device(name, tensor.detach().cpu())


def entries_on_device(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """`entries` on the tensor's own device."""
    flat = unchecked(name, tensor)
    # No sum with NaN or infinity in it is finite, and a sum takes less time; one of finite numbers may overflow.
    if not math.isfinite(flat.sum()) and not math.isfinite(_magnitude(flat)):
        raise NotFinite(f"tensor {name!r} holds NaN or infinity in float32: lower the learning rate or clip gradients")
    return flat


def unchecked(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """`entries_on_device`, which may be NaN or infinite."""
    if not tensor.is_floating_point():
        raise RayflError(
            f"tensor {name!r} is {tensor.dtype}, only floating point can be encoded: "
            "send masks with mask_packet and counts with count_packet"
        )
    return tensor.detach().to(torch.float32).reshape(-1)


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies on a GPU."""
    return tensor.device.type == "cuda"


def encode_values(name: str, flat: torch.Tensor, dtype: ValueType) -> np.ndarray:
    """The buffer of finite float32 entries, rounded to nearest even (bf16 as uint16 bits).

    fp32 does not copy a tensor in main memory. Raise RayflError if a number is too large for `dtype`.
    """
    if dtype == "fp32":
        buffer = flat.cpu().numpy()
        buffer.flags.writeable = False
        return buffer
    largest = _magnitude(flat)
    if largest >= OVERFLOW[dtype]:
        wider = "bf16" if dtype == "fp16" else "fp32"
        raise NotFinite(f"tensor {name!r} holds a number of magnitude {largest:g}, too large for {dtype}; use {wider}")
    if dtype == "fp16":
        return flat.to(torch.float16).cpu().numpy()
    return flat.to(torch.bfloat16).cpu().view(torch.uint16).numpy()


def scaled(name: str, flat: torch.Tensor, factor: float) -> torch.Tensor:
    """float32 [numel]: factor * flat, rounded once. Raise RayflError if a product is too large for float32."""
    if factor == 1:
        return flat
    product = flat.double().mul_(factor).float()
    if not math.isfinite(_magnitude(product)):
        raise NotFinite(
            f"tensor {name!r} holds {_magnitude(flat):g}, and {factor:g} times that is too large for float32; clip "
            "gradients, or choose a compressor that does not scale what it sends"
        )
    return product


def decode_values(buffer: np.ndarray, dtype: ValueType) -> torch.Tensor:
    """The inverse of `encode_values`: float32 [numel]; for fp32 a read-only view if the buffer is aligned."""
    tensor = tensor_over(buffer)
    return (tensor.view(torch.bfloat16) if dtype == "bf16" else tensor).to(torch.float32)


def _magnitude(flat: torch.Tensor) -> float:
    """The largest |entry|; NaN if any is NaN, since aminmax then returns NaN twice."""
    if flat.numel() == 0:
        return 0.0
    low, high = torch.aminmax(flat)
    return max(-low.item(), high.item())

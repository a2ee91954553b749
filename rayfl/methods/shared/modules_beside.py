"""First values of small modules that a method has beside the network, named as torch names their tensors."""

import math

import numpy as np
import torch
from torch.nn import functional

from rayfl.methods.base import Tree


def linear(name: str, outputs: int, inputs: int, generator: np.random.Generator) -> Tree:
    """A linear layer, uniform within 1 / sqrt(inputs), as torch's own: weight [outputs, inputs], bias [outputs]."""
    bound = 1 / math.sqrt(inputs)
    return {
        f"{name}.{part}": torch.from_numpy(generator.uniform(-bound, bound, shape).astype(np.float32))
        for part, shape in (("weight", (outputs, inputs)), ("bias", (outputs,)))
    }


def layer_norm(name: str, width: int) -> Tree:
    """A layer norm that scales by 1 and shifts by 0."""
    return {f"{name}.weight": torch.ones(width), f"{name}.bias": torch.zeros(width)}


def apply_linear(params: Tree, name: str, inputs: torch.Tensor) -> torch.Tensor:
    """The layer's outputs [..., outputs]."""
    return functional.linear(inputs, params[f"{name}.weight"], params[f"{name}.bias"])


def apply_norm(params: Tree, name: str, inputs: torch.Tensor) -> torch.Tensor:
    """The normalised inputs, over the last dimension."""
    weight = params[f"{name}.weight"]
    return functional.layer_norm(inputs, weight.shape, weight, params[f"{name}.bias"])

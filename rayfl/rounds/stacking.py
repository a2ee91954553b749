"""Chooses whether clients are trained one after another or in stacks, and how wide a stack is."""

import torch

from rayfl import tree
from rayfl.errors import RayflError
from rayfl.methods.base import Method, Tree
from rayfl.models import flops
from rayfl.rounds.engines import Engine, run_loop, run_vmap

MOST_STACKED = 64
"""The widest stack that the rule chooses on a GPU."""
MOST_ENTRIES = 1 << 25
"""Parameters of a stack on a GPU, at most: 128 MB of float32, and as much again for each gradient and moment."""
LARGE_CONVOLUTIONS = 100_000_000
"""A client is trained alone on a GPU if the convolutions of one example's forward pass need this number of operations.

Under vmap convolutions become grouped convolutions, which are slower if a single one keeps the GPU busy. The number was
chosen from the operations of known models (resnet20: 81 million, vgg11: 306), not from measurements."""
ON_CPU = 16
"""Clients of a stack on a CPU, where clients are stacked only with `engine = "vmap"`."""


def choose(name: str, method: Method, device: torch.device, params: Tree) -> Engine:
    """The engine of a run: "loop", "vmap" or "auto". `params`: the shapes of one client's model.

    "auto" is vmap on a GPU, because small models alone leave it idle, and the loop on a CPU, because vmap makes
    convolutions slower there. It is the loop also for models that cannot run under vmap (LSTM, or random numbers in
    training, as for dropout), and for models that would be slower in stacks (large convolutions, and models of which
    fewer than two fit into a stack). Raise RayflError if "vmap" is impossible.
    """
    vmappable = method.task.vmappable
    if name == "vmap" and not vmappable:
        raise RayflError(
            "engine='vmap' cannot run a model with dropout or other random numbers in training, recurrent layers, or "
            "buffers that other layers than BatchNorm change; use engine='loop'"
        )
    stacks = name == "auto" and device.type == "cuda" and vmappable and _fits(method, params) > 1
    return run_vmap if name == "vmap" or stacks else run_loop


def width(given: int | None, method: Method, device: torch.device, params: Tree) -> int:
    """Return the number of clients in a stack: `given`, or a number that depends only on the model and the device.

    On a GPU: as many clients as `MOST_ENTRIES` parameters allow, from 2 to `MOST_STACKED`. On a CPU: `ON_CPU`. The
    participants and the number of workers do not matter, so they cannot change a bit.
    """
    if given is not None:
        return given
    return max(2, _fits(method, params)) if device.type == "cuda" else ON_CPU


def convolution_flops(method: Method, params: Tree) -> int:
    """Operations of the convolutions in one example's forward pass; 0 if unknown."""
    uses = {name: times for name, times in method.task.weight_uses.items() if params[name].dim() > 2}
    return flops.forward_flops(flops.Uses(uses), params=params)


def _fits(method: Method, params: Tree) -> int:
    """Number of clients in one stack on a GPU; 1 if stacks would be slower."""
    if convolution_flops(method, params) >= LARGE_CONVOLUTIONS:
        return 1
    return max(1, min(MOST_STACKED, MOST_ENTRIES // max(1, tree.num_entries(params))))

"""The rule for how clients are trained: one after another, or so many at once as the model and the device allow."""

import torch

from rayfl import tree
from rayfl.errors import RayflError
from rayfl.methods.base import Method
from rayfl.models import flops
from rayfl.rounds.engines import Engine, run_loop, run_vmap
from rayfl.tree import Tree

MOST_STACKED = 64
"""The widest stack that the rule chooses on a GPU."""
MOST_ENTRIES = 1 << 25
"""Parameters of a stack that the rule chooses on a GPU: 128 MB of float32, and as much for each gradient and moment."""
LARGE_CONVOLUTIONS = 100_000_000
"""Operations of all convolutions in an example's forward pass from which a client is trained alone on a GPU.

Convolutions under vmap become grouped ones, which are slower where a single one keeps a GPU busy. The number was chosen
by counting (resnet20: 81 million, vgg11: 306), not by measuring."""
ON_CPU = 16
"""Clients of a stack on a CPU, where only `engine = "vmap"` stacks."""


def choose(name: str, method: Method, device: torch.device, params: Tree) -> Engine:
    """The engine of a run: "loop", "vmap" or "auto". `params`: the shapes of one client's model.

    The rule of "auto": vmap on a GPU, where small models leave it idle otherwise; the loop on a CPU, where vmap makes
    convolutions slower; the loop for what cannot run under vmap (LSTM, dropout), and for what would be slower in stacks
    (large convolutions, and models of which fewer than two fit into a stack). ValueError where "vmap" cannot be.
    """
    vmappable = method.task.vmappable
    if name == "vmap" and not vmappable:
        raise RayflError("engine='vmap' cannot run a model with dropout or recurrent layers; use engine='loop'")
    if name == "vmap":
        return run_vmap
    stacks = name == "auto" and device.type == "cuda" and vmappable
    return run_vmap if stacks and _fits(method, params) > 1 else run_loop


def width(given: int | None, method: Method, device: torch.device, params: Tree) -> int:
    """Clients of a stack: as given, or by the rule.

    On a GPU as many as have `MOST_ENTRIES` parameters together, from 2 to `MOST_STACKED`; on a CPU `ON_CPU`. Neither
    the participants nor the workers play a part, so they cannot change a bit.
    """
    if given is not None:
        return given
    return max(2, _fits(method, params)) if device.type == "cuda" else ON_CPU


def convolution_flops(method: Method, params: Tree) -> int:
    """Operations of the convolutions in one example's forward pass; 0 where they are not known."""
    uses = {name: times for name, times in method.task.weight_uses.items() if params[name].dim() > 2}
    return flops.forward_flops(uses, params=params)


def _fits(method: Method, params: Tree) -> int:
    """Clients that one stack holds on a GPU by the rule; 1 where stacks would be slower."""
    if convolution_flops(method, params) >= LARGE_CONVOLUTIONS:
        return 1
    return max(1, min(MOST_STACKED, MOST_ENTRIES // max(1, tree.num_entries(params))))

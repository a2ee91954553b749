"""Random numbers inside a step, which works on tensors alone and also runs under vmap, where generators cannot be used.

`begin` draws a key (`first_key(ctx.generator)`) and keeps it in the carry; a step computes its numbers from the key by
a hash, and puts `next_key` into the new carry. The numbers depend on (seed, round, client, step) and on the entry, and
are the same in the loop, in stacks, on a CPU and on a GPU. The hash is the output function of SplitMix64 (Steele, Lea,
Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014), on int64, whose products wrap around.
"""

import numpy as np
import torch

from rayfl.methods.base import Tree

GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
FIRST_FACTOR = 0xBF58476D1CE4E5B9 - (1 << 64)
SECOND_FACTOR = 0x94D049BB133111EB - (1 << 64)


def first_key(generator: np.random.Generator) -> torch.Tensor:
    """The key of the first step, int64 []."""
    return torch.tensor(int(generator.integers(-(1 << 63), 1 << 63)))


def next_key(key: torch.Tensor) -> torch.Tensor:
    """The key of the step that follows."""
    return _mixed(key + GOLDEN_GAMMA)


def uniforms(key: torch.Tensor, like: Tree) -> Tree:
    """Independent numbers in [0, 1), multiples of 2^-24, float32 in the shapes of `like`."""
    drawn: Tree = {}
    start = 1
    for name, tensor in like.items():
        places = torch.arange(start, start + tensor.numel(), device=tensor.device)
        start += tensor.numel()
        bits = _mixed(_mixed(key) + places * GOLDEN_GAMMA)
        drawn[name] = (_shifted(bits, 40).to(torch.float32) * 2.0**-24).view(tensor.shape)
    return drawn


def choice(key: torch.Tensor, count: int) -> torch.Tensor:
    """A number from 0 to count - 1, int64 []."""
    return _shifted(_mixed(key), 1) % count


def _mixed(state: torch.Tensor) -> torch.Tensor:
    state = (state ^ _shifted(state, 30)) * FIRST_FACTOR
    state = (state ^ _shifted(state, 27)) * SECOND_FACTOR
    return state ^ _shifted(state, 31)


def _shifted(state: torch.Tensor, count: int) -> torch.Tensor:
    """`state` >> `count` with zeros in front, as of an unsigned number."""
    return (state >> count) & ((1 << (64 - count)) - 1)

"""Sparse models: how dense each tensor is, which entries it starts with, and how they move.

A mask is a tree of boolean tensors in the shapes of the parameters, True where an entry is kept. Sources: ERK, Evci et
al., Rigging the Lottery: Making All Tickets Winners, ICML 2020; the search, Dai et al., DisPFL, ICML 2022, Algorithm 2.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypedDict

import numpy as np
import torch

from rayfl import tree
from rayfl.compress.sparse import top_k_positions
from rayfl.compress.values import entries
from rayfl.methods.base import ModelState, Traits, Tree

Distribution = Literal["erk", "uniform"]
Prune = Literal["all", "weights_only"]
Regrow = Callable[[np.ndarray, int], np.ndarray]
"""Chooses which idle entries come back: from their positions (ascending) and a count to `count` indices into them."""


class Masked(TypedDict):
    """A state, a carry, or a server's memory of a client, with a mask."""

    mask: Tree  # the entries that the client's model keeps


class MaskedModel(ModelState, Masked):
    """A state with a mask and a model."""


def erk_densities(shapes: Mapping[str, Sequence[int]], density: float, power: float = 1.0) -> dict[str, float]:
    """Erdos-Renyi-Kernel densities by tensor: eps * (sum of dims / product of dims) ** power, at most 1.

    `density` is the share of all entries together, which holds exactly before numbers of entries are rounded. If the
    largest density would exceed 1, its tensors are dense, and eps is computed again for the rest. Tensors of one
    dimension have raw density 1, like a single number.
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    raw = {name: (sum(shape or (1,)) / max(1, sizes[name])) ** power for name, shape in shapes.items()}
    sparse, epsilon = [name for name in shapes if sizes[name]], 0.0
    while sparse:
        budget = sum(density * sizes[name] for name in sparse)
        budget -= sum((1 - density) * sizes[name] for name in shapes if name not in sparse)
        epsilon = budget / sum(raw[name] * sizes[name] for name in sparse)
        largest = max(raw[name] for name in sparse)
        # Within rounding of 1 is dense too, or a dense model would lose an entry when numbers are rounded down.
        if largest * epsilon < 1 - 1e-12:
            break
        sparse = [name for name in sparse if raw[name] < largest]
    return {name: epsilon * raw[name] if name in sparse else 1.0 for name in shapes}


def densities(params: Tree, density: float, distribution: Distribution, power: float, prune: Prune) -> dict[str, float]:
    """The density of every tensor that is pruned; the others, which are not in the answer, stay dense.

    `prune="weights_only"` leaves tensors of fewer than two dimensions out (biases, norms); `density` is then the share
    of the rest.
    """
    shapes = {name: tuple(t.shape) for name, t in params.items() if prune == "all" or t.dim() > 1}
    return dict.fromkeys(shapes, density) if distribution == "uniform" else erk_densities(shapes, density, power)


def random_mask(params: Tree, density_of: Mapping[str, float], generator: np.random.Generator) -> Tree:
    """int(density * n + 1e-9) entries of every tensor of n entries, at random; all where no density is given.

    With the same draws, the entries of a lower density are among those of a higher density.
    """

    def draw(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if density_of.get(name, 1.0) >= 1:
            return torch.ones(tensor.shape, dtype=torch.bool)
        mask = torch.zeros(tensor.numel(), dtype=torch.bool)
        order = generator.permutation(tensor.numel())
        mask[torch.from_numpy(order[: int(density_of[name] * tensor.numel() + 1e-9)])] = True
        return mask.reshape(tensor.shape)

    return {name: draw(name, tensor) for name, tensor in params.items()}


def everything(params: Tree) -> Tree:
    """The mask that keeps every entry."""
    return {name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in params.items()}


def kept_ratio(client: Traits, given: float | None, default: float) -> float:
    """The share that a client keeps: `given` by the method, else `clients.retention_ratio`, else `default`."""
    if given is not None:
        return given
    return client.retention_ratio if client.retention_given else default


def masked(x: Tree, mask: Tree) -> Tree:
    """`x` where the mask keeps an entry, else 0 (without a sign)."""
    return {name: _cut(tensor, mask[name]) for name, tensor in x.items()}


def _cut(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """torch.where(mask, tensor, 0.0). If no gradient is needed, bits are masked, which takes a tenth of the time.

    Under vmap they are not: older versions of torch have no rule there for a view of another dtype.
    """
    if tensor.dtype != torch.float32 or tensor.requires_grad or tree.is_transformed():
        return torch.where(mask, tensor, 0.0)
    return (tensor.view(torch.int32) & -mask.view(torch.int8).to(torch.int32)).view(torch.float32)


def num_kept(mask: Tree) -> int:
    """Number of entries that a mask keeps."""
    return sum(int(torch.count_nonzero(tensor)) for tensor in mask.values())


def annealed(first: float, round_number: int, num_rounds: int) -> float:
    """(first / 2) (1 + cos(pi t / T)): the share of the kept entries that round t moves."""
    return first / 2 * (1 + math.cos(math.pi * round_number / num_rounds))


def by_gradient(name: str, gradient: torch.Tensor) -> Regrow:
    """The idle entries with the largest |gradient|, ties to the lowest index. ValueError on NaN and infinity."""
    flat = entries(name, gradient).numpy()
    return lambda idle, count: top_k_positions(flat[idle], count)


def at_random(generator: np.random.Generator) -> Regrow:
    """Idle entries drawn uniformly, without replacement."""
    return lambda idle, count: generator.choice(len(idle), count, replace=False)


def search(name: str, mask: torch.Tensor, weight: torch.Tensor, share: float, regrow: Regrow) -> torch.Tensor:
    """A tensor's next mask: kept entries with the smallest |weight| are dropped, and as many other ones are regrown.

    ceil(share * kept) entries are dropped; of equal magnitudes those with the lowest index stay. Dropped entries may be
    regrown at once, so there are always enough. A dense tensor does not change. Raise ValueError on NaN and infinity.
    """
    if bool(mask.all()):
        return mask
    left, num_moved = without_smallest(name, mask, weight, share)
    return with_regrown(left, num_moved, regrow)


def without_smallest(name: str, mask: torch.Tensor, weight: torch.Tensor, share: float) -> tuple[torch.Tensor, int]:
    """The mask without the ceil(share * kept) kept entries of smallest |weight|, and their number; see `search`."""
    flat, kept = entries(name, weight).numpy(), np.flatnonzero(mask.cpu().numpy())
    num_moved = math.ceil(share * kept.size)
    left = np.zeros(mask.numel(), np.bool_)
    left[kept[top_k_positions(flat[kept], kept.size - num_moved)]] = True
    return torch.from_numpy(left).reshape(mask.shape).to(mask.device), num_moved


def with_regrown(mask: torch.Tensor, count: int, regrow: Regrow) -> torch.Tensor:
    """The mask with `count` further entries, which `regrow` chooses."""
    grown = mask.cpu().numpy().ravel().copy()
    idle = np.flatnonzero(~grown)
    grown[idle[regrow(idle, count)]] = True
    return torch.from_numpy(grown).reshape(mask.shape).to(mask.device)


def largest_held(values: torch.Tensor, held: torch.Tensor, count: int) -> torch.Tensor:
    """The mask of the `count` entries with the largest |value| among those that are held; ties to the lowest index."""
    order = torch.where(held, values.abs(), -1.0).reshape(-1).argsort(descending=True, stable=True)
    mask = torch.zeros(values.numel(), dtype=torch.bool)
    mask[order[:count]] = True
    return mask.reshape(values.shape)


def prune_quantile(mask: torch.Tensor, weight: torch.Tensor, ratio: float) -> torch.Tensor:
    """The mask without entries whose |weight| is strictly below the `ratio` quantile (linear) of the kept ones."""
    magnitudes = weight.detach().abs().double()
    kept = magnitudes[mask]
    if not kept.numel():
        return mask
    return mask & (magnitudes >= float(np.quantile(kept.cpu().numpy(), ratio)))


def pruned(mask: Tree, params: Tree, ratio: float) -> Tree:
    """`prune_quantile` of every tensor of two or more dimensions; biases and norms do not change."""
    return {name: prune_quantile(kept, params[name], ratio) if kept.dim() > 1 else kept for name, kept in mask.items()}

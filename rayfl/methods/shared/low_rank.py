"""Clients that train adapters (`[adapters]`) of a rank of their own; the model has those of the largest rank.

A client of rank r_i has the first r_i rows of each A and the first r_i columns of each B; the others are 0, have no
gradient, and are neither sent nor counted. So all have the same scale alpha / rank, that of the model. A client's share
of the rank is `clients.retention_ratio`: r_i = ceil(ratio rank). Other trained parameters (a new head) are whole.
"""

import math
from collections.abc import Sequence

import torch

from rayfl.compress.masks import known_support_packet
from rayfl.methods.base import Capabilities, FirstDraws, ModelState, Packet, RayflError, Received, Traits, Tree
from rayfl.methods.shared import masks
from rayfl.methods.shared.local_training import GradientMethod
from rayfl.methods.shared.masked_server import WEIGHTS, MaskedServer
from rayfl.models.adapters import factor_pairs


class LowRank(GradientMethod, MaskedServer):
    """A client trains the part of the server's adapters that has its rank; a subclass combines what clients send."""

    capabilities = Capabilities(personalized=True, newcomer="model", own_compression=True, honours_retention=True)

    def check_model(self, params: Tree) -> None:
        if not factor_pairs(params):
            raise RayflError(
                f"{type(self).__name__} trains adapters of which both factors are trained, and the model has none; add "
                'for example adapters={layers=["*.query", "*.value"], rank=8}, with factors="both"'
            )

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> masks.Masked:
        return {"mask": rank_mask(params, first_rank(client, params))}

    def init_server_memory(self, client: Traits, params: Tree) -> masks.Masked:
        return {"mask": rank_mask(params, first_rank(client, params))}

    def final_model(self, state: masks.Masked, server: ModelState) -> Tree:
        """The part of the server's model that the client has."""
        return masks.masked(server["params"], state["mask"])


def largest_rank(params: Tree) -> int:
    """The rank of the model's adapters."""
    return len(params[factor_pairs(params)[0][0]])


def first_rank(client: Traits, params: Tree) -> int:
    """ceil(retention ratio * rank), at least 1."""
    return max(1, math.ceil(client.retention_ratio * largest_rank(params) - 1e-9))


def rank_mask(params: Tree, rank: int) -> Tree:
    """The entries that a client of this rank has."""
    mask = masks.everything(params)
    for a, b in factor_pairs(params):
        kept = torch.arange(len(params[a]), device=params[a].device) < rank
        mask[a], mask[b] = mask[a] & kept[:, None], mask[b] & kept
    return mask


def rank_in(mask: Tree) -> int:
    """The rank of a client with this mask."""
    return int(mask[factor_pairs(mask)[0][0]][:, 0].sum())


def product_norms(params: Tree) -> list[torch.Tensor]:
    """||B A||_F of every adapter, as sqrt(trace(B^T B A A^T)) in float64."""
    norms = []
    for a, b in ((params[a].double(), params[b].double()) for a, b in factor_pairs(params)):
        norms.append(((b.T @ b) * (a @ a.T)).sum().clamp(min=0).sqrt())
    return norms


def adapters_packet(params: Tree, mask: Tree) -> dict[str, Packet]:
    """A client's message: the entries of its mask, which both ends know from the rank."""
    return {WEIGHTS: known_support_packet(params, mask)}


def collected(received: Received) -> tuple[list[Tree], list[float]]:
    """The collected messages in the senders' order, and their weights, which add up to 1."""
    trees = {sender: item for sender, item in received[WEIGHTS].items.items() if isinstance(item, dict)}
    counts = {sender: item for sender, item in received["num_examples"].items.items() if isinstance(item, dict)}
    numbers = [float(counts[sender]["num_examples"]) if counts else 1.0 for sender in trees]
    return [*trees.values()], [number / sum(numbers) for number in numbers]


def weighted_mean(trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
    """sum_i p_i x_i, added in float64."""
    pairs = list(zip(trees, weights, strict=True))
    return {name: torch.stack([w * x[name].double() for x, w in pairs]).sum(0).to(trees[0][name]) for name in trees[0]}

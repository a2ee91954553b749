"""HetLoRA: Cho, Liu, Xu, Fahrezi, Joshi, Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models,
EMNLP 2024.

Client i has adapters of rank r_i (`clients.retention_ratio` of `adapters.rank`), cut from the server's. It trains

    loss + lambda sum over adapters ||B[:, c:]|| ||A[c:]||,  c = floor(gamma r_i)

and if the sum over adapters of these products is smaller after training than before, its rank becomes c. The server
fills what clients send up with zeros, and takes the mean weighted by ||B_i A_i||_F.

Where the paper is silent:
- No code of the authors was found.
- One rank for the whole model: norms and sums run over all adapters. The scale alpha / rank is that of the model for
  all clients, so that zeros do not change a product.
- A rank does not fall below `least_rank`. It falls in the round in which the message arrives, and is sent in 8 bytes.
- Rows and columns that no client that delivered has do not change.
- If all products are 0, the weights are equal. A head that is trained beside the adapters has the same weights.
"""

import torch

from rayfl.methods.base import Capabilities, Context, Field, Finished, Message, ModelState, Received, Tree, count_packet
from rayfl.methods.shared import masks
from rayfl.methods.shared.local_training import LocalCarry, LocalWork
from rayfl.methods.shared.low_rank import LowRank, adapters_packet, product_norms, rank_in, rank_mask
from rayfl.methods.shared.masked_server import WEIGHTS
from rayfl.models.adapters import factor_pairs

LEAST_WEIGHT = 1e-20
"""The weight of a client whose products are 0, beside which every other weight is huge."""


class HetLoRAHyper(LocalWork):
    """Hyper-parameters of HetLoRA."""

    pruned_share: float = Field(
        default=0.99, gt=0, le=1, description="rank that is left after a pruning, as a share, gamma; 1: no pruning"
    )
    penalty: float = Field(default=1e-3, ge=0, description="weight of the penalty on what would be pruned, lambda")
    least_rank: int = Field(default=1, ge=1, description="rank below which nothing is pruned")


class HetLoRACarry(LocalCarry, masks.Masked):
    """A client's carry."""

    tail: torch.Tensor  # by rank, whether it would be pruned
    tail_norm: torch.Tensor  # before the training


class HetLoRA(LowRank):
    """Clients of different ranks that prune their ranks; the server weighs by the size of their products."""

    hyper: HetLoRAHyper
    paper = "Cho et al., EMNLP 2024"
    capabilities = Capabilities(on_device=True)

    def begin(self, state: masks.Masked, received: Message, ctx: Context) -> HetLoRACarry:
        carry, rank = self.start(received[WEIGHTS].decode()), rank_in(state["mask"])
        first = carry["params"][factor_pairs(carry["params"])[0][0]]
        tail = torch.arange(len(first), device=first.device) >= self.pruned_rank(rank)
        return {**carry, "mask": state["mask"], "tail": tail, "tail_norm": tail_norm(carry["params"], tail)}

    def pruned_rank(self, rank: int) -> int:
        """c: the rank after a pruning."""
        return max(min(rank, self.hyper.least_rank), int(self.hyper.pruned_share * rank + 1e-9))

    def direction(self, carry: HetLoRACarry, gradient: Tree) -> Tree:
        """The gradient with that of the penalty."""
        if not self.hyper.penalty:
            return gradient
        along = dict(gradient)
        for a, b in factor_pairs(gradient):
            row = carry["params"][a] * carry["tail"][:, None]
            column = carry["params"][b] * carry["tail"]
            norm_a, norm_b = torch.linalg.vector_norm(row), torch.linalg.vector_norm(column)
            along[a] = along[a] + self.hyper.penalty * norm_b * torch.where(norm_a > 0, row / norm_a, 0.0)
            along[b] = along[b] + self.hyper.penalty * norm_a * torch.where(norm_b > 0, column / norm_b, 0.0)
        return along

    def finish(self, state: masks.Masked, carry: HetLoRACarry, ctx: Context) -> Finished:
        params, mask = carry["params"], carry["mask"]
        rank = rank_in(mask)
        if bool(tail_norm(params, carry["tail"]) < carry["tail_norm"]):
            rank = self.pruned_rank(rank)
            mask = rank_mask(params, rank)
            params = masks.masked(params, mask)
        weight = float(torch.stack(product_norms(params)).square().sum().sqrt())
        message = {**adapters_packet(params, mask), "rank": count_packet("rank", rank)}
        metrics = {**self.train_loss(carry, ctx), "hetlora/rank": float(rank)}
        return Finished({"mask": mask}, message, max(weight, LEAST_WEIGHT), metrics)

    def update(self, server: ModelState, received: Received, ctx: Context) -> ModelState:
        total, held = received[WEIGHTS], received[WEIGHTS].weights
        return {
            "params": {
                name: torch.where(held[name] > 0, values / total.weight, server["params"][name])
                for name, values in total.sum.items()
            }
        }


def tail_norm(params: Tree, tail: torch.Tensor) -> torch.Tensor:
    """The sum over adapters of ||B[:, c:]|| ||A[c:]||."""
    products = [
        torch.linalg.vector_norm(params[a] * tail[:, None]) * torch.linalg.vector_norm(params[b] * tail)
        for a, b in factor_pairs(params)
    ]
    return torch.stack(products).sum()

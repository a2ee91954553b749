"""FlexLoRA: Bai, Chen, Qian, Yao, Li, Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and
Client Resources, NeurIPS 2024.

Client i trains adapters of rank r_i (`clients.retention_ratio` of `adapters.rank`). The server takes the mean of the
products, not of the factors, and cuts it to each client's rank by the singular value decomposition:

    sum_i p_i B_i A_i = U S V^T;  client i gets B = U[:, :r_i] S[:r_i], A = V[:, :r_i]^T

Where the paper is silent:
- No code of the authors was found.
- The model has the product cut to `adapters.rank`; flexlora/cut is the norm of what that leaves out, as a share.
- All clients have the scale alpha / rank of the model, so that it drops out of the equations.
- The decomposition is that of the stacked factors, by QR in float64, so that no full matrix is made. Of each column of
  U the entry of largest magnitude, the first of equal ones, is positive.
- A head that is trained beside the adapters is averaged with the same weights p_i.
"""

import torch
from torch.nn.functional import pad

from rayfl.methods.base import (
    Capabilities,
    Collect,
    Context,
    Delivered,
    Finished,
    Message,
    Metrics,
    ModelState,
    Received,
)
from rayfl.methods.shared import masks
from rayfl.methods.shared.local_training import LocalCarry
from rayfl.methods.shared.low_rank import LowRank, adapters_packet, collected, largest_rank, weighted_mean
from rayfl.methods.shared.masked_server import WEIGHTS
from rayfl.models.adapters import factor_pairs


class FlexLoRACarry(LocalCarry, masks.Masked):
    """A client's carry."""


class FlexLoRA(LowRank):
    """The server averages products and cuts them to every client's rank."""

    paper = "Bai et al., NeurIPS 2024"
    capabilities = Capabilities(on_device=True)
    gather = {WEIGHTS: Collect(), "num_examples": Collect()}

    def begin(self, state: masks.Masked, received: Message, ctx: Context) -> FlexLoRACarry:
        return {**self.start(received[WEIGHTS].decode()), "mask": state["mask"]}

    def finish(self, state: masks.Masked, carry: FlexLoRACarry, ctx: Context) -> Finished:
        return self.finished(state, adapters_packet(carry["params"], carry["mask"]), carry, ctx)

    def server_update(
        self, server: ModelState, received: Received, delivered: Delivered, ctx: Context
    ) -> tuple[ModelState, Metrics]:
        trees, weights = collected(received)
        if not trees:
            return server, {}
        params = weighted_mean(trees, weights)
        cut, whole = 0.0, 0.0
        for a, b in factor_pairs(params):
            left = torch.cat([w * each[b].double() for each, w in zip(trees, weights, strict=True)], dim=1)
            right = torch.cat([each[a].double() for each in trees])
            params[b], params[a], singular = cut_to_rank(left, right, largest_rank(params))
            whole += float(singular.square().sum())
            cut += float(singular[largest_rank(params) :].square().sum())
        return {"params": params}, {"flexlora/cut": (cut / whole) ** 0.5 if whole else 0.0}


def cut_to_rank(left: torch.Tensor, right: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """B [out, rank] = U S and A [rank, in] = V^T of left @ right, float32, and all singular values, float64.

    left: [out, n]; right: [n, in]. With fewer singular values than `rank` the rest is 0.
    """
    q_left, r_left = torch.linalg.qr(left)
    q_right, r_right = torch.linalg.qr(right.T)
    u, singular, vt = torch.linalg.svd(r_left @ r_right.T, full_matrices=False)
    u, v = q_left @ u, q_right @ vt.T
    largest = u.abs().argmax(dim=0)
    signs = torch.where(u.gather(0, largest[None])[0] < 0, -1.0, 1.0)
    b, a = (u * singular * signs)[:, :rank], (v * signs).T[:rank]
    missing = rank - len(a)
    return pad(b.float(), (0, missing)), pad(a.float(), (0, 0, 0, missing)), singular

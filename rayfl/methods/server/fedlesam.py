"""FedLESAM: Fan et al., Locally Estimated Global Perturbations are Better than Local Perturbations for Federated
Sharpness-aware Minimization, ICML 2024.

FedSAM looks uphill of the client's own loss. FedLESAM estimates where the global loss rises by the way that the global
model came: x_last,i is the model that client i received in its last round, and all steps of a round go along

g_i(y + e_i),   e_i = rho (x_last,i - x) / ||x_last,i - x||.

The rest is FedAvg. e_i = 0 in a client's first round, and if x has not moved since; rho = 0 is FedAvg.

- The authors' code sends all clients the last step of the server, and indexes that vector by the number of a tensor, so
  that each tensor is shifted by a single number. This file follows the paper's equation.
- A client that is absent, or whose upload is lost, keeps its x_last,i.
- A step takes one gradient, and messages are FedAvg's; a client remembers one model.
- rho = 0.1 is the authors' code. The recorded training loss is that at y + e_i.
"""

import torch

from rayfl.methods.base import (
    Batch,
    Capabilities,
    Context,
    Finished,
    FirstDraws,
    Message,
    ModelState,
    Stage,
    Traits,
    Tree,
    tree,
)
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalCarry, LocalTraining
from rayfl.methods.shared.sharpness import Sharpness, ascended


class FedLESAMHyper(LocalTraining, Sharpness):
    """Hyper-parameters of FedLESAM."""


class FedLESAMState(ModelState):
    """Client state; "params" are x_last,i."""

    has_received: torch.Tensor  # bool []


class FedLESAMCarry(LocalCarry):
    """A client's carry."""

    shift: Tree  # e_i


class FedLESAM(FedAvg):
    """Client: y <- y - eta_l g_i(y + e_i). Client state: x_last,i."""

    hyper: FedLESAMHyper
    paper = "Fan et al., ICML 2024"
    capabilities = Capabilities(on_device=True, server_on_device=True, keeps_parts=True, takes_stale=True)

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> FedLESAMState:
        return {"params": params, "has_received": torch.tensor(False)}

    def begin(self, state: FedLESAMState, received: Message, ctx: Context) -> FedLESAMCarry:
        carry = super().begin(state, received, ctx)
        back = tree.sub(state["params"], carry["received"])
        shift = ascended(tree.zeros_like(back), back, self.hyper.rho)
        return {**carry, "shift": tree.map(lambda tensor: tensor * state["has_received"], shift)}

    def step(self, carry: FedLESAMCarry, batch: Batch, *, stage: Stage) -> FedLESAMCarry:
        loss, gradient = self.task.value_and_grad(tree.add(carry["params"], carry["shift"]), batch)
        return self.descend(carry, loss, gradient, stage)

    def finish(self, state: FedLESAMState, carry: FedLESAMCarry, ctx: Context) -> Finished:
        new: FedLESAMState = {"params": carry["received"], "has_received": torch.ones_like(state["has_received"])}
        return super().finish(new, carry, ctx)

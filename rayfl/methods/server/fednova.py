"""FedNova: Wang, Liu, Liang, Joshi, Poor, Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization, NeurIPS 2020, Algorithm 1 and equation (7).

Clients that take more steps than others pull FedAvg's model towards themselves. Client i divides its change by
a_i = ||a_i||_1, the sum of the weights that its optimizer gives to the gradients of its tau_i steps:

d_i = (x - x_i) / a_i,   x <- x - tau_eff sum_i p_i d_i,   tau_eff = sum_i p_i a_i, over the i that delivered.

- a_i is the distance, in units of the learning rate, that the client's optimizer moves if every gradient is 1: tau_i
  for plain SGD, (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho) with momentum rho, (1 - (1 - eta mu)^tau) / (eta mu)
  with the proximal term mu / 2 ||y - x||^2. One recurrence gives all of these, and also a_i for momentum with mu, which
  the authors' code double counts. Adam's steps are not linear in gradients, so Adam is refused.
- `clip_norm` acts on gradients before the optimizer, and weight decay is a part of f_i, so neither changes a_i.
- With mu, tau_eff is sum_i p_i tau_i, as in the authors' code.
- If all clients take the same number of steps, this is FedAvg up to rounding. `clients.work = "capacity"` gives
  clients unequal numbers of steps.
- The server may apply momentum to tau_eff sum_i p_i d_i, as FedAvgM does to its mean (`server_momentum`).
- Clients keep no state between rounds, so an absent client or a lost upload only changes the p_i.
"""

from typing import Literal

from rayfl.methods.base import (
    Aggregate,
    Capabilities,
    Context,
    Field,
    Finished,
    RayflError,
    Received,
    State,
    WeightedMean,
    scalar_packet,
    tree,
)
from rayfl.methods.server.fedavgm import FedAvgM, FedAvgMHyper
from rayfl.methods.server.fedprox import FedProx, FedProxHyper
from rayfl.methods.shared.local_training import LocalCarry
from rayfl.methods.shared.server_optimizer import StepperState


class FedNovaHyper(FedProxHyper, FedAvgMHyper):
    """Hyper-parameters of FedNova."""

    optimizer: Literal["sgd", "nesterov"] = Field(
        default="sgd", description="client optimizer, reset every round: one that is linear in gradients"
    )
    mu: float = Field(default=0.0, ge=0, description="weight of the proximal term mu / 2 ||y - x_t||^2")
    server_momentum: float = Field(default=0.0, ge=0, lt=1, description="momentum of the server, beta")


class FedNova(FedProx, FedAvgM):
    """Up: d_i, and a_i (or tau_i) in 4 bytes."""

    hyper: FedNovaHyper
    paper = "Wang et al., NeurIPS 2020"
    capabilities = Capabilities(on_device=True, keeps_parts=True, hands_over_trees=False)
    gather = {"direction": WeightedMean(), "steps": WeightedMean()}
    difference = ""

    def finish(self, state: State, carry: LocalCarry, ctx: Context) -> Finished:
        num_steps = ctx.work["train"].num_steps
        norm = self.norm(num_steps, lr := ctx.plan.stages[-1].lr)
        if norm <= 0:
            raise RayflError(
                f"mu={self.hyper.mu:g} pulls too hard at lr={lr:g}: a_i={norm:g} after {num_steps} steps "
                "is not above 0; lower one of them"
            )
        message = {
            "direction": tree.scale(self.progress(carry), 1 / norm),
            "steps": scalar_packet("steps", num_steps if self.hyper.mu else norm),
        }
        return self.finished(state, message, carry, ctx)

    def norm(self, num_steps: int, lr: float) -> float:
        """a_i after `num_steps` steps of rate `lr`."""
        momentum, moved, velocity = self.hyper.momentum, 0.0, 0.0
        for _ in range(num_steps):
            gradient = 1.0 - lr * self.hyper.mu * moved
            velocity = momentum * velocity + gradient
            moved += gradient + momentum * velocity if self.hyper.optimizer == "nesterov" else velocity
        return moved

    def update(self, server: StepperState, received: Received, ctx: Context) -> StepperState:
        delta = tree.scale(received["direction"].result, float(received["steps"].result["steps"]))
        return super().update(server, {"delta": Aggregate(WeightedMean(), known=delta)}, ctx)

"""q-FedAvg: Li, Sanjabi, Beirami, Smith, Fair Resource Allocation in Federated Learning, ICLR 2020, Algorithm 2.

Clients whose loss is large count more: the objective is sum_i F_i^(q+1) / (q + 1), so that losses become more equal as
q rises. Client i measures F_i, the loss of the received x on its train split, and trains from x. With g_i = delta_i /
eta_l and L = 1 / eta_l the server moves

x <- x - (sum_S F_i^q g_i) / (sum_S (q F_i^(q-1) ||g_i||^2 + L F_i^q)).

- q = 0 is FedAvg with a uniform mean.
- Clients are selected uniformly, and both sums are over those who delivered, as in the authors' code; the paper draws
  clients by their number of examples.
- F_i has 1e-10 added, as in the code, so that no power of 0 is taken. It is measured in evaluation mode, in one forward
  pass; with `clients.work` a slow client measures a share of its examples.
- eta_l is the rate of the round. Local steps are plain SGD: with momentum or Adam, delta_i / eta_l is no sum of
  gradients.
- A client sends F_i, by which the server weighs delta_i, and its term of the lower sum, in 4 bytes each.
- If clients take many local steps, q ||g_i||^2 is much larger than L F_i, and x moves by a small part of the mean
  delta: give fewer steps, a larger lr, or a smaller q.
- Clients keep nothing, and a round in which nothing arrives changes nothing.
- The paper has q from 0.001 (Shakespeare) to 5 (Vehicle).
"""

import torch

from rayfl.methods.base import (
    Batch,
    Capabilities,
    Context,
    Field,
    Finished,
    Message,
    ModelServer,
    ModelState,
    Plan,
    Received,
    Stage,
    State,
    Sum,
    WeightedMean,
    scalar_packet,
    tree,
)
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalWork

MEASURE = "measure"
"""The stage that measures F_i."""


class QFedAvgHyper(LocalWork):
    """Hyper-parameters of q-FedAvg."""

    q: float = Field(default=1.0, ge=0, description="strength of fairness, q")

    def unused(self) -> dict[str, str]:
        return {**super().unused(), **dict.fromkeys(("optimizer", "momentum"), "as q-FedAvg's steps are plain SGD")}


class QFedAvgCarry(LocalCarry):
    """A client's carry."""

    measured: torch.Tensor  # the sum of the losses at x, and their number, float32 [2]


class QFedAvg(GradientMethod, ModelServer):
    """Down: x. Up: delta_i with the weight F_i^q, F_i, and q F_i^(q-1) ||g_i||^2 + L F_i^q."""

    hyper: QFedAvgHyper
    paper = "Li et al., ICLR 2020"
    capabilities = Capabilities(on_device=True, keeps_parts=True, hands_over_trees=False)
    gather = {"delta": WeightedMean(), "smoothness": Sum()}

    def plan(self, round_number: int, coin: float) -> Plan:
        # The batch size limits the memory of the pass; it does not change the sum.
        return Plan(stages=(Stage(MEASURE, epochs=1, batch_size=1000), self.hyper.stage(round_number)))

    def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
        return float(stage.name == "train")

    def begin(self, state: State, received: Message, ctx: Context) -> QFedAvgCarry:
        return {**super().begin(state, received, ctx), "measured": torch.zeros(2)}

    def step(self, carry: QFedAvgCarry, batch: Batch, *, stage: Stage) -> QFedAvgCarry:
        if stage.name != MEASURE:
            return super().step(carry, batch, stage=stage)
        sums = torch.stack([batch.without_padding(part).sum() for part in self.task.losses(carry["params"], batch)])
        return {**carry, "measured": carry["measured"] + sums}

    def finish(self, state: State, carry: QFedAvgCarry, ctx: Context) -> Finished:
        total, count = carry["measured"].tolist()
        loss, q, lr = total / max(count, 1.0) + 1e-10, self.hyper.q, ctx.plan.stages[-1].lr
        delta = self.progress(carry)
        slope = q * loss ** (q - 1) * (tree.norm(delta) / lr) ** 2 if q else 0.0
        message = {
            "delta": delta,
            "loss": scalar_packet("loss", loss),
            "smoothness": scalar_packet("smoothness", slope + loss**q / lr),
        }
        metrics = {**self.train_loss(carry, ctx, "train"), "qfedavg/loss": loss}
        return Finished(state, message, weight=loss**q, metrics=metrics)

    def update(self, server: ModelState, received: Received, ctx: Context) -> ModelState:
        total, lr = received["delta"].weight, ctx.plan.stages[-1].lr
        smoothness = float(received["smoothness"].sum["smoothness"])
        # Losses whose powers are all too small for float32 move nothing.
        size = total / (lr * smoothness) if smoothness else 0.0
        return {"params": tree.add(server["params"], received["delta"].result, -size)}

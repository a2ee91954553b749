"""Per-FedAvg: Fallah et al., Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach, NeurIPS 2020, Algorithm 1, with exact Hessian-vector products.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from rayfl import tree
from rayfl.data.batches import Batch
from rayfl.gather import Gather, WeightedMean
from rayfl.methods.base import Carry, Plan, Stage
from rayfl.methods.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalTraining


class PerFedAvgHyper(LocalTraining):
    """Hyper-parameters of Per-FedAvg; beta is `lr`."""

    adaptation_lr: float = Field(default=0.1, gt=0, description="step size of the adaptation, alpha")


class PerFedAvg(FedAvg):
    """w <- w - beta (I - alpha H_D''(w)) grad f(w - alpha grad f(w; D); D'), on three batches a step."""

    Hyper: ClassVar[type[PerFedAvgHyper]] = PerFedAvgHyper
    hyper: PerFedAvgHyper
    paper: ClassVar[str] = "Fallah et al., NeurIPS 2020"
    gather: Mapping[str, Gather] = {"delta": WeightedMean()}

    def plan(self, round: int, coin: float) -> Plan:
        return Plan(stages=(replace(self.hyper.stage(round), batches_per_step=3),))

    def step(self, carry: Carry, batch: Batch | tuple[Batch, ...], *, stage: Stage) -> Carry:
        params, rate = carry["params"], self.hyper.adaptation_lr
        if isinstance(batch, Batch):
            return {**carry, "params": tree.add(params, self.task.grad(params, batch), -rate)}
        first, second, third = batch
        adapted = tree.add(params, self.task.grad(params, first), -rate)
        loss, outer = self.task.value_and_grad(adapted, second)
        curved = self.task.hvp(params, third, outer)
        return self.descend(carry, loss, tree.add(outer, curved, -rate), stage)

    def eval_stages(self, round: int) -> tuple[Stage, ...]:
        """One adaptation step on the client's own train split."""
        return (Stage("adapt", steps=1),)

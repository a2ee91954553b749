"""Clients that prune where they are good enough: a stage counts the accuracy on a validation split, batch by batch.

`Lottery` is the client of LotteryFL, with a server or among peers: a gate, pruning and rewinding, then masked training.
Li et al., LotteryFL: Personalized and Communication-Efficient Federated Learning with Lottery Ticket Hypothesis on
Non-IID Datasets, 2020.
"""

from typing import TypeVar, cast

import torch

from rayfl.methods.base import (
    Batch,
    Capabilities,
    Context,
    Field,
    Finished,
    FirstDraws,
    Packet,
    Plan,
    Stage,
    Traits,
    Tree,
    unused_with,
)
from rayfl.methods.shared import masks
from rayfl.methods.shared.local_training import ADAM, GradientMethod, LocalCarry, LocalWork
from rayfl.models import flops

GATE = "gate"
"""The name of the stage that counts correct predictions."""


class GateHyper(LocalWork):
    """Hyper-parameters of pruning behind a gate."""

    momentum: float = Field(
        default=0.5, ge=0, lt=1, description="momentum of sgd", json_schema_extra=unused_with(optimizer=ADAM)
    )
    prune_ratio: float = Field(default=0.1, gt=0, lt=1, description="share of the kept weights that a pruning removes")
    min_accuracy: float = Field(default=0.2, ge=0, le=1, description="validation accuracy above which a client prunes")
    target_density: float | None = Field(
        default=None, gt=0, le=1, description="density at which pruning ends; default: clients.retention_ratio, or 0.5"
    )


class Gate(masks.Masked):
    """The gate's part of a carry."""

    correct: torch.Tensor  # examples that the model gets right
    evaluated: torch.Tensor  # all examples
    target: torch.Tensor  # the density at which pruning ends


class GatedCarry(LocalCarry, Gate):
    """The carry of a client with a gate."""


Gated = TypeVar("Gated", bound=GatedCarry)
"""The carry of a method that adds to `GatedCarry`."""


class GatedPruning(GradientMethod):
    """A client that trains what its mask keeps, and prunes if its accuracy passes the gate."""

    hyper: GateHyper
    capabilities = Capabilities(
        personalized=True, own_compression=True, honours_retention=True, own_retention=("target_density",)
    )
    splits = {"validation": 0.2}

    def gate_stage(self) -> Stage:
        """The pass over the validation examples."""
        return Stage(GATE, split="validation", epochs=1, batch_size=self.hyper.batch_size or None)

    def closed_gate(self, mask: Tree, ctx: Context) -> Gate:
        """The gate's part of a carry before the first batch."""
        target = masks.kept_ratio(ctx.traits, self.hyper.target_density, 0.5)
        return {
            "mask": mask,
            "correct": torch.zeros(()),
            "evaluated": torch.zeros(()),
            "target": torch.tensor(target, dtype=torch.float64),
        }

    def evaluated_params(self, carry: GatedCarry) -> Tree:
        """The model whose accuracy the gate counts."""
        return carry["params"]

    def step(self, carry: Gated, batch: Batch, *, stage: Stage) -> Gated:
        if stage.name != GATE:
            return super().step(carry, batch, stage=stage)
        right: torch.Tensor = self.task.score(self.evaluated_params(carry), batch)
        correct = carry["correct"] + batch.without_padding(right).sum()
        evaluated = carry["evaluated"] + batch.without_padding(torch.ones_like(right)).sum()
        return cast(Gated, {**carry, "correct": correct, "evaluated": evaluated})

    def descend(self, carry: Gated, loss: torch.Tensor, gradient: Tree, stage: Stage) -> Gated:
        # An entry whose weight and gradient are 0 has no weight decay and no momentum: it stays exactly 0.
        return super().descend(carry, loss, masks.masked(gradient, carry["mask"]), stage)

    def passes(self, carry: GatedCarry) -> bool:
        """Whether the accuracy is above the gate's threshold; the accuracy is 0 if nothing was counted."""
        return float(carry["correct"]) / max(1.0, float(carry["evaluated"])) > self.hyper.min_accuracy


TRAIN = "train"


class LotteryState(masks.MaskedModel):
    """The state of a client that prunes."""

    left: torch.Tensor  # share of the weights left after this number of prunings, (1 - prune_ratio)^number


class LotteryCarry(GatedCarry):
    """The carry of a client that may prune and rewind."""

    left: torch.Tensor
    initial: Tree  # the common start, to which it rewinds


class Lottery(GatedPruning):
    """LotteryFL's client. The settings' defaults are those of LotteryFL's code."""

    def plan(self, round_number: int, coin: float) -> Plan:
        return Plan(stages=(self.gate_stage(), self.hyper.stage(round_number, TRAIN)))

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> LotteryState:
        return {"params": params, "mask": masks.everything(params), "left": torch.ones((), dtype=torch.float64)}

    def begin_from(self, params: Tree, state: LotteryState, ctx: Context) -> LotteryCarry:
        """The carry of a client that reaches its gate with `params`, which are 0 outside its mask."""
        gate = self.closed_gate(state["mask"], ctx)
        return {**self.start(params), **gate, "left": state["left"], "initial": ctx.initial}

    def end_stage(self, carry: LotteryCarry, *, stage: Stage) -> LotteryCarry:
        if stage.name != GATE or not self.prunes(carry):
            return carry
        mask = masks.pruned(carry["mask"], carry["params"], self.hyper.prune_ratio)
        rewound = masks.masked(carry["initial"], mask)
        return {**carry, "mask": mask, "params": rewound, "left": carry["left"] * (1 - self.hyper.prune_ratio)}

    def prunes(self, carry: LotteryCarry) -> bool:
        """Whether the client passes the gate, and its density is still above the target."""
        return self.passes(carry) and float(carry["left"]) > float(carry["target"])

    def finished_with(self, packet: Packet, carry: LotteryCarry, ctx: Context) -> Finished:
        """End a round that sends `packet` as its weights, with the training loss and operations as metrics."""
        metrics = flops.training_metrics(self.task.weight_uses, carry["mask"], ctx.work[TRAIN].num_examples)
        state: LotteryState = {"params": carry["params"], "mask": carry["mask"], "left": carry["left"]}
        return Finished(state, {"weights": packet}, 1.0, metrics | self.train_loss(carry, ctx, TRAIN))

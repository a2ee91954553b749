"""The client of LotteryFL, with a server or among peers: a gate, pruning and rewinding, then masked training.

Li et al., LotteryFL: Personalized and Communication-Efficient Federated Learning with Lottery Ticket Hypothesis on
Non-IID Datasets, 2020.
"""

import torch

from rayfl.methods.base import Context, Finished, FirstDraws, Packet, Plan, Stage, Traits, Tree
from rayfl.methods.shared import masks
from rayfl.methods.shared.accuracy_gate import GATE, GatedCarry, GatedPruning
from rayfl.models import flops

TRAIN = "train"


class LotteryState(masks.MaskedModel):
    """The state of a client that prunes."""

    left: torch.Tensor  # share of the weights that the prunings left, (1 - prune_ratio)^times


class LotteryCarry(GatedCarry):
    """The carry of a client that may prune and rewind."""

    left: torch.Tensor
    initial: Tree  # the common start, to which it rewinds


class Lottery(GatedPruning):
    """LotteryFL's client. The settings' defaults are those of LotteryFL's code."""

    def plan(self, round: int, coin: float) -> Plan:
        return Plan(stages=(self.gate_stage(), self.hyper.stage(round, TRAIN)))

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> LotteryState:
        return {"params": params, "mask": masks.everything(params), "left": torch.ones((), dtype=torch.float64)}

    def begin_from(self, params: Tree, state: LotteryState, ctx: Context) -> LotteryCarry:
        """The carry of a client that comes to its gate with `params`, which are 0 outside its mask."""
        gate = self.closed_gate(state["mask"], ctx)
        return {**self.start(params), **gate, "left": state["left"], "initial": ctx.initial}

    def end_stage(self, carry: LotteryCarry, *, stage: Stage) -> LotteryCarry:
        if stage.name != GATE or not self.prunes(carry):
            return carry
        mask = masks.pruned(carry["mask"], carry["params"], self.hyper.prune_ratio)
        rewound = masks.masked(carry["initial"], mask)
        return {**carry, "mask": mask, "params": rewound, "left": carry["left"] * (1 - self.hyper.prune_ratio)}

    def prunes(self, carry: LotteryCarry) -> bool:
        """Whether the client is good enough to prune, and has something left to."""
        return self.passes(carry) and float(carry["left"]) > float(carry["target"])

    def finished_with(self, packet: Packet, carry: LotteryCarry, ctx: Context) -> Finished:
        """End a round that sends `packet` as its weights, with the training loss and operations as metrics."""
        metrics = flops.training_metrics(self.task.weight_uses, carry["mask"], ctx.work[TRAIN].num_examples)
        state: LotteryState = {"params": carry["params"], "mask": carry["mask"], "left": carry["left"]}
        return Finished(state, {"weights": packet}, 1.0, metrics | self.train_loss(carry, ctx, TRAIN))

"""The client of LotteryFL, with a server or among peers: a gate, pruning and rewinding, then masked training.

Li et al., LotteryFL: Personalized and Communication-Efficient Federated Learning with Lottery Ticket Hypothesis on
Non-IID Datasets, 2020.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rayfl.methods.base import Batch, Context, Finished, FirstDraws, ModelState, Packet, Plan, Stage, Traits, Tree
from rayfl.methods.shared import accuracy_gate, masks
from rayfl.methods.shared.accuracy_gate import Counters
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalWork
from rayfl.models import flops

GATE, TRAIN = "gate", "train"


class LotteryHyper(LocalWork):
    """Hyper-parameters of pruning and rewinding, from LotteryFL's code."""

    momentum: float = Field(default=0.5, ge=0, lt=1, description="momentum of sgd")
    prune_ratio: float = Field(default=0.1, gt=0, lt=1, description="share of the kept weights that a pruning removes")
    min_accuracy: float = Field(default=0.2, ge=0, le=1, description="validation accuracy that a pruning takes")
    target_density: float | None = Field(
        default=None, gt=0, le=1, description="where pruning ends; default: clients.retention_ratio, else 0.5"
    )


class LotteryState(ModelState):
    """The state of a client that prunes."""

    mask: Tree
    left: Tensor  # share of the weights that the prunings left, (1 - prune_ratio)^times


class LotteryCarry(LocalCarry, Counters):
    """The carry of a client that may prune and rewind."""

    mask: Tree
    left: Tensor
    initial: Tree  # the common start, to which it rewinds
    target: Tensor  # the share of the weights at which pruning ends


class Lottery(GradientMethod):
    """LotteryFL's client."""

    hyper: LotteryHyper
    personalized: ClassVar[bool] = True
    own_compression: ClassVar[bool] = True
    honours_retention: ClassVar[bool] = True
    splits: ClassVar[Mapping[str, float]] = {"validation": 0.2}

    def plan(self, round: int, coin: float) -> Plan:
        gate = Stage(GATE, split="validation", epochs=1, batch_size=self.hyper.batch_size or None)
        return Plan(stages=(gate, self.hyper.stage(round, TRAIN)))

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> LotteryState:
        return {"params": params, "mask": masks.everything(params), "left": torch.ones((), dtype=torch.float64)}

    def begin_from(self, params: Tree, state: LotteryState, ctx: Context) -> LotteryCarry:
        """The carry of a client that comes to its gate with `params`, which are 0 outside its mask."""
        target = masks.kept_ratio(ctx.traits, self.hyper.target_density, 0.5)
        return {
            **self.start(params),
            **accuracy_gate.nothing_counted(),
            "mask": state["mask"],
            "left": state["left"],
            "initial": ctx.initial,
            "target": torch.tensor(target, dtype=torch.float64),
        }

    def step(self, carry: LotteryCarry, batch: Batch, *, stage: Stage) -> LotteryCarry:
        if stage.name == GATE:
            return accuracy_gate.counted(carry, self.task, carry["params"], batch)
        loss, gradient = self.task.value_and_grad(carry["params"], batch)
        # An entry whose weight and gradient are 0 has no weight decay and no momentum: it stays exactly 0.
        return self.descend(carry, loss, masks.masked(gradient, carry["mask"]), stage)

    def end_stage(self, carry: LotteryCarry, *, stage: Stage) -> LotteryCarry:
        if stage.name != GATE or not self.prunes(carry):
            return carry
        mask = masks.pruned(carry["mask"], carry["params"], self.hyper.prune_ratio)
        rewound = masks.masked(carry["initial"], mask)
        return {**carry, "mask": mask, "params": rewound, "left": carry["left"] * (1 - self.hyper.prune_ratio)}

    def prunes(self, carry: LotteryCarry) -> bool:
        """Whether the client is good enough to prune, and has something left to."""
        good = accuracy_gate.accuracy(carry) > self.hyper.min_accuracy
        return good and float(carry["left"]) > float(carry["target"])

    def finished_with(self, packet: Packet, carry: LotteryCarry, ctx: Context) -> Finished:
        """End a round that sends `packet` as its weights, with the training loss and operations as metrics."""
        metrics = flops.training_metrics(self.task.weight_uses, carry["mask"], ctx.work[TRAIN].num_examples)
        state: LotteryState = {"params": carry["params"], "mask": carry["mask"], "left": carry["left"]}
        return Finished(state, {"weights": packet}, 1.0, metrics | self.train_loss(carry, ctx, TRAIN))

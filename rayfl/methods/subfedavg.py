"""Sub-FedAvg, unstructured: Vahidian et al., Personalized Federated Learning by Structured and Unstructured Pruning
under Data Heterogeneity, ICDCS Workshops 2021; in Dai et al., Dis-PFL, ICML 2022, as SubFedAvg.

A client gets the entries of its mask, at first all of them, and trains them. From its mask and its weights it makes two
candidates, m' after the first epoch and m'' after the last one: each leaves out the smallest of the weights that are
alive. It takes m'' for its mask, and prunes, where

- the candidates have settled on no common form: the share of weights in which they differ is above `min_distance`;
- its density is above `target_density`;
- the pruned model is good enough: its accuracy on a validation split is above `min_accuracy`.

It sends what its mask keeps. The server takes the mean of every entry over the clients that hold it, and keeps its own
entry where none of them does.

Where the sources differ or are silent:
- The gate looks at a validation split: the authors' code looks at the test data, Dis-PFL's at the train data.
- Only tensors of two or more dimensions are pruned, each by itself: those with |w| strictly below the quantile of the
  living ones. Distance and density count the entries of these tensors.
- Entries are counted by the masks that were sent; Dis-PFL's code counts those from before the pruning.
- Every client counts the same, once in each entry that it holds.
- A mask costs bits in the round in which it changes; both ends remember it.
- With one epoch both candidates are the same, and nothing is ever pruned.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rayfl import tree
from rayfl.methods.base import (
    Batch,
    Context,
    Finished,
    FirstDraws,
    Gather,
    Message,
    ModelState,
    Plan,
    RayflError,
    Stage,
    Traits,
    Tree,
)
from rayfl.methods.shared import accuracy_gate, masks
from rayfl.methods.shared.accuracy_gate import Counters
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalWork
from rayfl.methods.shared.masked_server import HELD_MEAN, WEIGHTS, MaskedServer, weights_packet
from rayfl.models import flops

FIRST, REST, GATE = "first epoch", "train", "gate"


class SubFedAvgHyper(LocalWork):
    """Hyper-parameters of Sub-FedAvg, from its code. Dis-PFL's run has prune_ratio = 0.05."""

    lr: float = Field(default=0.01, gt=0, description="client learning rate")
    momentum: float = Field(default=0.5, ge=0, lt=1, description="momentum of sgd")
    batch_size: int = Field(default=10, ge=0, description="examples a batch, b; 0: the whole split")
    default_epochs: ClassVar[int] = 5
    epochs: int | None = Field(default=None, ge=1, description="local epochs a round (left out: 5)")
    prune_ratio: float = Field(default=0.1, gt=0, lt=1, description="share of the living weights that a pruning takes")
    min_distance: float = Field(
        default=1e-4, ge=0, description="share of weights by which the two masks of a round must differ"
    )
    min_accuracy: float = Field(default=0.5, ge=0, le=1, description="validation accuracy above which it prunes")
    target_density: float | None = Field(
        default=None, gt=0, le=1, description="where pruning ends; default: clients.retention_ratio, else 0.5"
    )

    @model_validator(mode="after")
    def _counts_epochs(self) -> Self:
        if self.steps is not None:
            raise RayflError(
                f"={self.steps} has no first and last epoch, by whose masks Sub-FedAvg decides; give epochs",
                key=("steps",),
            )
        return self


class SubFedAvgState(ModelState):
    """Client state, beside the model that it trained last."""

    mask: Tree


class SubFedAvgCarry(LocalCarry, Counters):
    """A client's carry."""

    mask: Tree
    early: Tree  # m', after the first epoch
    late: Tree  # m'', after the last one
    target: Tensor  # the density at which pruning ends


class SubFedAvg(GradientMethod, MaskedServer):
    """Client: train, make two candidates for the mask, gate. Server: the mean over those who hold an entry."""

    hyper: SubFedAvgHyper
    paper: ClassVar[str] = "Vahidian et al., ICDCSW 2021"
    personalized: ClassVar[bool] = True
    own_compression: ClassVar[bool] = True
    honours_retention: ClassVar[bool] = True
    splits: ClassVar[Mapping[str, float]] = {"validation": 0.2}
    gather: Mapping[str, Gather] = HELD_MEAN

    def plan(self, round: int, coin: float) -> Plan:
        train = self.hyper.stage(round)
        assert train.epochs is not None
        stages = [replace(train, name=FIRST, epochs=1)]
        if train.epochs > 1:
            stages.append(replace(train, epochs=train.epochs - 1))
        gate = Stage(GATE, split="validation", epochs=1, batch_size=self.hyper.batch_size or None)
        return Plan(stages=(*stages, gate))

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> SubFedAvgState:
        return {"params": params, "mask": masks.everything(params)}

    def begin(self, state: SubFedAvgState, received: Message, ctx: Context) -> SubFedAvgCarry:
        mask, target = state["mask"], masks.kept_ratio(ctx.traits, self.hyper.target_density, 0.5)
        return {
            **self.start(received[WEIGHTS].decode()),
            **accuracy_gate.nothing_counted(),
            "mask": mask,
            "early": mask,
            "late": mask,
            "target": torch.tensor(target, dtype=torch.float64),
        }

    def step(self, carry: SubFedAvgCarry, batch: Batch, *, stage: Stage) -> SubFedAvgCarry:
        if stage.name == GATE:
            pruned = tree.mul(carry["params"], carry["late"])
            return accuracy_gate.counted(carry, self.task, pruned, batch)
        loss, gradient = self.task.value_and_grad(carry["params"], batch)
        # An entry whose weight and gradient are 0 has no weight decay and no momentum: it stays exactly 0.
        return self.descend(carry, loss, masks.masked(gradient, carry["mask"]), stage)

    def end_stage(self, carry: SubFedAvgCarry, *, stage: Stage) -> SubFedAvgCarry:
        if stage.name == GATE:
            if not self.prunes(carry):
                return carry
            return {**carry, "mask": carry["late"], "params": masks.masked(carry["params"], carry["late"])}
        candidate = masks.pruned(carry["mask"], carry["params"], self.hyper.prune_ratio)
        return {**carry, "late": candidate, "early": candidate if stage.name == FIRST else carry["early"]}

    def prunes(self, carry: SubFedAvgCarry) -> bool:
        """Whether the client takes its later candidate for its mask."""
        prunable = [name for name, mask in carry["mask"].items() if mask.dim() > 1]
        size = max(1, sum(carry["mask"][name].numel() for name in prunable))
        alive = sum(int(carry["mask"][name].sum()) for name in prunable)
        differ = sum(int((carry["early"][name] != carry["late"][name]).sum()) for name in prunable)
        good = accuracy_gate.accuracy(carry) > self.hyper.min_accuracy
        return good and differ / size > self.hyper.min_distance and alive / size > float(carry["target"])

    def finish(self, state: SubFedAvgState, carry: SubFedAvgCarry, ctx: Context) -> Finished:
        params, mask = carry["params"], carry["mask"]
        num_trained = sum(work.num_examples for name, work in ctx.work.items() if name != GATE)
        metrics = flops.training_metrics(self.task.weight_uses, state["mask"], num_trained)
        metrics |= self.train_loss(carry, ctx, FIRST, REST)
        message = {WEIGHTS: weights_packet(params, mask, state["mask"])}
        return Finished({"params": params, "mask": mask}, message, 1.0, metrics)

    def eval_begin(
        self, state: SubFedAvgState, model: Tree | None, carry: SubFedAvgCarry | None, ctx: Context
    ) -> ModelState:
        if carry is not None:
            return {"params": carry["params"]}
        assert model is not None, "Sub-FedAvg has a global model"
        return {"params": masks.masked(model, state["mask"])}

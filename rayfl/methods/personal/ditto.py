"""Ditto: Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021, Algorithm 1, with the
epochs of its run in Dai et al., Dis-PFL, ICML 2022.

The global model x is trained as FedAvg trains it. In addition every client keeps a personal model v_i, which is never
sent, and minimises f_i(v) + lam / 2 ||v - x_t||^2 by local steps from its last v_i, with x_t the global model that it
received: lam = 0 is training alone, a large lam is FedAvg.

- Dis-PFL's run has 2 epochs for x and 3 for v_i, which are the defaults, and lam = 0.5. Its code moves v along the
  gradient first and then subtracts lr lam (v - x_t), which is `pull="after"`; the paper's step, along the sum of both,
  is `pull="joint"`. They differ by O(lr^2).
- x_t does not change while a client works and both trainings draw their own batches, so their order does not change
  the result.
- A client that is not selected keeps its v_i. Before its first round it is the common start.
- The recorded training loss is that of x, as in FedAvg.
"""

from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from rayfl.methods.base import (
    Batch,
    Capabilities,
    Context,
    Finished,
    FinishedStack,
    Message,
    ModelState,
    Plan,
    RayflError,
    StackRows,
    Stage,
    Tree,
    tree,
    unused_with,
)
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalCarry, LocalTraining, OwnModel

PERSONAL = "personal"
"""The stage of the personal model."""


class DittoHyper(LocalTraining):
    """Hyper-parameters of Ditto; the personal model is trained with those of the global one, except these."""

    default_epochs = 2
    epochs: int | None = Field(
        default=None, ge=1, description="local epochs of the global model (2 where steps is not given)"
    )
    lam: float = Field(default=0.5, ge=0, description="pull of the global model on the personal one, lambda")
    pull: Literal["joint", "after"] = Field(
        default="joint",
        description="joint: a step along g + lam (v - x); after: along g, then off goes lr lam (v - x)",
        json_schema_extra=unused_with(lam=[0]),
    )
    personal_epochs: int | None = Field(
        default=None, ge=1, description="local epochs of the personal model (3 where personal_steps is not given)"
    )
    personal_steps: int | None = Field(default=None, ge=1, description="its local steps, instead of epochs")
    personal_lr: float | None = Field(
        default=None, gt=0, description="its learning rate, which changes by round as lr does (left out: lr)"
    )

    @model_validator(mode="after")
    def _one_amount_of_personal_work(self) -> "DittoHyper":
        if self.personal_epochs is not None and self.personal_steps is not None:
            raise RayflError(
                f"={self.personal_epochs} and personal_steps={self.personal_steps} are both given; give one of them",
                key=("personal_epochs",),
            )
        if self.personal_epochs is None and self.personal_steps is None:
            self.settle(personal_epochs=3)
        rate = self.personal_lr or self.lr
        self.settle(personal_lr=rate)
        name, doubled = "lr" if rate == self.lr else "personal_lr", self.lr_schedule == "cosine-literal"
        if (strength := rate * (2 if doubled else 1) * self.lam) >= 1:
            twice = " twice, where cosine-literal begins," if doubled else ""
            raise RayflError(
                f"={self.lam} times {name}={rate}{twice} is {strength:g}, and a step would go past the global model; "
                "keep the product below 1",
                key=("lam",),
            )
        return self

    def personal_stage(self, round_number: int) -> Stage:
        """The stage in which the personal model is trained."""
        stage = self.stage(round_number, PERSONAL)
        rate = self.personal_lr or self.lr
        lr = stage.lr if rate == self.lr else rate * stage.lr / self.lr
        return replace(stage, epochs=self.personal_epochs, steps=self.personal_steps, lr=lr)


class DittoCarry(LocalCarry):
    """A client's carry: that of x, and that of v_i."""

    personal: LocalCarry


class Ditto(OwnModel, FedAvg):
    """FedAvg with a personal model v_i at every client, which is its state."""

    hyper: DittoHyper
    paper = "Li et al., ICML 2021"
    capabilities = Capabilities(on_device=True, server_on_device=True, whole_stacks=True, takes_stale=True)

    def plan(self, round_number: int, coin: float) -> Plan:
        return Plan(stages=(self.hyper.stage(round_number), self.hyper.personal_stage(round_number)))

    def begin(self, state: ModelState, received: Message, ctx: Context) -> DittoCarry:
        return {**super().begin(state, received, ctx), "personal": self.start(state["params"])}

    def begin_stack(self, states: ModelState, received: Message, ctx: Context, width: int) -> DittoCarry:
        carry = super().begin_stack(states, received, ctx, width)
        return {**carry, "personal": self.start_stack(states["params"])}

    def step(self, carry: DittoCarry, batch: Batch, *, stage: Stage) -> DittoCarry:
        if stage.name != PERSONAL:
            return super().step(carry, batch, stage=stage)
        personal: LocalCarry = carry["personal"]
        anchor = carry["received"]
        loss, gradient = self.task.value_and_grad(personal["params"], batch)
        if self.hyper.pull == "joint":
            gradient = tree.add(gradient, tree.sub(personal["params"], anchor), self.hyper.lam)
        personal = self.descend(personal, loss, gradient, stage)
        if self.hyper.pull == "after":
            pull = tree.sub(personal["params"], anchor)
            personal = {**personal, "params": tree.add(personal["params"], pull, -stage.lr * self.hyper.lam)}
        return {**carry, "personal": personal}

    def finish(self, state: ModelState, carry: DittoCarry, ctx: Context) -> Finished:
        new: ModelState = {"params": carry["personal"]["params"]}
        return self.finished(new, {"delta": self.delta(carry)}, carry, ctx, "train")

    def finish_stack(self, states: ModelState, carry: DittoCarry, rows: StackRows, ctx: Context) -> FinishedStack:
        new: ModelState = {"params": carry["personal"]["params"]}
        return self.finished_stack(new, {"delta": self.delta(carry)}, carry, rows, "train")

    def eval_begin(self, state: ModelState, model: Tree | None, carry: DittoCarry | None, ctx: Context) -> ModelState:
        return {"params": state["params"] if carry is None else carry["personal"]["params"]}

"""FedPD with variance reduction: Zhang et al., FedPD: A Federated Learning Framework with Adaptivity to Non-IID Data,
IEEE Transactions on Signal Processing 2021, Algorithm 1 with Oracle II.

FedPD, whose clients step along v + lambda_i + (x_i - x0_i) / eta with an estimate v of grad f_i(x_i): after each step
v <- v + g(x_i) - g(x_i before the step), both on the step's batch. Every `restart` rounds v is the full gradient at x_i
again; between them a client keeps its v, as it keeps x_i.

- A client's first round begins with the full gradient, too.
- With full batches v is always grad f_i(x_i), and this is FedPD.
- Steps are plain; weight decay is a part of f_i.
- Experimental: the paper's text of Oracle II was not at hand. The estimator is that of Fang, Li, Lin, Zhang, SPIDER,
  NeurIPS 2018; it and the restarts are what FedPD's count of samples, M + sqrt(M) / epsilon, is for.
"""

from dataclasses import replace
from typing import NotRequired

from rayfl.methods.base import (
    Batch,
    Capabilities,
    Context,
    Field,
    Finished,
    Message,
    Plan,
    Stage,
    Tree,
    tree,
)
from rayfl.methods.server.fedpd import FedPD, FedPDCarry, FedPDHyper, FedPDState
from rayfl.methods.shared.full_gradient import MEASURE, GradientSum, mean_gradient, no_gradient, with_batch
from rayfl.methods.shared.local_training import NOT_PLAIN


class FedPDVRHyper(FedPDHyper):
    """Hyper-parameters of FedPD with variance reduction."""

    restart: int = Field(default=1, ge=1, description="rounds from one full gradient of a client to the next")

    def unused(self) -> dict[str, str]:
        return {**super().unused(), **dict.fromkeys(NOT_PLAIN, "as a variance-reduced oracle takes plain steps")}


class FedPDVRState(FedPDState):
    """Client state."""

    estimate: NotRequired[Tree]  # v at x_i


class FedPDVRCarry(GradientSum, FedPDCarry):
    """A client's carry."""

    estimate: Tree  # v at x_i


class FedPDVR(FedPD):
    """FedPD with another local solver. Client state: v, too."""

    hyper: FedPDVRHyper
    paper = "Zhang et al., IEEE TSP 2021, Oracle II"
    capabilities = Capabilities(on_device=True)

    def stages(self, state: FedPDVRState, plan: Plan, ctx: Context) -> tuple[Stage, ...]:
        if "estimate" in state and ctx.round % self.hyper.restart:
            return plan.stages
        return (Stage(MEASURE, epochs=1, batch_size=self.hyper.batch_size or None), *plan.stages)

    def begin(self, state: FedPDVRState, received: Message, ctx: Context) -> FedPDVRCarry:
        carry = super().begin(state, received, ctx)
        zeros = no_gradient(carry["params"])
        return {**carry, **zeros, "estimate": state.get("estimate", zeros["gradients"])}

    def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
        # In training after and before the step.
        return 1.0 if stage.name == MEASURE else 2.0

    def step(self, carry: FedPDVRCarry, batch: Batch, *, stage: Stage) -> FedPDVRCarry:
        before = carry["params"]
        if stage.name == MEASURE:
            return with_batch(carry, self.task.grad(before, batch), batch)
        loss, old = self.task.value_and_grad(before, batch)
        carry = self.descend(carry, loss, self.direction(carry, carry["estimate"]), stage)
        change = tree.sub(self.task.grad(carry["params"], batch), old)
        return {**carry, "estimate": tree.add(carry["estimate"], change)}

    def end_stage(self, carry: FedPDVRCarry, *, stage: Stage) -> FedPDVRCarry:
        return {**carry, "estimate": mean_gradient(carry)} if stage.name == MEASURE else carry

    def finish(self, state: FedPDVRState, carry: FedPDVRCarry, ctx: Context) -> Finished:
        finished = super().finish(state, carry, ctx)
        return replace(finished, state={**finished.state, "estimate": carry["estimate"]})

    def receive_reply(self, state: FedPDVRState, received: Message, ctx: Context) -> FedPDVRState:
        return {**state, **super().receive_reply(state, received, ctx)}

    def train_loss(self, carry: FedPDVRCarry, ctx: Context, *stages: str) -> dict[str, float]:
        return super().train_loss(carry, ctx, *(stages or ("train",)))

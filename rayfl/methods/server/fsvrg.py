"""FSVRG: Konecny, McMahan, Ramage, Richtarik, Federated Optimization: Distributed Machine Learning for On-Device
Intelligence, arXiv 1610.02527, 2016, Algorithm 4, with the scalings S_k and A left out, and Algorithm 3.

An iteration has two exchanges, and so takes two rounds. In the first, clients send their full gradients at x, whose
mean is G. In the second, each takes a pass of steps w <- w - h_k (g_k(w) - g_k(x) + G) from x, both gradients on the
same batch, and the server averages: x <- x - sum_k (n_k / n) (x - w_k).

- `scaled_steps`: h_k = h / (the number of the client's steps), Algorithm 4's h / n_k, so that clients with many
  examples go no farther than others. Without it h_k = h: Algorithm 3. That is also the distributed SVRG of Cen, Zhang,
  Chi, Chen, Liu, IEEE TSP 2020, which WEN Hao's slides call F-SVRG, but for its choice of the point that a client
  sends: here it is the last one.
- S_k and A make up for features that few clients have. They are for sparse inputs of linear models; where every client
  has every feature they are 1.
- Rounds 0, 2, 4, ... compute gradients and leave x as it is; rounds 1, 3, 5, ... train. If clients are sampled, other
  ones train than those whose gradients make G. If no gradient arrived, clients skip the round of training.
- Batches take the place of single examples. Weight decay is a part of f_k.
- Experimental: written from the published algorithm as it is known, without the paper's text at hand.
"""

from typing import cast

import torch

from rayfl.data.batches import amount
from rayfl.methods.base import (
    Batch,
    Capabilities,
    Context,
    Download,
    Field,
    Finished,
    Message,
    ModelServer,
    ModelState,
    Plan,
    Received,
    Stage,
    State,
    Tree,
    WeightedMean,
    tree,
)
from rayfl.methods.shared.full_gradient import MEASURE, GradientSum, mean_gradient, no_gradient, with_batch
from rayfl.methods.shared.local_training import NOT_PLAIN, GradientMethod, LocalCarry, LocalTraining
from rayfl.methods.shared.optimizers import SGD, Optimizer


class FSVRGHyper(LocalTraining):
    """Hyper-parameters of FSVRG; lr is h."""

    lr: float = Field(default=1.0, gt=0, description="step size, h")
    scaled_steps: bool = Field(
        default=True, description="divide the step size by the number of the client's steps in a round, as h / n_k"
    )

    def unused(self) -> dict[str, str]:
        return {**super().unused(), **dict.fromkeys(NOT_PLAIN, "as FSVRG takes plain steps")}


class FSVRGCarry(GradientSum, LocalCarry):
    """A client's carry."""

    full: Tree  # G
    scale: torch.Tensor  # h_k / h, float32 []


class FSVRGServer(ModelState):
    """Server state, beside x."""

    gradient: Tree  # G at x
    measured: torch.Tensor  # whether G is there


class FSVRG(GradientMethod, ModelServer):
    """Down: x, and in rounds of training G. Up: the full gradient, or x - w_k."""

    hyper: FSVRGHyper
    paper = "Konecny et al., arXiv 1610.02527"
    capabilities = Capabilities(on_device=True, may_be_silent=True)
    gather = {"delta": WeightedMean(), "gradient": WeightedMean()}

    @property
    def optimizer(self) -> Optimizer:  # pyright: ignore[reportIncompatibleMethodOverride]
        return SGD()

    def plan(self, round_number: int, coin: float) -> Plan:
        training = self.hyper.stage(round_number)
        if round_number % 2:
            return Plan(stages=(training,))
        return Plan(stages=(Stage(MEASURE, epochs=1, batch_size=training.batch_size),))

    def has_work(self, received: Message, ctx: Context) -> bool:
        return ctx.round % 2 == 0 or "gradient" in received

    def begin(self, state: State, received: Message, ctx: Context) -> FSVRGCarry:
        carry = super().begin(state, received, ctx)
        zeros = no_gradient(carry["params"])
        full = received["gradient"].decode() if "gradient" in received else zeros["gradients"]
        return {**carry, **zeros, "full": full, "scale": torch.tensor(self.step_scale(ctx))}

    def step_scale(self, ctx: Context) -> float:
        """h_k / h: 1 over the number of the client's steps, with `scaled_steps`."""
        stage = ctx.plan.stages[-1]
        if not self.hyper.scaled_steps:
            return 1.0
        return (
            1 / amount(ctx.traits.num_examples, epochs=stage.epochs, steps=stage.steps, batch_size=stage.batch_size)[0]
        )

    def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
        # In training at w and at x.
        return 1.0 if stage.name == MEASURE else 2.0

    def step(self, carry: FSVRGCarry, batch: Batch, *, stage: Stage) -> FSVRGCarry:
        if stage.name == MEASURE:
            return with_batch(carry, self.task.grad(carry["params"], batch), batch)
        loss, gradient = self.task.value_and_grad(carry["params"], batch)
        reference = self.task.grad(carry["received"], batch)
        along = tree.add(tree.sub(gradient, reference), carry["full"])
        if decay := self.hyper.weight_decay:
            along = tree.add(along, carry["params"], decay)
        return self.descend(carry, loss, tree.map(lambda tensor: carry["scale"] * tensor, along), stage)

    def finish(self, state: State, carry: FSVRGCarry, ctx: Context) -> Finished:
        if ctx.round % 2 == 0:
            return self.finished(state, {"gradient": mean_gradient(carry)}, carry, ctx, "train")
        return self.finished(state, {"delta": self.delta(carry)}, carry, ctx)

    def init_server(self, params: Tree) -> FSVRGServer:
        return {"params": params, "gradient": tree.zeros_like(params), "measured": torch.tensor(False)}

    def download(self, server: FSVRGServer, ctx: Context) -> Download:
        if ctx.round % 2 == 0:
            return super().download(server, ctx)
        if not server["measured"]:
            return {}
        return {**super().download(server, ctx), "gradient": server["gradient"]}

    def update(self, server: FSVRGServer, received: Received, ctx: Context) -> FSVRGServer:
        gradient, delta = received["gradient"].result, received["delta"].result
        if gradient:
            return {**server, "gradient": gradient, "measured": torch.tensor(True)}
        # The gradient was that of the old x.
        params = tree.sub(server["params"], cast(Tree, delta))
        return {**server, "params": params, "measured": torch.tensor(False)}

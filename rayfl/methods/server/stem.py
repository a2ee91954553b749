"""STEM: Khanduri et al., STEM: A Stochastic Two-Sided Momentum Algorithm Achieving Near-Optimal Sample and
Communication Complexities for Federated Learning, NeurIPS 2021, Algorithm 1.

Worker k steps x_{t+1} = x_t - eta d_t and corrects its direction with one minibatch at two points:
d_{t+1} = g(x_{t+1}) + (1 - a) (d_t - g(x_t)). After I steps the points and the directions of all workers are averaged.
Round 0 is the start: the mean of gradients on large batches, at the common x_1, becomes d_1.

- By default eta is constant within a round (lr, lr_schedule) and a is a constant in (0, 1]; a = 1 is local SGD. With
  `schedule_offset` both are the paper's, step by step: eta_t = kappa / (w + sigma^2 t)^(1/3) and a_{t+1} = c eta_t^2
  for t = 1, 2, ... through all rounds. Constant factors cancel, so that the settings are lr = kappa / w^(1/3), which
  eta comes from, momentum = c lr^2, which a comes from, and schedule_offset = w / sigma^2: eta_t = lr s_t and a_{t+1}
  = momentum s_t^2 with s_t = (1 + t / schedule_offset)^(-1/3). The paper's w_t is the constant w here.
- After an exchange the point of the old gradient stays the worker's own x_{t+1}, from before the average, so that the
  mean of d_t - g(x_t) over workers telescopes. A worker that missed the last exchange takes the averaged point.
- Means are uniform and all workers take part. If no message of round 0 arrived, the next round's first step has a = 1.
- A worker sends the difference of its point to the averaged one that it received, which gives the same mean.
"""

from typing import Self, TypedDict

import torch

from rayfl.methods.base import (
    Batch,
    Capabilities,
    Context,
    Download,
    Field,
    Finished,
    FirstDraws,
    Message,
    Method,
    ModelServer,
    ModelState,
    Plan,
    Received,
    Stage,
    Traits,
    Tree,
    WeightedMean,
    tree,
)
from rayfl.methods.shared.local_training import LearningRate

START = "start"
"""The stage of round 0."""


class STEMHyper(LearningRate):
    """Hyper-parameters of STEM. Schedules by round begin with round 1: round 0 makes no step."""

    steps: int = Field(default=10, ge=1, description="local steps between two exchanges, I")
    batch_size: int = Field(default=32, ge=0, description="examples per batch, b; 0: the whole split")
    start_batch_size: int = Field(default=0, ge=0, description="examples of the first gradient, B; 0: the whole split")
    momentum: float = Field(default=0.1, gt=0, le=1, description="weight of the fresh gradient, a")
    schedule_offset: float | None = Field(
        default=None, gt=0, description="w / sigma^2 of the paper's schedules of eta and a; by default neither is used"
    )

    def unused(self) -> dict[str, str]:
        others = () if self.schedule_offset is None else ("lr_schedule", "lr_decay")
        return {**super().unused(), **dict.fromkeys(others, f"beside schedule_offset={self.schedule_offset}")}

    def for_num_rounds(self, rounds: int) -> Self:
        return super().for_num_rounds(max(rounds - 1, 1))

    def shrunk(self, t: torch.Tensor) -> torch.Tensor:
        """s_t, by which the paper's schedules shrink eta at step t (float64, scalar), as float32; 1 without them."""
        if self.schedule_offset is None:
            return torch.ones_like(t, dtype=torch.float32)
        return (1 + t / self.schedule_offset).pow(-1 / 3).to(torch.float32)


class STEMState(TypedDict):
    """Client state."""

    point: Tree  # x_t, at which its old gradient is taken
    round: torch.Tensor  # the round of that point


class STEMCarry(TypedDict):
    """A client's carry."""

    params: Tree
    received: Tree
    previous: Tree  # x_t
    direction: Tree  # d_t
    kept: torch.Tensor  # 1 if an old direction goes into the next one, else 0
    t: torch.Tensor  # the number of the next step
    loss: torch.Tensor


class STEMServer(ModelState):
    """Server state, beside the averaged point."""

    direction: Tree
    started: torch.Tensor  # whether there is a direction


class STEM(Method, ModelServer):
    """Client: x_t and d_t. Server: their averages."""

    hyper: STEMHyper
    paper = "Khanduri et al., NeurIPS 2021"
    capabilities = Capabilities(on_device=True)
    gather = {"delta": WeightedMean(), "direction": WeightedMean()}

    def plan(self, round_number: int, coin: float) -> Plan:
        hyper = self.hyper
        if round_number == 0:
            return Plan(stages=(Stage(START, steps=1, batch_size=hyper.start_batch_size or None, lr=hyper.lr),))
        return Plan(
            stages=(Stage(steps=hyper.steps, batch_size=hyper.batch_size or None, lr=hyper.rate(round_number - 1)),)
        )

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> STEMState:
        return {"point": params, "round": torch.tensor(-1)}

    def begin(self, state: STEMState, received: Message, ctx: Context) -> STEMCarry:
        params = received["model"].decode()
        started = "direction" in received
        followed = int(state["round"]) == ctx.round - 1 and ctx.round > 0
        return {
            "params": params,
            "received": params,
            "previous": state["point"] if followed else params,
            "direction": received["direction"].decode() if started else tree.zeros_like(params),
            "kept": torch.tensor(1.0 if started else 0.0),
            "t": torch.tensor((ctx.round - 1) * self.hyper.steps + 1, dtype=torch.float64),
            "loss": torch.zeros(()),
        }

    def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
        # At the point and at the one before it.
        return 1.0 if stage.name == START else 2.0

    def step(self, carry: STEMCarry, batch: Batch, *, stage: Stage) -> STEMCarry:
        if stage.name == START:
            loss, gradient = self.task.value_and_grad(carry["params"], batch)
            return {**carry, "direction": gradient, "loss": loss}
        shrunk = self.hyper.shrunk(carry["t"])
        step = stage.lr * shrunk
        params = {name: tensor - step * carry["direction"][name] for name, tensor in carry["params"].items()}
        loss, gradient = self.task.value_and_grad(params, batch)
        error = tree.sub(carry["direction"], self.task.grad(carry["previous"], batch))
        kept = carry["kept"] * (1 - self.hyper.momentum * shrunk.square())
        return {
            **carry,
            "params": params,
            "previous": params,
            "direction": {name: gradient[name] + kept * error[name] for name in gradient},
            "kept": torch.ones_like(kept),
            "t": carry["t"] + 1,
            "loss": carry["loss"] + loss,
        }

    def finish(self, state: STEMState, carry: STEMCarry, ctx: Context) -> Finished:
        sent: dict[str, Tree] = {"direction": carry["direction"]}
        if ctx.round > 0:
            sent["delta"] = tree.sub(carry["received"], carry["params"])
        state = {"point": carry["params"], "round": torch.tensor(ctx.round)}
        num_steps = sum(work.num_steps for work in ctx.work.values())
        metrics = {"train/loss": float(carry["loss"]) / num_steps} if num_steps else {}
        return Finished(state, sent, metrics=metrics)

    def init_server(self, params: Tree) -> STEMServer:
        return {"params": params, "direction": tree.zeros_like(params), "started": torch.tensor(False)}

    def download(self, server: STEMServer, ctx: Context) -> Download:
        point = super().download(server, ctx)
        return {**point, "direction": server["direction"]} if server["started"] else point

    def update(self, server: STEMServer, received: Received, ctx: Context) -> STEMServer:
        delta, direction = received["delta"].result, received["direction"].result
        params = tree.sub(server["params"], delta) if delta else server["params"]
        return {"params": params, "direction": direction, "started": torch.tensor(True)}

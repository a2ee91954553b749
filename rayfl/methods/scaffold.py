"""SCAFFOLD: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020,
Algorithm 1.

Client i steps along g_i(y) - c_i + c, K times from x, so that it drifts with the mean gradient and not with its own.
Its control variate becomes c_i+ = g_i(x) (option I, on a batch of its own), or c_i - c + (x - y) / (K eta_l), the mean
of its K gradients (option II). Server: x <- x - eta_g mean_S delta_i and c <- c + (m / N) mean_S (c_i+ - c_i).

- c = mean_i c_i over all N clients after every round, whoever took part, because an absent client keeps its c_i. So
  control variates are averaged uniformly whatever `weighting` says: that weighs the deltas alone, and does not move
  the point that SCAFFOLD converges to, the minimiser of the plain mean of the f_i.
- Local steps are plain SGD: under momentum, Adam or clipping (x - y) / (K eta_l) is no mean of gradients. Weight decay
  is a part of f_i.
- A lossy uplink without memory sends C(c_i+ - c_i), and c_i moves by just that, so that c = mean_i c_i still holds.
  With error feedback c_i becomes c_i+: the memory holds what the server does not have yet.
The sign is ours on the wire: the change that goes up is c_i - c_i+.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from rayfl import tree
from rayfl.compress.base import Message
from rayfl.data.batches import Batch
from rayfl.determinism.seeding import FirstDraws
from rayfl.errors import RayflError
from rayfl.gather import Aggregate, Gather, Sum, WeightedMean
from rayfl.methods.base import Carry, Context, Finished, Metrics, Plan, Stage
from rayfl.methods.shared.local_training import GradientMethod, LocalTraining, Weighting
from rayfl.methods.shared.model_server import ModelServer
from rayfl.methods.shared.uplink import compressed
from rayfl.population.client import Traits
from rayfl.tree import State, Tree

CONTROL = "control"
"""The stage of option I."""


class ScaffoldHyper(LocalTraining):
    """Hyper-parameters of SCAFFOLD."""

    weighting: Weighting = Field(default="uniform", description="weight of a client's delta in the average")
    server_lr: float = Field(default=1.0, gt=0, description="learning rate of the server, eta_g")
    option: Literal["I", "II"] = Field(
        default="II", description="new control variate: I, a gradient at x; II, the mean of the local gradients"
    )
    control_batch_size: int = Field(default=0, ge=0, description="examples of option I's gradient; 0: the whole split")

    @model_validator(mode="after")
    def _plain_steps(self) -> "ScaffoldHyper":
        if self.optimizer != "sgd" or self.momentum or self.clip_norm is not None:
            raise RayflError(
                f"optimizer={self.optimizer!r}, momentum={self.momentum} and clip_norm={self.clip_norm}: SCAFFOLD "
                "corrects plain SGD steps; leave all three out"
            )
        return self


class Scaffold(GradientMethod, ModelServer):
    """Client state: c_i. Server: x and c. Down: both. Up: delta and c_i - c_i+."""

    Hyper: ClassVar[type[ScaffoldHyper]] = ScaffoldHyper
    hyper: ScaffoldHyper
    paper: ClassVar[str] = "Karimireddy et al., ICML 2020"
    gather: Mapping[str, Gather] = {"delta": WeightedMean(), "control_variate": Sum()}

    def plan(self, round: int, coin: float) -> Plan:
        training = self.hyper.stage(round)
        if self.hyper.option == "II":
            return Plan(stages=(training,))
        return Plan(stages=(Stage(CONTROL, steps=1, batch_size=self.hyper.control_batch_size or None), training))

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> State:
        return {"control_variate": tree.zeros_like(params)}

    def begin(self, state: State, received: Message, ctx: Context) -> Carry:
        correction = tree.sub(received["control_variate"].decode(), state["control_variate"])
        carry = {**self.start(received["model"].decode()), "correction": correction}
        return carry if self.hyper.option == "II" else {**carry, "gradient": tree.zeros_like(correction)}

    def step(self, carry: Carry, batch: Batch, *, stage: Stage) -> Carry:
        loss, gradient = self.task.value_and_grad(carry["params"], batch)
        if stage.name == CONTROL:
            return {**carry, "gradient": self.optimizer.penalised(gradient, carry["params"])}
        return self.descend(carry, loss, tree.add(gradient, carry["correction"]), stage)

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        ctx = replace(ctx, work={"train": ctx.work["train"]})
        own, delta = state["control_variate"], self.progress(carry)
        new = self.new_control_variate(carry, delta, ctx)
        message, state = compressed(state, {"delta": delta, "control_variate": tree.sub(own, new)}, ctx)
        if "control_variate" not in state.get("uplink", {}):
            new = tree.sub(own, message["control_variate"].decode_beside(own))
        return self.finished({**state, "control_variate": new}, message, carry, ctx)

    def new_control_variate(self, carry: Carry, delta: Tree, ctx: Context) -> Tree:
        """c_i+ by the option."""
        if self.hyper.option == "I":
            return carry["gradient"]
        lr = ctx.plan.stages[-1].lr
        return tree.sub(tree.scale(delta, 1 / (ctx.work["train"].num_steps * lr)), carry["correction"])

    def init_server(self, params: Tree) -> State:
        return {"params": params, "control_variate": tree.zeros_like(params)}

    def broadcast(self, server: State, ctx: Context) -> Message:
        names = {"model": "params", "control_variate": "control_variate"}
        return {name: ctx.downlink.encode(server[part], {}, ctx.generator)[0] for name, part in names.items()}

    def server_update(
        self, server: State, received: Mapping[str, Aggregate], delivered: Sequence[int], ctx: Context
    ) -> tuple[State, Metrics]:
        delta, change = received["delta"].result, received["control_variate"].sum
        if not delta:
            return server, {}
        params = tree.add(server["params"], delta, -self.hyper.server_lr)
        return {
            "params": params,
            "control_variate": tree.add(server["control_variate"], change, -1 / ctx.num_clients),
        }, {}

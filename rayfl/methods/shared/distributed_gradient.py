"""Distributed gradient methods: a client's round is one gradient at the received point, sent compressed.

There is no local training: only the server moves. The gradient is that of f_i(x) + l2 / 2 ||x||^2 on the client's
whole train split (batch_size = 0, as the theory of these methods needs), or on one minibatch per round.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypedDict, TypeVar, cast

import torch

from rayfl.compress.held import added_to
from rayfl.determinism.seeding import LazyGenerator
from rayfl.methods.base import (
    Aggregate,
    Batch,
    BoundTask,
    Capabilities,
    Compressor,
    Context,
    Download,
    Field,
    Finished,
    FirstDraws,
    HyperParameters,
    Message,
    Method,
    ModelServer,
    ModelState,
    Packet,
    Plan,
    RayflError,
    Received,
    Stage,
    State,
    Traits,
    Tree,
    UplinkMemory,
    Upload,
    WeightedMean,
    contracting,
    tree,
)
from rayfl.methods.shared.local_training import LearningRate, Weighting, weighed


class GradientCarry(TypedDict):
    """The carry of a client that computes one gradient."""

    params: Tree
    gradient: Tree  # 0 before the step, then the gradient at params
    loss: torch.Tensor


OneStep = TypeVar("OneStep", bound=GradientCarry)
"""The carry of a method that adds to `GradientCarry`."""


class OneBatch(HyperParameters):
    """Hyper-parameters of a client that computes one gradient per round."""

    batch_size: int = Field(default=0, ge=0, description="examples of the gradient, b; 0: the whole split")

    def stage(self, lr: float = 0.0) -> Stage:
        """One step on one batch."""
        return Stage(steps=1, batch_size=self.batch_size or None, lr=lr)


class OneGradient(Method):
    """A client whose one step stores the gradient and leaves the model alone."""

    hyper: OneBatch

    # Any: see Method.
    @classmethod
    def unused(cls, hyper: Any) -> Mapping[str, str]:
        return {**super().unused(hyper), "clients.work": f"as clients of {cls.__name__} do one step per round"}

    def plan(self, round_number: int, coin: float) -> Plan:
        return Plan(stages=(self.hyper.stage(),), coin=coin)

    def begin(self, state: State, received: Message, ctx: Context) -> GradientCarry:
        return self.start(received["model"].decode() if "model" in received else state["params"])

    def start(self, params: Tree) -> GradientCarry:
        """The carry of a client that has computed nothing yet."""
        return {"params": params, "gradient": tree.zeros_like(params), "loss": torch.zeros(())}

    def step(self, carry: OneStep, batch: Batch, *, stage: Stage) -> OneStep:
        loss, gradient = self.value_and_grad(carry["params"], batch)
        return cast(OneStep, {**carry, "gradient": gradient, "loss": loss})

    def value_and_grad(self, params: Tree, batch: Batch) -> tuple[torch.Tensor, Tree]:
        """The objective's value (scalar) and its gradient."""
        return self.task.value_and_grad(params, batch)


class GradientWork(OneBatch):
    """Hyper-parameters of a client of distributed gradient methods: its batch, l2, and its weight in the mean."""

    l2: float = Field(default=0.0, ge=0, description="l2 / 2 ||x||^2 is part of every client's objective")
    weighting: Weighting = Field(default="uniform", description="weight of a client in the mean")


class GradientStep(GradientWork, LearningRate):
    """`GradientWork`, and the size of the server's step along the mean of the messages."""

    lr: float = Field(default=0.05, gt=0, description="step size, gamma")


class DistributedGradient(OneGradient, ModelServer):
    """The client's gradient and the server's model; subclasses say what is sent (`finish`) and how x moves (`update`).

    Metric: `train/loss`, the client's objective, l2 included, at the point that it received.
    """

    capabilities = Capabilities(evaluated_after_training=False)
    Hyper = GradientStep
    hyper: GradientWork

    def value_and_grad(self, params: Tree, batch: Batch) -> tuple[torch.Tensor, Tree]:
        """The objective's value (scalar) and its gradient, with l2."""
        loss, gradient = self.task.value_and_grad(params, batch)
        if not self.hyper.l2:
            return loss, gradient
        square = torch.stack([tensor.square().sum() for tensor in params.values()]).sum()
        return loss + 0.5 * self.hyper.l2 * square, tree.add(gradient, params, self.hyper.l2)

    def finished(self, state: State, message: Upload, carry: GradientCarry, ctx: Context) -> Finished:
        """End a round that sends this message, with its weight in the mean and the objective as a metric."""
        metrics = {"train/loss": float(carry["loss"])}
        if not message:
            return Finished(state, None, metrics=metrics)
        message, weight = weighed(message, self.hyper.weighting, ctx)
        return Finished(state, message, weight, metrics)


class CompressedSGD(DistributedGradient):
    """Distributed SGD with a compressor that belongs to the method: x <- x - sum_i p_i C(gamma g_i).

    Up: one compressed step per client and round, as "delta". Down: the dense model, 4 bytes per entry. Client state:
    the compressor's memory.

    The step size is inside the compressor, so that with error feedback, C(gamma g_i + e_i), the memory stays in units
    of x when gamma changes. If C(a v) = a C(v) for a > 0, then C(gamma g_i) = gamma C(g_i).
    """

    hyper: GradientStep
    capabilities = Capabilities(own_compression=True)
    gather = {"delta": WeightedMean()}

    @property
    @abstractmethod
    def compressor(self) -> Compressor:
        """C, made from the hyper-parameters."""

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> Tree:
        return self.compressor.init(params)

    # The state is the compressor's memory alone.
    def finish(self, state: Tree, carry: GradientCarry, ctx: Context) -> Finished:
        delta = tree.scale(carry["gradient"], self.hyper.rate(ctx.round))
        packet, memory = self.compressor.encode(delta, state, ctx.generator)
        return self.finished(memory, {"delta": packet}, carry, ctx)

    def update(self, server: ModelState, received: Received, ctx: Context) -> ModelState:
        return {"params": tree.sub(server["params"], received["delta"].result)}


class ShiftState(UplinkMemory):
    """The state of a client that sends the compressed difference of its gradient and its shift."""

    shift: Tree  # h_i


class ShiftedGradient(DistributedGradient):
    """Clients keep shifts, at first 0, that approach their gradients."""

    capabilities = Capabilities(needs_one_omega=True)

    # Any: see Method.
    def __init__(self, task: BoundTask | None = None, hyper: HyperParameters | None = None, **settings: Any) -> None:
        super().__init__(task, hyper, **settings)
        # The server does not know the examples of all clients, so it cannot weigh some of them among all.
        self.capabilities = self.capabilities.but(needs_everyone=self.hyper.weighting == "samples")

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> ShiftState:
        return {"shift": tree.zeros_like(params)}


class ShiftedServer(ModelState):
    """The state of a server whose clients have shifts: x, and the mean shift."""

    shift: Tree  # h, the mean of all h_i


class SteppingServer(DistributedGradient):
    """A server that sends compressed steps instead of its model; every client starts from x^0 and applies them.

    A client that missed steps is sent, and billed for, all missed steps or the resulting trees, whichever is smaller
    (rayfl/rounds/downlinks.py).
    """

    capabilities = Capabilities(own_feedback=("uplink", "downlink"))
    num_held: ClassVar[int] = 1
    """Number of trees that clients keep, x among them."""

    def begin(self, state: State, received: Message, ctx: Context) -> GradientCarry:
        return self.start(received["step"].decode() if "step" in received else ctx.initial)

    @abstractmethod
    def steps(self, server: Any, ctx: Context) -> Sequence[Packet]:
        """The round's step, made by `encoded`: the packet that decodes to the new x, then others that only the server
        reads."""

    def encoded(self, step: Tree, ctx: Context, *held: tuple[Tree, float]) -> Sequence[Packet]:
        """For each (tree, factor) of `held`, a packet of C_down(step) that decodes to tree + factor * C_down(step).

        Every call in a round draws the same random numbers, and so gives the same packets.
        """
        packet, _ = ctx.downlink.encode(step, {}, LazyGenerator(*ctx.draws.key).generator)
        return [
            added_to(base, packet, factor * contracting(ctx.downlink, step), self.num_held) for base, factor in held
        ]

    def download(self, server: ModelState, ctx: Context) -> Download:
        return {"step": self.steps(server, ctx)[0]} if ctx.round else {}


def soft_threshold(x: Tree, threshold: float) -> Tree:
    """The proximal point of threshold * ||x||_1: entries move towards 0 by `threshold` and stop there."""
    return tree.map(lambda tensor: torch.nn.functional.softshrink(tensor, threshold), x) if threshold else x


def stated_omega(ctx: Context, wanted: str) -> float:
    """omega of the uplink on the whole model. Raises ValueError, naming the setting `wanted`, if it states none."""
    omega = ctx.uplink.omega(tree.num_entries(ctx.initial))
    if omega is None:
        raise RayflError(
            f"{wanted} has no default with uplink {ctx.uplink.name!r}, which states no omega; set method.{wanted} "
            "yourself, or choose an unbiased uplink, for example dense"
        )
    return omega


def damping(alpha: float | None, ctx: Context) -> float:
    """alpha, by default 1 / (1 + omega) of the uplink. Raises ValueError if that is unknown."""
    return 1 / (1 + stated_omega(ctx, "alpha")) if alpha is None else alpha


def shifted(shift: Tree, arrived: Aggregate, alpha: float, ctx: Context) -> Tree:
    """The server's new shift, h + alpha sum_i p_i D_i over the clients i that delivered.

    p_i is the weight of i among all n clients, so that h stays sum_i p_i h_i. If p_i is not 1 / n, all clients must
    have delivered (`ShiftedGradient`).
    """
    return tree.add(shift, arrived.result, alpha * arrived.count / ctx.num_clients) if arrived.count else shift

"""ADIANA: Li, Kovalev, Qian, Richtarik, Acceleration for Compressed Gradient Descent in Distributed and Federated
Optimization, ICML 2020, Algorithm 2; also in WEN Hao's slides. For strongly convex objectives.

x = theta1 z + theta2 w + (1 - theta1 - theta2) y. Client: sends Q(grad f_i(x) - h_i) and D_i = Q(grad f_i(w) - h_i),
h_i <- h_i + alpha D_i. Server: g = h + the mean of the first, h <- h + alpha mean_i D_i,
y' = prox_{eta R}(x - eta g) with R = l1 ||x||_1, z <- beta z + (1 - beta) x + (gamma / eta) (y' - x), w <- the old y
with probability p (the round's shared coin), y <- y'. The slides garble y and gamma / eta in these lines.

- Of mu, L = max_i L_i, n clients and omega (each may be given instead): alpha = 1 / (1 + omega),
  p = min(1, max(1, sqrt(n / (32 omega)) - 1) / (2 (1 + omega))),
  eta = min(1 / (2L), n / (64 omega (2p (omega + 1) + 1)^2 L)), theta1 = min(1/4, sqrt(eta mu / p)), theta2 = 1/2,
  gamma = eta / (2 (theta1 + eta mu)), beta = 1 - gamma mu; omega = 0 gives p = 1 and eta = 1 / (2L).
- L and mu are those of the data and the model; like a default learning rate, the defaults need not fit yours.
- A client's round is two gradients, at x and at w on the same examples: the whole train split (batch_size = 0), or one
  minibatch. It downloads both points, 8P bytes, and sends 2 C(P). The model that is evaluated is y.
- If clients are absent, the mean in g is over those who delivered, and h moves by alpha times the sum of their D_i
  over n, so that h = mean_i h_i. Weights by examples need all clients in every round.
"""

from math import sqrt
from typing import NamedTuple, TypedDict

from pydantic import Field, model_validator

from rayfl.methods.base import (
    Batch,
    Capabilities,
    Context,
    Download,
    Finished,
    Message,
    RayflError,
    Received,
    Stage,
    Tree,
    WeightedMean,
    compressed,
    tree,
)
from rayfl.methods.shared.distributed_gradient import (
    GradientCarry,
    GradientWork,
    ShiftedGradient,
    ShiftState,
    damping,
    shifted,
    soft_threshold,
    stated_omega,
)


class ADIANAHyper(GradientWork):
    """Hyper-parameters of ADIANA; those that are left out follow from mu, L, n and the uplink's omega."""

    smoothness: float = Field(default=10.0, gt=0, description="L, the largest curvature of any client's objective")
    strong_convexity: float = Field(default=0.01, gt=0, description="mu, at least l2 where the loss is convex")
    alpha: float | None = Field(default=None, gt=0, le=1, description="step of the shifts")
    refresh_probability: float | None = Field(default=None, gt=0, le=1, description="chance that w becomes y, p")
    eta: float | None = Field(default=None, gt=0, description="step size of y")
    theta1: float | None = Field(default=None, gt=0, le=1, description="share of z in x")
    theta2: float = Field(default=0.5, ge=0, le=1, description="share of w in x")
    gamma: float | None = Field(default=None, gt=0, description="step size of z")
    beta: float | None = Field(default=None, ge=0, le=1, description="share of the old z in z")
    l1: float = Field(default=0.0, ge=0, description="l1 ||x||_1 is part of the objective, by its proximal step")

    def unused(self) -> dict[str, str]:
        derived = {"smoothness": (self.eta,), "strong_convexity": (self.theta1, self.gamma, self.beta)}
        reason = "beside numbers that would follow from it"
        return {**super().unused(), **{name: reason for name, values in derived.items() if None not in values}}

    @model_validator(mode="after")
    def _consistent(self) -> "ADIANAHyper":
        if self.strong_convexity > self.smoothness:
            raise RayflError(
                f"={self.strong_convexity} is above smoothness={self.smoothness}; mu is at most L",
                key=("strong_convexity",),
            )
        if (self.theta1 or 0.0) + self.theta2 > 1:
            raise RayflError(
                f"={self.theta1} and theta2={self.theta2} are shares; their sum must be at most 1", key=("theta1",)
            )
        return self


class Parameters(NamedTuple):
    """Every number of the algorithm, under its symbol."""

    alpha: float
    p: float
    eta: float
    theta1: float
    theta2: float
    gamma: float
    beta: float


class ADIANACarry(GradientCarry):
    """A client's carry."""

    anchor: Tree  # w
    anchored: Tree  # the gradient at w


class ADIANAServer(TypedDict):
    """Server state."""

    y: Tree
    z: Tree
    w: Tree
    shift: Tree  # h


class ADIANA(ShiftedGradient):
    """Client: two gradients, at x and at w. Server: x, y, z and w."""

    hyper: ADIANAHyper
    paper = "Li et al., ICML 2020"
    capabilities = Capabilities(on_device=True)
    gather = {"gradient": WeightedMean(), "shift": WeightedMean()}

    def parameters(self, ctx: Context) -> Parameters:
        """The numbers of this run. Raises ValueError if one follows from an omega that the uplink does not state."""
        hyper, n = self.hyper, ctx.num_clients
        mu, smoothness = hyper.strong_convexity, hyper.smoothness
        p, eta, theta1 = hyper.refresh_probability, hyper.eta, hyper.theta1
        if p is None:
            omega = stated_omega(ctx, "refresh_probability")
            p = min(1.0, max(1.0, sqrt(n / (32 * omega)) - 1) / (2 * (1 + omega))) if omega else 1.0
        if eta is None:
            omega, eta = stated_omega(ctx, "eta"), 1 / (2 * smoothness)
            if omega:
                eta = min(eta, n / (64 * omega * (2 * p * (omega + 1) + 1) ** 2 * smoothness))
        if theta1 is None:
            theta1 = min(0.25, sqrt(eta * mu / p))
        gamma = eta / (2 * (theta1 + eta * mu)) if hyper.gamma is None else hyper.gamma
        beta = 1 - gamma * mu if hyper.beta is None else hyper.beta
        return Parameters(damping(hyper.alpha, ctx), p, eta, theta1, hyper.theta2, gamma, beta)

    def begin(self, state: ShiftState, received: Message, ctx: Context) -> ADIANACarry:
        carry = super().begin(state, received, ctx)
        return {**carry, "anchor": received["anchor"].decode(), "anchored": tree.zeros_like(carry["params"])}

    def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
        # At x and at w.
        return 2.0

    def step(self, carry: ADIANACarry, batch: Batch, *, stage: Stage) -> ADIANACarry:
        _, anchored = self.value_and_grad(carry["anchor"], batch)
        return {**super().step(carry, batch, stage=stage), "anchored": anchored}

    def finish(self, state: ShiftState, carry: ADIANACarry, ctx: Context) -> Finished:
        differences = {
            "gradient": tree.sub(carry["gradient"], state["shift"]),
            "shift": tree.sub(carry["anchored"], state["shift"]),
        }
        message, state = compressed(state, differences, ctx)
        shift = tree.add(state["shift"], message["shift"].decode_beside(state["shift"]), damping(self.hyper.alpha, ctx))
        return self.finished({**state, "shift": shift}, message, carry, ctx)

    def init_server(self, params: Tree) -> ADIANAServer:
        return {"y": params, "z": params, "w": params, "shift": tree.zeros_like(params)}

    def model(self, server: ADIANAServer) -> Tree:
        return server["y"]

    def point(self, server: ADIANAServer, ctx: Context) -> Tree:
        """x, the point of the gradient."""
        numbers = self.parameters(ctx)
        x = tree.scale(server["y"], 1 - numbers.theta1 - numbers.theta2)
        return tree.add(tree.add(x, server["z"], numbers.theta1), server["w"], numbers.theta2)

    def download(self, server: ADIANAServer, ctx: Context) -> Download:
        return {"model": self.point(server, ctx), "anchor": server["w"]}

    def update(self, server: ADIANAServer, received: Received, ctx: Context) -> ADIANAServer:
        numbers, x = self.parameters(ctx), self.point(server, ctx)
        gradient = tree.add(server["shift"], received["gradient"].result)
        shift = shifted(server["shift"], received["shift"], numbers.alpha, ctx)
        y = soft_threshold(tree.add(x, gradient, -numbers.eta), numbers.eta * self.hyper.l1)
        z = tree.add(tree.scale(server["z"], numbers.beta), x, 1 - numbers.beta)
        z = tree.add(z, tree.sub(y, x), numbers.gamma / numbers.eta)
        return {"y": y, "z": z, "w": server["y"] if ctx.plan.coin < numbers.p else server["w"], "shift": shift}

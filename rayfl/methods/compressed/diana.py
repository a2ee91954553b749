"""DIANA: Mishchenko, Gorbunov, Takac, Richtarik, Distributed Learning with Compressed Gradient Differences, arXiv
1901.09269, 2019, Algorithm 1; also in WEN Hao's slides.

Client: D_i = Q(g_i - h_i), h_i <- h_i + alpha D_i. Server: g = h + mean_i D_i, h <- h + alpha mean_i D_i,
v <- beta v + g, x <- prox_{gamma R}(x - gamma v) with R = l1 ||x||_1. The shifts h_i learn the clients' gradients at
the minimiser, so that the compressed differences vanish there, and h = mean_i h_i always.

- The slides print v^0 = grad f(x^0) beside v = beta v + g; here v = 0 before round 0.
- alpha is 1 / (1 + omega) unless given; an uplink without omega demands it. gamma about 1 / (L (1 + 6 omega / n)) with
  L = max_i L_i.
- h_i = 0 at the start, or with start = "gradient" the gradient of round 0, which is then sent uncompressed.
- A client's round is one gradient, on its whole train split (batch_size = 0) or on one minibatch.
- If clients are absent, g = h + the mean of the D_i that arrived, and h moves by alpha times their sum over n, so
  that it stays the mean over all n; the h_i of the absent clients do not change. Weights by examples need all clients
  in every round.
"""

from typing import Literal

from rayfl.methods.base import (
    Capabilities,
    Context,
    Download,
    Field,
    Finished,
    Message,
    Received,
    Tree,
    WeightedMean,
    compressed,
    tree,
    uncompressed,
)
from rayfl.methods.shared.distributed_gradient import (
    GradientCarry,
    GradientStep,
    ShiftedGradient,
    ShiftedServer,
    ShiftState,
    damping,
    shifted,
    soft_threshold,
)


class DIANAHyper(GradientStep):
    """Hyper-parameters of DIANA."""

    alpha: float | None = Field(default=None, gt=0, le=1, description="step of the shifts; default: 1 / (1 + omega)")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="heavy-ball momentum of the server, beta")
    l1: float = Field(default=0.0, ge=0, description="l1 ||x||_1 is part of the objective, by its proximal step")
    start: Literal["zero", "gradient"] = Field(default="zero", description="h_i before round 0: 0, or its gradient")


class DIANAServer(ShiftedServer):
    """Server state, beside x and h."""

    velocity: Tree  # v


class DIANA(ShiftedGradient):
    """Clients send the compressed differences of their gradients to their shifts."""

    hyper: DIANAHyper
    paper = "Mishchenko et al., arXiv 1901.09269"
    capabilities = Capabilities(on_device=True)
    gather = {"gradient": WeightedMean()}

    def alpha(self, ctx: Context) -> float:
        """The step of the shifts in this round. Raises ValueError if it must be given and is not."""
        return 1.0 if self.is_exact(ctx) else damping(self.hyper.alpha, ctx)

    def is_exact(self, ctx: Context) -> bool:
        """Whether this round sends gradients uncompressed, which become the shifts."""
        return self.hyper.start == "gradient" and ctx.round == 0

    def finish(self, state: ShiftState, carry: GradientCarry, ctx: Context) -> Finished:
        difference = tree.sub(carry["gradient"], state["shift"])
        if self.is_exact(ctx):
            message: Message = uncompressed({"gradient": difference}, ctx)
        else:
            message, state = compressed(state, {"gradient": difference}, ctx)
        shift = tree.add(state["shift"], message["gradient"].decode_beside(difference), self.alpha(ctx))
        return self.finished({**state, "shift": shift}, message, carry, ctx)

    def init_server(self, params: Tree) -> DIANAServer:
        return {"params": params, "shift": tree.zeros_like(params), "velocity": tree.zeros_like(params)}

    def download(self, server: DIANAServer, ctx: Context) -> Download:
        # If alpha must be given and is not, this raises before any client works.
        self.alpha(ctx)
        return super().download(server, ctx)

    def update(self, server: DIANAServer, received: Received, ctx: Context) -> DIANAServer:
        arrived = received["gradient"]
        gradient = tree.add(server["shift"], arrived.result)
        shift = shifted(server["shift"], arrived, self.alpha(ctx), ctx)
        velocity = tree.add(gradient, server["velocity"], self.hyper.momentum)
        lr = self.hyper.rate(ctx.round)
        params = soft_threshold(tree.add(server["params"], velocity, -lr), lr * self.hyper.l1)
        return {"params": params, "shift": shift, "velocity": velocity}

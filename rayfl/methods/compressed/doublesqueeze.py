"""DoubleSqueeze: Tang, Lian, Yu, Zhang, Liu, DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-pass
Error-Compensated Compression, ICML 2019, Algorithm 1.

Client: v_i = gamma grad f_i(x) + e_i, c_i = C(v_i), e_i <- v_i - c_i; it sends c_i. Server: v = e + mean_i c_i,
c = C_down(v), e <- v - c; it sends c. All: x <- x - c. No model is sent. In every round x - e - mean_i e_i changes by
-gamma mean_i grad f_i(x), whatever the compressors do.

- The paper compresses gradients and steps by gamma c. Here gamma is inside C, so that the errors stay in units of x
  when gamma changes. If C(a v) = a C(v) and gamma is constant, both are the same.
- C is the experiment's uplink, C_down its downlink. `feedback` is refused around both, and so is any C_down with a
  memory. Receivers divide the output of an unbiased one by 1 + omega, which makes it a contraction; clients then cannot
  have ratios of their own (`clients.retention_ratio`).
- Round t begins with the c made of the uploads of round t - 1; in round 0 the server sends nothing. The evaluated model
  is the x at which the round's gradients were computed.
- A client's round is one gradient, on its whole train split (batch_size = 0) or on one minibatch. For local steps take
  `fedavg` with `feedback` around both compressors: the same equations, with x - y_i in place of gamma grad f_i(x).
- If clients are absent, their e_i stay, the mean is over those who delivered, and the identity above does not hold. A
  lost upload leaves e_i as it was. If nothing arrived, the server takes v = e. A client that missed rounds gets every c
  that it missed, or x (4 bytes per entry), whichever is smaller, and is billed for it (the paper does not say).
"""

from collections.abc import Sequence

from rayfl.methods.base import (
    Capabilities,
    Context,
    Delivered,
    Finished,
    FirstDraws,
    Metrics,
    ModelState,
    Packet,
    Received,
    Traits,
    Tree,
    UplinkMemory,
    WeightedMean,
    compressed,
    contracting,
    tree,
)
from rayfl.methods.shared.distributed_gradient import GradientCarry, GradientStep, SteppingServer


class DoubleSqueezeState(UplinkMemory):
    """Client state."""

    error: Tree  # e_i


class DoubleSqueezeServer(ModelState):
    """Server state, beside x."""

    step: Tree  # v; the server sends C_down(v) next


class DoubleSqueeze(SteppingServer):
    """Clients keep errors e_i and the server e; each sends the compressed sum of its error and its new step."""

    hyper: GradientStep
    paper = "Tang et al., ICML 2019"
    capabilities = Capabilities(on_device=True, needs_one_omega=True)
    gather = {"delta": WeightedMean()}

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> DoubleSqueezeState:
        return {"error": tree.zeros_like(params)}

    def finish(self, state: DoubleSqueezeState, carry: GradientCarry, ctx: Context) -> Finished:
        step = tree.add(state["error"], carry["gradient"], self.hyper.rate(ctx.round))
        message, state = compressed(state, {"delta": step}, ctx)
        error = tree.add(step, message["delta"].decode_beside(step), -contracting(ctx.uplink, step))
        return self.finished({**state, "error": error}, message, carry, ctx)

    def init_server(self, params: Tree) -> DoubleSqueezeServer:
        return {"params": params, "step": tree.zeros_like(params)}

    def steps(self, server: DoubleSqueezeServer, ctx: Context) -> Sequence[Packet]:
        """c, as packets that decode to the new x and to the new e."""
        return self.encoded(server["step"], ctx, (server["params"], -1.0), (server["step"], -1.0))

    def server_update(
        self, server: DoubleSqueezeServer, received: Received, delivered: Delivered, ctx: Context
    ) -> tuple[DoubleSqueezeServer, Metrics]:
        x, error = (packet.decode() for packet in self.steps(server, ctx))
        arrived = received["delta"].result or tree.zeros_like(error)
        return {"params": x, "step": tree.add(error, arrived, contracting(ctx.uplink, error))}, {}

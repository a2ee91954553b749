"""DoubleSqueeze: Tang, Lian, Yu, Zhang, Liu, DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-pass
Error-Compensated Compression, ICML 2019, Algorithm 1.

Client: v_i = gamma grad f_i(x) + e_i, c_i = C(v_i), e_i <- v_i - c_i, up c_i. Server: v = e + mean_i c_i,
c = C_down(v), e <- v - c, down c; everybody: x <- x - c. No model goes down. x - e - mean_i e_i moves by
-gamma mean_i grad f_i(x) a round, whatever the compressors do.

- The paper compresses gradients and steps by gamma c. Here gamma is inside, so that the errors stay parts of x when it
  changes; where C(a v) = a C(v) that is the same at a constant gamma.
- C is the experiment's uplink, C_down its downlink; `feedback` is refused around both, and any memory in C_down. An
  unbiased one is divided by 1 + omega by who receives it, which makes it a contraction; clients then cannot have shares
  (`clients.retention_ratio`) of their own.
- Round t begins with the c of the uploads before it; nothing goes down in round 0. The judged model is x, at which the
  gradients of the round were computed.
- A client's round is one gradient, on its whole train split (batch_size = 0) or on one minibatch. For local steps take
  `fedavg` with `feedback` around both compressors: the same equations, with x - y_i in place of gamma grad f_i(x).
- Where clients are away, their e_i stay, the mean is over those who delivered, and the identity above does not hold. A
  lost upload leaves e_i as it was. The server goes on: where nothing arrived, v = e. A client that missed rounds gets
  all c that it missed (the paper is silent), or x (4 bytes an entry), whichever is smaller, and is billed for it.
"""

from collections.abc import Sequence

from rayfl import tree
from rayfl.methods.base import (
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
)
from rayfl.methods.shared.distributed_gradient import GradientCarry, GradientStep, SteppingServer


class DoubleSqueezeState(UplinkMemory):
    """Client state."""

    error: Tree  # e_i


class DoubleSqueezeServer(ModelState):
    """Server state, beside x."""

    step: Tree  # v, of which C_down(v) goes down next


class DoubleSqueeze(SteppingServer, on_device=True):
    """Errors e_i and e at both ends; both send what they compress of errors and news together."""

    hyper: GradientStep
    paper = "Tang et al., ICML 2019"
    needs_one_omega = True
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

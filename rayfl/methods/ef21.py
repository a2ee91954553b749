"""EF21: Richtarik, Sokolov, Fatkhullin, EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
Feedback, NeurIPS 2021, Algorithm 2. For contractive compressors (top-k), which keep DCGD from converging.

Client: c_i = C(grad f_i(x) - h_i), h_i <- h_i + c_i. Server: G <- G + mean_i c_i, x <- x - gamma G. The h_i follow the
clients' gradients, which may differ at the minimiser: G goes to 0 there. G = mean_i h_i always.

- C is the experiment's uplink, `topk` with a keep_ratio of 0.05 for example; without compression this is gradient
  descent. `feedback` is refused: what C leaves out is in the next difference already.
- C with ||C(v) - v||^2 <= (1 - delta) ||v||^2; an unbiased one is divided by 1 + omega at both ends, which gives
  delta = 1 / (1 + omega), and no client may then have a share (`clients.retention_ratio`) of its own.
- With theta = 1 - sqrt(1 - delta), b = (1 - delta) / theta and Lt^2 = mean_i L_i^2, gamma is at most
  1 / (L + Lt sqrt(b / theta)), about delta / (2 L); under strong convexity also at most theta / (2 mu), with 2 b under
  the root. Then f - f* + gamma / theta mean_i ||h_i - grad f_i||^2 falls by 1 - gamma mu a round.
- h_i = 0 before round 0, so that the first h_i is C(grad f_i(x^0)), as the paper begins.
- A client's round is one gradient, on its whole train split (batch_size = 0) or on one minibatch, whose noise stays.
- Where clients are away, G moves by the sum of the c_i that arrived over n, so that it stays the mean over all n; the
  h_i of the others stay (EF21-PP in Fatkhullin et al., "EF21 with Bells & Whistles"). A lost upload leaves h_i as it
  was. A round in which nothing arrived moves nothing. Weights by samples need everyone in every round.
"""

from rayfl import tree
from rayfl.methods.base import Context, Finished, Received, Tree, WeightedMean, compressed, contracting
from rayfl.methods.shared.distributed_gradient import (
    GradientCarry,
    GradientStep,
    ShiftedGradient,
    ShiftedServer,
    ShiftState,
    shifted,
)


class EF21(ShiftedGradient, on_device=True):
    """Clients send the compressed differences of their gradients to their shifts, which move by all of them."""

    hyper: GradientStep
    paper = "Richtarik et al., NeurIPS 2021"
    own_feedback = ("uplink",)
    gather = {"gradient": WeightedMean()}

    def finish(self, state: ShiftState, carry: GradientCarry, ctx: Context) -> Finished:
        difference = tree.sub(carry["gradient"], state["shift"])
        message, state = compressed(state, {"gradient": difference}, ctx)
        sent = message["gradient"].decode_beside(difference)
        shift = tree.add(state["shift"], sent, contracting(ctx.uplink, difference))
        return self.finished({**state, "shift": shift}, message, carry, ctx)

    def init_server(self, params: Tree) -> ShiftedServer:
        return {"params": params, "shift": tree.zeros_like(params)}

    def update(self, server: ShiftedServer, received: Received, ctx: Context) -> ShiftedServer:
        shift = shifted(server["shift"], received["gradient"], contracting(ctx.uplink, server["shift"]), ctx)
        return {"params": tree.add(server["params"], shift, -self.hyper.rate(ctx.round)), "shift": shift}

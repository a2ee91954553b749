"""EF21: Richtarik, Sokolov, Fatkhullin, EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
Feedback, NeurIPS 2021, Algorithm 2. For contractive compressors such as top-k, with which DCGD does not converge.

Client: c_i = C(grad f_i(x) - h_i), h_i <- h_i + c_i. Server: G <- G + mean_i c_i, x <- x - gamma G. Each h_i approaches
its client's gradient, which may differ from 0 at the minimiser; G, which is always mean_i h_i, goes to 0 there.

- C is the experiment's uplink, `topk` with a keep_ratio of 0.05 for example; without compression this is gradient
  descent. `feedback` is refused, because the next difference already contains what C left out.
- C must have E||C(v) - v||^2 <= (1 - delta) ||v||^2. An unbiased C is divided by 1 + omega at both ends, which gives
  delta = 1 / (1 + omega); clients then cannot have ratios of their own (`clients.retention_ratio`).
- With theta = 1 - sqrt(1 - delta), b = (1 - delta) / theta and Lt^2 = mean_i L_i^2, gamma is at most
  1 / (L + Lt sqrt(b / theta)), about delta / (2 L). Under strong convexity it is at most 1 / (L + Lt sqrt(2 b / theta))
  and theta / (2 mu), and f - f* + gamma / theta mean_i ||h_i - grad f_i||^2 is multiplied by at most 1 - gamma mu
  per round.
- h_i = 0 before round 0, so the first h_i is C(grad f_i(x^0)), as in the paper.
- A client's round is one gradient, on its whole train split (batch_size = 0) or on one minibatch. The noise of
  minibatches does not vanish.
- If clients are absent, G moves by the sum of the c_i that arrived, divided by n, and so stays the mean over all n; the
  h_i of the others stay (EF21-PP in Fatkhullin et al., "EF21 with Bells & Whistles"). A lost upload leaves h_i as it
  was. A round in which nothing arrived changes nothing. `weighting="samples"` needs all clients in every round.
"""

from rayfl.methods.base import (
    Capabilities,
    Context,
    Finished,
    Received,
    Tree,
    WeightedMean,
    compressed,
    contracting,
    tree,
)
from rayfl.methods.shared.distributed_gradient import (
    GradientCarry,
    GradientStep,
    ShiftedGradient,
    ShiftedServer,
    ShiftState,
    shifted,
)


class EF21(ShiftedGradient):
    """Clients send the compressed difference of gradient and shift, C(grad f_i(x) - h_i)."""

    hyper: GradientStep
    paper = "Richtarik et al., NeurIPS 2021"
    capabilities = Capabilities(on_device=True, own_feedback=("uplink",))
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

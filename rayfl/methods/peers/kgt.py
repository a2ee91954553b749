"""K-GT: Liu, Lin, Koloskova, Stich, Decentralized Gradient Tracking with Local Steps, Optimization Methods and Software
2024, Algorithm 1.

Peer i keeps its model x_i and a correction c_i. A round: K steps y <- y - eta (g_i(y) + c_i) from y = x_i;
delta_i = x_i - y and z_i = delta_i / (K eta), the mean corrected gradient; both go to the neighbours, and
x_i <- sum_j W_ij (x_j - eta_s delta_j), c_i <- c_i + sum_j W_ij z_j - z_i.

- The sum of the c_i stays 0. With K = 1 and eta_s = 1 it is `dsgt`. The point with all x_i = x* and c_i = -grad f_i(x*)
  is a fixed point: with gradients of the whole train split (batch_size = 0) K-GT converges to x* with a constant eta
  and unlike data, where D-PSGD with local steps does not.
- c_i begins at 0. In the theory it begins at the difference of the mean gradient and the peer's, which no peer knows.
- Steps are plain SGD; weight decay is part of f_i. With `epochs` peers may take unequal numbers of steps, and each
  divides by its own.
- W is doubly stochastic; it may change from round to round.
- A peer that is absent from the exchange keeps c_i and continues from x_i - eta_s delta_i; the sum of the c_i is kept.
- A message has two trees, as large as two models. Compressors are refused. `led` sends one tree.
"""

from typing import NotRequired

from rayfl.methods.base import Capabilities, Context, Field, Finished, Received, Tree, WeightedMean, tree
from rayfl.methods.shared.corrected_steps import CorrectedCarry, CorrectedState, CorrectedSteps, CorrectedWork


class KGTHyper(CorrectedWork):
    """Hyper-parameters of K-GT; its mixing weights are the topology's."""

    mixed_lr: float = Field(default=1.0, gt=0, description="factor of a round's progress in what is mixed, eta_s")


class KGTState(CorrectedState):
    """A peer's state."""

    progress: NotRequired[Tree]  # between training and exchange, z_i


class KGT(CorrectedSteps):
    """A peer takes corrected steps, and mixes models and mean corrected gradients."""

    hyper: KGTHyper
    paper = "Liu et al., Optim. Methods Softw. 2024"
    capabilities = Capabilities(on_device=True, needs_weights="doubly")
    gather = {"model": WeightedMean(), "tracker": WeightedMean()}

    def finish(self, state: CorrectedState, carry: CorrectedCarry, ctx: Context) -> Finished:
        delta = self.progress(carry)
        params = tree.add(state["params"], delta, -self.hyper.mixed_lr)
        # Without a step there is no progress either.
        num_steps = max(1, sum(work.num_steps for work in ctx.work.values()))
        tracker = tree.scale(delta, 1.0 / (num_steps * self.hyper.rate(ctx.round)))
        new: KGTState = {"params": params, "correction": state["correction"], "progress": tracker}
        message = {"model": tree.sub(params, ctx.initial), "tracker": tracker}
        return Finished(new, message, 1.0, self.train_loss(carry, ctx))

    def mix(self, state: KGTState, received: Received, ctx: Context) -> CorrectedState:
        params, correction, progress = state["params"], state["correction"], state.get("progress")
        if received and progress is not None:
            params = tree.add(received["model"].result, ctx.initial)
            correction = tree.add(correction, tree.sub(received["tracker"].result, progress))
        return {"params": params, "correction": correction}

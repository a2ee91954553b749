"""DSGT, gradient tracking: Pu, Nedic, Distributed Stochastic Gradient Tracking Methods, Mathematical Programming 2021;
Koloskova, Lin, Stich, An Improved Analysis of Gradient Tracking for Decentralized Machine Learning, NeurIPS 2021.

Peer i keeps its model x_i and v_i, which tracks the mean gradient. A round, with u_i the gradient of one batch at x_i:
x_i <- sum_j W_ij (x_j - eta v_j), and v_i <- sum_j W_ij v_j + (the u_i of the next round) - u_i. In round 0 v_i = u_i.

- The mean of all v_i is the mean of all u_i, so the mean of the models moves by the mean gradient. The point with all
  x_i = x* and v_i = 0 is a fixed point, although the gradients of single peers are not 0 there: with gradients of the
  whole train split (batch_size = 0) DSGT converges to x* with a constant eta and unlike data.
- The state holds a_i = v_i - u_i, so that a round takes one gradient and one exchange. u_i is stored, not taken again
  on the next batch, which keeps the mean exact for minibatches, too.
- `order="mix_first"`: x_i <- sum_j W_ij x_j - eta v_i (Qu, Li, IEEE TCNS 2018). Both orders converge to x*.
- W is doubly stochastic; it may be directed, and change from round to round. The theory's eta is of the order of the
  squared spectral gap of W over L.
- A peer that is absent from the exchange takes its step, and keeps a_i; all means are kept.
- A message has two trees, x_i - eta v_i and v_i. Compressors are refused; `beer` is the form for them.
- Peers take one step per round; `kgt` and `led` are forms with local steps.
"""

from typing import Literal, NotRequired

from rayfl.methods.base import (
    Capabilities,
    Context,
    Field,
    Finished,
    FirstDraws,
    ModelState,
    PeerHalf,
    Received,
    Traits,
    Tree,
    WeightedMean,
    tree,
)
from rayfl.methods.shared.distributed_gradient import GradientCarry, OneBatch, OneGradient
from rayfl.methods.shared.local_training import LearningRate


class DSGTHyper(OneBatch, LearningRate):
    """Hyper-parameters of gradient tracking; its mixing weights are the topology's."""

    lr: float = Field(default=0.01, gt=0, description="step size, eta")
    order: Literal["step_first", "mix_first"] = Field(
        default="step_first",
        description="step_first: average the models after the step; mix_first: step from the average",
    )


class DSGTState(ModelState):
    """A peer's state."""

    drift: Tree  # a_i = v_i - u_i
    gradient: NotRequired[Tree]  # between step and exchange, u_i


class DSGT(OneGradient, PeerHalf):
    """A peer steps along its estimate of the mean gradient, and mixes models and estimates."""

    hyper: DSGTHyper
    paper = "Pu, Nedic, Math. Program. 2021"
    capabilities = Capabilities(
        on_device=True,
        personalized=True,
        evaluated_after_training=False,
        own_compression=True,
        needs_weights="doubly",
    )
    gather = {"model": WeightedMean(), "tracker": WeightedMean()}

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> DSGTState:
        return {"params": params, "drift": tree.zeros_like(params)}

    def finish(self, state: DSGTState, carry: GradientCarry, ctx: Context) -> Finished:
        tracker = tree.add(state["drift"], carry["gradient"])
        stepped = tree.add(state["params"], tracker, -self.hyper.rate(ctx.round))
        sent = stepped if self.hyper.order == "step_first" else state["params"]
        new: DSGTState = {"params": stepped, "drift": state["drift"], "gradient": carry["gradient"]}
        message = {"model": tree.sub(sent, ctx.initial), "tracker": tracker}
        return Finished(new, message, 1.0, {"train/loss": float(carry["loss"])})

    def mix(self, state: DSGTState, received: Received, ctx: Context) -> DSGTState:
        params, drift, gradient = state["params"], state["drift"], state.get("gradient")
        if received and gradient is not None:
            mixed = tree.add(received["model"].result, ctx.initial)
            if self.hyper.order == "mix_first":
                mixed = tree.add(mixed, tree.add(drift, gradient), -self.hyper.rate(ctx.round))
            params, drift = mixed, tree.sub(received["tracker"].result, gradient)
        return {"params": params, "drift": drift}

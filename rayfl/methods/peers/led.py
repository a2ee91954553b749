"""LED, local exact diffusion: Alghunaim, Local Exact-Diffusion for Decentralized Optimization and Learning, IEEE
Transactions on Automatic Control 2024.

Peer i keeps its model x_i and a correction c_i. A round: K steps phi <- phi - eta (g_i(phi) + c_i) from phi = x_i;
x_i <- sum_j W_ij phi_j; c_i <- c_i + (phi_i - x_i) / (K eta).

- The paper has y_i = eta c_i / beta with beta = 1 / K. For a constant eta these are the same iterates; c_i keeps the
  fixed point where it is when eta changes.
- The sum of the c_i stays 0. The point with all x_i = x* and c_i = -grad f_i(x*) is a fixed point: with gradients of
  the whole train split (batch_size = 0) LED converges to x* with a constant eta and unlike data. With K = 1 it is `d2`.
- W is symmetric. A disagreement along an eigenvector of W decays only if the eigenvalue is above -1/3: an even
  ring with weights 1/3 is at the edge, and on a 4 x 4 torus with weights 1/5, with least one -3/5, every eta diverges.
  `lazy=true` takes (I + W) / 2, which has no negative eigenvalues; "auto" does so unless the least eigenvalue is above
  -1/3 + 0.01. On graphs that change that is not enough: two of them in turn, each above -1/3, may diverge. So "auto" is
  lazy there too, where peers may be absent, and with more than 1,000 peers; `lazy=false` is refused in these cases.
- With absent peers the lazy form has converged in all tests, but there is no theorem. An absent peer keeps c_i and
  continues from phi_i.
- Steps are plain SGD; weight decay is part of f_i. All peers divide by the same K, `steps`, also those that take fewer
  steps (`clients.work`): with divisors of their own they would end at the minimiser of another sum of the f_i.
- A message is one tree, phi_i - x^0. Compressors are refused.
"""

from typing import ClassVar, Literal

import scipy

from rayfl.methods.base import (
    Capabilities,
    Context,
    Field,
    Finished,
    RayflError,
    Received,
    WeightedMean,
    tree,
)
from rayfl.methods.shared.corrected_steps import CorrectedCarry, CorrectedState, CorrectedSteps, CorrectedWork
from rayfl.topology.mixing import MOST_PEERS, Exchange, Sparse, least_eigenvalue

LEAST = -1 / 3 + 0.01


class LEDHyper(CorrectedWork):
    """Hyper-parameters of LED; its mixing weights are the topology's."""

    default_steps: ClassVar[int | None] = 5
    steps: int | None = Field(default=None, ge=1, description="local steps per round, K (left out: 5)")
    lazy: bool | Literal["auto"] = Field(
        default="auto", description="mix by (I + W) / 2; auto: if the eigenvalues of W, or changes of it, call for it"
    )

    def unused(self) -> dict[str, str]:
        return {**super().unused(), "epochs": "as LED counts in steps, which all peers divide by"}


class LED(CorrectedSteps):
    """A peer takes corrected steps, and what the exchange takes from its model goes into its correction."""

    hyper: LEDHyper
    paper = "Alghunaim, IEEE TAC 2024"
    capabilities = Capabilities(on_device=True, needs_weights="symmetric")
    gather = {"model": WeightedMean()}

    def mixing(self, weights: Sparse, exchange: Exchange) -> Sparse:
        lazy = self.hyper.lazy
        if lazy is not True:
            why = "" if exchange.steady else "the graph changes, or peers may be absent"
            if not why and weights.shape[0] > MOST_PEERS:
                why = f"no eigenvalues are computed for more than {MOST_PEERS} peers"
            if not why and (least := least_eigenvalue(weights)) <= LEAST:
                why = f"the least eigenvalue of the mixing matrix is {least:.4g}, which must be above {LEAST:.4g}"
            if why and lazy is False:
                raise RayflError(f"method.lazy=false may diverge: {why}; leave it out, or set lazy=true")
            lazy = bool(why)
        if not lazy:
            return weights
        return scipy.sparse.csr_array((weights + scipy.sparse.eye_array(weights.shape[0], format="csr")) / 2)

    def finish(self, state: CorrectedState, carry: CorrectedCarry, ctx: Context) -> Finished:
        params = carry["params"]
        new: CorrectedState = {"params": params, "correction": state["correction"]}
        return Finished(new, {"model": tree.sub(params, ctx.initial)}, 1.0, self.train_loss(carry, ctx))

    def mix(self, state: CorrectedState, received: Received, ctx: Context) -> CorrectedState:
        if not received:
            return state
        assert self.hyper.steps is not None, "default_steps is not"
        params, divisor = tree.add(received["model"].result, ctx.initial), self.hyper.steps * self.hyper.rate(ctx.round)
        given = tree.sub(state["params"], params)
        return {"params": params, "correction": tree.add(state["correction"], given, 1.0 / divisor)}

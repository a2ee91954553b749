"""DCGD: Khirirat, Feyzmahdavian, Johansson, Distributed learning with compressed gradients, arXiv 1806.06573, 2018;
also in WEN Hao's slides, Problems of Personalization in Federated Learning.

x <- prox_{gamma R}(x - gamma mean_i Q(grad f_i(x))) with R = l1 ||x||_1. If the gradients of single clients do not
vanish at the minimiser, x stays in a neighbourhood of it whose size grows with gamma and omega.

- gamma about 1 / (L (1 + omega / n)) with L = max_i L_i; gamma is constant unless lr_decay is below 1.
- A client's round is one gradient, on its whole train split (batch_size = 0) or on one minibatch.
- The mean is over those who delivered, uniform by default. A round in which nothing arrives moves nothing.
"""

from rayfl.methods.base import Capabilities, Context, Field, Finished, ModelState, Received, State, WeightedMean, tree
from rayfl.methods.shared.distributed_gradient import DistributedGradient, GradientCarry, GradientStep, soft_threshold


class DCGDHyper(GradientStep):
    """Hyper-parameters of DCGD."""

    l1: float = Field(default=0.0, ge=0, description="l1 ||x||_1 is part of the objective, by its proximal step")


class DCGD(DistributedGradient):
    """Clients remember nothing except an uplink's own memory, if it has one. Server: x."""

    hyper: DCGDHyper
    paper = "Khirirat et al., arXiv 1806.06573"
    capabilities = Capabilities(on_device=True)
    gather = {"gradient": WeightedMean()}

    def finish(self, state: State, carry: GradientCarry, ctx: Context) -> Finished:
        return self.finished(state, {"gradient": carry["gradient"]}, carry, ctx)

    def update(self, server: ModelState, received: Received, ctx: Context) -> ModelState:
        lr = self.hyper.rate(ctx.round)
        return {
            "params": soft_threshold(tree.add(server["params"], received["gradient"].result, -lr), lr * self.hyper.l1)
        }

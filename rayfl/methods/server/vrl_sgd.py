"""VRL-SGD: Liang, Shen, Liu, Pan, Chen, Cheng, Variance Reduced Local SGD with Lower Communication Complexity, arXiv
1912.12844, 2019, Algorithm 1.

Worker i takes k steps x_i <- x_i - gamma (g_i(x_i) - Delta_i) from the common x. The server averages, x = mean_i x_i,
and every worker moves Delta_i += (x - x_i) / (k gamma), so that Delta_i is how its mean gradient of the round differed
from that of all workers. The sum of the Delta_i stays 0, and x converges to the minimiser of the plain mean of the f_i.

- `warm_up`: round 0 has one step instead of k, VRL-SGD-W, which gives Delta_i a value sooner.
- With all workers and without a warm-up the equations are those of `scaffnew` with fixed `steps`; Scaffnew's theory
  draws the number of steps, and needs all clients.
- In the paper all workers take part. Here x is the mean over those that delivered, and they alone move their Delta_i,
  by the x of their round, which they get in reply: the sum stays 0. A worker that missed an exchange downloads x first.
- All workers have the same k, also in Delta_i if a slow one took fewer steps.
- Steps are plain SGD; weight decay is a part of f_i. Messages are not compressed, because Delta_i needs x_i exactly.
- Experimental: written from the published algorithm as it is known, without the paper's text at hand.
"""

from dataclasses import replace

from rayfl.methods.base import (
    Capabilities,
    Context,
    Field,
    Finished,
    FirstDraws,
    Message,
    ModelState,
    Plan,
    Received,
    Traits,
    Tree,
    WeightedMean,
    tree,
)
from rayfl.methods.shared.local_training import NOT_PLAIN, GradientMethod, LocalCarry, LocalWork
from rayfl.methods.shared.model_server import ExchangedModel, ExchangedModelServer


class VRLSGDHyper(LocalWork):
    """Hyper-parameters of VRL-SGD; lr is gamma."""

    default_steps = 10
    steps: int | None = Field(default=None, ge=1, description="local steps per round, k (10 where it is not given)")
    warm_up: bool = Field(default=False, description="one step in round 0, as in VRL-SGD-W")

    def unused(self) -> dict[str, str]:
        return {
            **super().unused(),
            **dict.fromkeys(NOT_PLAIN, "as VRL-SGD corrects plain SGD steps"),
            "epochs": "as all workers of VRL-SGD take the same number of steps",
        }


class VRLSGDState(ModelState):
    """Client state; "params" are the x_i that it sent, and after the reply the x that it received."""

    deviation: Tree  # Delta_i


class VRLSGDCarry(LocalCarry):
    """A client's carry."""

    deviation: Tree


class VRLSGD(GradientMethod, ExchangedModelServer):
    """Up: x - x_i. Down, in reply: the next x."""

    hyper: VRLSGDHyper
    paper = "Liang et al., arXiv 1912.12844"
    capabilities = Capabilities(on_device=True, own_compression=True)
    gather = {"delta": WeightedMean()}

    def plan(self, round_number: int, coin: float) -> Plan:
        stage = self.hyper.stage(round_number)
        return Plan(stages=(replace(stage, steps=1) if self.hyper.warm_up and round_number == 0 else stage,))

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> VRLSGDState:
        return {"params": params, "deviation": tree.zeros_like(params)}

    def begin(self, state: VRLSGDState, received: Message, ctx: Context) -> VRLSGDCarry:
        return {**super().begin(state, received, ctx), "deviation": state["deviation"]}

    def direction(self, carry: VRLSGDCarry, gradient: Tree) -> Tree:
        return tree.sub(gradient, carry["deviation"])

    def finish(self, state: VRLSGDState, carry: VRLSGDCarry, ctx: Context) -> Finished:
        new: VRLSGDState = {**state, "params": carry["params"]}
        return Finished(new, {"delta": self.delta(carry)}, metrics=self.train_loss(carry, ctx))

    def receive_reply(self, state: VRLSGDState, received: Message, ctx: Context) -> VRLSGDState:
        (stage,), x = ctx.plan.stages, received["model"].decode()
        assert stage.steps is not None, "VRL-SGD has no epochs"
        moved = tree.sub(x, state["params"])
        return {"params": x, "deviation": tree.add(state["deviation"], moved, 1 / (stage.steps * stage.lr))}

    def update(self, server: ExchangedModel, received: Received, ctx: Context) -> ExchangedModel:
        return {
            "params": tree.sub(server["params"], received["delta"].result),
            "exchanges": server["exchanges"] + 1,
        }

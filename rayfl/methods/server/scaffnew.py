"""Scaffnew (ProxSkip for federated learning): Mishchenko, Malinovsky, Stich, Richtarik, ProxSkip: Yes! Local Gradient
Steps Provably Lead to Communication Acceleration! Finally!, ICML 2022, Algorithm 2.

An iteration: y_i = x_i - gamma (g_i(x_i) - h_i); then, with probability p, by a coin that all clients share,
x_i = mean_j y_j and h_i += (p / gamma) (x_i - y_i); otherwise x_i = y_i. The sum of the h_i is 0, and h_i approaches
the gradient of client i at the minimiser of the plain mean of the f_i. So a constant gamma reaches the minimiser,
however unlike the clients are.

- A round is one communication and the iterations before it. Their number K is the same for all clients, and is drawn by
  the round's coin from the geometric distribution of p. `steps` fixes K instead, with p = 1 / K, which no theorem
  covers.
- Up: x - y_i. A client keeps y_i and moves h_i when it gets the next x, so nothing is sent in reply.
- On L-smooth, mu-strongly convex f_i take gamma = 1 / L and p = sqrt(mu / L). An iteration then multiplies
  sum_i ||x_i - x*||^2 + (gamma / p)^2 sum_i ||h_i - grad f_i(x*)||^2 by at most 1 - mu / L on average, and only one in
  sqrt(L / mu) iterations communicates. That needs full gradients (`batch_size = 0`); with minibatches x stays in a
  neighbourhood of x*. p = 1 is gradient descent.
- If the rate changes from round to round, h_i moves with the gamma of the steps that led to y_i.
- Steps are plain SGD; weight decay is a part of f_i.
- If a client missed one communication, the sum of the h_i would differ from 0 for the rest of the run. So settings that
  keep clients or messages away are refused, and so are compressors and wrappers, which change messages.
"""

import math

from rayfl.methods.base import (
    Capabilities,
    Context,
    Field,
    Finished,
    FirstDraws,
    Message,
    ModelState,
    Plan,
    Stage,
    Traits,
    Tree,
    tree,
)
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import NOT_PLAIN, LocalCarry, LocalWork


class ScaffnewHyper(LocalWork):
    """Hyper-parameters of Scaffnew; lr is gamma."""

    p: float = Field(default=0.2, gt=0, le=1, description="probability of a communication after a step")
    steps: int | None = Field(
        default=None, ge=1, description="fixed number of local steps per round, K, instead of a random one; p is 1 / K"
    )

    def default_work(self) -> dict[str, int]:
        return {}

    def unused(self) -> dict[str, str]:
        return {
            **super().unused(),
            **dict.fromkeys(NOT_PLAIN, "as Scaffnew corrects plain SGD steps"),
            "epochs": "as all clients of Scaffnew take the same number of steps",
            **({"p": f"beside steps={self.steps}"} if self.steps else {}),
        }


class ScaffnewState(ModelState):
    """Client state; "params" are the y_i that it sent last."""

    shift: Tree  # h_i, before the update by that communication


class ScaffnewCarry(ScaffnewState, LocalCarry):
    """A client's carry."""


class Scaffnew(FedAvg):
    """FedAvg of all clients, whose local steps follow g_i - h_i. Server: x."""

    hyper: ScaffnewHyper
    paper = "Mishchenko et al., ICML 2022"
    capabilities = Capabilities(on_device=True, own_compression=True, needs_everyone=True)

    def plan(self, round_number: int, coin: float) -> Plan:
        # The coin c, uniform in [0, 1), has K - 1 >= n with probability (1 - p)^n. At p = 1 K is 1.
        steps = self.hyper.steps or 1 + int(math.log(1 - coin) / math.log(max(1 - self.hyper.p, 1e-300)))
        return Plan(
            stages=(Stage(steps=steps, batch_size=self.hyper.batch_size or None, lr=self.hyper.rate(round_number)),)
        )

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> ScaffnewState:
        return {"params": params, "shift": tree.zeros_like(params)}

    def begin(self, state: ScaffnewState, received: Message, ctx: Context) -> ScaffnewCarry:
        carry, p = super().begin(state, received, ctx), 1 / self.hyper.steps if self.hyper.steps else self.hyper.p
        moved, lr = tree.sub(carry["params"], state["params"]), self.hyper.rate(max(0, ctx.round - 1))
        # In round 0 `moved` is 0.
        return {**carry, "shift": tree.add(state["shift"], moved, p / lr)}

    def direction(self, carry: ScaffnewCarry, gradient: Tree) -> Tree:
        return tree.sub(gradient, carry["shift"])

    def finish(self, state: ScaffnewState, carry: ScaffnewCarry, ctx: Context) -> Finished:
        return Finished(
            {"params": carry["params"], "shift": carry["shift"]},
            {"delta": self.delta(carry)},
            metrics=self.train_loss(carry, ctx),
        )

"""FedPD: Zhang et al., FedPD: A Federated Learning Framework with Adaptivity to Non-IID Data, IEEE Transactions on
Signal Processing 2021, Algorithm 1 with Oracle I (SGD).

Client i minimises L_i = f_i(x_i) + <lambda_i, x_i - x0_i> + ||x_i - x0_i||^2 / (2 eta) from its last x_i, then sets
lambda_i += (x_i - x0_i) / eta and x0_i <- x_i + eta lambda_i. With probability 1 - p, by a coin that all share, x0 is
the mean of the x0_i and goes back to all clients in the same round; otherwise nothing is sent and every client
continues from its own x0_i. With an exact oracle lambda_i = -grad f_i(x_i).

- The mean is uniform: the objective is the mean of the f_i. A client sends the difference of x0_i to the x0 that it
  last received, which gives the same mean and can be compressed. All start from the x0 of the seed, which is not sent.
- In the paper all clients take part in every exchange. If clients are absent, the mean is over those who delivered,
  and the others continue from their own x0_i. A client that missed an exchange downloads the x0 of the last one before
  the next exchange, and uses it only as the reference point of its difference.
- With p above 0 clients that differ drift apart between exchanges, and x0 keeps moving around the minimiser.
- For f_i with L-Lipschitz gradients that are not convex take eta about 0.3 / L; 0.5 / L and more can diverge.
"""

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
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry, LocalWork
from rayfl.methods.shared.model_server import ExchangedModel, ExchangedModelServer


class FedPDHyper(LocalWork):
    """Hyper-parameters of FedPD. lr * (L + 1 / eta) below 2 keeps the local steps stable."""

    eta: float = Field(default=0.1, gt=0, description="the penalty on ||x_i - x0_i||^2 is 1 / (2 eta)")
    skip_probability: float = Field(default=0.0, ge=0, lt=1, description="chance of a round without an exchange, p")


class FedPDState(ModelState):
    """Client state, beside x_i."""

    anchor: Tree  # x0_i
    multiplier: Tree  # lambda_i
    received: Tree  # the x0 that it last received


class FedPDCarry(LocalCarry):
    """A client's carry; `received` is the x0 that it last received."""

    anchor: Tree
    multiplier: Tree


class FedPD(GradientMethod, ExchangedModelServer):
    """Client: x_i, x0_i and lambda_i. Server: x0, and the number of exchanges."""

    hyper: FedPDHyper
    paper = "Zhang et al., IEEE TSP 2021"
    capabilities = Capabilities(on_device=True)
    gather = {"delta": WeightedMean()}

    def plan(self, round_number: int, coin: float) -> Plan:
        exchange = coin >= self.hyper.skip_probability
        return Plan(stages=(self.hyper.stage(round_number),), down=exchange, up=exchange)

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> FedPDState:
        return {"params": params, "anchor": params, "multiplier": tree.zeros_like(params), "received": params}

    def begin(self, state: FedPDState, received: Message, ctx: Context) -> FedPDCarry:
        base = received["model"].decode() if received else state["received"]
        carry: LocalCarry = {**self.start(state["params"]), "received": base}
        return {**carry, "anchor": state["anchor"], "multiplier": state["multiplier"]}

    def direction(self, carry: FedPDCarry, gradient: Tree) -> Tree:
        pull = tree.sub(carry["params"], carry["anchor"])
        return tree.add(tree.add(gradient, carry["multiplier"]), pull, 1 / self.hyper.eta)

    def finish(self, state: FedPDState, carry: FedPDCarry, ctx: Context) -> Finished:
        eta, params = self.hyper.eta, carry["params"]
        multiplier = tree.add(state["multiplier"], tree.sub(params, state["anchor"]), 1 / eta)
        anchor = tree.add(params, multiplier, eta)
        delta = tree.sub(carry["received"], anchor)
        state = {**state, "params": params, "anchor": anchor, "multiplier": multiplier}
        return Finished(state, {"delta": delta}, metrics=self.train_loss(carry, ctx))

    def receive_reply(self, state: FedPDState, received: Message, ctx: Context) -> FedPDState:
        anchor = received["model"].decode()
        return {**state, "anchor": anchor, "received": anchor}

    def update(self, server: ExchangedModel, received: Received, ctx: Context) -> ExchangedModel:
        x0 = tree.sub(server["params"], received["delta"].result)
        return {"params": x0, "exchanges": server["exchanges"] + 1}

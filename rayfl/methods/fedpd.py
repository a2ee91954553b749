"""FedPD: Zhang et al., FedPD: A Federated Learning Framework with Adaptivity to Non-IID Data, IEEE Transactions on
Signal Processing 2021, Algorithm 1 with Oracle I (SGD).

Client i minimises L_i = f_i(x_i) + <lambda_i, x_i - x0_i> + ||x_i - x0_i||^2 / (2 eta) from its last x_i, then sets
lambda_i += (x_i - x0_i) / eta and x0_i <- x_i + eta lambda_i. With probability 1 - p, by a coin that all share, x0 is
the mean of the x0_i and goes back to everyone in the same round; else nothing crosses the wire and every client goes
on from its own x0_i. With an exact oracle lambda_i = -grad f_i(x_i).

- The mean is uniform: the objective is the mean of the f_i. On the wire x0_i is its difference to the x0 that the
  client last received, which is the same mean and can be compressed. All start from the x0 of the seed, which is not
  sent.
- Everyone takes part or nobody does. Where clients are away all the same, the mean is over those who delivered, and
  the others go on from their own x0_i. Who missed an exchange gets the x0 of the last one before the next, as what its
  difference is taken from and as nothing else.
- With p above 0 clients that differ drift apart between exchanges, and x0 keeps moving around the minimiser.
- For f_i with L-Lipschitz gradients that are not convex take eta about 0.3 / L; 0.5 / L and more can diverge.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import Field

from rayfl import tree
from rayfl.compress.base import Message
from rayfl.data.batches import Batch
from rayfl.determinism.seeding import FirstDraws
from rayfl.gather import Aggregate, Gather, WeightedMean
from rayfl.methods.base import Carry, Context, Finished, Metrics, Plan, Stage
from rayfl.methods.shared.counted_exchanges import CountedExchanges
from rayfl.methods.shared.local_training import GradientMethod, LocalWork
from rayfl.methods.shared.model_server import ModelServer
from rayfl.population.client import Traits
from rayfl.tree import State, Tree


class FedPDHyper(LocalWork):
    """Hyper-parameters of FedPD. lr * (L + 1 / eta) below 2 keeps the local steps stable."""

    eta: float = Field(default=0.1, gt=0, description="the penalty on ||x_i - x0_i||^2 is 1 / (2 eta)")
    skip_probability: float = Field(default=0.0, ge=0, lt=1, description="chance of a round without an exchange, p")


class FedPD(GradientMethod, CountedExchanges, ModelServer):
    """Client state: x_i, x0_i, lambda_i, and the x0 it last received.

    Server: x0, and how many exchanges there were. Server's memory of a client: how many there had been when the client
    last got x0.
    """

    Hyper: ClassVar[type[FedPDHyper]] = FedPDHyper
    hyper: FedPDHyper
    paper: ClassVar[str] = "Zhang et al., IEEE TSP 2021"
    gather: Mapping[str, Gather] = {"delta": WeightedMean()}

    def plan(self, round: int, coin: float) -> Plan:
        exchange = coin >= self.hyper.skip_probability
        return Plan(stages=(self.hyper.stage(round),), down=exchange, up=exchange)

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> State:
        return {"params": params, "anchor": params, "multiplier": tree.zeros_like(params), "received": params}

    def begin(self, state: State, received: Message, ctx: Context) -> Carry:
        base = received["model"].decode() if received else state["received"]
        carry = {**self.start(state["params"]), "received": base}
        return {**carry, "anchor": state["anchor"], "multiplier": state["multiplier"]}

    def step(self, carry: Carry, batch: Batch, *, stage: Stage) -> Carry:
        loss, gradient = self.task.value_and_grad(carry["params"], batch)
        pull = tree.sub(carry["params"], carry["anchor"])
        gradient = tree.add(tree.add(gradient, carry["multiplier"]), pull, 1 / self.hyper.eta)
        return self.descend(carry, loss, gradient, stage)

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        eta, params = self.hyper.eta, carry["params"]
        multiplier = tree.add(state["multiplier"], tree.sub(params, state["anchor"]), 1 / eta)
        anchor = tree.add(params, multiplier, eta)
        delta = tree.sub(carry["received"], anchor)
        state = {**state, "params": params, "anchor": anchor, "multiplier": multiplier}
        return Finished(state, {"delta": delta}, metrics=self.train_loss(carry, ctx))

    def receive_reply(self, state: State, received: Message, ctx: Context) -> State:
        anchor = received["model"].decode()
        return {**state, "anchor": anchor, "received": anchor}

    def init_server(self, params: Tree) -> State:
        return {"params": params, "exchanges": torch.tensor(0)}

    def current(self, server: State, ctx: Context) -> Tree:
        return server["params"]

    def server_update(
        self, server: State, received: Mapping[str, Aggregate], delivered: Sequence[int], ctx: Context
    ) -> tuple[State, Metrics]:
        delta = received["delta"].result
        if not delta:
            return server, {}
        return {"params": tree.sub(server["params"], delta), "exchanges": server["exchanges"] + 1}, {}

"""SCAFFOLD: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020, option II.

Deltas are received - trained, so the control variate's change is too: c_i - c_i+.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from rayfl import tree
from rayfl.compress.base import Message
from rayfl.data.batches import Batch
from rayfl.gather import Aggregate, Gather, Sum, WeightedMean
from rayfl.methods.base import Carry, Context, Finished, Metrics, ServerHalf, Stage, Traits
from rayfl.training import GradientMethod
from rayfl.tree import State, Tree


class Scaffold(GradientMethod, ServerHalf):
    """Client state: control variate c_i. Server: x and c."""

    paper: ClassVar[str] = "Karimireddy et al., ICML 2020"
    gather: Mapping[str, Gather] = {"delta": WeightedMean(), "control": Sum()}

    def init_client(self, client: Traits, params: Tree, generator: np.random.Generator) -> State:
        return {"control": tree.zeros_like(params)}

    def begin(self, state: State, received: Message | None, ctx: Context) -> Carry:
        assert received is not None
        drift = tree.sub(received["control"].decode(), state["control"])
        return {**self.start(received["model"].decode()), "drift": drift}

    def step(self, carry: Carry, batch: Batch, *, stage: Stage) -> Carry:
        loss, gradient = self.task.value_and_grad(carry["params"], batch)
        return self.descend(carry, loss, tree.add(gradient, carry["drift"]), stage)

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        (stage,) = ctx.plan.stages
        (work,) = ctx.work.values()
        delta = self.progress(carry)
        # c_i+ = c_i - c + delta / (K lr), so c_i - c_i+ = c - delta / (K lr).
        control = tree.add(carry["drift"], state["control"])
        change = tree.add(control, delta, -1 / (work.num_steps * stage.lr))
        message, state = self.compress(state, {"delta": delta, "control": change}, ctx)
        return Finished({**state, "control": tree.sub(state["control"], message["control"].decode())}, message)

    def init_server(self, params: Tree) -> State:
        return {"params": params, "control": tree.zeros_like(params)}

    def model(self, server: State) -> Tree:
        return server["params"]

    def broadcast(self, server: State, ctx: Context) -> Message:
        model, _ = ctx.downlink.encode(server["params"], {}, ctx.generator)
        control, _ = ctx.downlink.encode(server["control"], {}, ctx.generator)
        return {"model": model, "control": control}

    def server_update(
        self, server: State, received: Mapping[str, Aggregate], delivered: Sequence[int], ctx: Context
    ) -> tuple[State, Metrics]:
        if not delivered:
            return server, {}
        params = tree.sub(server["params"], received["delta"].result)
        return {
            "params": params,
            "control": tree.add(server["control"], received["control"].sum, -1 / ctx.num_clients),
        }, {}

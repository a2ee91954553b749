"""LAG: Chen et al., LAG: Lazily Aggregated Gradient, NeurIPS 2018, the worker-side rule (LAG-WK).

The objective is the mean over clients, so 1 / (alpha^2 M^2) becomes 1 / alpha^2.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field

from rayfl import tree
from rayfl.compress.base import Message
from rayfl.data.batches import Batch
from rayfl.gather import Aggregate, Gather, Sum
from rayfl.methods.base import (
    Carry,
    Context,
    Finished,
    HyperParameters,
    Method,
    Metrics,
    Plan,
    ServerHalf,
    Stage,
    Traits,
)
from rayfl.tree import State, Tree


class LAGHyper(HyperParameters):
    """Hyper-parameters of LAG."""

    lr: float = Field(0.3, gt=0, description="step size, alpha")
    threshold: float = Field(0.1, ge=0, description="weight of each of the last steps, xi")
    num_steps: int = Field(10, ge=1, description="how many steps the trigger remembers, D")


class LAG(Method, ServerHalf):
    """Clients are silent while their gradient hardly changed; the server steps along the sum that it remembers."""

    Hyper: ClassVar[type[LAGHyper]] = LAGHyper
    hyper: LAGHyper
    paper: ClassVar[str] = "Chen et al., NeurIPS 2018"
    gather: Mapping[str, Gather] = {"change": Sum()}

    def plan(self, round: int, coin: float) -> Plan:
        return Plan(stages=(Stage("gradient", steps=1),))

    def init_client(self, client: Traits, params: Tree, generator: np.random.Generator) -> State:
        return {"sent": tree.zeros_like(params), "model": params, "steps": torch.zeros(self.hyper.num_steps)}

    def begin(self, state: State, received: Message | None, ctx: Context) -> Carry:
        assert received is not None
        params = received["model"].decode()
        return {"params": params, "gradient": tree.zeros_like(params)}

    def step(self, carry: Carry, batch: Batch, *, stage: Stage) -> Carry:
        return {**carry, "gradient": self.task.grad(carry["params"], batch)}

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        square = tree.norm(tree.sub(carry["params"], state["model"])) ** 2
        steps = torch.cat([torch.tensor([square]), state["steps"][:-1]])
        change = tree.sub(carry["gradient"], state["sent"])
        limit = self.hyper.threshold * float(steps.sum()) / self.hyper.lr**2
        state = {**state, "model": carry["params"], "steps": steps}
        if tree.norm(change) ** 2 <= limit:
            return Finished(state, None)
        message, state = self.compress(state, {"change": change}, ctx)
        return Finished({**state, "sent": tree.add(state["sent"], message["change"].decode())}, message)

    def init_server(self, params: Tree) -> State:
        return {"params": params, "gradients": tree.zeros_like(params)}

    def model(self, server: State) -> Tree:
        return server["params"]

    def broadcast(self, server: State, ctx: Context) -> Message:
        return {"model": ctx.downlink.encode(server["params"], {}, ctx.generator)[0]}

    def server_update(
        self, server: State, received: Mapping[str, Aggregate], delivered: Sequence[int], ctx: Context
    ) -> tuple[State, Metrics]:
        gradients = server["gradients"]
        if received["change"].count:
            gradients = tree.add(gradients, received["change"].sum)
        params = tree.add(server["params"], gradients, -self.hyper.lr / ctx.num_clients)
        return {"params": params, "gradients": gradients}, {}

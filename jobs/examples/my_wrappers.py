"""Wrappers of your own: one that changes messages, one that changes the training, and a robust mean.

rayfl run jobs/experiments/demo.toml 'wrap=["jobs/examples/my_wrappers.py:WorkerMomentum"]'
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rayfl.methods.base import Capabilities, Carry, Context, Field, Method, Metrics, Stage, State, Tree, tree
from rayfl.methods.shared.wrapper import Wrapping
from rayfl.wrappers.base import MessageWrapper, Wrapper
from rayfl.wrappers.robust import ByDistances


class WorkerMomentum(MessageWrapper):
    """Send m <- beta m + (1 - beta) message, from m = 0 (Karimireddy, He, Jaggi, ICML 2021), for methods that send one
    tree."""

    beta: float = 0.9
    """The weight of earlier messages."""

    def init_client(self, params: Tree) -> State:
        return {"momentum": tree.zeros_like(params)}

    def client(
        self, trees: Mapping[str, Tree], state: State, received: Tree, ctx: Context
    ) -> tuple[Mapping[str, Tree], State, Metrics]:
        ((name, sent),) = trees.items()
        momentum = tree.add(tree.scale(state["momentum"], self.beta), sent, 1 - self.beta)
        return {name: momentum}, {"momentum": momentum}, {}


class Decaying(Wrapping):
    """The method with weight decay: clients scale their model down after each step."""

    capabilities = Capabilities(on_device=True)
    decay: float

    # Any: see Method.
    def step(self, carry: Carry, batch: Any, *, stage: Stage) -> Carry:
        carry = super().step(carry, batch, stage=stage)
        return {**carry, "params": tree.scale(carry["params"], 1 - stage.lr * self.decay)}


class WeightDecay(Wrapper):
    """A training wrapper: x <- (1 - lr decay) x after each step (Loshchilov, Hutter, ICLR 2019), for methods with a
    server whose clients train one model."""

    decay: float = Field(default=0.01, ge=0, description="weight decay")

    def around(self, method: Method) -> Method:
        decaying = Decaying(method)
        decaying.decay = self.decay
        return decaying


class ShortestMean(ByDistances):
    """A robust mean: the mean of the messages with the smallest norms, for `weighting = "uniform"`."""

    share: float = Field(
        default=0.7, gt=0, le=1, description="share of the messages that count, those with the smallest norms"
    )

    def decide(self, statistics: np.ndarray) -> np.ndarray:
        """The messages' weights [n], from their inner products [n, n]."""
        shortest = np.argsort(np.diag(statistics), kind="stable")[: max(1, int(self.share * len(statistics)))]
        return np.isin(range(len(statistics)), shortest) / len(shortest)

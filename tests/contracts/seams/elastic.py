"""Elastic aggregation around any server method: Chen et al., Elastic Aggregation for Federated Optimization, CVPR 2023.

Sensitivity is weighted as the inner method weights its clients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rayfl import tree
from rayfl.compress.base import Message
from rayfl.compress.dense import Dense
from rayfl.data.batches import Batch
from rayfl.gather import Aggregate, WeightedMean
from rayfl.methods.base import Carry, Context, Finished, HyperParameters, Method, Metrics, Plan, Stage
from rayfl.tree import State, Tree
from rayfl.wrapping import Wrapping

SENSITIVITY = "sensitivity"


class ElasticHyper(HyperParameters):
    """Hyper-parameters of elastic aggregation."""

    memory: float = Field(0.95, ge=0, lt=1, description="how much of the sensitivity a new batch leaves, mu")
    floor: float = Field(0.5, ge=0, description="factor of the most sensitive entry of a tensor, tau")
    batch_size: int = Field(2, ge=1, description="held-out examples a batch")


class Elastic(Wrapping):
    """The inner method's `delta`, entry by entry times 1 + tau - sensitivity / largest sensitivity of the tensor."""

    Hyper: ClassVar[type[ElasticHyper]] = ElasticHyper
    hyper: ElasticHyper
    paper: ClassVar[str] = "Chen et al., CVPR 2023"
    splits: Mapping[str, float] = {"heldout": 0.1}
    own_stages: ClassVar[tuple[str, ...]] = (SENSITIVITY,)

    # Any: hyper-parameters are whatever Hyper declares and validates.
    def __init__(self, inner: Method, **hyper: Any) -> None:
        super().__init__(inner, **hyper)
        if "delta" not in inner.gather:
            raise ValueError(f"Elastic rescales a method's delta, and {type(inner).__name__} sends none")
        self.gather = {**inner.gather, SENSITIVITY: WeightedMean()}

    def plan(self, round: int, coin: float) -> Plan:
        plan = self.inner.plan(round, coin)
        own = Stage(SENSITIVITY, split="heldout", epochs=1, batch_size=self.hyper.batch_size)
        return replace(plan, stages=(own, *plan.stages))

    def begin(self, state: State, received: Message | None, ctx: Context) -> Carry:
        carry = super().begin(state, received, ctx)
        return {**carry, SENSITIVITY: tree.zeros_like(carry["params"])}

    def step(self, carry: Carry, batch: Any, *, stage: Stage) -> Carry:
        if stage.name != SENSITIVITY:
            return beside(carry, super().step(without(carry), batch, stage=stage))
        gradient = self.task.grad(carry["params"], batch, self.squared_output)
        kept = tree.scale(carry[SENSITIVITY], self.hyper.memory)
        return {**carry, SENSITIVITY: tree.add(kept, tree.map(torch.abs, gradient), 1 - self.hyper.memory)}

    def squared_output(self, params: Tree, batch: Batch) -> Tensor:
        """The batch's mean squared norm of the network's output."""
        squares = self.task.outputs(params, batch).square().flatten(1).sum(dim=1)
        return squares.mean() if batch.weights is None else (squares * batch.weights).sum() / batch.weights.sum()

    def turn(self, carry: Carry, *, stage: Stage) -> Carry:
        return carry if stage.name == SENSITIVITY else beside(carry, super().turn(without(carry), stage=stage))

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        finished = super().finish(state, without(carry), ctx)
        if finished.message is None:
            return finished
        packet, _ = Dense().encode(carry[SENSITIVITY], {}, ctx.generator)
        return replace(finished, message={**finished.message, SENSITIVITY: packet})

    def server_update(
        self, server: State, received: Mapping[str, Aggregate], delivered: Sequence[int], ctx: Context
    ) -> tuple[State, Metrics]:
        inner = {name: aggregate for name, aggregate in received.items() if name != SENSITIVITY}
        if received[SENSITIVITY].count:
            factors = tree.map(self.factor, received[SENSITIVITY].result)
            inner["delta"] = inner["delta"].scaled(factors)
        return super().server_update(server, inner, delivered, ctx)

    def factor(self, sensitivity: Tensor) -> Tensor:
        """1 + tau - sensitivity / max for one tensor; 1 where nothing is sensitive."""
        largest = sensitivity.max()
        return 1 + self.hyper.floor - sensitivity / largest if largest > 0 else torch.ones_like(sensitivity)


def without(carry: Carry) -> Carry:
    """The inner method's carry."""
    return {name: value for name, value in carry.items() if name != SENSITIVITY}


def beside(outer: Carry, inner: Carry) -> Carry:
    """The inner method's new carry with the wrapper's own part, where there is one (there is none while judging)."""
    return {**inner, SENSITIVITY: outer[SENSITIVITY]} if SENSITIVITY in outer else inner

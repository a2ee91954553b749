"""Elastic aggregation around any server method: Chen et al., Elastic Aggregation for Federated Optimization, CVPR 2023,
Algorithm 1 and Eq. 5 to 7.

Before it trains, a client runs over held-out examples at the model that it received: Omega_i <- mu Omega_i +
(1 - mu) |grad ||F(x)||^2|, batch after batch, from zero. The server multiplies the aggregated delta entry by entry by
zeta = 1 + tau - Omega / max(Omega) before its own update, whatever that is.

Where the paper is silent or contradicts itself:
- The sign is that of Eq. 3: delta = received - trained.
- The gradient is that of the batch's mean squared norm; the absolute value comes after it, once a batch. The model is
  in evaluation mode. No label is read.
- `sensitivity="outputs"` is Eq. 5 as it stands, with a gradient for each output of the last layer, whose absolute
  values are added up; the paper describes it and takes the squared norm, which needs one gradient. The sum's scale does
  not matter to zeta. `average="polyak"` is footnote 1's plain mean over the batches.
- `applied="after"` multiplies the step that the inner server makes with the plain delta, x <- x_t + zeta (x - x_t),
  instead of the delta before it: with FedAvg the same, with Adam not. The paper leaves open which it means.
- With PFNM nothing is defined: matched networks change their shapes, and the paper, which lists it, has no formula.
- A layer is a parameter tensor (`group="module"`: a module's tensors together). Where nothing is sensitive, zeta = 1.
- Omega is weighted as the inner method weights its clients: by examples in FedAvg, uniformly in SCAFFOLD.
- A server that collects deltas one by one gets each of them times zeta.
- Held-out examples are no longer trained on; to be fair to a baseline give it the same `splits.heldout_ratio`.
Omega is a message of its own and is not compressed: 4 bytes per entry (2 with fp16 or bf16).
"""

from dataclasses import replace
from functools import partial, reduce
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

from rayfl.compress.values import ValueType
from rayfl.methods.base import (
    Batch,
    Capabilities,
    Carry,
    Context,
    Delivered,
    Dense,
    Field,
    Finished,
    HyperParameters,
    KeptModel,
    Message,
    Method,
    Metrics,
    Plan,
    RayflError,
    Received,
    Relay,
    Stage,
    State,
    Tree,
    WeightedMean,
    tree,
    unused_with,
)
from rayfl.methods.shared.wrapper import Wrapping
from rayfl.wrappers.base import Wrapper

SENSITIVITY = "sensitivity"
"""The wrapper's stage, its message, and its part of carries and of the server's state."""


class ElasticHyper(HyperParameters):
    """Hyper-parameters of elastic aggregation."""

    tau: float = Field(default=0.5, ge=0, description="zeta of the most sensitive entry of a layer")
    mu: float = Field(
        default=0.95,
        ge=0,
        lt=1,
        description="share of the old sensitivity that each batch keeps",
        json_schema_extra=unused_with(average=["polyak"]),
    )
    batch_size: int = Field(default=32, ge=0, description="held-out examples per batch; 0: the whole split")
    group: Literal["tensor", "module"] = Field(
        default="tensor", description="what a layer is: zeta divides by the largest sensitivity of a tensor or module"
    )
    dtype: ValueType = Field(default="fp32", description="numbers in which the sensitivity is sent")
    every: int = Field(default=1, ge=1, description="rounds from one measurement of the sensitivity to the next")
    sensitivity: Literal["norm", "outputs"] = Field(
        default="norm", description="gradients: of the outputs' squared norm, or of each output (costs one for each)"
    )
    average: Literal["exponential", "polyak"] = Field(
        default="exponential", description="average over the batches: with mu, or the plain mean"
    )
    applied: Literal["before", "after"] = Field(
        default="before", description="zeta multiplies the delta before the server's step, or the step itself"
    )
    factors: Literal["entry", "mean"] = Field(
        default="entry", description="zeta of each entry; or, as a control, the tensor's mean zeta for all its entries"
    )


class Elastic(Wrapping):
    """The inner method's `delta`, entry by entry times zeta in [tau, 1 + tau].

    With `every` above 1 the server keeps the last Omega that arrived. `factors="mean"` is a control of ours: the mean
    zeta is the same, and each tensor's step keeps the inner method's direction. Metrics: `elastic/boosted_share`, the
    share of entries with zeta > 1; `elastic/mean_factor`, the mean zeta of all entries. Raises ValueError if the method
    has no server, or if its server sees no delta.
    """

    hyper: ElasticHyper
    paper = "Chen et al., CVPR 2023"
    capabilities = Capabilities(on_device=True, keeps_parts=True)
    splits = {"heldout": 0.1}
    own_stages = (SENSITIVITY,)
    own_names = frozenset((SENSITIVITY,))

    # Any: see Method.
    def __init__(self, inner: Method, hyper: HyperParameters | None = None, **settings: Any) -> None:
        super().__init__(inner, hyper, **settings)
        has_delta = inner.capabilities.delta_of_network and not isinstance(inner.gather.get("delta", Relay()), Relay)
        if not has_delta or inner.capabilities.needs_everyone:
            raise RayflError(
                f"elastic rescales the delta of the network that a server aggregates, and {type(inner).__name__} has "
                "none, or needs it unchanged; remove it"
            )
        if self.capabilities.sees_all:
            raise RayflError(
                "elastic sends a message that a wrapper inside it must see and cannot; list elastic before that "
                "wrapper, or remove it"
            )
        if self.hyper.applied == "after" and not isinstance(inner.innermost, KeptModel):
            raise RayflError(
                f"elastic's applied='after' rescales the step of the server's model, and {inner.title} has none; take "
                "'before'"
            )
        self.gather = {**inner.gather, SENSITIVITY: WeightedMean()}
        self.capabilities = self.capabilities.but(hands_over_trees=False)

    def plan(self, round_number: int, coin: float) -> Plan:
        plan = self.inner.plan(round_number, coin)
        if round_number % self.hyper.every or not plan.up:
            return plan
        sensitivity_stage = Stage(SENSITIVITY, split="heldout", epochs=1, batch_size=self.hyper.batch_size or None)
        return replace(plan, stages=(sensitivity_stage, *plan.stages))

    def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
        if stage.name != SENSITIVITY:
            return super().gradients_per_example(stage, ctx)
        return 1.0 if self.hyper.sensitivity == "norm" else float(self.num_outputs(ctx.initial))

    def check_model(self, params: Tree) -> None:
        super().check_model(params)
        if self.hyper.sensitivity == "outputs" and f"{self.task.head}.weight" not in params:
            raise RayflError(
                "elastic's sensitivity='outputs' counts the outputs of a last linear layer that is trained in common, "
                "and the model has none; take 'norm'"
            )

    def num_outputs(self, params: Tree) -> int:
        """The number of outputs of the last layer."""
        return len(params[f"{self.task.head}.weight"])

    def begin(self, state: State, received: Message, ctx: Context) -> Carry:
        carry = super().begin(state, received, ctx)
        if all(stage.name != SENSITIVITY for stage in ctx.plan.stages):
            return carry
        return {**carry, SENSITIVITY: tree.zeros_like(carry["params"])}

    def step(self, carry: Carry, batch: Any, *, stage: Stage) -> Carry:
        if stage.name != SENSITIVITY:
            return super().step(carry, batch, stage=stage)
        params, total = carry["params"], carry[SENSITIVITY]
        if self.hyper.sensitivity == "norm":
            size = tree.map(torch.abs, self.task.grad(params, batch, self.squared_output))
        else:
            size = tree.zeros_like(params)
            for number in range(self.num_outputs(params)):
                gradient = self.task.grad(params, batch, partial(self.one_output, number=number))
                size = tree.add(size, tree.map(torch.abs, gradient))
        if self.hyper.average == "polyak":
            return {**carry, SENSITIVITY: tree.add(total, size)}
        return {**carry, SENSITIVITY: tree.add(tree.scale(total, self.hyper.mu), size, 1 - self.hyper.mu)}

    def one_output(self, params: Tree, batch: Batch, number: int) -> torch.Tensor:
        """The mean over the batch of output `number`, a scalar; of a sequence the sum over its positions."""
        output = self.task.evaluated(params, batch)[..., number]
        return batch.mean(output.reshape(len(output), -1).sum(dim=1))

    def squared_output(self, params: Tree, batch: Batch) -> torch.Tensor:
        """The mean over the batch of ||F(x)||^2, a scalar; of several outputs their sum."""
        outputs = tree_leaves(self.task.evaluated(params, batch))
        squares = [output.square().reshape(len(output), -1).sum(dim=1) for output in outputs]
        return batch.mean(reduce(torch.add, squares))

    def end_stage(self, carry: Carry, *, stage: Stage) -> Carry:
        return carry if stage.name == SENSITIVITY else super().end_stage(carry, stage=stage)

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        finished = super().finish(state, carry, ctx)
        if finished.message is None or SENSITIVITY not in carry or not ctx.sends:
            return finished
        sensitivity = carry[SENSITIVITY]
        if self.hyper.average == "polyak":
            sensitivity = tree.scale(sensitivity, 1 / ctx.work[SENSITIVITY].num_steps)
        packet, _ = Dense(dtype=self.hyper.dtype).encode(sensitivity, {}, ctx.generator)
        return replace(finished, message={**finished.message, SENSITIVITY: packet})

    def init_server(self, params: Tree) -> State:
        state = super().init_server(params)
        return {**state, SENSITIVITY: tree.zeros_like(params)} if self.hyper.every > 1 else state

    def server_update(
        self, server: State, received: Received, delivered: Delivered, ctx: Context
    ) -> tuple[State, Metrics]:
        sensitivity = received[SENSITIVITY].result or server.get(SENSITIVITY, {})
        delta = received["delta"]
        inner, metrics, factors = dict(received), {}, {}
        if sensitivity and delta.count:
            ratios = self.normalised(sensitivity)
            like = delta.known or delta.sum or next(item for item in delta.items.values() if isinstance(item, dict))
            factors = {name: self.factors(ratios.get(name)) for name in like}
            if self.hyper.applied == "before":
                inner["delta"] = delta.scaled(factors)
            total = sum(float(factors[name].mean()) * tensor.numel() for name, tensor in like.items())
            metrics = {
                "elastic/boosted_share": self.boosted_share(ratios, like),
                "elastic/mean_factor": total / tree.num_entries(like),
            }
        state, others = super().server_update(server, inner, delivered, ctx)
        if self.hyper.applied == "after" and factors:
            old, new = server["params"], state["params"]
            state = {**state, "params": {name: x + factors.get(name, 1) * (new[name] - x) for name, x in old.items()}}
        return {**state, SENSITIVITY: sensitivity} if SENSITIVITY in server else state, {**others, **metrics}

    def normalised(self, sensitivity: Tree) -> Tree:
        """Omega / max(Omega) in [0, 1], the maximum over each tensor or module; without those where it is 0."""
        largest: dict[str, float] = {}
        for name, tensor in sensitivity.items():
            most = float(tensor.max()) if tensor.numel() else 0.0
            largest[self.layer(name)] = max(most, largest.get(self.layer(name), 0.0))
        return {
            name: tensor / largest[self.layer(name)]
            for name, tensor in sensitivity.items()
            if largest[self.layer(name)] > 0
        }

    def layer(self, name: str) -> str:
        """The layer of a tensor: itself, or its module ("fc" of "fc.weight")."""
        return name.rpartition(".")[0] if self.hyper.group == "module" else name

    def factors(self, ratio: torch.Tensor | None) -> torch.Tensor:
        """zeta of a tensor; 1 where nothing is sensitive. Added in this order, a ratio of 1 gives exactly tau."""
        zeta = torch.ones(()) if ratio is None else self.hyper.tau + (1 - ratio)
        return zeta.mean() if self.hyper.factors == "mean" else zeta

    def boosted_share(self, ratios: Tree, like: Tree) -> float:
        """Share of the entries of `like` with zeta > 1: those with a ratio below tau."""
        boosted = sum(int((ratios[name] < self.hyper.tau).sum()) for name in like if name in ratios)
        return boosted / tree.num_entries(like)


class ElasticAggregation(Wrapper, ElasticHyper):
    """Elastic aggregation (Chen et al., CVPR 2023) around a method whose server aggregates a delta."""

    name = "elastic"
    splits = Elastic.splits

    def around(self, method: Method) -> Method:
        return Elastic(method, self)

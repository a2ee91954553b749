"""Wrapping: a server method around another one, to which it passes every call that it does not change.

A wrapper adds stages of its own (`own_stages` names them), messages under names of its own, or changes what the inner
method is given. The context of the inner method holds its own stages and its own work only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from rayfl.compress.base import Message
from rayfl.determinism.seeding import FirstDraws
from rayfl.errors import RayflError
from rayfl.gather import Aggregate
from rayfl.methods.base import (
    Carry,
    Context,
    Finished,
    HyperParameters,
    Method,
    Metrics,
    Plan,
    Reply,
    ServerHalf,
    Stage,
)
from rayfl.population.client import Traits
from rayfl.task import Task
from rayfl.topology.graphs import Topology
from rayfl.tree import State, Tree


class Wrapping(Method, ServerHalf):
    """Passes every hook on to `inner`."""

    own_stages: ClassVar[tuple[str, ...]] = ()
    inner: Method

    # Any: see Method.
    def __init__(self, inner: Method, hyper: HyperParameters | None = None, **settings: Any) -> None:
        super().__init__(vars(inner).get("task"), hyper, **settings)
        if not isinstance(inner, ServerHalf):
            raise RayflError(f"{type(self).__name__} wraps methods with a server, and {type(inner).__name__} has none")
        self.inner = self.server = inner
        self.gather = inner.gather
        self.personalized, self.splits = inner.personalized, {**inner.splits, **type(self).splits}
        self.own_compression, self.uses_graph = inner.own_compression, inner.uses_graph
        self.on_device = type(self).on_device and inner.on_device
        self.honours_retention, self.needs_one_omega = inner.honours_retention, inner.needs_one_omega
        self.metrics_with_variance = inner.metrics_with_variance

    def with_task(self, task: Task) -> Self:
        twin = super().with_task(task)
        twin.inner = twin.server = self.inner.with_task(task)
        return twin

    def inside(self, ctx: Context) -> Context:
        """The context as the inner method knows it."""
        stages = tuple(stage for stage in ctx.plan.stages if stage.name not in self.own_stages)
        work = {name: work for name, work in ctx.work.items() if name not in self.own_stages}
        return replace(ctx, plan=replace(ctx.plan, stages=stages), work=work)

    def check(self, num_clients: int, topology: Topology | None, seed: int) -> None:
        self.inner.check(num_clients, topology, seed)

    def plan(self, round: int, coin: float) -> Plan:
        return self.inner.plan(round, coin)

    def init_params(self, params: Tree, draws: FirstDraws) -> Tree:
        return self.inner.init_params(params, draws)

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> State:
        return self.inner.init_client(client, params, draws)

    def begin(self, state: State, received: Message, ctx: Context) -> Carry:
        return self.inner.begin(state, received, self.inside(ctx))

    # Any: a Batch, or a tuple of them, as the stage says.
    def step(self, carry: Carry, batch: Any, *, stage: Stage) -> Carry:
        return self.inner.step(carry, batch, stage=stage)

    def end_stage(self, carry: Carry, *, stage: Stage) -> Carry:
        return self.inner.end_stage(carry, stage=stage)

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        return self.inner.finish(state, carry, self.inside(ctx))

    def receive_reply(self, state: State, received: Message, ctx: Context) -> State:
        return self.inner.receive_reply(state, received, self.inside(ctx))

    def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
        return self.inner.gradients_per_example(stage, self.inside(ctx))

    def eval_stages(self, round: int) -> tuple[Stage, ...]:
        return self.inner.eval_stages(round)

    def eval_begin(self, state: State, model: Tree | None, carry: Carry | None, ctx: Context) -> Carry:
        return self.inner.eval_begin(state, model, carry, self.inside(ctx))

    def final_model(self, state: State) -> Tree:
        return self.inner.final_model(state)

    def mask(self, state: State) -> Tree | None:
        return self.inner.mask(state)

    def init_server(self, params: Tree) -> State:
        return self.server.init_server(params)

    def init_server_memory(self, client: Traits, params: Tree) -> State:
        return self.server.init_server_memory(client, params)

    def model(self, server: State) -> Tree:
        return self.server.model(server)

    def broadcast(self, server: State, ctx: Context) -> Message:
        return self.server.broadcast(server, self.inside(ctx))

    def personal_message(self, server: State, server_memory: State, ctx: Context) -> Reply:
        return self.server.personal_message(server, server_memory, self.inside(ctx))

    def store_uplink(self, server_memory: State, message: Message, ctx: Context) -> State:
        return self.server.store_uplink(server_memory, message, self.inside(ctx))

    def server_update(
        self, server: State, received: Mapping[str, Aggregate], delivered: Sequence[int], ctx: Context
    ) -> tuple[State, Metrics]:
        return self.server.server_update(server, received, delivered, self.inside(ctx))

    def reply(self, server: State, server_memory: State, ctx: Context) -> Reply:
        return self.server.reply(server, server_memory, self.inside(ctx))

    def overrides(self, hook: Literal["personal_message", "reply"]) -> bool:
        return self.server.overrides(hook)

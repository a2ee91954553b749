"""Wrapping: a method around another one, to which it passes every call that it does not change.

A wrapper adds stages of its own (`own_stages` names them), entries of states, carries and messages (`own_names`), or
changes the arguments of the inner method. The inner method sees only its own stages, work and entries: each hook here
calls the inner method's hook of the same name with `inside` of its arguments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch

from rayfl.methods.base import (
    Batch,
    BoundTask,
    Carry,
    Context,
    Delivered,
    Download,
    Finished,
    FirstDraws,
    HyperParameters,
    Message,
    Method,
    Metrics,
    PeerHalf,
    Plan,
    RayflError,
    Received,
    Reply,
    ServerHalf,
    ServerHook,
    Stage,
    State,
    Topology,
    Traits,
    Tree,
    Upload,
)
from rayfl.topology.mixing import Exchange, Sparse


class WrappingClients(Method):
    """Passes a client's hooks on to `inner`. A subclass changes a hook, and calls the inner method's by `super()`."""

    own_stages: ClassVar[tuple[str, ...]] = ()
    own_names: frozenset[str] = frozenset()
    inner: Method

    # Any: see Method.
    def __init__(self, inner: Method, hyper: HyperParameters | None = None, **settings: Any) -> None:
        """Take the declarations of `inner`: what `Capabilities` says field by field, and the rest here."""
        super().__init__(getattr(inner, "task", None), hyper, **settings)
        self.inner = inner
        self.capabilities = self.capabilities.around(inner.capabilities)
        self.splits = {**inner.splits, **type(self).splits}
        self.gather = inner.gather
        self.difference = inner.difference

    @property
    def innermost(self) -> Method:
        return self.inner.innermost

    @property
    def title(self) -> str:
        return self.inner.title

    def with_task(self, task: BoundTask) -> Self:
        twin = super().with_task(task)
        twin.inner = self.inner.with_task(task)
        return twin

    # Any: an argument of a hook.
    def inside(self, value: Any) -> Any:
        """The argument of a hook without the wrapper's own stages and entries."""
        if isinstance(value, Context):
            stages = tuple(stage for stage in value.plan.stages if stage.name not in self.own_stages)
            work = {name: work for name, work in value.work.items() if name not in self.own_stages}
            return replace(value, plan=replace(value.plan, stages=stages), work=work)
        if isinstance(value, Mapping) and not self.own_names.isdisjoint(value):
            return {name: entry for name, entry in value.items() if name not in self.own_names}
        return value

    # Any: a state or a carry.
    def beside(self, outer: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
        """The inner method's new state or carry, and the wrapper's own entries of the old one."""
        return {**inner, **{name: outer[name] for name in self.own_names if name in outer}}

    def check(self, num_clients: int, topology: Topology | None, seed: int) -> None:
        self.inner.check(num_clients, topology, seed)

    def check_model(self, params: Tree) -> None:
        self.inner.check_model(self.inside(params))

    def check_ratios(self, ratios: Sequence[float], ctx: Context) -> None:
        self.inner.check_ratios(ratios, self.inside(ctx))

    def plan(self, round_number: int, coin: float) -> Plan:
        return self.inner.plan(round_number, coin)

    def stages(self, state: State, plan: Plan, ctx: Context) -> tuple[Stage, ...]:
        """The inner method's stages for the client. The wrapper's own ones stay before those that they preceded."""
        inside = self.inside(replace(ctx, plan=plan))
        stages = list(self.inner.stages(self.inside(state), inside.plan, inside))
        for place, stage in enumerate(plan.stages):
            if stage.name in self.own_stages:
                later = {planned.name for planned in plan.stages[place:]}
                stages.insert(
                    next((at for at, inner_stage in enumerate(stages) if inner_stage.name in later), len(stages)), stage
                )
        return tuple(stages)

    @property
    def has_own_stages(self) -> bool:
        """Whether the inner method, or the wrapper, gives clients stages of their own."""
        return self.inner.has_own_stages or type(self).stages is not WrappingClients.stages

    def init_params(self, params: Tree, draws: FirstDraws) -> Tree:
        return self.inner.init_params(self.inside(params), draws)

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> State:
        return self.inner.init_client(client, self.inside(params), draws)

    def has_work(self, received: Message, ctx: Context) -> bool:
        return self.inner.has_work(self.inside(received), self.inside(ctx))

    def begin(self, state: State, received: Message, ctx: Context) -> Carry:
        return self.inner.begin(self.inside(state), self.inside(received), self.inside(ctx))

    # Any: see Method.
    def step(self, carry: Carry, batch: Any, *, stage: Stage) -> Carry:
        return self.beside(carry, self.inner.step(self.inside(carry), batch, stage=stage))

    def end_stage(self, carry: Carry, *, stage: Stage) -> Carry:
        return self.beside(carry, self.inner.end_stage(self.inside(carry), stage=stage))

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        return self.inner.finish(self.inside(state), self.inside(carry), self.inside(ctx))

    def receive_reply(self, state: State, received: Message, ctx: Context) -> State:
        return self.beside(state, self.inner.receive_reply(self.inside(state), self.inside(received), self.inside(ctx)))

    def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
        return self.inner.gradients_per_example(stage, self.inside(ctx))

    def trains_under(self, state: State, stage: Stage, ctx: Context) -> Tree | None:
        return self.inner.trains_under(self.inside(state), stage, self.inside(ctx))

    def eval_stages(self, round_number: int) -> tuple[Stage, ...]:
        return self.inner.eval_stages(round_number)

    def eval_begin(self, state: State, model: Tree | None, carry: Carry | None, ctx: Context) -> Carry:
        return self.inner.eval_begin(self.inside(state), self.inside(model), self.inside(carry), self.inside(ctx))

    def outputs(self, params: Tree, batch: Batch) -> torch.Tensor:
        return self.inner.outputs(self.inside(params), batch)

    def final_model(self, state: State, server: State) -> Tree | None:
        return self.inner.final_model(self.inside(state), self.inside(server))

    def mask(self, state: State) -> Tree | None:
        return self.inner.mask(self.inside(state))


class Wrapping(WrappingClients, ServerHalf):
    """Passes the hooks of the server on, too."""

    # Any: see Method.
    def __init__(self, inner: Method, hyper: HyperParameters | None = None, **settings: Any) -> None:
        super().__init__(inner, hyper, **settings)
        if not isinstance(inner, ServerHalf):
            raise RayflError(f"{type(self).__name__} wraps methods with a server, and {type(inner).__name__} has none")

    @property
    def server_half(self) -> ServerHalf:
        """The inner method as a server."""
        assert isinstance(self.inner, ServerHalf), "refused by the constructor"
        return self.inner

    def init_server(self, params: Tree) -> State:
        return self.server_half.init_server(self.inside(params))

    def init_server_memory(self, client: Traits, params: Tree) -> State:
        return self.server_half.init_server_memory(client, self.inside(params))

    def model(self, server: State) -> Tree:
        return self.server_half.model(self.inside(server))

    def further_models(self, server: State) -> Mapping[str, Tree]:
        return self.server_half.further_models(self.inside(server))

    def download(self, server: State, ctx: Context) -> Download:
        return self.server_half.download(self.inside(server), self.inside(ctx))

    def personal_message(self, server: State, server_memory: State, ctx: Context) -> Reply:
        return self.server_half.personal_message(self.inside(server), self.inside(server_memory), self.inside(ctx))

    def store_uplink(self, server_memory: State, message: Message, ctx: Context) -> State:
        return self.server_half.store_uplink(self.inside(server_memory), self.inside(message), self.inside(ctx))

    def server_update(
        self, server: State, received: Received, delivered: Delivered, ctx: Context
    ) -> tuple[State, Metrics]:
        return self.server_half.server_update(self.inside(server), self.inside(received), delivered, self.inside(ctx))

    def update(self, server: State, received: Received, ctx: Context) -> State:
        return self.server_half.update(self.inside(server), self.inside(received), self.inside(ctx))

    def reply(self, server: State, server_memory: State, ctx: Context) -> Reply:
        return self.server_half.reply(self.inside(server), self.inside(server_memory), self.inside(ctx))

    def overrides(self, hook: ServerHook) -> bool:
        return self.server_half.overrides(hook)


class WrappingPeers(WrappingClients, PeerHalf):
    """Passes the peers' hooks on, too."""

    @property
    def peer_half(self) -> PeerHalf:
        """The inner method as a peer."""
        assert isinstance(self.inner, PeerHalf), "whoever wraps chooses this class for peers"
        return self.inner

    def mixing(self, weights: Sparse, exchange: Exchange) -> Sparse:
        return self.peer_half.mixing(weights, exchange)

    def message_to(self, state: State, neighbour: int, ctx: Context) -> Upload:
        return self.peer_half.message_to(self.inside(state), neighbour, self.inside(ctx))

    @property
    def has_link_messages(self) -> bool:
        return self.peer_half.has_link_messages

    def mix(self, state: State, received: Received, ctx: Context) -> State:
        return self.peer_half.mix(self.inside(state), self.inside(received), self.inside(ctx))

    def message_to_partner(self, state: State, ctx: Context) -> Mapping[str, Tree]:
        return self.peer_half.message_to_partner(self.inside(state), self.inside(ctx))

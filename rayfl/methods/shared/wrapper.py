"""Wrapping: a method around another one, to which it passes every call that it does not change.

A wrapper adds stages of its own (`own_stages` names them), entries of states, carries and messages (`own_names`), or
changes the arguments of the inner method. The inner method sees only its own stages, work and entries.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self, TypeVar, cast

from rayfl.methods.base import (
    BoundTask,
    Carry,
    Context,
    HyperParameters,
    Message,
    Method,
    Plan,
    RayflError,
    ServerHalf,
    Stage,
    State,
)

OF_INNER = (
    *("gather", "personalized", "own_compression", "uses_graph", "hands_over_trees", "has_global_model", "difference"),
    *("honours_retention", "needs_one_omega", "metrics_with_variance", "judged_after_training", "may_be_silent"),
)
"""Attributes that a wrapper takes from the inner method, unless its class changes them."""
OF_BOTH = ("on_device", "keeps_parts", "takes_stale")
"""Attributes that are true of a wrapper only if they are true of the inner method too."""
Hook = TypeVar("Hook", bound=Callable[..., Any])


def _passed(hook: Hook) -> Hook:
    """A hook that calls the inner method's hook of the same name, with `inside` of its arguments."""

    # Any: the arguments and the result are those of `hook`.
    @functools.wraps(hook, updated=())
    def call(self: "WrappingClients", *args: Any, **kwargs: Any) -> Any:
        inside = [self.inside(value) for value in args]
        named = {name: self.inside(value) for name, value in kwargs.items()}
        return getattr(self.inner, hook.__name__)(*inside, **named)

    return cast(Hook, call)


class WrappingClients(Method):
    """Passes a client's hooks on to `inner`. A subclass changes a hook, and calls the inner method's by `super()`."""

    own_stages: ClassVar[tuple[str, ...]] = ()
    own_names: frozenset[str] = frozenset()
    sees_all: bool = False
    """Whether a wrapper inside must see all that clients send, so that none around it may add messages."""
    inner: Method

    # Any: see Method.
    def __init__(self, inner: Method, hyper: HyperParameters | None = None, **settings: Any) -> None:
        super().__init__(vars(inner).get("task"), hyper, **settings)
        self.inner = inner
        self.splits, self.sees_all = {**inner.splits, **type(self).splits}, getattr(inner, "sees_all", False)
        vars(self).update({name: getattr(inner, name) for name in OF_INNER})
        vars(self).update({name: getattr(type(self), name) and getattr(inner, name) for name in OF_BOTH})

    @property
    def innermost(self) -> Method:
        return self.inner.innermost

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

    def stages(self, state: State, plan: Plan, ctx: Context) -> tuple[Stage, ...]:
        """The inner method's stages for the client. The wrapper's own ones stay before those that they preceded."""
        inside = self.inside(replace(ctx, plan=plan))
        stages = list(self.inner.stages(self.inside(state), inside.plan, inside))
        for place, stage in enumerate(plan.stages):
            if stage.name in self.own_stages:
                later = {one.name for one in plan.stages[place:]}
                stages.insert(next((at for at, one in enumerate(stages) if one.name in later), len(stages)), stage)
        return tuple(stages)

    @property
    def has_own_stages(self) -> bool:
        """Whether the inner method, or the wrapper, gives clients stages of their own."""
        return self.inner.has_own_stages or type(self).stages is not WrappingClients.stages

    plan = _passed(Method.plan)
    begin = _passed(Method.begin)
    finish = _passed(Method.finish)

    # Any: see Method.
    def step(self, carry: Carry, batch: Any, *, stage: Stage) -> Carry:
        return self.beside(carry, self.inner.step(self.inside(carry), batch, stage=stage))

    def end_stage(self, carry: Carry, *, stage: Stage) -> Carry:
        return self.beside(carry, self.inner.end_stage(self.inside(carry), stage=stage))

    def receive_reply(self, state: State, received: Message, ctx: Context) -> State:
        return self.beside(state, self.inner.receive_reply(self.inside(state), self.inside(received), self.inside(ctx)))

    # Any: a state or a carry.
    def beside(self, outer: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
        """The inner method's new state or carry, and the wrapper's own entries of the old one."""
        return {**inner, **{name: outer[name] for name in self.own_names if name in outer}}


for _hook in (
    *(Method.for_newcomers, Method.check, Method.check_model, Method.init_params, Method.init_client, Method.has_work),
    *(Method.gradients_per_example, Method.trains_under, Method.eval_stages, Method.eval_begin, Method.final_model),
    Method.mask,
):
    setattr(WrappingClients, _hook.__name__, _passed(_hook))


class Wrapping(WrappingClients, ServerHalf):
    """Passes the hooks of the server on, too."""

    # Any: see Method.
    def __init__(self, inner: Method, hyper: HyperParameters | None = None, **settings: Any) -> None:
        super().__init__(inner, hyper, **settings)
        if not isinstance(inner, ServerHalf):
            raise RayflError(f"{type(self).__name__} wraps methods with a server, and {type(inner).__name__} has none")

    init_server = _passed(ServerHalf.init_server)
    model = _passed(ServerHalf.model)


for _hook in (
    *(ServerHalf.init_server_memory, ServerHalf.download, ServerHalf.personal_message, ServerHalf.store_uplink),
    *(ServerHalf.server_update, ServerHalf.update, ServerHalf.reply, ServerHalf.overrides),
):
    setattr(Wrapping, _hook.__name__, _passed(_hook))

"""Wrapper: something around a method that changes its training or its messages; an experiment has a list of them."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from rayfl.choices.kinds import Choice
from rayfl.compress.base import shapes_of
from rayfl.errors import refuse_if
from rayfl.methods.base import (
    Capabilities,
    Carry,
    Context,
    Delivered,
    Dense,
    Difference,
    Download,
    Finished,
    FirstDraws,
    Gather,
    Message,
    Method,
    Metrics,
    Packet,
    PeerHalf,
    RayflError,
    Received,
    ServerHalf,
    State,
    Traits,
    Tree,
    Trees,
    Upload,
)
from rayfl.methods.shared.wrapper import Wrapping, WrappingClients, WrappingPeers
from rayfl.rounds.check_hooks import A_STATE, checked, is_state
from rayfl.rounds.setup import Setup

KEY = ("wrap",)


class Wrapper(Choice):
    """What an experiment puts around its method.

    A training wrapper implements `around`, which returns a `rayfl.methods.shared.wrapper.Wrapping`.
    """

    label = "wrapper"
    package = "rayfl.wrappers"
    splits: ClassVar[Mapping[str, float]] = {}
    """Further splits that it needs, with the default share of the train split."""

    @abstractmethod
    def around(self, method: Method) -> Method:
        """The method with this wrapper around it. Raise RayflError if they do not fit."""

    def check(self, setup: Setup, store_bytes: int) -> None:
        """Raise RayflError if the wrapper does not fit the rest of the experiment; called before round 0.

        store_bytes: of Ray's object store, or of the memory that it would take by default.
        """


class MessageWrapper(Wrapper):
    """Changes a client's whole message before it is encoded, and arrived messages before the method's server gets them.

    Pure, as methods are: every hook returns new states. Tensors lie in main memory.
    """

    needs_server: ClassVar[bool] = False
    """Whether the wrapper needs a server, so that methods of peers are refused."""
    sees_all: ClassVar[bool] = False
    """Whether nothing may be sent that the wrapper has not seen. It must then be the last wrapper, and methods are
    refused that send counts beside their trees, or whose clients may send nothing."""
    leaves_encoded: ClassVar[bool] = False
    """Whether the wrapper may change the trees that peers send each neighbour, and those beside packets which stay as
    they are, as the mass of `sgp`. It then keeps no state, and `client` may be called several times a round."""

    def around(self, method: Method) -> Method:
        can = method.capabilities
        name = method.title
        what = "encodes them in its own way" if can.own_compression else "has messages that are encoded already"
        has_server = isinstance(method, ServerHalf)
        is_open = self.leaves_encoded and not has_server and can.hands_over_trees
        refuse_if(
            [
                (
                    not method.gather,
                    "wrap",
                    f": {self.name!r} changes messages, and clients of {name} send none; remove it",
                ),
                (
                    (can.own_compression or not can.hands_over_trees) and not is_open,
                    "wrap",
                    f": {self.name!r} changes messages before they are encoded, and {name} {what}; take another "
                    "method, or (with elastic) list this wrapper first",
                ),
                (
                    isinstance(method, PeerHalf) and method.has_link_messages and not is_open,
                    "wrap",
                    f": {self.name!r} changes a client's one message, and peers of {name} send each neighbour another; "
                    "remove it",
                ),
                (
                    self.sees_all and can.may_be_silent,
                    "wrap",
                    f": {self.name!r} must see a whole message of every client, and in {name} some send nothing in "
                    "some rounds, or a part of what the server gathers; take another method, fedavg for example",
                ),
                (
                    self.sees_all and can.label_counts,
                    "wrap",
                    f": {self.name!r} must see all that clients send, and in {name} they tell their label counts "
                    "beside their messages; take another method, fedavg for example",
                ),
                (
                    not has_server and (self.needs_server or self.gather()),
                    "wrap",
                    f": {self.name!r} needs a server, and {name} has none; remove it",
                ),
            ]
        )
        return WrappedClients(method, self) if has_server else WrappedPeers(method, self)

    @property
    def takes_stale(self) -> bool:
        """Whether messages of several rounds may be mixed (see `Method`): by default if it has no `aggregate`."""
        return type(self).aggregate is MessageWrapper.aggregate

    def gather(self) -> Mapping[str, Gather]:
        """Messages of its own that `client` adds, by name."""
        return {}

    def init_client(self, params: Tree) -> State:
        """A client's state before its first round; `params` are those of round 0."""
        return {}

    def init_server(self, params: Tree) -> State:
        """The server's state before round 0."""
        return {}

    def download(self, server: State) -> Tree:
        """What every participant downloads of it, dense: a tree of a few numbers, or {}."""
        return {}

    @abstractmethod
    def client(
        self, trees: Mapping[str, Tree], state: State, received: Tree, ctx: Context
    ) -> tuple[Mapping[str, Tree], State, Metrics]:
        """The trees that are encoded in place of `trees`, the client's new state, and metrics of the client.

        trees: everything that the client sends, by message name. received: the tree of `download`, {} if there was
        none.
        """

    def aggregate(self, received: Received, server: State, ctx: Context) -> tuple[Received, State, Metrics]:
        """What the method's server gets in place of `received`, the new server state, and metrics of the round."""
        return received, server, {}


class Wrapped(WrappingClients):
    """The clients of `inner`, whose messages the wrapper changes.

    The wrapper has one entry, `entry`, in states of clients and of the server, in messages down and in carries.
    """

    capabilities = Capabilities(keeps_parts=True)

    def __init__(self, inner: Method, wrapper: MessageWrapper) -> None:
        super().__init__(inner)
        self.wrapper = wrapper
        self.entry = f"wrap {wrapper.name}"
        if taken := sorted(inner.gather.keys() & wrapper.gather()):
            what = f"{taken[0]!r}, as the method or another wrapper does"
            raise RayflError(f": {wrapper.name!r} adds a message {what}; remove one", KEY)
        self.gather = {**inner.gather, **wrapper.gather()}
        self.own_names = frozenset((self.entry, *wrapper.gather()))
        self.capabilities = self.capabilities.but(
            sees_all=self.capabilities.sees_all or wrapper.sees_all,
            takes_stale=self.capabilities.takes_stale and wrapper.takes_stale,
        )

    # Any: a state, a carry or a message.
    def _with(self, inner: Mapping[str, Any], part: Any) -> dict[str, Any]:
        """The inner method's part, and the wrapper's, if it has one."""
        return {**inner, self.entry: part} if part else dict(inner)

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> State:
        return self._with(
            super().init_client(client, params, draws), checked(self.wrapper.init_client, *A_STATE)(params)
        )

    def begin(self, state: State, received: Message, ctx: Context) -> Carry:
        return self._with(
            super().begin(state, received, ctx), received[self.entry].decode() if self.entry in received else {}
        )

    # Any: trees, some of them as `Difference`.
    def changed(
        self, trees: Mapping[str, Any], state: State, received: Tree, ctx: Context
    ) -> tuple[Mapping[str, Tree], State, Metrics]:
        """What the wrapper makes of trees that are to be sent, its new state, and its metrics."""
        opened = {name: part.tree() if isinstance(part, Difference) else part for name, part in trees.items()}
        client = checked(
            self.wrapper.client,
            f"the trees {', '.join(map(repr, opened))}, each with the names and shapes of its tensors, then a "
            "state, and metrics",
            lambda returned: is_state(*returned[1:]) and _is_like(self.inside(returned[0]), opened),
        )
        return client(opened, state, received, ctx)

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        wrapper_state: State = state.get(self.entry, {})
        metrics, seen = dict[str, float](), set[str]()

        def outgoing(trees: Trees) -> Trees:
            nonlocal wrapper_state, metrics
            if seen:
                raise RayflError(
                    f"{type(self.inner).__name__} sends trees in two parts; {self.wrapper.name!r} must see all at once"
                )
            sent, wrapper_state, metrics = self.changed(trees, wrapper_state, carry.get(self.entry, {}), ctx)
            seen.update(trees, sent)
            return ctx.outgoing(sent)

        finished = super().finish(state, carry, replace(ctx, outgoing=outgoing) if ctx.sends else ctx)
        if not ctx.sends:
            return replace(finished, state=self._with(finished.state, wrapper_state))
        message = dict(finished.message or {})
        if trees := {name: part for name, part in message.items() if not isinstance(part, Packet)}:
            message |= trees if seen else outgoing(trees)
        required = message if self.wrapper.sees_all else () if self.wrapper.leaves_encoded else self.gather
        unseen = [name for name in message if name not in seen and name in required]
        if unseen or (self.wrapper.sees_all and not seen):
            raise RayflError(
                f"{type(self.inner).__name__} sends {', '.join(unseen) or 'nothing this time'}, and the wrapper "
                f"{self.wrapper.name!r} must see a whole message of every client; take another method or wrapper"
            )
        return replace(
            finished,
            state=self._with(finished.state, wrapper_state),
            message=None if finished.message is None else message,
            metrics={**finished.metrics, **metrics},
        )


class WrappedClients(Wrapped, Wrapping):
    """`Wrapped` with a server."""

    capabilities = Capabilities(keeps_parts=True, takes_stale=True)

    def init_server(self, params: Tree) -> State:
        return self._with(super().init_server(params), checked(self.wrapper.init_server, *A_STATE)(params))

    def download(self, server: State, ctx: Context) -> Download:
        tensors = checked(self.wrapper.download, *A_STATE)(server.get(self.entry, {}))
        return self._with(
            super().download(server, ctx), Dense().encode(tensors, {}, ctx.generator)[0] if tensors else {}
        )

    def server_update(
        self, server: State, received: Received, delivered: Delivered, ctx: Context
    ) -> tuple[State, Metrics]:
        aggregate = checked(
            self.wrapper.aggregate,
            "all that it got, under the same names, each with finite numbers in the shapes of what arrived, then a "
            "state, and metrics",
            lambda returned: is_state(*returned[1:]) and _replaces(returned[0], self.inside(received)),
        )
        received, wrapper_state, metrics = aggregate(received, server.get(self.entry, {}), ctx)
        state, others = super().server_update(server, received, delivered, ctx)
        return self._with(state, wrapper_state), {**others, **metrics}


class WrappedPeers(Wrapped, WrappingPeers):
    """`Wrapped` among peers."""

    capabilities = Capabilities(keeps_parts=True, takes_stale=True)

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        finished = super().finish(state, carry, ctx)
        if not (self.has_link_messages or self.capabilities.in_pairs):
            return finished
        # What is sent is made later, where metrics are none.
        return replace(finished, metrics={**finished.metrics, **self.changed({}, {}, {}, ctx)[2]})

    def message_to(self, state: State, neighbour: int, ctx: Context) -> Upload:
        upload = super().message_to(state, neighbour, ctx)
        return {
            **upload,
            **self.changed({name: part for name, part in upload.items() if not isinstance(part, Packet)}, {}, {}, ctx)[
                0
            ],
        }

    def message_to_partner(self, state: State, ctx: Context) -> Mapping[str, Tree]:
        return self.changed(super().message_to_partner(state, ctx), {}, {}, ctx)[0]

    def mix(self, state: State, received: Received, ctx: Context) -> State:
        return self._with(super().mix(state, received, ctx), state.get(self.entry, {}))


def _is_like(trees: Mapping[str, Tree], others: Mapping[str, Tree]) -> bool:
    """Whether trees have the names and shapes of others."""
    return (
        is_state(dict(trees), {})
        and trees.keys() == others.keys()
        and all(dict(shapes_of(trees[name])) == dict(shapes_of(other)) for name, other in others.items())
    )


def _replaces(now: Received, before: Received) -> bool:
    """Whether a wrapper may return `now` for `before`: each changed aggregate has finite numbers in the same shapes."""
    changed = [
        (now[name], old) for name, old in before.items() if now[name] is not old and now[name].count and old.count
    ]
    return all(
        _is_like({"": new.result}, {"": old.result}) and all(value.isfinite().all() for value in new.result.values())
        for new, old in changed
    )


def require_uniform_weights(name: str, method: Method) -> None:
    """Raise RayflError if clients send the number of their examples, which then weighs their messages."""
    if (weighting := getattr(method.innermost.hyper, "weighting", "uniform")) != "uniform":
        raise RayflError(
            f": {name!r} cannot trust the weights that clients send; give method.weighting='uniform' in place of "
            f"{weighting!r}",
            KEY,
        )

"""The interface of a method: the client's half (`Method`), and the server's (`ServerHalf`) or the peers' (`PeerHalf`).

A method is pure: every function takes states and returns new ones, keeps nothing on `self`, and draws random numbers
from `ctx.generator` alone. One class implements `Method` and exactly one of `ServerHalf` and `PeerHalf`.
Sign everywhere: `delta = x_received - x_trained`, a descent direction.

A plug-in's author imports from here what nearly every method needs: what hooks take and return, ways to gather, trees,
settings, and packets of a number or a count. A codec, or a packet that only a few methods make, has its own module.

States and carries are dictionaries of tensors. A method declares each of its own as a `TypedDict`, a plain dictionary
at run time, and annotates its hooks with it: pyright then finds a misspelt key. One that extends another inherits it.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field

from rayfl import tree
from rayfl.choices.kinds import Kind
from rayfl.compress.base import Compressor, Message, Packet
from rayfl.compress.dense import Dense
from rayfl.compress.scalar import count_packet, exact_packet, scalar_packet
from rayfl.data.batches import Batch
from rayfl.determinism.seeding import FirstDraws
from rayfl.errors import RayflError
from rayfl.gather import Aggregate, Collect, ElementwiseMean, Gather, Received, Relay, Sum, WeightedMean, WeightedSum
from rayfl.methods.capabilities import OF_EXCHANGES, OF_SERVERS, Capabilities
from rayfl.methods.hook_types import (
    Carry,
    Context,
    Delivered,
    Download,
    Finished,
    FinishedStack,
    HyperParameters,
    Metrics,
    ModelState,
    Plan,
    Reply,
    StackRows,
    Stage,
    Trees,
    UplinkMemory,
    Upload,
    Work,
    compressed,
    contracting,
    uncompressed,
)
from rayfl.population.client import Traits
from rayfl.settings import unused_with
from rayfl.task import BoundTask
from rayfl.topology.graphs import Topology
from rayfl.topology.mixing import Exchange, Sparse
from rayfl.tree import Difference, State, Tree


class Method(Kind, ABC):
    """The client's half. A built-in method has the name of its file below rayfl/methods/, which holds one class."""

    label = "method"
    package = "rayfl.methods"
    # Any: each method has settings of its own.
    Hyper: ClassVar[type[Any]] = HyperParameters
    """The class of the method's settings: the class that `hyper` is annotated with, unless a method sets another."""
    paper: ClassVar[str] = ""
    capabilities: Capabilities = Capabilities()
    """What the method can do and needs: what the class itself says, then what its bases say (`Capabilities`)."""
    splits: Mapping[str, float] = {}
    """Further splits that the method needs, with the default share of the train split: {"validation": 0.2}."""
    gather: Mapping[str, Gather] = {}
    """How messages are added up, by message name; {} if nothing is sent. Packets under other names are billed only."""
    difference: str = ""
    """The message whose mean the server subtracts from its model, x_received - x_trained; "" if there is none. A
    schedule that mixes models (FedAsync) needs one."""

    renamed = {
        "judged_after_training": "capabilities.evaluated_after_training",
        "for_newcomers": "capabilities.newcomer",
    }

    # Any: arguments of a class line, of which there are none.
    def __init_subclass__(cls, **arguments: Any) -> None:
        if misplaced := sorted(Capabilities.model_fields.keys() & {*arguments, *dir(cls)}):
            names = ", ".join(f"{name}=..." for name in misplaced)
            raise RayflError(
                f"{cls.__name__} sets {' and '.join(misplaced)}, which its capabilities have; write "
                f"capabilities = Capabilities({names}) in the class, with Capabilities from rayfl.methods.base"
            )
        super().__init_subclass__(**arguments)
        cls.capabilities = Capabilities.of(cls, issubclass(cls, PeerHalf))
        settings = vars(cls).get("__annotations__", {}).get("hyper")
        if "Hyper" not in vars(cls) and isinstance(settings, type):
            cls.Hyper = settings
        room, _, file = cls.__module__.rpartition(".")
        if f"{room}.".startswith(f"{cls.package}.") and room != f"{cls.package}.shared":
            cls.name = file

    task: BoundTask
    hyper: HyperParameters

    # Any: settings are whatever the method's Hyper declares and validates.
    def __init__(self, task: BoundTask | None = None, hyper: HyperParameters | None = None, **settings: Any) -> None:
        """Take an instance of the method's `Hyper`, or make it of `settings`. Raises ValueError for another class.

        A method without a task, such as FedAvg(lr=0.1), describes an experiment's method and cannot train.
        """
        if task is not None:
            self.task = task
        self.hyper = self.Hyper(**settings) if hyper is None else hyper
        if not isinstance(self.hyper, self.Hyper):
            name = type(self).__name__
            raise RayflError(f"{name} takes {name}.Hyper(...), and was given a {type(hyper).__name__}")

    @property
    def innermost(self) -> "Method":
        """The method inside all wrappers, or itself."""
        return self

    @property
    def title(self) -> str:
        """The name of the method's class in messages to the user; a wrapper has that of the method inside."""
        return type(self).__name__

    def with_task(self, task: BoundTask) -> Self:
        """A copy of the method with another form of its task."""
        twin = copy.copy(self)
        twin.task = task
        return twin

    # Any: `hyper` is an instance of the method's own Hyper.
    @classmethod
    def unused(cls, hyper: Any) -> Mapping[str, str]:
        """Settings outside `[method]` that do nothing with this method, by dotted key, each with the reason.

        They are refused before anything starts. `Hyper.unused` lists those of `[method]` itself.
        """
        name, can, is_peer = cls.__name__, cls.capabilities, issubclass(cls, PeerHalf)
        has_one_model = not can.personalized and cls.eval_stages is Method.eval_stages
        rows: list[tuple[bool, Sequence[str], str]] = [
            (not (is_peer or can.uses_graph), ["topology"], f"as {name} has a server"),
            (is_peer, OF_SERVERS, f"as {name} has no server, and all of its clients train every round"),
            (can.own_compression, ["uplink", "downlink"], f"as {name} encodes messages in its own way"),
            (not cls.gather, OF_EXCHANGES, f"as clients of {name} exchange nothing"),
            (
                can.newcomer == "undefined",
                ["clients.unseen"],
                f"as {name} defines no model for a client that comes for the first time",
            ),
            (has_one_model, ["evaluation.personal_on_pooled"], f"as clients of {name} have no models of their own"),
        ]
        return {key: reason for does_nothing, keys, reason in rows if does_nothing for key in keys}

    def check(self, num_clients: int, topology: Topology | None, seed: int) -> None:
        """Raise ValueError if the settings do not fit the number of clients or their graph; called before round 0."""

    def check_model(self, params: Tree) -> None:
        """Raise RayflError before round 0 if the settings do not fit the model, initially `params`, by name."""

    def check_ratios(self, ratios: Sequence[float], ctx: Context) -> None:
        """Raise RayflError before round 0 if the clients' different retention ratios, ascending, do not fit the model
        or the uplink of `ctx`."""

    @abstractmethod
    def plan(self, round_number: int, coin: float) -> Plan:
        """The plan of round `round_number`; `coin` in [0, 1) is the shared coin of that round."""

    def stages(self, state: State, plan: Plan, ctx: Context) -> tuple[Stage, ...]:
        """One client's stages, for work that only some clients do; called on the actors. `ctx.plan` has them later."""
        return plan.stages

    @property
    def has_own_stages(self) -> bool:
        """Whether only the actors know a client's stages."""
        return type(self).stages is not Method.stages

    def init_params(self, params: Tree, draws: FirstDraws) -> Tree:
        """The common parameters of round 0, from the model's initial ones. Only `draws.common` may be used."""
        return params

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> State:
        """A client's state before its first round; {} if clients remember nothing.

        `draws.own` is for random values that differ between clients, `draws.common` for those that all share (masks).
        """
        return {}

    def has_work(self, received: Message, ctx: Context) -> bool:
        """Whether a client has anything to do with the received message ({} if none was sent).

        If False, the client computes and sends nothing and keeps its state, and the round does not wait for it.
        """
        return True

    @abstractmethod
    def begin(self, state: State, received: Message, ctx: Context) -> Carry:
        """The carry before the first step, from the state and the received message ({} if none was sent)."""

    # Any: a Batch, or a tuple of them, as the stage says.
    @abstractmethod
    def step(self, carry: Carry, batch: Any, *, stage: Stage) -> Carry:
        """One step on a `Batch`, or on a tuple of them if `stage.batches_per_step` is above 1.

        It also runs under vmap: it works on tensors and draws no random numbers; under vmap a draw ends the run.
        """

    def end_stage(self, carry: Carry, *, stage: Stage) -> Carry:
        """The carry after the last step of a stage (prune, rewind, warm start)."""
        return carry

    @abstractmethod
    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        """The new state and the message, from the carry after the last step."""

    def begin_stack(self, states: State, received: Message, ctx: Context, width: int) -> Carry:
        """`begin` for a stack of clients, if `capabilities.whole_stacks`: tensors of states and carry are [width, ...].

        `ctx` is that of no client, and nothing may be drawn at random."""
        raise TypeError(f"{type(self).__name__} has whole_stacks and no begin_stack; implement it")

    def finish_stack(self, states: State, carry: Carry, rows: StackRows, ctx: Context) -> FinishedStack:
        """`finish` for the clients of a stack that upload, if `capabilities.whole_stacks`: tensors are [count, ...]."""
        raise TypeError(f"{type(self).__name__} has whole_stacks and no finish_stack; implement it")

    def receive_reply(self, state: State, received: Message, ctx: Context) -> State:
        """The client's state after the server's reply of the same round (`ServerHalf.reply`)."""
        return state

    def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
        """Gradients that a step of a stage takes per example, for simulated time and the count of training operations.

        0 if the stage only runs forward: the count leaves it out, and on the clock it is a third of a gradient. A
        Hessian-vector product counts as two. `ctx.work` has the work of the stage, planned or done.
        """
        return 1.0 if stage.split == "train" else 0.0

    def trains_under(self, state: State, stage: Stage, ctx: Context) -> Tree | None:
        """The mask under which a client that begins a round with `state` does a stage; None: all entries are used.

        `ctx` is that of the client's hooks, for a method whose mask follows from the round or the client's traits.
        An example then counts, and with `clients.sparse_speedup` takes, only the operations that the mask leaves.
        Tensors that it does not name are whole.
        """
        return self.mask(state) if stage.split == "train" else None

    def eval_stages(self, round_number: int) -> tuple[Stage, ...]:
        """Local work before an evaluation (fine-tuning, one adaptation step). Its result is not kept."""
        return ()

    def eval_begin(self, state: State, model: Tree | None, carry: Carry | None, ctx: Context) -> Carry:
        """The model to evaluate, as "params".

        With a `carry` it is the trained model; else the client's own, if `personalized`; else `model`, the server's
        (None among peers, except with `evaluated_from_mean`).
        """
        untrained = state["params"] if self.capabilities.personalized and carry is None else model
        params = carry["params"] if carry is not None else untrained
        if params is None:
            raise RayflError(
                f"{type(self).__name__} has no global model to evaluate; give its capabilities personalized=True, or "
                "define eval_begin"
            )
        return {"params": params}

    def outputs(self, params: Tree, batch: Batch) -> torch.Tensor:
        """The outputs [batch, ...] by which a model is evaluated; called without gradients. By default the network's.

        `params` comes from `eval_begin` and `eval_stages`, or is the server's model. It may hold more than the
        network's parameters: those of a module beside the network, or a client's examples, which this hook then uses.
        """
        return self.task.evaluated(params, batch)

    def final_model(self, state: State, server: State) -> Tree | None:
        """The personal model of a client at the end of a run; `server` is the server's state, {} among peers.

        By default None: it is the model that `own/...` evaluates after the last round, from `eval_begin` and
        `eval_stages`.
        """
        return None

    def mask(self, state: State) -> Tree | None:
        """The entries that a client keeps, booleans by name; None if clients keep all."""
        return state.get("mask")


ServerHook = Literal["personal_message", "reply", "store_uplink"]
"""The hooks that the engine calls for every client, and only if a method implements them."""


class ServerHalf(ABC):
    """The server's half. The server's memory of one client is a state of its own, like the client's state."""

    @abstractmethod
    def init_server(self, params: Tree) -> State:
        """The server's state before round 0."""

    def init_server_memory(self, client: Traits, params: Tree) -> State:
        """The server's memory of a client before its first round."""
        return {}

    @abstractmethod
    def model(self, server: State) -> Tree:
        """The global model; evaluation sends the workers nothing else of the server's state."""

    def download(self, server: State, ctx: Context) -> Download:
        """What every participant downloads this round, by name; nothing by default. It is encoded once for all."""
        return {}

    def personal_message(self, server: State, server_memory: State, ctx: Context) -> Reply:
        """The message that one client downloads besides the broadcast; called on the actors."""
        return Reply({}, server_memory)

    def store_uplink(self, server_memory: State, message: Message, ctx: Context) -> State:
        """The server's memory of a client whose message has arrived; called on the actors."""
        return server_memory

    def server_update(
        self, server: State, received: Received, delivered: Delivered, ctx: Context
    ) -> tuple[State, Metrics]:
        """The new server state; called every round, even if nothing arrived. `delivered`: ids, ascending.

        By default `update` makes the new state, and a round in which nothing arrived changes nothing.
        """
        if not any(aggregate.count for aggregate in received.values()):
            return server, {}
        return self.update(server, received, ctx), {}

    def update(self, server: State, received: Received, ctx: Context) -> State:
        """The new server state after a round in which a message arrived."""
        raise TypeError(f"{type(self).__name__} has neither update nor server_update; implement one of them")

    def further_models(self, server: State) -> Mapping[str, Tree]:
        """Models besides `model` that are evaluated on the pooled test set, by what names their metrics:
        {"width_0.5": ...} is evaluated as pooled/accuracy_at_width_0.5."""
        return {}

    def reply(self, server: State, server_memory: State, ctx: Context) -> Reply:
        """The message to a client that delivered, in the same round, after the update; called on the actors."""
        return Reply({}, server_memory)

    def overrides(self, hook: ServerHook) -> bool:
        """Whether this method implements `hook`: the engine then calls it for every client."""
        return getattr(type(self), hook) is not getattr(ServerHalf, hook)


class KeptModel(ServerHalf):
    """Server state: the model x as "params"; subclasses say how it changes (`update`), and what is sent to clients."""

    def init_server(self, params: Tree) -> ModelState:
        return {"params": params}

    def model(self, server: ModelState) -> Tree:
        return server["params"]


class ModelServer(KeptModel):
    """Down: x as "model"."""

    def download(self, server: ModelState, ctx: Context) -> Download:
        return {"model": server["params"]}


class PeerHalf:
    """The peers' half: how a peer mixes its neighbours' messages into its state."""

    def mixing(self, weights: Sparse, exchange: Exchange) -> Sparse:
        """The matrix [n, n] of the weights with which peers gather, from the topology's mixing weights: by default the
        same. Called once a round, where the round is played."""
        return weights

    def message_to(self, state: State, neighbour: int, ctx: Context) -> Upload:
        """What a peer sends to one of `ctx.neighbours_out`, by name, for methods that send each neighbour a message of
        its own; `state` is what `finish` returned, with {} as the message. Trees are encoded with the uplink."""
        return {}

    @property
    def has_link_messages(self) -> bool:
        """Whether a peer sends each neighbour a message of its own."""
        return type(self).message_to is not PeerHalf.message_to

    def mix(self, state: State, received: Received, ctx: Context) -> State:
        """The new state after the exchange; the same state by default. `received` is empty for an absent peer.

        Of a method that is `in_pairs`: what the pair has sent is in `received`, with equal weights. The peer that has
        trained has the state of its training's end, which does not know what others have changed since it began; its
        own present model is in `received`. The other one may be in the middle of its training.
        """
        return state

    def message_to_partner(self, state: State, ctx: Context) -> Mapping[str, Tree]:
        """What a peer sends the neighbour that it meets, from its present state (`Capabilities.in_pairs`).

        It is sent as it is, and must always have the same size: it decides how long the exchange takes.
        """
        raise TypeError(f"{type(self).__name__} is in_pairs and has no message_to_partner; implement it")

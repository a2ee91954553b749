"""The interface of a method: the client's half (`Method`), and the server's (`ServerHalf`) or the peers' (`PeerHalf`).

A method is pure: every function takes states and returns new ones, keeps nothing on `self`, and draws random numbers
from `ctx.generator` alone. One class implements `Method` and exactly one of `ServerHalf` and `PeerHalf`.
Sign everywhere: `delta = x_received - x_trained`, a descent direction.

States and carries are dictionaries of tensors. A method declares each of its own as a `TypedDict`, which is a plain
dictionary when it runs, and annotates its hooks with it: pyright then finds a misspelt key. A method that extends
another's state or carry inherits from its `TypedDict`.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from rayfl import tree
from rayfl.choices.kinds import Kind
from rayfl.compress.base import Codec, Compressor, Message, Packet, message_bits, shapes_of
from rayfl.compress.dense import Dense
from rayfl.compress.masks import known_support_packet, mask_packet
from rayfl.compress.scalar import count_packet, scalar_packet
from rayfl.compress.sparse import sparse_packet
from rayfl.data.batches import Batch
from rayfl.determinism.seeding import FirstDraws
from rayfl.errors import RayflError
from rayfl.gather import Aggregate, Collect, ElementwiseMean, Gather, Handle, Received, Relay, Sum, WeightedMean
from rayfl.methods.hook_types import (
    Carry,
    Context,
    Delivered,
    Download,
    Finished,
    HyperParameters,
    Metrics,
    ModelState,
    Newcomer,
    Plan,
    Reply,
    Split,
    Stage,
    Trees,
    UplinkMemory,
    Upload,
    Work,
    compressed,
    contracting,
    encode_broadcast,
    uncompressed,
)
from rayfl.population.client import Traits
from rayfl.settings import unused_with
from rayfl.task import BoundTask, NetworkTask, inner
from rayfl.topology.graphs import Topology
from rayfl.tree import Difference, State, Tree

_OF_SERVERS = (
    "downlink",
    "schedule",
    "selection",
    *(f"clients.{name}" for name in ("per_round", "fraction", "deadline_s", "take_first", "upload_loss")),
    "clients.dropout_after_download",
)
_OF_EXCHANGES = ("topology", "uplink", "downlink", "clients.uplink_mbps", "clients.downlink_mbps")


class Method(Kind, ABC):
    """The client's half. A built-in method has the name of its file in rayfl/methods/, which holds one class."""

    label = "method"
    package = "rayfl.methods"
    # Any: each method has settings of its own.
    Hyper: ClassVar[type[Any]] = HyperParameters
    """The class of the method's settings: the class that `hyper` is annotated with, unless a method sets another."""
    paper: ClassVar[str] = ""
    personalized: bool = False
    """Whether a client's model differs from the server's: evaluation then needs every client's state."""
    depends_on_num_rounds: ClassVar[bool] = False
    """Whether a round depends on `Context.num_rounds`: a run that has begun then cannot be extended."""
    splits: Mapping[str, float] = {}
    """Further splits that the method needs, with the default share of the train split: {"validation": 0.2}."""
    gather: Mapping[str, Gather] = {}
    """How messages are added up, by message name; {} if nothing is sent. Packets under other names are billed only."""
    uses_graph: bool = False
    """Whether a method with a server uses the experiment's topology, as a graph over its clients."""
    needs_features: ClassVar[bool] = False
    """Whether steps call `BoundTask.loss_and_features`: the task must be a classifier with a linear head that is
    trained, with its bias, and with layers before it."""
    honours_retention: bool = False
    """Whether a client's retention ratio (`clients.retention_ratio`) changes what it keeps or sends."""
    own_retention: ClassVar[tuple[str, ...]] = ()
    """Settings of `Hyper` that cannot be given beside `clients.retention_ratio`: they set one ratio for all clients."""
    newcomer: ClassVar[Newcomer | None] = None
    """What the method does for a client that comes for the first time; `clients.unseen` evaluates the result.

    "model": the client takes the global model (or the mean of `PeerHalf.evaluated_from_mean`) and does `eval_stages`.
    "round": it downloads, does the local work of a round and sends nothing; its state is then evaluated as others are.
    "undefined": `clients.unseen` is refused. None: "round" if `personalized`, else "model"; "undefined" among peers.
    """
    has_global_model: bool = True
    """Whether the server's model is one that all clients have. False if each of them trains parts of its own."""
    judged_after_training: bool = True
    """Whether a client is also evaluated right after its local work. False if that work does not change its model."""
    needs_everyone: bool = False
    """Whether every client must be in every round, and every message must arrive. Settings that may keep a client or a
    message away are then refused."""
    needs_one_omega: bool = False
    """Whether all clients must have an uplink of the same omega. Uplinks with a ratio of each client's own are then
    refused; with `own_feedback` only unbiased ones are."""
    metrics_with_variance: tuple[str, ...] = ()
    """Metrics of clients whose variance over a round's clients is also recorded, as <name>_variance."""
    on_device: bool = False
    """Whether `begin`, `end_stage`, `finish` and `eval_begin` take tensors of the GPU that clients are trained on.

    False unless the class itself says so, as in `class FedAvg(GradientMethod, ModelServer, on_device=True)`; not
    inherited. If False, these hooks are given tensors of main memory, and only `step` works on the GPU. A hook that
    takes tensors of a GPU makes no tensors of more than one number in main memory, decodes what it has sent by
    `packet.decode_beside(tree)`, and calls no numpy.
    """
    keeps_parts: bool = False
    """Whether clients train one model, `carry["params"]`, by at most one gradient per step, so that they can keep parts
    of it for themselves (`[parts]`). False unless the class itself says so, as with `on_device`."""
    takes_stale: bool = False
    """Whether the server can update with messages that began from different versions of its state and are each
    multiplied by a factor, as under schedules that are not in rounds. False unless the class itself says so, as with
    `on_device`."""
    difference: str = ""
    """The message whose mean the server subtracts from its model, x_received - x_trained; "" if there is none. A
    schedule that mixes models (FedAsync) needs one."""
    may_be_silent: bool = False
    """Whether a client that has trained may send nothing in some rounds, or nothing under some names of `gather`.
    Wrappers that must see what every client sends, differential privacy among them, refuse such a method."""
    own_compression: bool = False
    """Whether the method fixes how its messages are encoded, so that `uplink` and `downlink` may not be set."""
    own_feedback: ClassVar[tuple[str, ...]] = ()
    """Of "uplink" and "downlink", those whose error the method sends later by itself: `feedback` is refused there."""
    hands_over_trees: bool = True
    """Whether `finish` returns every message named in `gather` as trees, or passes its trees to `Context.outgoing`."""

    def __init_subclass__(cls, on_device: bool = False, keeps_parts: bool = False, takes_stale: bool = False) -> None:
        super().__init_subclass__()
        cls.on_device = vars(cls).get("on_device", on_device)
        cls.keeps_parts = vars(cls).get("keeps_parts", keeps_parts)
        cls.takes_stale = vars(cls).get("takes_stale", takes_stale)
        settings = vars(cls).get("__annotations__", {}).get("hyper")
        if "Hyper" not in vars(cls) and isinstance(settings, type):
            cls.Hyper = settings
        room, _, file = cls.__module__.rpartition(".")
        if room == cls.package:
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
        name = cls.__name__
        found = {} if cls.uses_graph else {"topology": f"as {name} has a server"}
        if issubclass(cls, PeerHalf):
            found = dict.fromkeys(_OF_SERVERS, f"as {name} has no server, and all of its clients train every round")
        if cls.own_compression:
            found |= dict.fromkeys(("uplink", "downlink"), f"as {name} encodes messages in its own way")
        if not cls.gather:
            found |= dict.fromkeys(_OF_EXCHANGES, f"as clients of {name} exchange nothing")
        if cls.for_newcomers() == "undefined":
            found["clients.unseen"] = f"as {name} defines no model for a client that comes for the first time"
        if not cls.personalized and cls.eval_stages is Method.eval_stages:
            found["evaluation.personal_on_pooled"] = f"as clients of {name} have no models of their own"
        return found

    @classmethod
    def for_newcomers(cls) -> Newcomer:
        """`newcomer`, or if that is None the default that its documentation gives."""
        if cls.newcomer is not None:
            return cls.newcomer
        if issubclass(cls, PeerHalf):
            return "undefined"
        return "round" if cls.personalized else "model"

    def check(self, num_clients: int, topology: Topology | None, seed: int) -> None:
        """Raise ValueError if the settings do not fit the number of clients or their graph; called before round 0."""

    def check_model(self, params: Tree) -> None:
        """Raise RayflError before round 0 if the settings do not fit the model, initially `params`, by name."""

    @abstractmethod
    def plan(self, round: int, coin: float) -> Plan:
        """The plan of round `round`; `coin` in [0, 1) is the shared coin of that round."""

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

    def receive_reply(self, state: State, received: Message, ctx: Context) -> State:
        """The client's state after the server's reply of the same round (`ServerHalf.reply`)."""
        return state

    def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
        """Gradients that a step of a stage takes per example, for simulated time and the count of training operations.

        0 if the stage only runs forward: the count leaves it out, and on the clock it is a third of a gradient. A
        Hessian-vector product counts as two. `ctx.work` has the work of the stage, planned or done.
        """
        return 1.0 if stage.split == "train" else 0.0

    def trains_under(self, state: State, stage: Stage) -> Tree | None:
        """The mask under which a client that begins a round with `state` does a stage; None: all entries are used.

        An example then counts, and with `clients.sparse_speedup` takes, only the operations that the mask leaves.
        Tensors that it does not name are whole.
        """
        return self.mask(state) if stage.split == "train" else None

    def eval_stages(self, round: int) -> tuple[Stage, ...]:
        """Local work before an evaluation (fine-tuning, one adaptation step). Its result is not kept."""
        return ()

    def eval_begin(self, state: State, model: Tree | None, carry: Carry | None, ctx: Context) -> Carry:
        """The model to evaluate, as "params".

        With a `carry` it is the trained model; else the client's own, if `personalized`; else `model`, the server's
        (None among peers, except with `PeerHalf.evaluated_from_mean`).
        """
        own = state["params"] if self.personalized and carry is None else model
        params = carry["params"] if carry is not None else own
        if params is None:
            raise RayflError(f"{type(self).__name__} has no global model to evaluate; set personalized, or eval_begin")
        return {"params": params}

    def final_model(self, state: State, server: State) -> Tree | None:
        """The personal model of a client at the end of a run; `server` is the server's state, {} among peers.

        By default None: it is the model that `own/...` evaluates after the last round, from `eval_begin` and
        `eval_stages`.
        """
        return None

    def mask(self, state: State) -> Tree | None:
        """The entries that a client keeps, booleans by name; None if clients keep all."""
        return state.get("mask")


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

    def reply(self, server: State, server_memory: State, ctx: Context) -> Reply:
        """The message to a client that delivered, in the same round, after the update; called on the actors."""
        return Reply({}, server_memory)

    def overrides(self, hook: Literal["personal_message", "reply", "store_uplink"]) -> bool:
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

    include_self: ClassVar[bool] = True
    """Whether a peer gathers its own message too."""
    weighs_links: ClassVar[bool] = False
    """Whether messages are weighed by `graphs.link_weights` instead of by mixing weights."""
    symmetric: ClassVar[bool] = False
    """Whether the mixing matrix must be symmetric, to keep the mean; with `needs_everyone`, the same in all rounds."""
    evaluated_from_mean: bool = False
    """Whether `eval_begin` gets the mean of all peers' models, which no peer knows in reality."""

    def mix(self, state: State, received: Received, ctx: Context) -> State:
        """The new state after the exchange; the same state by default. `received` is empty for an absent peer."""
        return state

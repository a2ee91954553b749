"""The interface of a method: the client's half (`Method`), and the server's (`ServerHalf`) or the peers' (`PeerHalf`).

A method is pure: every function takes states and returns new ones, keeps nothing on `self`, and draws random numbers
from `ctx.generator` alone. One class implements `Method` and exactly one of `ServerHalf` and `PeerHalf`.
Sign everywhere: `delta = x_received - x_trained`, a descent direction.

States and carries are dictionaries of tensors and not typed records, because subclasses and wrappers extend those of
other methods (`{**self.start(params), "correction": c}`), which no NamedTuple allows. torch.vmap refuses a field that
is None, so that every part which a method has only at times would need a class more. States also leave the process and
come back by name, from numpy arrays and from checkpoints, and would need their class from every method for that.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

import numpy as np

from rayfl.choices.kinds import Kind
from rayfl.compress.base import Compressor, Message, Packet
from rayfl.determinism.seeding import FirstDraws, LazyGenerator
from rayfl.errors import RayflError
from rayfl.gather import Aggregate, Gather
from rayfl.population.client import Traits
from rayfl.settings import Settings
from rayfl.task import Task
from rayfl.topology.graphs import Topology
from rayfl.tree import Difference, State, Tree

Carry = State
"""What a client holds while it trains; `carry["params"]` is the model in training."""
Metrics = Mapping[str, float]
Upload = Mapping[str, Packet | Tree | Difference]
"""What a client sends, by name: a tree, or a difference of two, which the engine encodes with the experiment's uplink;
or a finished packet."""
Split = Literal["train", "validation", "heldout"]


@dataclass(frozen=True)
class Stage:
    """A stretch of local work on one split: `epochs` or `steps`, in batches of `batch_size` (None: the whole split)."""

    name: str = "train"
    split: Split = "train"
    epochs: int | None = None
    steps: int | None = None
    batch_size: int | None = None
    batches_per_step: int = 1
    lr: float = 0.0


@dataclass(frozen=True)
class Plan:
    """The plan of a round: the stages of local work, whether anything is downloaded or uploaded, and who trains.

    `trainers="all"`: every client downloads and trains, only the sampled ones upload (pFedMe).
    `coin`: the round's shared coin, kept for methods that know its odds only with the compressor (MARINA).
    """

    stages: tuple[Stage, ...]
    down: bool = True
    up: bool = True
    trainers: Literal["sampled", "all"] = "sampled"
    coin: float = 0.0


@dataclass(frozen=True)
class Work:
    """Local work done in a stage: optimizer steps, and examples seen (the sum of the real batch sizes)."""

    num_steps: int = 0
    num_examples: int = 0


@dataclass(frozen=True)
class Context:
    """Everything that a method may read besides its own states.

    `client` is None on the server. `num_rounds`, T, is the length of the experiment, for schedules over all of it.
    `coin` is the shared coin of any round, in [0, 1). `links` [num_clients, num_clients] are the weights a_kl of the
    round's graph, for the server of a method that `uses_graph`.
    `initial` are the parameters of round 0. `work` is filled, by stage name, when `finish` is called.
    `sends` is False for a client that trains and does not upload; it must leave the memory of its compressor alone.
    `generator` belongs to this (seed, round, client, call) and to nothing else.
    """

    round: int
    plan: Plan
    client: Traits | None
    num_clients: int
    num_rounds: int
    initial: Tree
    uplink: Compressor
    downlink: Compressor
    draws: LazyGenerator
    coin: Callable[[int], float]
    links: np.ndarray | None = None
    work: Mapping[str, Work] = field(default_factory=dict)
    sends: bool = True

    @property
    def generator(self) -> np.random.Generator:
        """The source of this call's random numbers."""
        return self.draws.generator

    @property
    def traits(self) -> Traits:
        """The client's traits, where there is a client."""
        assert self.client is not None, "the server has no traits"
        return self.client


@dataclass(frozen=True)
class Finished:
    """The end of a client's round: its new state, its message (None: it sends nothing), and its weight in means."""

    state: State
    message: Upload | None
    weight: float = 1.0
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """A message to one client, the server's new memory of that client, and metrics to record."""

    message: Message
    server_memory: State
    metrics: Metrics = field(default_factory=dict)


class HyperParameters(Settings):
    """Hyper-parameters of one method; a method's own `Hyper` adds to these."""

    def for_num_rounds(self, rounds: int) -> Self:
        """The same settings, completed for an experiment of `rounds` rounds (the length of a learning rate's cosine).

        ValueError where the settings do not fit that number of rounds.
        """
        return self


class Method(Kind, ABC):
    """The client half. A method of ours is called as the file in rayfl/methods/ that holds its one class."""

    label: ClassVar[str] = "method"
    package: ClassVar[str] = "rayfl.methods"
    Hyper: ClassVar[type[HyperParameters]] = HyperParameters
    paper: ClassVar[str] = ""
    personalized: bool = False
    """Whether a client's model differs from the server's, so that evaluation visits every client's state."""
    depends_on_num_rounds: ClassVar[bool] = False
    """Whether a round depends on `Context.num_rounds`, so that a run that has begun cannot be made longer."""
    splits: Mapping[str, float] = {}
    """Further splits that the method needs, with the default share of the train split: {"validation": 0.2}."""
    gather: Mapping[str, Gather]
    """How messages are added up, by message name; packets under other names are billed and not added."""
    uses_graph: bool = False
    """Whether a method with a server has a graph over its clients too, the experiment's topology."""
    honours_retention: bool = False
    """Whether a client's retention ratio (`clients.retention_ratio`) changes what it keeps or sends."""
    needs_one_omega: bool = False
    """Whether the method reckons with one constant of the uplink, so that no client may have an uplink of its own."""
    metrics_with_variance: tuple[str, ...] = ()
    """Metrics of clients whose variance over a round's clients is recorded too, as <name>_variance."""
    on_device: bool = False
    """Whether `begin`, `end_stage`, `finish` and `eval_begin` take tensors of a GPU where clients are trained on one.

    Otherwise they are given tensors of main memory, and only `step` works on the GPU. Ours take them; a class from
    elsewhere says so itself, and a subclass of it again. A hook that takes them makes no tensor in main memory beside
    them (of more than one number), asks `packet.decode_beside(tree)` what it has sent, and hands nothing to numpy."""
    own_compression: bool = False
    """Whether the method fixes its own compressors, so that `uplink` and `downlink` may not be set."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "on_device" not in vars(cls):
            cls.on_device = cls.__module__.startswith("rayfl.")
        room, _, file = cls.__module__.rpartition(".")
        if room == cls.package:
            cls.name = file

    task: Task

    # Any: settings are whatever the method's Hyper declares and validates.
    def __init__(self, task: Task | None = None, hyper: HyperParameters | None = None, **settings: Any) -> None:
        """`hyper`: an instance of the method's `Hyper`; by default it is made from `settings`. ValueError for another.

        A method without a task, such as FedAvg(lr=0.1), describes an experiment's method and cannot train.
        """
        if task is not None:
            self.task = task
        self.hyper = self.Hyper(**settings) if hyper is None else hyper
        if not isinstance(self.hyper, self.Hyper):
            name = type(self).__name__
            raise RayflError(f"{name} takes {name}.Hyper(...), and was given a {type(hyper).__name__}")

    def with_task(self, task: Task) -> Self:
        """The same method on another form of its task."""
        twin = copy.copy(self)
        twin.task = task
        return twin

    def check(self, num_clients: int, topology: Topology | None, seed: int) -> None:
        """ValueError, in one sentence, where the settings do not fit the number of clients or their graph.

        Called once, before anything starts.
        """

    @abstractmethod
    def plan(self, round: int, coin: float) -> Plan:
        """What happens in round `round`; `coin` in [0, 1) is the shared coin of that round."""

    def init_params(self, params: Tree, draws: FirstDraws) -> Tree:
        """The common parameters of round 0, from those that the model begins with; `draws.common` alone may be used."""
        return params

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> State:
        """A client's state before its first round; {} for methods whose clients remember nothing.

        `draws.own` is for what differs at random between clients, `draws.common` for what all of them share (masks).
        """
        return {}

    @abstractmethod
    def begin(self, state: State, received: Message, ctx: Context) -> Carry:
        """The carry before the first step, from the state and the messages that came down ({}: nothing came down)."""

    # Any: a Batch, or a tuple of them, as the stage says.
    @abstractmethod
    def step(self, carry: Carry, batch: Any, *, stage: Stage) -> Carry:
        """One step on a `Batch`, or on a tuple of them where `stage.batches_per_step` is above 1.

        Pure tensors and no randomness, because it also runs under vmap.
        """

    def end_stage(self, carry: Carry, *, stage: Stage) -> Carry:
        """The carry after the last step of a stage (prune, rewind, warm start)."""
        return carry

    @abstractmethod
    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        """The new state and the message, from the carry after the last step."""

    def receive_reply(self, state: State, received: Message, ctx: Context) -> State:
        """The client's state after the server's reply, which comes in the same round (`ServerHalf.reply`)."""
        return state

    def gradients_per_example(self, stage: Stage, ctx: Context) -> float:
        """Gradients that a step of a stage takes of each of its examples, for the count of training operations.

        0 where the stage only runs forward, which is not counted. A Hessian-vector product is two.
        """
        return 1.0 if stage.split == "train" else 0.0

    def eval_stages(self, round: int) -> tuple[Stage, ...]:
        """Local work before an evaluation (fine-tuning, one adaptation step); its result is thrown away afterwards."""
        return ()

    def eval_begin(self, state: State, model: Tree | None, carry: Carry | None, ctx: Context) -> Carry:
        """The model to evaluate: what was trained, where `carry` is given; else the client's own, if `personalized`, or
        `model`, the server's (None among peers, but for `PeerHalf.evaluated_from_mean`)."""
        own = state["params"] if self.personalized and carry is None else model
        params = carry["params"] if carry is not None else own
        assert params is not None, f"{type(self).__name__} must say which model is evaluated"
        return {"params": params}

    def final_model(self, state: State) -> Tree:
        """The personal model of a client at the end of a run; called where `personalized` is True."""
        return state["params"]

    def mask(self, state: State) -> Tree | None:
        """Which entries a client keeps, booleans by name; None for a method whose clients keep all."""
        return state.get("mask")


class ServerHalf(ABC):
    """The server's half. The server's memory of one client is an object of its own, like the client's state."""

    @abstractmethod
    def init_server(self, params: Tree) -> State:
        """The server's state before round 0."""

    def init_server_memory(self, client: Traits, params: Tree) -> State:
        """The server's memory of a client before its first round."""
        return {}

    @abstractmethod
    def model(self, server: State) -> Tree:
        """The global model, all that evaluation ships."""

    @abstractmethod
    def broadcast(self, server: State, ctx: Context) -> Message:
        """The message that every participant downloads this round, encoded once."""

    def personal_message(self, server: State, server_memory: State, ctx: Context) -> Reply:
        """The message that one client downloads besides the broadcast; runs on the actors."""
        return Reply({}, server_memory)

    def store_uplink(self, server_memory: State, message: Message, ctx: Context) -> State:
        """The server's memory of a client whose message has arrived; runs on the actors."""
        return server_memory

    @abstractmethod
    def server_update(
        self, server: State, received: Mapping[str, Aggregate], delivered: Sequence[int], ctx: Context
    ) -> tuple[State, Metrics]:
        """The new server state; called every round, even if nothing arrived. `delivered`: ids, ascending."""

    def reply(self, server: State, server_memory: State, ctx: Context) -> Reply:
        """The message to a client that delivered, in the same round and after the update; runs on the actors."""
        return Reply({}, server_memory)

    def overrides(self, hook: Literal["personal_message", "reply"]) -> bool:
        """Whether this method has a hook of its own, so that the engine must call it for every client."""
        return getattr(type(self), hook) is not getattr(ServerHalf, hook)


class PeerHalf(ABC):
    """The peers' half: how a peer mixes the messages of its neighbours into its state."""

    include_self: ClassVar[bool] = True
    """Whether a peer's own message is part of what it gathers."""
    weighs_links: ClassVar[bool] = False
    """Whether messages are weighed by `graphs.link_weights` instead of by mixing weights."""
    evaluated_from_mean: bool = False
    """Whether evaluation hands the mean of all peers' models to `eval_begin`, which no peer could know (an oracle)."""

    @abstractmethod
    def mix(self, state: State, received: Mapping[str, Aggregate], ctx: Context) -> State:
        """The new state after the exchange. `received` is empty for a peer that was away."""

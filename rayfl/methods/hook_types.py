"""The arguments and results of a method's hooks: contexts, plans, messages and replies.

Methods import these names from `rayfl.methods.base`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NotRequired, Self, TypedDict, TypeVar, cast

import numpy as np

from rayfl.compress.base import Compressor, Message, Packet, encode_trees
from rayfl.compress.dense import Dense
from rayfl.determinism.seeding import LazyGenerator
from rayfl.population.client import Traits
from rayfl.settings import Settings
from rayfl.tree import Difference, State, Tree

# Any: each method declares the keys of its own, as a TypedDict.
Carry = Any
"""What a client holds while it trains; `carry["params"]` is the model in training. Methods declare their own."""
Metrics = Mapping[str, float]


class ModelState(TypedDict):
    """A state, or a carry to evaluate, that is one model."""

    params: Tree


Upload = Mapping[str, Packet | Tree | Difference]
"""What a client sends, by name: a tree, or a difference of two, which the engine encodes with the experiment's uplink;
or a finished packet."""
Download = Mapping[str, Packet | Tree]
"""What the server sends, by name: a tree, which the engine encodes with the experiment's downlink; or a finished
packet."""
Trees = Mapping[str, Tree | Difference]
"""What a client sends, by name, before it is encoded."""
Delivered = Sequence[int]
"""The clients whose messages arrived, ascending."""
Split = Literal["train", "validation", "heldout"]


Newcomer = Literal["model", "round", "undefined"]
"""What a method does for a client that comes for the first time; see `Capabilities.newcomer`."""


@dataclass(frozen=True)
class Stage:
    """Local work on one split: `epochs` or `steps`, in batches of `batch_size` (None: the whole split).

    On the train split a client takes only the first `share` of these steps, rounded, and at least one. All passes are
    over the same share `subset` of the split, drawn for this stage of this round. A stage that is `free`, because it
    computes nothing with the model (it counts labels), counts no steps and no examples, takes no simulated time, and is
    done whole by slow clients too.
    """

    name: str = "train"
    split: Split = "train"
    epochs: int | None = None
    steps: int | None = None
    batch_size: int | None = None
    batches_per_step: int = 1
    lr: float = 0.0
    share: float = 1.0
    subset: float = 1.0
    free: bool = False

    def num_examples(self, held: int) -> int:
        """The number of examples in a pass, if the client holds `held` in the split: rounded, and at least one."""
        return held if self.subset == 1 else max(1, math.floor(self.subset * held + 0.5))


@dataclass(frozen=True)
class Plan:
    """The plan of a round: the stages of local work, whether anything is downloaded or uploaded, and who trains.

    With `trainers="all"` every client downloads and trains, and only the sampled ones upload (pFedMe). `coin` is the
    round's shared coin, for methods whose odds depend on the compressor (MARINA).
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
    """All that a method may read besides its own states.

    `plan` is the round's; in a client's own hooks it has the client's stages (`Method.stages`). `client` is None on the
    server. `num_clients` does not count the unseen clients, whose numbers follow. `num_rounds`,
    T, is the length of the experiment, for schedules over all of it; `may_be_last`: whether the run may end with this
    round, as with an early stop after any evaluation. `coin` is the shared coin of any round, in [0, 1).
    `links` [num_clients, num_clients] are the weights a_kl of the round's graph, for the server of a method that
    `uses_graph`. `retention_given`: whether the experiment gives each client a retention ratio, of which `least_ratio`
    is the smallest. `initial` are the parameters of round 0. `work` is filled, by stage name, when `finish` is called.
    `sends` is False for a client that trains and does not upload; it must leave the memory of its compressor alone.
    `generator` belongs to this (seed, round, client, call) and to nothing else. `num_selected` is `clients.per_round`.
    `neighbours_in` and `neighbours_out` are the peers that this one receives from, and that receive from it, in this
    round's exchange, ascending; () before it is known who is present, when peers begin and finish.
    `traits_of` gives the traits of a client that has delivered, for the server's update.
    `outgoing` applies the wrappers to the trees of a message; a method that encodes trees itself calls it once on all
    of them before it encodes (`compressed` does so).
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
    traits_of: Callable[[int], Traits]
    links: np.ndarray | None = None
    retention_given: bool = False
    least_ratio: float = 1.0
    work: Mapping[str, Work] = field(default_factory=dict)
    sends: bool = True
    num_selected: int = 0
    neighbours_in: tuple[int, ...] = ()
    neighbours_out: tuple[int, ...] = ()
    outgoing: Callable[[Trees], Trees] = dict
    may_be_last: bool = False

    @property
    def seed(self) -> int:
        """The experiment's seed."""
        return self.draws.key[0]

    @property
    def generator(self) -> np.random.Generator:
        """The source of this call's random numbers."""
        return self.draws.generator

    # Any: fields.
    def but(self, **changed: Any) -> Self:
        """A copy with other values of some fields; `dataclasses.replace` takes ten times as long."""
        twin = object.__new__(type(self))
        vars(twin).update(vars(self), **changed)
        return twin

    @property
    def traits(self) -> Traits:
        """The client's traits. The server has none."""
        assert self.client is not None, "the server has no traits"
        return self.client


@dataclass(frozen=True)
class Finished:
    """The end of a client's round: its new state, its message (None: it sends nothing), and its weight in means."""

    state: State
    message: Upload | None
    weight: float = 1.0
    metrics: Metrics = field(default_factory=dict)


class StackRows(NamedTuple):
    """What differs between the clients of a stack, row by row: train examples, and the work by stage name."""

    num_examples: Sequence[int]
    work: Sequence[Mapping[str, Work]]


@dataclass(frozen=True)
class FinishedStack:
    """`Finished` of all clients of a stack: every tensor is [count, ...], and sequences have an entry for each row.

    `trees`: of the message, by name. `packets`: what else a client sends, by its row.
    """

    state: State
    trees: Trees
    weights: Sequence[float]
    metrics: Sequence[Metrics]
    packets: Callable[[int], Mapping[str, Packet]] = lambda row: {}


@dataclass(frozen=True)
class Reply:
    """A message to one client, the server's new memory of that client, and metrics to record."""

    message: Message
    server_memory: State
    metrics: Metrics = field(default_factory=dict)


def encode_broadcast(parts: Download, ctx: Context) -> Message:
    """A message of the server: its trees encoded with the experiment's downlink, its finished packets as they are."""
    return {
        name: part if isinstance(part, Packet) else ctx.downlink.encode(part, {}, ctx.generator)[0]
        for name, part in parts.items()
    }


class UplinkMemory(TypedDict):
    """The part of a client's state that its uplink compressor remembers (error feedback)."""

    uplink: NotRequired[State]


Sender = TypeVar("Sender", bound=UplinkMemory)


def compressed(state: Sender, trees: Mapping[str, Tree], ctx: Context) -> tuple[dict[str, Packet], Sender]:
    """Encode trees with the experiment's uplink, and keep its memory in the client's state, under "uplink".

    For a client that does not send there are no packets, and its memory stays unchanged.
    """
    if not ctx.sends:
        return {}, state
    packets, memories = encode_trees(ctx.uplink, ctx.outgoing(trees), state.get("uplink", {}), ctx.generator)
    return packets, cast(Sender, {**state, "uplink": memories}) if memories else state


def uncompressed(trees: Mapping[str, Tree], ctx: Context) -> dict[str, Packet]:
    """Encode trees as they are, whatever the uplink is."""
    return encode_trees(Dense(), ctx.outgoing(trees), {}, ctx.generator)[0]


def contracting(compressor: Compressor, like: Tree) -> float:
    """The factor that makes a contraction of C: 1 / (1 + omega) if C is unbiased, else 1.

    E||C(v) / (1 + omega) - v||^2 <= omega / (1 + omega) ||v||^2. `like`: the tree that is encoded.
    """
    return 1 / (1 + (compressor.omega(sum(tensor.numel() for tensor in like.values())) or 0.0))


class HyperParameters(Settings):
    """Hyper-parameters of one method; a method's own `Hyper` adds to these."""

    def for_num_rounds(self, rounds: int) -> Self:
        """The same settings, completed for an experiment of `rounds` rounds (the length of a learning rate's cosine).

        Raises ValueError if the settings do not fit that number of rounds.
        """
        return self

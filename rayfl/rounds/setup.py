"""Setup: everything of an experiment that stays the same through all rounds, shared with every worker."""

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from pydantic import Field

from rayfl import tree
from rayfl.choices import plugins
from rayfl.compress.base import Compressor, Message, OnDevice
from rayfl.data.batches import ClientData
from rayfl.data.datasets import Dataset
from rayfl.data.device import DeviceData
from rayfl.data.partition import Partition
from rayfl.data.transfer import to_device
from rayfl.determinism import seeding
from rayfl.determinism.process import Precision
from rayfl.errors import RayflError
from rayfl.gather import Relay
from rayfl.methods.base import Context, Method, PeerHalf, Plan, ServerHalf
from rayfl.models import flops
from rayfl.population.client import Traits
from rayfl.population.sampling import Clients, Population
from rayfl.rounds import engines, stacking
from rayfl.rounds.check_hooks import checked_hook
from rayfl.rounds.client_outputs import Slots
from rayfl.settings import Settings
from rayfl.topology.graphs import Topology, link_weights, mixing_weights
from rayfl.tree import Arrays, State, Tree


class Evaluation(Settings):
    """The `[evaluation]` table: how often models are evaluated, and on what."""

    every: int = Field(default=1, ge=0, description="evaluate every so many rounds and after the last; 0: only then")
    pooled: bool = Field(default=True, description="evaluate the global model on the pooled test set")
    own: bool = Field(default=True, description="evaluate each client's model on its own test split")
    personal_on_pooled: bool = Field(
        default=False, description="evaluate each personal model on the pooled test set too"
    )
    train: bool = Field(default=False, description="evaluate on training examples too: train accuracy")
    masks: bool = Field(
        default=False, description="compare the clients' masks after the last round, pair by pair, beside their labels"
    )


@dataclass(frozen=True)
class Setup:
    """What a worker needs to do any client's work. Pickles with its large arrays out of band."""

    seed: int
    rounds: int
    method: Method
    dataset: Dataset
    partition: Partition
    population: Population
    initial_arrays: Arrays
    uplink: Compressor
    downlink: Compressor
    topology: Topology | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)
    engine_name: str = "auto"
    stack_width: int | None = None
    """Clients of a stack; None: by the rule of `stacking`."""
    device_name: str = "cpu"
    threads: int = 1
    precision: Precision = "fp32"
    identity: str = ""
    """A digest of all that decides the numbers; "" where nobody compares it. Checkpoints have it."""

    # Any: fields and what was computed from them.
    def __getstate__(self) -> dict[str, Any]:
        # Pickle reads in order: plugin files must have run before it comes to objects of their classes.
        # Each process puts the samples on its own device, and looks at the initial arrays where they are.
        fields = {
            name: value
            for name, value in vars(self).items()
            if name not in ("device_data", "initial", "initial_on_device")
        }
        return {"plugin_files": plugins.loaded_files(), **fields}

    # Any: see `__getstate__`.
    def __setstate__(self, state: dict[str, Any]) -> None:
        del state["plugin_files"]
        vars(self).update(state)

    @cached_property
    def initial(self) -> Tree:
        """The parameters of round 0."""
        return tree.to_tensors(self.initial_arrays)

    @cached_property
    def initial_on_device(self) -> Tree:
        """The same where local work runs."""
        return to_device(self.initial, self.device)

    @property
    def num_clients(self) -> int:
        """Number of clients, N."""
        return len(self.population)

    @property
    def device(self) -> torch.device:
        """Where local work runs."""
        return torch.device(self.device_name)

    @property
    def hooks_on_device(self) -> bool:
        """Whether clients' hooks and uplinks are given tensors of a device, where local work runs on one."""
        return self.device.type != "cpu" and self.method.on_device and self.uplink.takes_device

    @cached_property
    def device_data(self) -> DeviceData:
        """The dataset where local work runs."""
        return DeviceData(self.dataset, self.device)

    @cached_property
    def forward_flops(self) -> int:
        """Operations of one example's forward pass through the dense model; 0 where they are not known."""
        return flops.forward_flops(self.method.task.weight_uses, params=self.initial)

    @property
    def server_half(self) -> ServerHalf:
        """The method as a server method."""
        assert isinstance(self.method, ServerHalf)
        return self.method

    @property
    def peer_half(self) -> PeerHalf:
        """The method as a peer method."""
        assert isinstance(self.method, PeerHalf)
        return self.method

    @property
    def is_peer(self) -> bool:
        """Whether clients talk to each other and there is no server."""
        return isinstance(self.method, PeerHalf)

    @cached_property
    def stateful(self) -> bool:
        """Whether clients remember anything between rounds (their compressor's memory included)."""
        return bool(self.first_state(0)) or bool(self.uplink.init(self.initial))

    @cached_property
    def has_server_memory(self) -> bool:
        """Whether the server remembers anything of single clients."""
        return not self.is_peer and bool(self.first_server_memory(0))

    @cached_property
    def relayed(self) -> tuple[str, ...]:
        """The names of messages that the server sends on unopened."""
        return () if self.is_peer else tuple(n for n, rule in self.method.gather.items() if isinstance(rule, Relay))

    @cached_property
    def retention_ratios(self) -> dict[int, float]:
        """The retention ratio that the experiment gives each client; {} where it gives none."""
        if self.population.settings.retention_ratio is None:
            return {}
        return {client: self.population.traits(client).retention_ratio for client in range(self.num_clients)}

    @property
    def keeps_messages(self) -> bool:
        """Whether messages are kept until it is known who needs them (peers, `take_first`)."""
        return self.is_peer or self.population.settings.take_first is not None

    @cached_property
    def state_slots(self) -> Slots:
        """A client's state alone."""
        return Slots(self.stateful)

    @cached_property
    def memory_slots(self) -> Slots:
        """What is remembered of a client between rounds: its state, and the server's memory of it."""
        return Slots(self.stateful, self.has_server_memory)

    @cached_property
    def output_slots(self) -> Slots:
        """What a client leaves behind when it has trained."""
        return Slots(self.stateful, self.has_server_memory, self.keeps_messages, self.relayed)

    @cached_property
    def engine(self) -> engines.Engine:
        """The engine that runs local work."""
        return stacking.choose(self.engine_name, self.method, self.device, self.initial)

    @cached_property
    def work_width(self) -> int:
        """Clients that are trained together: a stack under vmap, one in the loop."""
        if self.engine is not engines.run_vmap:
            return 1
        return stacking.width(self.stack_width, self.method, self.device, self.initial)

    @property
    def most_actors(self) -> int:
        """Actors that a round can use at most: clients that train at once, or stacks of them. Without a server, or
        where the method says so, all clients train."""
        everyone = self.is_peer or self.plan(0).trainers == "all"
        clients = self.num_clients if everyone else self.population.settings.num_selected
        return -(-clients // self.work_width)

    def first_state(self, client: int) -> State:
        """What a client remembers before its first round."""
        draws = seeding.FirstDraws(self.seed, client)
        return checked_hook(self.method.init_client)(self.population.traits(client), self.initial, draws)

    def first_server_memory(self, client: int) -> State:
        """What the server remembers of a client before the client's first round."""
        return checked_hook(self.server_half.init_server_memory)(self.population.traits(client), self.initial)

    def data(self, client: int) -> ClientData:
        """The client's examples."""
        return ClientData(self.dataset, self.partition, client, self.device_data)

    def context(self, round: int, plan: Plan, client: int, purpose: str) -> Context:
        """What a method may know in this round about this client (`seeding.NOBODY`: the server)."""
        traits: Traits | None = None if client == seeding.NOBODY else self.population.traits(client)
        sees_graph = client == seeding.NOBODY and self.method.uses_graph
        return Context(
            round=round,
            plan=plan,
            client=traits,
            num_clients=self.num_clients,
            num_rounds=self.rounds,
            initial=self.initial,
            uplink=self.uplink if traits is None else self.uplink_of(traits),
            downlink=self.downlink,
            draws=seeding.LazyGenerator(self.seed, round, client, purpose),
            coin=partial(seeding.coin, self.seed),
            links=self.links(round) if sees_graph else None,
        )

    def context_for_hooks(self, round: int, plan: Plan, client: int, purpose: str) -> Context:
        """`context` for the hooks of a client that trains: the initial parameters lie where they work."""
        ctx = self.context(round, plan, client, purpose)
        return replace(ctx, initial=self.initial_on_device) if self.hooks_on_device else ctx

    def for_hooks(self, message: Message) -> Message:
        """A message whose packets decode where the hooks of clients that train work."""
        if not self.hooks_on_device:
            return message
        return {name: OnDevice.of(packet, self.device) for name, packet in message.items()}

    def uplink_of(self, client: Traits) -> Compressor:
        """The client's uplink: with its own retention ratio where it has one that the method does not use itself."""
        if not client.retention_given or self.method.honours_retention:
            return self.uplink
        return self.uplink.keeping(client.retention_ratio) or self.uplink

    def links(self, round: int) -> np.ndarray:
        """The weights of a round's graph among all clients, [num_clients, num_clients]."""
        assert self.topology is not None
        return link_weights(self.topology.receives(self.num_clients, self.seed, round), self.topology.weights)

    def plan(self, round: int) -> Plan:
        """The method's plan of a round, with the round's shared coin."""
        return checked_hook(self.method.plan)(round, seeding.coin(self.seed, round))

    def evaluated(self, round: int) -> bool:
        """Whether models are evaluated at the end of this round."""
        every = self.evaluation.every
        return round == self.rounds - 1 or (every > 0 and (round + 1) % every == 0)

    def check(self) -> None:
        """RayflError where the method and the rest of the experiment do not go together."""
        check_splits(self.method, self.partition)
        check_retention(self.method, self.uplink, self.population.settings)
        if self.evaluation.masks and self.method.mask(self.first_state(0)) is None:
            raise RayflError(
                f"=true compares masks, and clients of {type(self.method).__name__} keep none; remove it",
                ("evaluation", "masks"),
            )
        if self.is_peer:
            check_peers(self.method, self.population.settings)
        name = type(self.method).__name__
        if self.topology is None:
            if self.is_peer and self.method.gather:
                raise RayflError(f"{name} exchanges among peers; add a [topology] table")
            if self.method.uses_graph:
                raise RayflError(f"{name} has a graph over its clients; add a [topology] table")
        elif not self.is_peer and not self.method.uses_graph:
            raise RayflError(f"{name} has a server; remove the [topology] table")
        else:
            # The first graph, so that one that cannot be drawn or weighted is refused before anything starts.
            mixing_weights(self.topology.receives(self.num_clients, self.seed, 0), self.topology.weights)
        self.method.check(self.num_clients, self.topology, self.seed)


def check_peers(method: Method, clients: Clients) -> None:
    """RayflError for what only a server can do, or what only happens to its clients."""
    for name in ("dropout_after_download", "upload_loss", "deadline_s", "take_first"):
        if getattr(clients, name):
            raise RayflError(
                f"={getattr(clients, name)} needs a server, and {type(method).__name__} has none; remove it, or use "
                "dropout_before_download and dropout_after_training",
                ("clients", name),
            )


def check_retention(method: Method, uplink: Compressor, clients: Clients) -> None:
    """RayflError for retention ratios that neither the method nor the uplink uses, or that no theory covers."""
    if clients.retention_ratio is None or method.honours_retention:
        return
    name, key = type(method).__name__, ("clients", "retention_ratio")
    if uplink.keeping(1.0) is None:
        raise RayflError(
            f" is used by neither {name} nor the uplink {uplink.name!r}; remove it, or take a method that keeps or "
            "sends a share of the model, or an uplink that does, for example topk",
            key,
        )
    if method.needs_one_omega:
        raise RayflError(f" gives every client an uplink of its own, and {name} needs one for all; remove it", key)


def check_splits(method: Method, partition: Partition) -> None:
    """RayflError if the method needs a split that the partition left empty."""
    for split, share in method.splits.items():
        if not len(partition.split(split).indices):
            raise RayflError(
                f"{type(method).__name__} needs {split} examples; set splits.{split}_ratio (for example {share})"
            )

"""Setup: everything in an experiment that is the same in all rounds. Every worker has it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Literal

import numpy as np
import torch

from rayfl import tree
from rayfl.choices import plugins
from rayfl.compress.base import Compressor
from rayfl.data.batches import ClientData, first_two
from rayfl.data.datasets import Dataset
from rayfl.data.device import DeviceData
from rayfl.data.partition import Partition
from rayfl.data.transfer import to_device
from rayfl.determinism import seeding
from rayfl.determinism.global_draws import keyed
from rayfl.determinism.process import ArithmeticPrecision
from rayfl.gather import Relay, RobustMean
from rayfl.methods.base import Carry, Context, Method, PeerHalf, Plan, ServerHalf, Stage, Traits
from rayfl.metrics.base import Metric
from rayfl.metrics.check import checked_facts
from rayfl.metrics.facts import LOSS, Facts
from rayfl.metrics.loss import Loss
from rayfl.models import flops
from rayfl.population.sampling import DROPOUTS, Population
from rayfl.rounds import engines
from rayfl.rounds.check_hooks import checked_hook
from rayfl.rounds.early_stop import StopRule
from rayfl.rounds.evaluation_settings import Evaluation
from rayfl.rounds.step_graphs import CudaRecorder, StepGraphs
from rayfl.rounds.worker_jobs import OBJECT_BYTES, Slots
from rayfl.schedules.base import Schedule
from rayfl.schedules.synchronous import Synchronous
from rayfl.selections.base import Selection
from rayfl.selections.plain import Uniform
from rayfl.settings import ThirdPartySetting
from rayfl.task import NetworkTask
from rayfl.topology.graphs import Topology, link_weights
from rayfl.topology.mixing import Exchange
from rayfl.untyped import Anything

_MADE = ("device_data", "step_graphs", "initial", "initial_on_device", "evaluated_rows", "metrics", "plugin_files")
"""Attributes that every process makes for itself, and that are not pickled."""


@dataclass(frozen=True)
class Setup:
    """All that a worker needs to do any client's work. Pickles with its large arrays out of band."""

    seed: int
    rounds: int
    method: Method
    dataset: Dataset
    partition: Partition
    population: Population
    initial_arrays: tree.ArrayTree
    uplink: Compressor
    downlink: Compressor
    topology: Topology | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)
    selection: Selection = field(default_factory=Uniform)
    schedule: Schedule = field(default_factory=Synchronous)
    stop: StopRule | None = None
    engine_name: str = "auto"
    stack_width: int | None = None
    """Number of clients in a stack; None: `engines.width` chooses it."""
    device_name: str = "cpu"
    server_on_device: bool = False
    """Whether the server's state, the sums of messages and the update stay on the device (`InlineExecutor` only)."""
    graphs: Literal["auto", False] = False
    """Whether steps of local training are captured as CUDA graphs."""
    threads: int = 1
    precision: ArithmeticPrecision = "fp32"
    identity: str = ""
    """A digest of everything that decides the numbers, which checkpoints store; "" if nobody compares it."""
    unread: Sequence[ThirdPartySetting] = ()
    """Settings of third-party classes that no code had read when this was made."""

    def __getstate__(self) -> dict[str, Anything]:
        # Plug-in files come before objects of their classes, as pickle reads in order. Processes make the rest anew.
        return {
            "plugin_files": plugins.loaded_files(),
            **{name: value for name, value in vars(self).items() if name not in _MADE},
        }

    @cached_property
    def initial(self) -> tree.Tree:
        """The parameters of round 0."""
        return tree.to_tensors(self.initial_arrays)

    @property
    def first_model(self) -> tree.Tree:
        """The whole model of round 0, with the parts that clients keep."""
        return {**self.initial, **tree.to_tensors(dict(self.method.task.local))}

    @cached_property
    def initial_on_device(self) -> tree.Tree:
        """The parameters of round 0 on the device where local work runs."""
        return to_device(self.initial, self.device)

    @property
    def num_clients(self) -> int:
        """Number of clients that rounds ask. The unseen ones are not counted."""
        return len(self.population)

    @property
    def unseen(self) -> range:
        """The clients that no round asks; they have the numbers after those of the others."""
        return range(self.num_clients, self.population.settings.count)

    @cached_property
    def evaluated_clients(self) -> range | dict[int, None]:
        """The clients that every evaluation evaluates, ascending; unseen clients are evaluated besides."""
        if self.evaluation.clients is None:
            return range(self.num_clients)
        draws = seeding.generator(self.seed, purpose="evaluated clients")
        return dict.fromkeys(sorted(draws.choice(self.num_clients, self.evaluation.clients, replace=False).tolist()))

    @cached_property
    def evaluated_rows(self) -> np.ndarray:
        """The train examples of the clients that are evaluated, int64, by client."""
        if self.evaluation.clients is None:
            return self.partition.train.indices[: self.partition.train.offsets[self.num_clients]]
        return self.partition.train.of_clients(np.array([*self.evaluated_clients])).indices

    @cached_property
    def device(self) -> torch.device:
        """The device where local work runs."""
        return torch.device(self.device_name)

    @cached_property
    def hooks_on_device(self) -> bool:
        """Whether clients' hooks and uplinks get tensors on the GPU that local work runs on; False on a CPU."""
        return self.device.type != "cpu" and self.method.capabilities.on_device and self.uplink.takes_device

    @cached_property
    def device_data(self) -> DeviceData:
        """The dataset on the device where local work runs."""
        return DeviceData(self.dataset, self.device)

    @cached_property
    def step_graphs(self) -> StepGraphs | None:
        """The CUDA graphs of this process; None if steps run as they are, as in a dry run without a GPU."""
        return StepGraphs(CudaRecorder(), self.device) if self.graphs and self.device.type == "cuda" else None

    @cached_property
    def forward_flops(self) -> int:
        """Operations of one example's forward pass through the dense model; 0 if unknown."""
        return flops.forward_flops(self.method.task.weight_uses, params=self.initial)

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics of every evaluation: those of the experiment, else of the task. Without a network: the loss."""
        task = self.method.task
        if not isinstance(task, NetworkTask):
            return (Loss(),)
        targets = tree.tensor_over(self.dataset.train.labels)
        return tuple(
            metric.for_data(task.task, targets).with_names(self.dataset.classes)
            for metric in self.evaluation.metrics or task.task.default_metrics()
        )

    @cached_property
    def metric_facts(self) -> Mapping[str, Facts]:
        """The facts of every value by its name. Raise RayflError if a metric cannot evaluate this experiment."""
        task = self.method.task
        if not isinstance(task, NetworkTask):
            return {"loss": LOSS}
        with keyed(self.seed, purpose="facts"), torch.no_grad():
            outputs = task.evaluated(self.first_model, first_two(self.dataset))
        predictions = task.predictions(outputs, self.metrics)
        is_single = isinstance(outputs, torch.Tensor) and predictions is outputs
        return checked_facts(self.metrics, predictions, tree.tensor_over(self.dataset.train.labels), is_single)

    @property
    def graph_topology(self) -> Topology:
        """The topology of an experiment that has one."""
        assert self.topology is not None
        return self.topology

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
        """The names of the messages that the server forwards without decoding them."""
        return () if self.is_peer else tuple(n for n, rule in self.method.gather.items() if isinstance(rule, Relay))

    @cached_property
    def keeps_messages(self) -> bool:
        """Whether messages are stored until it is known who needs them (not so in plain rounds with a server)."""
        # What a client has trained in a flight is used only when its flight ends.
        waits = self.schedule.collects == "flights" or self.population.settings.take_first is not None
        return waits or self.is_peer or any(isinstance(rule, RobustMean) for rule in self.method.gather.values())

    @property
    def on_own_clocks(self) -> bool:
        """Whether peers train and exchange at their own times instead of in rounds (`Schedule.collects`)."""
        return self.schedule.collects == "clocks"

    @property
    def keeps_models(self) -> bool:
        """Whether trained models stay with their flights, because it is not known yet whether they are evaluated."""
        not_known = self.on_own_clocks or (self.schedule.collects == "flights" and self.evaluation.every != 1)
        return not_known and self.method.capabilities.evaluated_after_training

    @cached_property
    def state_slots(self) -> Slots:
        """The objects of a client between rounds that its evaluation reads: its state."""
        return Slots(self.stateful)

    @cached_property
    def memory_slots(self) -> Slots:
        """The objects of a client between rounds: its state, and the server's memory of the client."""
        return Slots(self.stateful, self.has_server_memory)

    @cached_property
    def output_slots(self) -> Slots:
        """The objects that a client's training returns."""
        return Slots(self.stateful, self.has_server_memory, self.keeps_messages, self.relayed, self.keeps_models)

    @cached_property
    def together(self) -> int:
        """How many clients' states share an object of the store: 1 if they hold handles of packets.

        A first state may be small and later ones as large as the model.
        """
        memory = self.first_server_memory(0) if self.has_server_memory else {}
        states = (self.initial, memory, {"state": self.first_state(0), "uplink": self.uplink.init(self.initial)})
        most = max(tree.num_bytes(tree.to_arrays(state)) for state in states)
        return 1 if self.relayed else max(1, OBJECT_BYTES // max(1, most))

    @cached_property
    def engine(self) -> engines.Engine:
        """The engine that runs local work."""
        return engines.choose(self.engine_name, self.method, self.device, self.initial)

    @cached_property
    def work_width(self) -> int:
        """Number of clients trained together: a stack under vmap, one in the loop.

        By default at most the clients that the settings let train in a round. How many come never matters.
        """
        if self.engine is not engines.run_vmap:
            return 1
        return self.stack_width or min(engines.width(self.method, self.device, self.initial), self.num_trainers)

    @property
    def num_trainers(self) -> int:
        """Clients that train in a round, or are under way at once, if nobody is away: all, or as many as selected."""
        everyone = self.is_peer or self.plan(0).trainers == "all"
        return self.num_clients if everyone else self.population.settings.num_selected

    @property
    def most_actors(self) -> int:
        """The largest number of actors that a round can use: one per client that trains, or per stack of clients."""
        return -(-self.num_trainers // self.work_width)

    def first_state(self, client: int) -> tree.State:
        """A client's state before its first round."""
        draws = seeding.FirstDraws(self.seed, client)
        with keyed(self.seed, client=client, purpose="first state"):
            return checked_hook(self.method.init_client)(self.traits(client), self.initial, draws)

    def first_server_memory(self, client: int) -> tree.State:
        """The server's memory of a client before the client's first round."""
        with keyed(self.seed, client=client, purpose="first server memory"):
            return checked_hook(self.server_half.init_server_memory)(self.traits(client), self.initial)

    def data(self, client: int) -> ClientData:
        """The client's examples."""
        # Unseen clients are stacked only with each other.
        stacked = self.num_clients if client < self.num_clients else len(self.partition.train)
        return ClientData(self.dataset, self.partition, client, self.device_data, stacked)

    def local_task(
        self, client: int, number: int, stages: tuple[Stage, ...], begin: Callable[[], Carry] = dict, **fields: Anything
    ) -> engines.LocalTask:
        """A client's work in a round or flight of this number, which keys its draws; `fields`: others of the task."""
        return engines.LocalTask(
            client,
            number,
            self.seed,
            begin,
            self.data(client),
            stages,
            self.device,
            share=float(self.population.work_shares[client]),
            on_device=self.hooks_on_device,
            graphs=self.step_graphs,
            **fields,
        )

    def context(self, round_number: int, plan: Plan, client: int, purpose: str, key: int | None = None) -> Context:
        """The context that a method gets in this round for this client (`seeding.NOBODY`: for the server).

        key: the number of the client's flight, by which it draws instead of by the round.
        """
        traits: Traits | None = None if client == seeding.NOBODY else self.traits(client)
        sees_graph = client == seeding.NOBODY and self.method.capabilities.uses_graph
        return Context(
            round=round_number,
            plan=plan,
            client=traits,
            num_clients=self.num_clients,
            num_rounds=self.rounds,
            # With an early stop the run may end with any round that is evaluated.
            may_be_last=round_number == self.rounds - 1 if self.stop is None else self.evaluated(round_number),
            initial=self.initial,
            uplink=self.uplink if traits is None else self.uplink_of(traits),
            downlink=self.downlink,
            draws=seeding.LazyGenerator(self.seed, round_number if key is None else key, client, purpose),
            coin=partial(seeding.coin, self.seed),
            traits_of=self.traits,
            links=self.links(round_number) if sees_graph else None,
            retention_given=self.population.settings.retention_ratio is not None,
            least_ratio=min(self.population.retention_groups, default=1.0),
            num_selected=self.population.settings.num_selected,
        )

    def traits(self, client: int) -> Traits:
        """The client's traits, with its label counts if the method needs them."""
        traits = self.population.traits(client)
        if not self.method.capabilities.label_counts:
            return traits
        labels = self.dataset.train.labels[self.partition.train[client]]
        return replace(traits, label_counts=tuple(np.bincount(labels, minlength=self.dataset.num_classes).tolist()))

    def uplink_of(self, client: Traits) -> Compressor:
        """The client's uplink; it keeps the client's own retention ratio, unless the method itself uses that ratio."""
        if not client.retention_given or self.method.capabilities.honours_retention:
            return self.uplink
        return self.uplink.keeping(client.retention_ratio) or self.uplink

    def links(self, round_number: int) -> np.ndarray:
        """The weights of a round's graph among all clients, [num_clients, num_clients]."""
        everyone = self.exchange(round_number, np.full(self.num_clients, True))
        graph = self.graph_topology.sparse(self.num_clients, self.seed, round_number)
        return link_weights(self.graph_topology, graph, everyone).toarray()

    def exchange(self, round_number: int, present: np.ndarray) -> Exchange:
        """What the weights of an exchange among the peers that are present, booleans [num_clients], may depend on."""
        return Exchange(self.seed, round_number, present, not (self.graph_topology.varying or self.away))

    @property
    def away(self) -> tuple[str, ...]:
        """The settings of `[clients]` that keep some clients out of the exchange among peers."""
        return tuple(key for key in (*DROPOUTS, "availability") if self.population.settings.is_given(key))

    def plan(self, round_number: int) -> Plan:
        """The method's plan for a round, made with the round's shared coin."""
        with keyed(self.seed, round_number, purpose="plan"):
            return checked_hook(self.method.plan)(round_number, seeding.coin(self.seed, round_number))

    def evaluated(self, round_number: int) -> bool:
        """Whether models are evaluated at the end of this round."""
        every = self.evaluation.every
        return round_number == self.rounds - 1 or (every > 0 and (round_number + 1) % every == 0)

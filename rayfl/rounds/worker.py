"""Worker: does the jobs of worker_jobs.py and mix.py, as pure functions. Ray actors and InlineExecutor have one each.

A job names clients and comes with their states. It returns one small result, and one object for each thing that is kept
after the call: a client's state, the server's memory of the client, or a message that others will read. A worker keeps
nothing but the setup between calls.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, singledispatchmethod
from typing import Any

import numpy as np
import torch

from rayfl import tree
from rayfl.compress.base import message_bits
from rayfl.data.transfer import to_device
from rayfl.determinism.global_draws import UnkeyedDraw, key, watched
from rayfl.determinism.process import trim
from rayfl.determinism.seeding import generator
from rayfl.errors import naming_round_and_client
from rayfl.gather import RobustMean
from rayfl.methods.base import Carry, Work
from rayfl.metrics.masks import ClientMask, client_mask
from rayfl.population.client import ClientStatus
from rayfl.rounds import evaluation
from rayfl.rounds.check_hooks import HookInputs, checked_hook
from rayfl.rounds.client_round import ClientRound, Ended, with_memory, without_memory
from rayfl.rounds.mix import MeetJob, MixJob, PeerWork, SendJob
from rayfl.rounds.model_sums import ModelSums, mean_loss, pooled_sums
from rayfl.rounds.partial_sums import FromClient, Summing, on_wire, robust_slice
from rayfl.rounds.setup import Setup
from rayfl.rounds.simulated_clock import FORWARD
from rayfl.rounds.whole_stacks import WholeStacks, is_whole_round, takes_whole_stacks
from rayfl.rounds.worker_jobs import (
    AddJob,
    ClientOutputs,
    ClientResult,
    EvaluateJob,
    EvaluateTrainedJob,
    MaskJob,
    MeanModelJob,
    MergeJob,
    NewcomerJob,
    PersonalModelJob,
    PollJob,
    PooledJob,
    ReplyJob,
    RewriteJob,
    RobustJob,
    RoundInputs,
    TrainJob,
    WorkerJob,
    num_values,
)

HUGE_BYTES = 1 << 29
"""Above this size of a model each client begins with a trimmed heap: the allocator's holes between tensors can take as
much as two more models. To touch a gigabyte for the first time takes about half a second."""


class Worker(PeerWork):
    """Does jobs on clients. `setup` is the same for all workers of a run; `on_client` is called whenever a client is
    trained or evaluated."""

    def __init__(self, setup: Setup, on_client: Callable[[], None] = lambda: None) -> None:
        super().__init__(setup)
        self.summing = Summing(setup)
        self._on_client = on_client
        self._draws = setup.method.task.stochastic
        if setup.device.type == "cuda" and torch.cuda.is_available():
            # A generator that a watched job finds only when it is under way may have drawn.
            torch.cuda.init()

    @cached_property
    def _takes_whole_stacks(self) -> bool:
        return takes_whole_stacks(self.setup)

    # Any: inputs and outputs are states, memories or messages; each class of job says which.
    def do(self, job: WorkerJob, round_inputs: RoundInputs, inputs: Sequence[Any]) -> tuple[Any, Iterable[Any]]:
        """Do one job; returns its result and its outputs.

        The outputs may be an iterator that makes each of them when it is asked for it, so that they need not all be in
        memory. A job that turns out to draw from global generators is done again with keys, and so are all later ones.
        """
        if not self._draws:
            with suppress(UnkeyedDraw):
                return watched(lambda: self._done(job, round_inputs, inputs))
            self._draws = True
        return self._done(job, round_inputs, inputs)

    # Any: see `do`.
    def _done(self, job: WorkerJob, round_inputs: RoundInputs, inputs: Sequence[Any]) -> tuple[Any, Iterable[Any]]:
        """What the job returns. Raise MethodError if a hook has written to what clients share."""
        self._given.note("ctx.initial", self.setup.initial)
        done = self.by_class(job, round_inputs, inputs)
        self._require_unchanged(round_inputs.round)
        self._given = HookInputs(self.method)
        return done

    @singledispatchmethod
    def by_class(self, job: WorkerJob, round_inputs: RoundInputs, inputs: Sequence[Any]) -> tuple[Any, Iterable[Any]]:
        """Do one job with the method for its class."""
        raise TypeError(f"a worker has no method for {type(job).__name__}")

    by_class.register(MixJob, PeerWork.mix)
    by_class.register(SendJob, PeerWork.send)
    by_class.register(MeetJob, PeerWork.meet)

    @by_class.register
    def train(
        self, job: TrainJob, round_inputs: RoundInputs, inputs: Sequence[Any]
    ) -> tuple[tuple[ClientResult, ...], list[Any]]:
        """Download, local work, upload, for every client of the job."""
        if job.own_inputs:
            round_inputs, *inputs = inputs
        kept = ClientOutputs.unpack(self.setup.memory_slots, job.clients, inputs)
        results: list[ClientResult] = []
        outputs: list[Any] = []

        def note(ended: Ended) -> None:
            result, left, evaluated = ended
            results.append(result if evaluated is None else result.joined(evaluated))
            self._on_client()
            if job.statuses[result.client].trains:
                outputs.extend(left.pack(self.setup.output_slots))

        if self._takes_whole_stacks and is_whole_round(round_inputs.plan):
            # Hooks get copies of the states, so nobody looks for writes to these.
            stored = {client: tree.to_tensors(outputs.state or {}) for client, outputs in kept.items()}
            stacks = WholeStacks(self.setup, self._call_inputs(round_inputs), job, stored)
            for ended in stacks.ended():
                note(ended)
            sent = stacks.sent()
        else:
            trained = self._trained(round_inputs, job.statuses, kept, job.numbers)

            def next_sent() -> FromClient | None:
                ended = next(trained)
                note(ended)
                result, left, _ = ended
                if result.status is not ClientStatus.DELIVERED or self.setup.keeps_messages:
                    return None
                return FromClient(result.client, *left.message)

            sent = [self.summing.sent(node, next_sent, round_inputs.round, job.packets) for node in job.nodes]
        return tuple(results), outputs if self.setup.keeps_messages else outputs + sent

    def _trained(
        self,
        round_inputs: RoundInputs,
        statuses: Mapping[int, ClientStatus],
        kept: Mapping[int, ClientOutputs],
        numbers: Mapping[int, int],
    ) -> Iterator[Ended]:
        """Train clients in order, one after another or a stack at a time; `numbers`: of their flights."""
        call_inputs = self._call_inputs(round_inputs)
        width, clients, shared = self.setup.work_width, [*statuses], self._given.num_noted
        for first in range(0, len(clients), width):
            self._require_unchanged(round_inputs.round, shared)
            group = clients[first : first + width]
            states = [self._state(client, kept[client]) for client in group]
            if self.setup.hooks_on_device:
                states = to_device(states, self.setup.device)
            memories = [self._server_memory(client, kept[client]) for client in group]
            client_rounds = [
                ClientRound(self.setup, call_inputs, client, statuses[client], state, memory, numbers.get(client))
                for client, state, memory in zip(group, states, memories, strict=True)
            ]
            untrained = {client_round.client: client_round.untrained() for client_round in client_rounds}
            tasks = [
                client_round.local_task() for client_round in client_rounds if untrained[client_round.client] is None
            ]
            trained = self.setup.engine(self.method, tasks, width)
            # Not before: until now the previous engine has kept its client's model.
            if tree.num_bytes(self.setup.initial_arrays) > HUGE_BYTES:
                trim()
            for client_round in client_rounds:
                # No variable holds the result, so that its memory is free before the next client trains.
                yield untrained[client_round.client] or self._finished(client_round, trained)

    def _finished(self, client_round: ClientRound, trained: Iterator[tuple[Carry, dict[str, Work]]]) -> Ended:
        """End a client's round after its training."""
        with naming_round_and_client(client_round.round, client_round.client):
            return client_round.finish(*next(trained))

    @by_class.register
    def add(self, job: AddJob, round_inputs: RoundInputs, inputs: Sequence[Any]) -> tuple[None, list[Any]]:
        """Add up stored messages as `train` adds those of the clients that it trains."""
        scales = job.scales or (1.0,) * len(job.clients)
        senders = (
            FromClient(client, *sent).scaled(scale)
            for client, sent, scale in zip(job.clients, inputs, scales, strict=True)
        )
        return None, [self.summing.sent(node, lambda: next(senders), round_inputs.round) for node in job.nodes]

    @by_class.register
    def merge(self, job: MergeJob, round_inputs: RoundInputs, inputs: Sequence[Any]) -> tuple[None, list[Any]]:
        """Add up the sums or packets of several nodes."""
        return None, [on_wire(self.summing.summed(job.node, dict(zip(job.parts, inputs, strict=True))))]

    @by_class.register
    def rewrite(self, job: RewriteJob, round_inputs: RoundInputs, inputs: Sequence[Any]) -> tuple[None, Sequence[Any]]:
        """Return the inputs."""
        return None, inputs

    @by_class.register
    def robust(
        self, job: RobustJob, round_inputs: RoundInputs, inputs: Sequence[Any]
    ) -> tuple[np.ndarray | None, list[Any]]:
        """Measure or combine a slice of messages."""
        rule = self.method.gather[job.name]
        assert isinstance(rule, RobustMean), "the round loop asks for no other"
        sent = [message[job.name] for message, _ in inputs if job.name in message]
        rows = torch.stack([tree.between(packet.decode(), job.first, job.last) for packet in sent])
        key(self.setup.seed, round_inputs.round, job.first, f"slice of {job.name}")
        return robust_slice(rule, rows, job.decision)

    @by_class.register
    def reply(
        self, job: ReplyJob, round_inputs: RoundInputs, inputs: Sequence[Any]
    ) -> tuple[tuple[ClientResult, ...], list[Any]]:
        """Make the server's replies after its update, and let the clients receive them."""
        slots, half = self.setup.memory_slots, self.setup.server_half
        server = self._shared("the server's state", round_inputs.server)
        assert server is not None
        results: list[ClientResult] = []
        outputs: list[Any] = []
        for client, kept in ClientOutputs.unpack(slots, job.clients, inputs).items():
            with naming_round_and_client(round_inputs.round, client):
                ctx = self._keyed(round_inputs, client, "reply")
                answer = checked_hook(half.reply)(server, self._server_memory(client, kept), ctx)
                state, uplink_memory = without_memory(self._state(client, kept))
                state = checked_hook(self.method.receive_reply)(state, answer.message, ctx)
            bits = message_bits(answer.message)
            results.append(
                ClientResult(
                    client,
                    downlink_bits=bits,
                    num_received=num_values(answer.message),
                    reply_bits=bits,
                    metrics=answer.metrics,
                )
            )
            outputs += ClientOutputs.of(slots, with_memory(state, uplink_memory), answer.server_memory).pack(slots)
        return tuple(results), outputs

    @by_class.register
    def evaluate(
        self, job: EvaluateJob, round_inputs: RoundInputs, inputs: Sequence[Any]
    ) -> tuple[tuple[ClientResult, ...], list[Any]]:
        """Evaluate every client's model after the exchange."""
        model = self._shared("the model", round_inputs.model)
        kept = ClientOutputs.unpack(self.setup.state_slots, job.clients, inputs)
        return tuple(self._evaluated(round_inputs, client, outputs, model) for client, outputs in kept.items()), []

    def _evaluated(
        self, round_inputs: RoundInputs, client: int, kept: ClientOutputs, model: tree.Tree | None
    ) -> ClientResult:
        """The metrics of a client's model, made of its state and of the server's `model`."""
        with naming_round_and_client(round_inputs.round, client):
            state, _ = without_memory(self._state(client, kept))
            params = evaluation.adapted(self.setup, state, model, None, self._keyed(round_inputs, client, "judge"))
            result = evaluation.evaluate_model(self.setup, params, client, round_inputs.round)
        self._on_client()
        return result

    @by_class.register
    def newcomers(
        self, job: NewcomerJob, round_inputs: RoundInputs, inputs: Sequence[Any]
    ) -> tuple[tuple[ClientResult, ...], list[Any]]:
        """Train every newcomer as in a round, and evaluate its model: after its training, and with the state it has."""
        model = self._shared("the model", round_inputs.model)
        statuses = dict.fromkeys(job.clients, ClientStatus.NOT_SELECTED)
        results: list[ClientResult] = []
        for ended in self._trained(round_inputs, statuses, dict.fromkeys(statuses, ClientOutputs()), {}):
            result = self._evaluated(round_inputs, ended.result.client, ended.outputs, model)
            results.append(result if ended.evaluated is None else ended.evaluated.joined(result))
        return tuple(results), []

    @by_class.register
    def evaluate_trained(
        self, job: EvaluateTrainedJob, round_inputs: RoundInputs, inputs: Sequence[Any]
    ) -> tuple[tuple[ClientResult, ...], list[Any]]:
        """Evaluate the models with which flights have ended. No model is kept of a client that is not evaluated."""
        results: list[ClientResult] = []
        flights = zip(job.flights.items(), inputs, strict=True)
        for (client, (round_number, number)), arrays in (flight for flight in flights if flight[1] is not None):
            with naming_round_and_client(round_number, client):
                key(self.setup.seed, number, client, evaluation.AFTER_TRAINING)
                params = self._shared(f"the model of client {client}", arrays) or {}
                results.append(evaluation.evaluate_model(self.setup, params, client, round_number, evaluation.SUFFIX))
            self._on_client()
        return tuple(results), []

    @by_class.register
    def poll(
        self, job: PollJob, round_inputs: RoundInputs, inputs: Sequence[Any]
    ) -> tuple[tuple[ClientResult, ...], list[Any]]:
        """Compute the loss of the server's model on train examples of every client: all of them, or one batch."""
        model, setup = self._shared("the model", round_inputs.model), self.setup
        assert model is not None
        most = setup.selection.polled_examples()
        results = list[ClientResult]()
        for client in job.clients:
            rows = setup.partition.train[client]
            if most != "all" and most < len(rows):
                rows = generator(setup.seed, round_inputs.round, client, "poll").choice(rows, most, replace=False)
            with naming_round_and_client(round_inputs.round, client):
                key(setup.seed, round_inputs.round, client, "poll")
                loss = mean_loss(setup, model, rows) if len(rows) else 0.0
            done, costs = {"poll": Work(0, len(rows))}, {"poll": FORWARD}
            results.append(ClientResult(client, work=done, costs=costs, metrics={"poll/loss": loss}))
        return tuple(results), []

    @by_class.register
    def personal_models(
        self, job: PersonalModelJob, round_inputs: RoundInputs, inputs: Sequence[Any]
    ) -> tuple[None, list[Any]]:
        """Make every client's model at the end of the run."""
        model = self._shared("the model", round_inputs.model)
        server = self._shared("the server's state", round_inputs.server)
        models: list[Any] = []
        for client, kept in ClientOutputs.unpack(self.setup.state_slots, job.clients, inputs).items():
            with naming_round_and_client(round_inputs.round, client):
                ctx = self._keyed(round_inputs, client, "judge")
                params = evaluation.personal_model(self.setup, self._state(client, kept), server or {}, model, ctx)
            models.append(tree.to_arrays(params))
        return None, models

    @by_class.register
    def mean_model(self, job: MeanModelJob, round_inputs: RoundInputs, inputs: Sequence[Any]) -> tuple[None, list[Any]]:
        """Add up the clients' own models in the clients' order. Output: their mean."""
        total: tree.Tree = {}
        for client, kept in ClientOutputs.unpack(self.setup.state_slots, job.clients, inputs).items():
            ctx = self._keyed(round_inputs, client, "judge")
            client_model = checked_hook(self.method.eval_begin)(self._state(client, kept), None, None, ctx)["params"]
            total = tree.add(total, client_model) if total else client_model
        return None, [tree.to_arrays(tree.scale(total, 1.0 / len(job.clients)))]

    @by_class.register
    def evaluate_pooled(
        self, job: PooledJob, round_inputs: RoundInputs, inputs: Sequence[Any]
    ) -> tuple[ModelSums, list[Any]]:
        """Evaluate the global model on a part of the pooled test set or of all train splits."""
        model = self._shared("the model", round_inputs.model)
        assert model is not None
        key(self.setup.seed, round_inputs.round, job.first, f"pooled {job.split}")
        return pooled_sums(self.setup, model, job), []

    @by_class.register
    def masks(
        self, job: MaskJob, round_inputs: RoundInputs, inputs: Sequence[Any]
    ) -> tuple[dict[int, ClientMask], list[Any]]:
        """Return what is compared of every client's mask, by client."""
        kept = ClientOutputs.unpack(self.setup.state_slots, job.clients, inputs)
        masks = {client: self.method.mask(self._state(client, outputs)) for client, outputs in kept.items()}
        # check_setup.py refuses a method without masks.
        return {client: client_mask(mask) for client, mask in masks.items() if mask is not None}, []

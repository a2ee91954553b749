"""One client in one training job: its download, its local work for the engine, its upload, and its result."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from rayfl import tree
from rayfl.compress.base import Message, Opened, Packet, encode_trees, message_bits
from rayfl.compress.dense import Dense, OpenedDense
from rayfl.data.transfer import to_device, to_memory
from rayfl.determinism import global_draws
from rayfl.determinism.seeding import LazyGenerator
from rayfl.errors import naming_round, naming_round_and_client
from rayfl.methods.base import Carry, Context, Reply, State, Upload, Work
from rayfl.models import flops
from rayfl.population.client import ClientStatus
from rayfl.rounds import evaluation
from rayfl.rounds.check_hooks import HookInputs, checked_hook
from rayfl.rounds.engines import LocalTask
from rayfl.rounds.setup import Setup
from rayfl.rounds.simulated_clock import cut_off_if_late, example_costs
from rayfl.rounds.worker_jobs import ClientOutputs, ClientResult, Missed, RoundInputs, num_values


@dataclass(frozen=True)
class OnDevice(Opened):
    """A packet that keeps its decoded tree on a device, for the clients that train there; never sent. The tree is
    copied to the device when a client first decodes it."""

    device: torch.device

    def support(self) -> tree.Tree:
        return self._support

    @cached_property
    def _decoded(self) -> tree.Tree:
        return tree.unwritten(to_device(self.codec.decode(self.parts), self.device))

    @cached_property
    def _support(self) -> tree.Tree:
        return to_device(self.codec.support(self.parts), self.device)

    @cached_property
    def _presence(self) -> tree.Tree:
        return {name: mask.to(torch.float32) for name, mask in self._support.items()}


def for_hooks(setup: Setup, message: Message) -> Message:
    """The message with packets that decode on the device of the hooks of clients that train."""
    if not setup.hooks_on_device:
        return message
    return {
        # The model of a server on the device is there already.
        name: packet if isinstance(packet, OpenedDense) else OnDevice(packet.parts, packet.codec, setup.device)
        for name, packet in message.items()
    }


class CallInputs(NamedTuple):
    """What all clients of a call read, decoded once: the broadcast, and the server's state if clients need it."""

    round_inputs: RoundInputs
    message: Message
    server: State | None


class JobInputs:
    """What the hooks in a worker's jobs get: tensors over the objects of a call, noted as what no hook may write to."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.method = setup.method
        self._given = HookInputs(setup.method)

    def _require_unchanged(self, round_number: int, since: int = 0) -> None:
        with naming_round(round_number):
            self._given.require_unchanged(since)

    def _call_inputs(self, round_inputs: RoundInputs) -> CallInputs:
        """What all clients of a call read. Each packet is decoded at most once, even if several clients read it."""
        message = for_hooks(self.setup, {name: packet.opened() for name, packet in round_inputs.message.items()})
        self._given.note_message(message)
        return CallInputs(round_inputs, message, self._shared("the server's state", round_inputs.server))

    def _keyed(self, round_inputs: RoundInputs, client: int, purpose: str, number: int | None = None) -> Context:
        """A client's context, with whose key the global generators draw from now on."""
        ctx = self.setup.context(round_inputs.round, round_inputs.plan, client, purpose, number)
        global_draws.key(*ctx.draws.key)
        return ctx

    # Any: a state's tensors, or a model's.
    def _shared(self, what: str, arrays: tree.ArrayTree | None) -> dict[str, Any] | None:
        """Tensors over arrays that all clients of the call read."""
        return None if arrays is None else self._given.note(what, tree.to_tensors(arrays))

    def _state(self, client: int, kept: ClientOutputs) -> tree.State:
        """A client's state; before the client's first round, the method's initial state."""
        if not self.setup.stateful:
            return {}
        stored = self._shared(f"the state of client {client}", kept.state)
        return self.setup.first_state(client) if stored is None else stored

    def _server_memory(self, client: int, kept: ClientOutputs) -> tree.State:
        """The server's memory of a client; before the client's first round, the method's initial one."""
        if not self.setup.has_server_memory:
            return {}
        stored = self._shared(f"the server's memory of client {client}", kept.memory)
        return self.setup.first_server_memory(client) if stored is None else stored


class Ended(NamedTuple):
    """The end of a client's round: its result, what is kept of it, and the metrics of its model after training."""

    result: ClientResult
    outputs: ClientOutputs
    evaluated: ClientResult | None = None


class ClientRound:
    """One client in one training job."""

    def __init__(
        self,
        setup: Setup,
        call_inputs: CallInputs,
        client: int,
        status: ClientStatus,
        state: State,
        server_memory: State,
        number: int | None = None,
    ) -> None:
        """`status`: as it was drawn; `state` and `server_memory`: before the round; `number`: that of the client's
        flight, by which it draws instead of by the round."""
        self.round_inputs, message, server = call_inputs
        self.client, self.status, self.number = client, status, number
        self.setup, self.method = setup, setup.method
        self.keeps_model = setup.keeps_models and self.number is not None
        self.state, self.uplink_memory = without_memory(state)
        self.round, self.plan = self.round_inputs.round, self.round_inputs.plan
        self.ctx = ctx = self._context("client")
        self._key("download")
        with naming_round_and_client(self.round, self.client):
            self.personal = Reply({}, server_memory)
            if server is not None and self.plan.down:
                at_server = ctx.but(
                    initial=setup.initial, draws=LazyGenerator(setup.seed, ctx.draws.key[1], self.client, "personal")
                )
                self.personal = checked_hook(setup.server_half.personal_message)(server, server_memory, at_server)
        downloads = self.plan.down and not setup.is_peer
        self.received: Message = {**message, **for_hooks(setup, self.personal.message)} if downloads else {}
        missed = self.round_inputs.missed.get(self.client, Missed())
        self.downlink_bits = message_bits(self.received) + missed.bits
        self.num_received = num_values(self.received) + missed.values
        with naming_round_and_client(self.round, self.client):
            self.has_work = checked_hook(self.method.has_work)(self.received, ctx)
            stages = checked_hook(self.method.stages)(self.state, self.plan, ctx) if self.has_work else ()
        if stages is not self.plan.stages:
            self.plan = replace(self.plan, stages=tuple(stages))
            self.ctx = ctx.but(plan=self.plan)

    def _context(self, purpose: str) -> Context:
        """The context of the client's hooks, with the initial parameters on the hooks' device."""
        ctx = self.setup.context(self.round, self.plan, self.client, purpose, self.number)
        return ctx.but(initial=self.setup.initial_on_device) if self.setup.hooks_on_device else ctx

    def untrained(self) -> Ended | None:
        """The result and the objects of a client that need not train, because it has no work, drops out or misses the
        deadline; None if it trains."""
        if not self.has_work:
            return self.idle()
        if self.status.trains and self.setup.population.settings.deadline_s is None:
            return None
        task = self.local_task()
        with naming_round_and_client(self.round, self.client):
            stages = () if self.status is ClientStatus.DROPPED_AFTER_DOWNLOAD else task.stages
            work = {stage.name: task.planned(stage) for stage in stages}
            costs = example_costs(self.setup, self.ctx.but(work=work), self.state)
        result = self._result(self.status, work=work, costs=costs, stages=self.plan.stages)
        result = cut_off_if_late(self.setup, self.plan, result)
        return None if result.status.trains else Ended(result, ClientOutputs())

    def idle(self) -> Ended:
        """The result and the objects of a client without work; it keeps its state."""
        status = ClientStatus.NOT_ASKED if self.status.uploads else self.status
        result = self._result(status, metrics=self.personal.metrics if status.keeps_state else {})
        kept = to_memory(with_memory(self.state, self.uplink_memory), self.setup.device)
        return Ended(result, ClientOutputs.of(self.setup.output_slots, kept, self.personal.server_memory))

    # Any: fields of `ClientResult`.
    def _result(self, status: ClientStatus, **fields: Any) -> ClientResult:
        """A result with the client's download and the second at which it begins."""
        begins_s = self.round_inputs.begins.get(self.client, 0.0)
        received = {"downlink_bits": self.downlink_bits, "num_received": self.num_received}
        return ClientResult(self.client, status, begins_s=begins_s, **received, **fields)

    def local_task(self) -> LocalTask:
        """The client's local work, for the engine."""
        _, number, _, _ = self.ctx.draws.key
        return self.setup.local_task(
            self.client, number, self.plan.stages, self.begin, is_flight=self.number is not None
        )

    def begin(self) -> Carry:
        """The client's carry before its first step."""
        self._key("begin")
        with naming_round_and_client(self.round, self.client):
            return checked_hook(self.method.begin)(self.state, self.received, self.ctx)

    def finish(self, carry: Carry, work: Mapping[str, Work]) -> Ended:
        """End the client's round after its training."""
        setup = self.setup
        sends = self.status.uploads and self.plan.up
        ctx = self.ctx.but(work=work, sends=sends)
        self._key("finish")
        finished = checked_hook(self.method.finish)(self.state, carry, ctx)
        message: Message = {}
        status, uplink_memory, server_memory = self.status, self.uplink_memory, self.personal.server_memory
        if sends and finished.message is not None:
            message, uplink_memory = encode_upload(finished.message, uplink_memory, ctx)
            if not setup.is_peer:
                at_server = ctx.but(initial=setup.initial) if setup.hooks_on_device else ctx
                server_memory = checked_hook(setup.server_half.store_uplink)(server_memory, message, at_server)
        elif status.uploads:
            status = ClientStatus.SILENT
        result = self._result(
            status,
            message_bits=message_bits(message),
            # A peer's message is billed once its receivers are known.
            billed_bits=0 if setup.is_peer else message_bits(message),
            work=work,
            metrics={**self.personal.metrics, **operations(setup, self.state, ctx), **finished.metrics}
            if status.keeps_state
            else {},
            relayed=tuple(name for name in setup.relayed if name in message),
            num_values=num_values(message),
            costs=example_costs(setup, ctx, self.state),
            stages=self.plan.stages,
        )
        result = cut_off_if_late(setup, self.plan, result)
        added = result.status is ClientStatus.DELIVERED and not setup.keeps_messages
        if not added or setup.relayed:
            message = {name: packet.written() for name, packet in message.items()}
        is_evaluated = result.status.keeps_state and self.may_be_evaluated
        model = self.trained_model(finished.state, carry) if is_evaluated else None
        kept = to_memory(with_memory(finished.state, uplink_memory), setup.device)
        outputs = ClientOutputs.of(
            setup.output_slots,
            kept,
            server_memory,
            message=message if setup.is_peer else (message, finished.weight),
            packets=message,
            model=tree.to_arrays(to_memory(model, setup.device)) if model and self.keeps_model else None,
        )
        if model is None or self.keeps_model:
            return Ended(result, outputs)
        return Ended(
            result, outputs, evaluation.evaluate_model(setup, model, self.client, self.round, evaluation.SUFFIX)
        )

    @property
    def may_be_evaluated(self) -> bool:
        """Whether the client's model is evaluated after its training: now, or by `EvaluateTrainedJob`."""
        setup = self.setup
        now_or_later = self.round_inputs.evaluated or self.keeps_model
        if not (self.method.capabilities.evaluated_after_training and now_or_later):
            return False
        return self.client in setup.unseen or (setup.evaluation.by_client and self.client in setup.evaluated_clients)

    def trained_model(self, state: State, carry: Carry) -> tree.Tree:
        """The client's model after its training, as it is evaluated."""
        ctx = self._context(evaluation.AFTER_TRAINING)
        global_draws.key(*ctx.draws.key)
        return evaluation.adapted(self.setup, state, None, carry, ctx)

    def _key(self, purpose: str) -> None:
        """Key the global generators for the hooks that follow."""
        global_draws.key(self.setup.seed, self.ctx.draws.key[1], self.client, purpose)


def operations(setup: Setup, state: State, ctx: Context) -> dict[str, float]:
    """The metric `flops/training`, of each stage under the client's mask; {} if unknown. `state`: before training."""
    dense, method = setup.forward_flops, setup.method
    if not (dense and ctx.plan.stages):
        return {}
    uses = method.task.weight_uses
    gradients: dict[float, float] = {}
    for stage in ctx.plan.stages:
        mask = method.trains_under(state, stage, ctx)
        cost = flops.gradient_flops(uses, dense if mask is None else flops.forward_flops(uses, mask, setup.initial))
        done = ctx.work[stage.name].num_examples * method.gradients_per_example(stage, ctx)
        gradients[cost] = gradients.get(cost, 0.0) + done
    return {"flops/training": sum([cost * number for cost, number in gradients.items()])}


UPLINK_MEMORY = "uplink memory"
"""The memory's name in a client's stored state; no method may use this name."""


def without_memory(stored: State) -> tuple[State, State]:
    """Split a stored state into the method's state and the compressor's memory by message name."""
    state = dict(stored)
    return state, state.pop(UPLINK_MEMORY, {})


def with_memory(state: State, memory: State) -> State:
    """Join both into the state that is stored: the inverse of `without_memory`."""
    return {**state, UPLINK_MEMORY: memory} if memory else state


def encode_upload(upload: Upload, memory: State, ctx: Context) -> tuple[Message, State]:
    """Encode the trees of an upload with the experiment's uplink; returns the message and the compressor's new memory.

    Random compressors draw from the client's generator after the method's own draws.
    """
    trees = {name: part for name, part in upload.items() if not isinstance(part, Packet)}
    # Dense draws nothing, and takes less time than making a generator.
    draws: Any = None if type(ctx.uplink) is Dense else ctx.generator
    packets, memory = encode_trees(ctx.uplink, trees, memory, draws)
    return {name: part if isinstance(part, Packet) else packets[name] for name, part in upload.items()}, memory

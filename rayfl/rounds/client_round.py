"""One client in one training job: its download, its local work for the engine, its upload, and what it used."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rayfl import tree
from rayfl.compress.base import Message, message_bits
from rayfl.methods.base import Carry, Reply, Work
from rayfl.rounds import evaluation
from rayfl.rounds.calls import (
    TRAINS,
    ClientError,
    ClientResult,
    OutOfMemory,
    Role,
    RoundInputs,
    described,
    out_of_memory,
)
from rayfl.rounds.engines import Start
from rayfl.rounds.paper_comm import num_values
from rayfl.rounds.setup import Setup
from rayfl.rounds.simulated_clock import arrival_s, cut_off, moment
from rayfl.rounds.uplink_memory import encode_upload, with_memory, without_memory
from rayfl.tree import Arrays, State, Tree


class ClientRound:
    """One client in one training job."""

    def __init__(
        self,
        setup: Setup,
        shared: RoundInputs,
        message: Message,
        server: State | None,
        client: int,
        role: Role,
        state: State,
        server_memory: State,
    ) -> None:
        self.setup, self.method = setup, setup.method
        self.shared, self.client, self.role = shared, client, role
        self.state, self.uplink_memory = without_memory(state)
        with naming_round_and_client(shared.round, client):
            personal = Reply({}, server_memory)
            if server is not None and shared.plan.down:
                ctx = self.setup.context(shared.round, shared.plan, client, "personal")
                personal = self.setup.server_half.personal_message(server, server_memory, ctx)
        self.personal = personal
        self.received = {**message, **personal.message} if shared.plan.down and not self.setup.is_peer else {}
        self.downlink_bits = message_bits(self.received)
        self.ctx = self.setup.context(shared.round, shared.plan, client, "client")

    def absence(self) -> ClientResult | None:
        """What a client used whose training nobody needs, since it vanishes or cannot be back in time; None: train."""
        if self.role in TRAINS and (self.deadline_s is None or self.role == "keep"):
            return None
        start = self.start()
        with naming_round_and_client(self.shared.round, self.client):
            work = {} if self.role == "download_only" else {s.name: start.planned(s) for s in start.stages}
        report = self._on_time(ClientResult(self.client, downlink_bits=self.downlink_bits, work=work, undone=True))
        return None if self.role in TRAINS and report.status is None else report

    @property
    def deadline_s(self) -> float | None:
        """When the server hangs up, in a round in which it waits for anybody."""
        return self.setup.population.settings.deadline_s if self.shared.plan.up else None

    def _on_time(self, report: ClientResult) -> ClientResult:
        """The report, cut off at the deadline."""
        deadline_s = None if self.role == "keep" else self.deadline_s
        if deadline_s is None or moment(arrival_s(self.ctx.traits, report)) <= deadline_s:
            return report
        return cut_off(self.setup, self.shared.plan, report, deadline_s, "late")

    def start(self) -> Start:
        """The client's local work, for the engine."""
        return Start(
            client=self.client,
            round=self.shared.round,
            seed=self.setup.seed,
            begin=self.begin,
            data=self.setup.data(self.client),
            stages=self.shared.plan.stages,
            device=self.setup.device,
            share=self.ctx.traits.work_share,
        )

    def begin(self) -> Carry:
        """What the client holds before its first step."""
        with naming_round_and_client(self.shared.round, self.client):
            return self.method.begin(self.state, self.received, self.ctx)

    def finish(self, carry: Carry, work: Mapping[str, Work], outputs: list[Any]) -> tuple[ClientResult, Message, float]:
        """End the client's round; appends its outputs and returns its report, its message and the message's weight."""
        sends = self.role != "keep" and self.shared.plan.up
        ctx = replace(self.ctx, work=work, sends=sends)
        finished = self.method.finish(self.state, carry, ctx)
        sent = sends and finished.message is not None
        message, uplink_memory = {}, self.uplink_memory
        if sent and finished.message is not None:
            message, uplink_memory = encode_upload(finished.message, uplink_memory, ctx)
        server_memory = self.personal.server_memory
        if sent and not self.setup.is_peer:
            server_memory = self.setup.server_half.store_uplink(server_memory, message, ctx)
        outputs += pack_outputs(self.setup, with_memory(finished.state, uplink_memory), server_memory)
        if self.setup.keeps_messages:
            outputs.append(message if self.setup.is_peer else (message, finished.weight))
        outputs += [message.get(name) for name in self.setup.relayed]
        relayed = tuple(name for name in self.setup.relayed if name in message)
        values = num_values(message) if self.setup.is_peer else 0
        bits = message_bits(message)
        metrics = {**self.personal.metrics, **finished.metrics}
        report = ClientResult(self.client, sent, bits, self.downlink_bits, work, metrics, relayed, values)
        if sent and self.role == "upload_lost":
            report = replace(report, sent=False, metrics={}, relayed=(), undone=True)
        report = self._on_time(report)
        if self.shared.evaluated and not report.undone:
            report = replace(report, metrics={**report.metrics, **self._judged(finished.state, carry)})
        return report, message, finished.weight

    def _judged(self, state: State, carry: Carry) -> dict[str, float]:
        ctx = self.setup.context(self.shared.round, self.shared.plan, self.client, "judge after training")
        model: Tree | None = None
        return evaluation.evaluate_client(self.setup, state, model, carry, ctx)


def pack_outputs(setup: Setup, state: State, server_memory: State) -> list[Arrays]:
    """What outlives a call, in the order that every job's outputs have."""
    name = type(setup.method).__name__
    assert setup.stateful or not state, f"{name}.init_client must say what clients keep"
    assert setup.has_server_memory or not server_memory, f"{name}.init_link must say what the server keeps"
    states = [tree.to_arrays(state)] if setup.stateful else []
    return states + ([tree.to_arrays(server_memory)] if setup.has_server_memory else [])


@contextmanager
def naming_round_and_client(round: int, client: int) -> Iterator[None]:
    """An error inside names the round and the client, and pickles. OutOfMemory where memory was what failed."""
    try:
        yield
    except ClientError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise OutOfMemory(f"round {round}, client {client}: out of memory ({described(error)})") from error
        raise ClientError(f"round {round}, client {client}: {type(error).__name__}: {error}") from error

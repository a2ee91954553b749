"""Worker: the work on clients, as pure functions of a job. A Ray actor holds one; so does InlineExecutor.

A job names clients and comes with their states; it returns one small result and one object for each thing that must
outlive the call (a client's state, the server's link to it, a message that others will read). A worker keeps nothing
between calls but the setup.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rayfl import gather, tree
from rayfl.compress.base import Message, message_bits
from rayfl.determinism.addition_order import Node, total
from rayfl.gather import Aggregate
from rayfl.rounds import evaluation
from rayfl.rounds.calls import (
    TRAINS,
    AddJob,
    ClientJob,
    ClientResult,
    MixJob,
    PooledJob,
    RoundInputs,
    Trained,
    TrainJob,
)
from rayfl.rounds.client_round import ClientRound, naming_round_and_client, pack_outputs
from rayfl.rounds.mix import gather_rows
from rayfl.rounds.setup import Setup
from rayfl.rounds.uplink_memory import with_memory, without_memory
from rayfl.tree import State, Tree


class Worker:
    """Does jobs on clients. `setup` is the same for all workers of a run."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.method = setup.method

    # Any: inputs and outputs are states, links or messages; each kind of job says which.
    def do(self, kind: str, shared: RoundInputs, job: Any, inputs: Sequence[Any]) -> tuple[Any, Iterable[Any]]:
        """Do one job of the kind "train", "reply", "mix", "evaluate", ...: its result and its outputs.

        Large outputs are made as they are asked for, so that the worker need not hold them all.
        """
        return getattr(self, kind)(shared, job, inputs)

    def train(self, shared: RoundInputs, job: TrainJob, inputs: Sequence[Any]) -> tuple[Trained, list[Any]]:
        """Download, local work, upload, for every client of the job."""
        clients = [client for client, _ in job.clients]
        states, server_memories = self._memories(clients, inputs)
        message = opened(shared.message)
        server = None if shared.server is None else tree.to_tensors(shared.server)
        reports: list[ClientResult] = []
        outputs: list[Any] = []

        def leaf(node: Node) -> dict[str, Aggregate] | None:
            if node[1] - node[0] > 1:
                return None
            client_rounds = [
                ClientRound(self.setup, shared, message, server, client, role, states[client], server_memories[client])
                for client, role in job.chunks[node[0]]
            ]
            return self._chunk(shared, client_rounds, reports, outputs)

        sums = total(job.node, leaf, merged) if job.chunks else {}
        return Trained(job.node, {name: gather.to_wire(value) for name, value in sums.items()}, tuple(reports)), outputs

    def _chunk(
        self, shared: RoundInputs, client_rounds: Sequence[ClientRound], reports: list[ClientResult], outputs: list[Any]
    ) -> dict[str, Aggregate]:
        """Train one chunk and add up what it sends, in order."""
        sums: dict[str, Aggregate] = {name: rule.empty() for name, rule in self.method.gather.items()}
        absent = {
            client_round.client: report
            for client_round in client_rounds
            if (report := client_round.absence()) is not None
        }
        results = self.setup.engine(
            self.method, [client_round.start() for client_round in client_rounds if client_round.client not in absent]
        )
        for client_round in client_rounds:
            if client_round.client in absent:
                reports.append(absent[client_round.client])
                outputs += [None] * (self.setup.num_outputs if client_round.role in TRAINS else 0)
                continue
            with naming_round_and_client(shared.round, client_round.client):
                carry, work = next(results)
                report, message, weight = client_round.finish(carry, work, outputs)
            reports.append(report)
            if report.sent and not self.setup.keeps_messages:
                self._add(sums, message, weight, client_round.client)
        return sums

    def _add(self, sums: dict[str, Aggregate], message: Message, weight: float, sender: int) -> None:
        """Add a message to what others have sent."""
        for name in sums:
            if name in message and name not in self.setup.relayed:
                sums[name] = self.method.gather[name].add(sums[name], message[name], weight, sender)

    def add(self, shared: RoundInputs, job: AddJob, inputs: Sequence[Any]) -> tuple[Trained, list[Any]]:
        """Add up messages as `train` does where nobody has to be waited for."""
        sent = dict(zip(job.clients, inputs, strict=True))

        def leaf(node: Node) -> dict[str, Aggregate] | None:
            if node[1] - node[0] > 1:
                return None
            sums: dict[str, Aggregate] = {name: rule.empty() for name, rule in self.method.gather.items()}
            for client in job.chunks[node[0]]:
                message, weight = sent[client]
                self._add(sums, message, weight, client)
            return sums

        sums = total(job.node, leaf, merged)
        return Trained(job.node, {name: gather.to_wire(value) for name, value in sums.items()}, ()), []

    def reply(
        self, shared: RoundInputs, job: ClientJob, inputs: Sequence[Any]
    ) -> tuple[tuple[ClientResult, ...], list[Any]]:
        """The server's answers after its update, taken in by the clients; outputs: states, then links, by client."""
        states, server_memories = self._memories(job.clients, inputs)
        assert shared.server is not None
        server, half = tree.to_tensors(shared.server), self.setup.server_half
        reports: list[ClientResult] = []
        outputs: list[Any] = []
        for client in job.clients:
            with naming_round_and_client(shared.round, client):
                ctx = self.setup.context(shared.round, shared.plan, client, "reply")
                answer = half.reply(server, server_memories[client], ctx)
                state, uplink_memory = without_memory(states[client])
                state = self.method.receive_reply(state, answer.message, ctx)
            bits = message_bits(answer.message)
            reports.append(ClientResult(client, downlink_bits=bits, reply_bits=bits, metrics=answer.metrics))
            outputs += pack_outputs(self.setup, with_memory(state, uplink_memory), answer.server_memory)
        return tuple(reports), outputs

    def mix(self, shared: RoundInputs, job: MixJob, inputs: Sequence[Any]) -> tuple[None, Iterable[Any]]:
        """Every receiver gathers its neighbours' messages; outputs: the receivers' new states."""
        return None, self._mixed(shared, job, inputs) if self.setup.stateful else ()

    def _mixed(self, shared: RoundInputs, job: MixJob, inputs: Sequence[Any]) -> Iterator[Any]:
        receivers = tuple(job.rows)
        gathered = gather_rows(self.method.gather, job, dict(zip(job.senders, inputs[len(receivers) :], strict=True)))
        for client, stored in zip(receivers, inputs, strict=False):
            with naming_round_and_client(shared.round, client):
                ctx = self.setup.context(shared.round, shared.plan, client, "mix")
                states, _ = self._memories((client,), (stored,))
                # Taken out, so that what only this receiver gathered is free again.
                state, uplink_memory = without_memory(states[client])
                state = self.setup.peer_half.mix(state, gathered.pop(client), ctx)
            yield from pack_outputs(self.setup, with_memory(state, uplink_memory), {})

    def evaluate(
        self, shared: RoundInputs, job: ClientJob, inputs: Sequence[Any]
    ) -> tuple[tuple[ClientResult, ...], list[Any]]:
        """Every client's model after the exchange."""
        states, _ = self._memories(job.clients, inputs, has_server_memory=False)
        model = None if shared.model is None else tree.to_tensors(shared.model)
        reports: list[ClientResult] = []
        for client in job.clients:
            with naming_round_and_client(shared.round, client):
                ctx = self.setup.context(shared.round, shared.plan, client, "judge")
                metrics = evaluation.evaluate_client(self.setup, states[client], model, None, ctx)
            reports.append(ClientResult(client, metrics=metrics))
        return tuple(reports), []

    def mean_model(self, shared: RoundInputs, job: ClientJob, inputs: Sequence[Any]) -> tuple[None, list[Any]]:
        """The mean of the clients' own models, added up in their order; output: that model."""
        total: Tree = {}
        for client, stored in zip(job.clients, inputs, strict=True):
            states, _ = self._memories((client,), (stored,), has_server_memory=False)
            own = self.method.final_model(states[client])
            total = tree.add(total, own) if total else own
        return None, [tree.to_arrays(tree.scale(total, 1.0 / len(job.clients)))]

    def evaluate_pooled(
        self, shared: RoundInputs, job: PooledJob, inputs: Sequence[Any]
    ) -> tuple[dict[str, np.ndarray], list[Any]]:
        """The global model on a run of the pooled test set: every metric for each example."""
        assert shared.model is not None
        rows = np.arange(job.first, job.last)
        return evaluation.per_example(self.setup, tree.to_tensors(shared.model), self.setup.dataset.test, rows), []

    def _memories(
        self, clients: Sequence[int], inputs: Sequence[Any], has_server_memory: bool = True
    ) -> tuple[dict[int, State], dict[int, State]]:
        """States and links by client; a client that comes for the first time gets its first ones."""
        values, states, server_memories = iter(inputs), {}, {}
        for client in clients:
            states[client], server_memories[client] = {}, {}
            if self.setup.stateful:
                stored = next(values)
                states[client] = self.setup.first_state(client) if stored is None else tree.to_tensors(stored)
            if self.setup.has_server_memory and has_server_memory:
                stored = next(values)
                server_memories[client] = (
                    self.setup.first_server_memory(client) if stored is None else tree.to_tensors(stored)
                )
        return states, server_memories


def opened(message: Message) -> Message:
    """A message whose packets are decoded at most once, however many read them."""
    return {name: packet.opened() for name, packet in message.items()}


def merged(a: Mapping[str, Aggregate], b: Mapping[str, Aggregate]) -> dict[str, Aggregate]:
    """Two nodes' sums by message name."""
    return {name: a[name].gather.merge(a[name], b[name]) for name in a}

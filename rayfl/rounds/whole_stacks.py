"""Stacks of clients that begin, end and are added up together: client_round.py and partial_sums.py for a whole stack.

So a GPU gets the same number of operations for a stack whatever its width, and Python has little to do for a client.
The bits are the same. Only methods with `whole_stacks` have the hooks, and `takes_whole_stacks` names the experiments
in which nobody needs a single client's message.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import torch

from rayfl import tree
from rayfl.compress.base import message_bits
from rayfl.compress.dense import Dense, UnwrittenDense, refuse_infinite
from rayfl.data.device import upload
from rayfl.data.transfer import offsets, stack, to_device, to_memory, unstack
from rayfl.determinism.addition_order import SumNode, nodes_within, pairs, ready_nodes
from rayfl.determinism.global_draws import key
from rayfl.determinism.seeding import NOBODY
from rayfl.errors import naming_round_and_client
from rayfl.gather import Aggregate, Sum, WeightedMean, WeightedSum
from rayfl.methods.base import Carry, Method, Metrics, Plan, StackRows, State, Tree, Work
from rayfl.population.client import ClientStatus
from rayfl.rounds.check_hooks import checked_hook
from rayfl.rounds.client_round import CallInputs, ClientRound, Ended, operations
from rayfl.rounds.engines import advanced
from rayfl.rounds.evaluation import SUFFIX, evaluate_model
from rayfl.rounds.partial_sums import Added, NodeAggregates, Sent, merged, on_wire
from rayfl.rounds.setup import Setup
from rayfl.rounds.simulated_clock import example_costs
from rayfl.rounds.worker_jobs import ClientOutputs, ClientResult, Missed, TrainJob, num_values

ITEM = torch.float32.itemsize
"""Bytes of a number of the table of messages."""
ONE_BY_ONE = ("has_work", "stages", "end_stage", "trains_under", "gradients_per_example", "mask")
"""Hooks that look at one client; a method that implements one is called client by client."""


def takes_whole_stacks(setup: Setup) -> bool:
    """Whether the clients of a round that downloads and uploads can be trained in whole stacks."""
    method, kind = setup.method, type(setup.method)
    return (
        method.capabilities.whole_stacks
        and setup.work_width > 1
        and setup.uplink == Dense()
        and not (setup.is_peer or setup.keeps_messages or setup.relayed or setup.has_server_memory)
        and setup.population.settings.deadline_s is None
        and setup.hooks_on_device == (setup.device.type != "cpu")
        and all(type(rule) in (Sum, WeightedSum, WeightedMean) for rule in method.gather.values())
        and all(getattr(kind, hook) is getattr(Method, hook) for hook in ONE_BY_ONE)
        and not (setup.server_half.overrides("personal_message") or setup.server_half.overrides("store_uplink"))
        and all(tensor.dtype == torch.float32 for tensor in setup.initial.values())
        and setup.method.mask(setup.first_state(0)) is None
    )


def is_whole_round(plan: Plan) -> bool:
    """Whether all clients that train in a round download and upload."""
    return plan.down and plan.up and plan.trainers == "sampled"


class StackRound:
    """A stack of clients in one training job, all of which train and send. `states`: before their training."""

    def __init__(
        self, setup: Setup, call_inputs: CallInputs, statuses: Mapping[int, ClientStatus], states: Sequence[State]
    ) -> None:
        self.setup, self.call_inputs, self.statuses, self.states = setup, call_inputs, statuses, states
        self.round, self.plan = call_inputs.round_inputs.round, call_inputs.round_inputs.plan
        self.clients = [*statuses]
        ctx = setup.context(self.round, self.plan, NOBODY, "stack")
        self.ctx = ctx.but(initial=setup.initial_on_device) if setup.hooks_on_device else ctx
        self.tasks = [setup.local_task(client, self.round, self.plan.stages) for client in self.clients]
        self.work = [{stage.name: task.planned(stage) for stage in self.plan.stages} for task in self.tasks]
        self._train()

    def _train(self) -> None:
        """Train all clients, and end their work."""
        setup, method, count = self.setup, self.setup.method, len(self.clients)
        states = stack(self.states, setup.work_width, setup.device)
        key(setup.seed, self.round, self.clients[0], "begin")
        with naming_round_and_client(self.round, self.clients[0]):
            carry = checked_hook(method.begin_stack)(states, self.call_inputs.message, self.ctx, setup.work_width)
        # A single number may have been made in main memory.
        carry = to_device(carry, setup.device)
        twin = method.with_task(method.task.functional())
        for stage in self.plan.stages:
            carry = advanced(twin, self.tasks, carry, stage, setup.work_width)
        self.carry = first_rows(carry, count)
        rows = StackRows([int(setup.population.num_examples[client]) for client in self.clients], self.work)
        key(setup.seed, self.round, self.clients[0], "finish")
        with naming_round_and_client(self.round, self.clients[0]):
            self.finished = checked_hook(method.finish_stack)(first_rows(states, count), self.carry, rows, self.ctx)
        sent = self.finished.trees
        self.trees = {name: part.a if isinstance(part, tree.Difference) else part for name, part in sent.items()}
        self.less = {name: part.b for name, part in sent.items() if isinstance(part, tree.Difference)}

    def ended(self) -> Iterator[Ended]:
        """Each client's result, the state to keep, and its evaluation, in order."""
        setup, inputs, message = self.setup, self.call_inputs.round_inputs, self.call_inputs.message
        trees = {name: UnwrittenDense(tree.map(lambda x: x[0], stacked)) for name, stacked in self.trees.items()}
        packets = {**trees, **self.finished.packets(0)}
        bits, values = message_bits(packets), num_values(packets)
        received_bits, received = message_bits(message), num_values(message)
        states = unstack(to_memory(self.finished.state, setup.device), len(self.clients))
        costs = example_costs(setup, self.ctx.but(work=self.work[0]), self.states[0])
        evaluated = self._evaluated()

        @cache
        def operations_of(*work: Work) -> Metrics:
            """`operations` of a client with this work in the stages: no state changes it (`ONE_BY_ONE`)."""
            return operations(setup, self.states[0], self.ctx.but(work=dict(zip(self.work[0], work, strict=True))))

        for row, (client, status) in enumerate(self.statuses.items()):
            missed = inputs.missed.get(client, Missed())
            metrics = {**operations_of(*self.work[row].values()), **self.finished.metrics[row]}
            result = ClientResult(
                client,
                status,
                bits,
                bits,
                received_bits + missed.bits,
                self.work[row],
                metrics if status.keeps_state else {},
                num_values=values,
                num_received=received + missed.values,
                costs=costs,
                stages=self.plan.stages,
                begins_s=inputs.begins.get(client, 0.0),
            )
            yield Ended(result, ClientOutputs(tree.to_arrays(states[row])), evaluated.get(client))

    def _evaluated(self) -> dict[int, ClientResult]:
        """The metrics of the clients that are evaluated right after their training."""
        setup, shared = self.setup, self.call_inputs
        if not shared.round_inputs.evaluated or not setup.evaluation.by_client:
            return {}
        evaluated: dict[int, ClientResult] = {}
        states, carries = (unstack(x, len(self.clients)) for x in (self.finished.state, self.carry))
        for (client, status), state, carry in zip(self.statuses.items(), states, carries, strict=True):
            client_round = ClientRound(setup, shared, client, status, {}, {})
            if status.keeps_state and client_round.may_be_evaluated:
                with naming_round_and_client(self.round, client):
                    evaluated[client] = evaluate_model(
                        setup, client_round.trained_model(state, carry), client, self.round, SUFFIX
                    )
        return evaluated

    def sums(self, leaves: Mapping[int, int], nodes: Sequence[SumNode]) -> dict[SumNode, NodeAggregates]:
        """The sums of nodes of the summation tree, below which no other client sends; `leaves`: by client."""
        rules = self.setup.method.gather
        rows = [row for row, status in enumerate(self.statuses.values()) if status is ClientStatus.DELIVERED]
        levels, places = pairs(nodes, [leaves[self.clients[row]] for row in rows])
        weights, counts = [float(self.finished.weights[row]) for row in rows], [1] * len(rows)
        totals = iter(self._added(rows, levels, [*places.values()]))
        for first, second in itertools.chain.from_iterable(levels):
            weights[first] += weights[second]
            counts[first] += counts[second]
        sums: dict[SumNode, NodeAggregates] = {}
        for node in nodes:
            trees, place = (next(totals), places[node]) if node in places else ({}, 0)
            sums[node] = {
                name: Aggregate(rule, (trees[name],), weights[place], count=counts[place])
                if name in trees
                else rule.empty()
                for name, rule in rules.items()
            }
        return sums

    def _added(
        self, rows: Sequence[int], levels: Sequence[Sequence[tuple[int, int]]], places: Sequence[int]
    ) -> list[dict[str, Tree]]:
        """The sums at `places` after all `levels` of additions (see `pairs`) of the weighted messages of `rows`.

        A row of the table has a client's whole message, so that one operation does a level of additions.
        """
        starts, size = self._starts()
        table = self._table(starts, size)
        sides = [[rows[index] for index in side] for level in levels for side in zip(*level, strict=True)]
        flat = [row for side in sides for row in side] + [rows[index] for index in places]
        weights = torch.tensor([[float(weight)] for weight in self.finished.weights], dtype=torch.float32)
        weights, index = (upload(x, self.setup.device) for x in (weights, torch.tensor(flat, dtype=torch.int64)))
        bounds = [*(starts[name][0] for name in self.trees), table.shape[1]]
        for name, (first, last) in zip(self.trees, itertools.pairwise(bounds), strict=True):
            if isinstance(self.setup.method.gather[name], WeightedSum):
                table.narrow(1, first, last - first).mul_(weights)
        # No sum is -0.0, as in `Packet.times`.
        table.add_(0.0)
        *sides, ends = index.split([*map(len, sides), len(places)])
        for into, others in zip(sides[::2], sides[1::2], strict=True):
            table.index_copy_(0, into, table.index_select(0, into).add_(table.index_select(0, others)))
        totals = table.index_select(0, ends)
        if not self.setup.server_on_device:
            totals = to_memory(totals, self.setup.device)
        return [self._tree_at(total, starts) for total in totals]

    def _starts(self) -> tuple[dict[str, list[int]], int]:
        """Where each tensor begins in a row of the table, by message name, and the row's length."""
        starts, size = offsets([(x.shape[1:], x.dtype) for stacked in self.trees.values() for x in stacked.values()])
        left = iter(starts)
        return {name: [next(left) // ITEM for _ in stacked] for name, stacked in self.trees.items()}, size // ITEM

    def _table(self, starts: Mapping[str, Sequence[int]], size: int) -> torch.Tensor:
        """All messages, float32 [count, size]. Raise Diverged, which names the client, if one is not finite."""
        table = torch.zeros((len(self.clients), size), device=self.setup.device)
        for name, stacked in self.trees.items():
            placed = [
                table.narrow(1, start, x[0].numel()).view(x.shape)
                for start, x in zip(starts[name], stacked.values(), strict=True)
            ]
            tree.private._foreach_copy_(placed, tree.tensors(stacked, stacked))
            if name in self.less:
                tree.private._foreach_sub_(placed, tree.tensors(self.less[name], stacked))
        for row, checked in enumerate(table.sum(1).tolist()):
            if not math.isfinite(checked):
                with naming_round_and_client(self.round, self.clients[row]):
                    for message in self._tree_at(table[row], starts).values():
                        refuse_infinite(message)
        return table

    def _tree_at(self, row: torch.Tensor, starts: Mapping[str, Sequence[int]]) -> dict[str, Tree]:
        """The trees in a row of the table, by message name, as views."""
        return {
            name: {
                key: row.narrow(0, start, x[0].numel()).view(x.shape[1:])
                for start, (key, x) in zip(starts[name], stacked.items(), strict=True)
            }
            for name, stacked in self.trees.items()
        }


# Any: tensors in dictionaries.
def first_rows(stacked: Carry, count: int) -> Carry:
    """The first `count` rows of every tensor, as views."""
    if isinstance(stacked, dict):
        return {name: first_rows(part, count) for name, part in stacked.items()}
    return stacked[:count]


class WholeStacks:
    """Trains the clients of a job in whole stacks. `stored`: each client's state before its training; {} if it has none
    yet."""

    def __init__(self, setup: Setup, call_inputs: CallInputs, job: TrainJob, stored: Mapping[int, State]) -> None:
        self.setup, self.call_inputs, self.job, self.stored = setup, call_inputs, job, stored
        self.leaves = {client: job.nodes[0][0] + index for index, client in enumerate(job.clients)}
        self._parts: dict[SumNode, dict[SumNode, NodeAggregates]] = {node: {} for node in job.nodes}

    def ended(self) -> Iterator[Ended]:
        """The ends of all clients' rounds, in order."""
        clients, width = self.job.clients, self.setup.work_width
        for first in range(0, len(clients), width):
            statuses = {client: self.job.statuses[client] for client in clients[first : first + width]}
            trains = {client: status for client, status in statuses.items() if status.trains}
            stacked = (
                StackRound(self.setup, self.call_inputs, trains, [self._state(client) for client in trains])
                if trains
                else None
            )
            ended = stacked.ended() if stacked else iter(())
            yield from (next(ended) if client in trains else self._untrained(client) for client in statuses)
            self._add(stacked, [self.leaves[client] for client in statuses])

    def _state(self, client: int) -> State:
        return self.stored[client] or (self.setup.first_state(client) if self.setup.stateful else {})

    def _untrained(self, client: int) -> Ended:
        ended = ClientRound(
            self.setup, self.call_inputs, client, self.job.statuses[client], self._state(client), {}
        ).untrained()
        assert ended is not None, "its status says that it does not train"
        return ended

    def _add(self, stacked: StackRound | None, leaves: Sequence[int]) -> None:
        """Add the messages of a stack, whose clients and those that do not train are `leaves`."""
        span = (leaves[0], leaves[-1] + 1)
        roots = {node: root for root in self._parts for node in nodes_within(span, root)}
        sums = stacked.sums(self.leaves, [*roots]) if stacked else {}
        for node, root in roots.items():
            self._parts[root][node] = (
                sums[node] if stacked else {name: rule.empty() for name, rule in self.setup.method.gather.items()}
            )
        for root, parts in self._parts.items():
            while ready := ready_nodes(root, parts):
                for node, (left, right) in ready.items():
                    parts[node] = merged(parts.pop(left), parts.pop(right))

    def sent(self) -> list[Sent]:
        """The sums of the job's nodes, once all clients have ended."""
        stays = self.setup.server_on_device
        return [Added(parts[root]) if stays else on_wire(parts[root]) for root, parts in self._parts.items()]

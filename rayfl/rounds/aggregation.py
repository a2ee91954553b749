"""Aggregation of a round's messages by calls on the workers, as far as the round loop does not do it faster.

Partial sums of messages are merged into one along the summation tree; if there are many, calls on the workers add them,
so that only one reaches the round loop. The tree does not depend on the workers, so they cannot change a bit. Robust
means are made slice by slice on the workers, in at most two passes.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from rayfl import tree
from rayfl.compress.base import Packet, shapes_of
from rayfl.compress.dense import DenseCodec
from rayfl.determinism.addition_order import SumNode, cut, nodes_within, ready_nodes
from rayfl.gather import CENTER, Aggregate, Collect, Handle, RobustMean
from rayfl.rounds.check_hooks import checked
from rayfl.rounds.executor import Job, Ref
from rayfl.rounds.partial_sums import Summing
from rayfl.rounds.run_state import CurrentRound
from rayfl.rounds.worker_jobs import AddJob, ClientOutputs, MergeJob, RobustJob

FEW_BYTES = 32_000_000
"""Up to this number of bytes the round loop adds faster than calls, since a wave of calls takes some milliseconds."""

MOST_ALONE = 2
"""Up to this number of workers or sums the round loop adds by itself, since calls could not add two pairs at once."""

MOST_PARTS = 8
"""Sums that a call adds if there are many workers: about those of a node, so that there is about one call a node."""

ENTRIES = 1 << 24
"""Entries that a call reads at most, summed over all messages. It is a constant, so that slices do not depend on the
workers."""


def aggregates(
    current: CurrentRound,
    sums: dict[SumNode, Ref],
    messages: Mapping[int, Ref],
    delivered: Mapping[int, ClientOutputs],
) -> dict[str, Aggregate]:
    """What arrived in a server round, by message name; empties `sums`.

    `sums`: of nodes that cover the tree, or none if those who `delivered` have sent `messages` that are not added yet.
    """
    setup = current.setup
    received = merge_sums(current, add_messages(current, messages) if setup.keeps_messages else sums)
    for name, aggregate in received.items():
        if isinstance(aggregate.gather, RobustMean) and aggregate.count:
            received[name] = robust_mean(current, name, aggregate, messages)
    for name in setup.relayed:
        received[name] = relayed(current, name, delivered)
    return received


def add_messages(
    current: CurrentRound, messages: Mapping[int, Ref], scales: Mapping[int, float] | None = None
) -> dict[SumNode, Ref]:
    """Add up messages that were kept until the server knew which of them count, times `scales` by client (None: 1).

    The sum is the same as if only these clients had been selected. Returns the sums of nodes that cover the tree.
    """
    clients = list(messages)
    root = (0, len(clients))
    jobs = list[Job]()
    factors = tuple(scales[client] for client in clients) if scales else ()
    for run in cut(len(clients), current.calls_per_wave, at_most=current.has_many_workers):
        work = AddJob(tuple(nodes_within(run, root)), tuple(clients[slice(*run)]), factors[slice(*run)])
        jobs.append(Job(work, tuple(messages[client] for client in work.clients), len(work.nodes)))
    added = zip(jobs, current.run(jobs), strict=True)
    return {node: ref for job, answer in added for node, ref in zip(job.work.nodes, answer.outputs, strict=True)}


def merge_sums(current: CurrentRound, sums: dict[SumNode, Ref]) -> dict[str, Aggregate]:
    """The aggregates by message name, from the sums of nodes that cover the tree; empties `sums`."""
    setup, executor = current.setup, current.executor
    if not sums:
        return {name: rule.empty() for name, rule in setup.method.gather.items()}
    root = (0, max(last for _, last in sums))
    if added_by_calls(current, len(sums)):
        merge(current, sums, root)
    return Summing(setup).summed(root, {node: executor.get(sums.pop(node)) for node in sorted(sums)})


def added_by_calls(current: CurrentRound, num_sums: int) -> bool:
    """Whether calls add the sums: with more than two workers, more than two sums, and more than FEW_BYTES bytes, if a
    sum is as large as the model.

    Collected messages are not added: the round loop needs all of them, and every call would copy them again.
    """
    setup = current.setup
    sum_bytes = num_sums * 4 * tree.num_entries(setup.initial)
    collects = any(isinstance(rule, Collect) for name, rule in setup.method.gather.items() if name not in setup.relayed)
    return min(current.executor.num_workers, num_sums) > MOST_ALONE and sum_bytes > FEW_BYTES and not collects


def merge(current: CurrentRound, sums: dict[SumNode, Ref], root: SumNode) -> None:
    """Add sums by calls until only `root` is left; each wave adds the two halves of every node that has both.

    If there are many workers, a call adds up to MOST_PARTS sums, because one process sends all calls.
    """
    most = MOST_PARTS if current.has_many_workers else 2
    while root not in sums:
        works = [MergeJob(node, parts) for node, parts in ready_nodes(root, sums, most).items()]
        jobs = [Job(work, tuple(sums.pop(part) for part in work.parts), 1) for work in works]
        sums |= {work.node: answer.outputs[0] for work, answer in zip(works, current.run(jobs), strict=True)}


def robust_mean(current: CurrentRound, name: str, received: Aggregate, messages: Mapping[int, Ref]) -> Aggregate:
    """What arrived under `name`, with the robust mean of the messages of those who delivered as its result."""
    rule = received.gather
    executor = current.executor
    refs = list(messages.values())
    assert isinstance(rule, RobustMean)
    like = next(sent[name].decode() for ref in refs if name in (sent := executor.get(ref)[0]))
    if rule.keeps_center:
        center = current.run_state.server.get(CENTER, {}).get(name) or tree.zeros_like(like)
        codec = DenseCodec(shapes_of(center), "fp32")
        refs.append(executor.put(({name: Packet(tree.to_arrays(tree.map(torch.flatten, center)), codec)}, 1.0)))
    size = tree.num_entries(like)
    width = max(1, ENTRIES // len(refs))

    def jobs(decision: np.ndarray | None, outputs: int) -> list[Job]:
        works = (RobustJob(name, first, min(first + width, size), decision) for first in range(0, size, width))
        return [Job(work, tuple(refs), outputs) for work in works]

    measured = [job_result.result for job_result in current.run(jobs(None, 0))] if rule.measures else None
    decision = None if measured is None else checked(rule.decide)(np.sum(measured, axis=0))
    parts = [executor.get(job_result.outputs[0]) for job_result in current.run(jobs(decision, 1))]
    return replace(received, known=tree.unvector(torch.from_numpy(np.concatenate(parts)), like))


def relayed(current: CurrentRound, name: str, delivered: Mapping[int, ClientOutputs]) -> Aggregate:
    """The packets of one message name that the server sends on unopened, by sender."""
    sent: dict[int, tree.Tree | Handle] = {
        client: current.executor.handle(outputs.packets[name])
        for client, outputs in delivered.items()
        if name in current.ledger.results[client].relayed
    }
    return Aggregate(current.setup.method.gather[name], count=len(sent), items=sent)

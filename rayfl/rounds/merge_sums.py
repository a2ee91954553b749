"""A round's partial sums become one: added along the summation tree, by calls on the workers where there are many.

The sums stay where they were made and travel from worker to worker, so that one of them reaches the round loop. The
tree does not depend on who adds, so no bit does.
"""

from rayfl.determinism.addition_order import Node, halves, ready_nodes
from rayfl.gather import Aggregate, Collect
from rayfl.rounds.executor import Job, Ref
from rayfl.rounds.partial_sums import Summing
from rayfl.rounds.round import Round
from rayfl.rounds.worker_jobs import MergeJob

FEW_BYTES = 32_000_000
"""Bytes of sums that the round loop adds sooner than calls would: a wave of calls takes some milliseconds."""

MOST_ALONE = 2
"""Workers, and sums, up to which the round loop adds by itself: calls could not add two pairs at once."""


def merge_sums(round: Round, sums: dict[Node, Ref], sum_bytes: int) -> dict[str, Aggregate]:
    """What arrived by message name, from the sums of nodes that cover the tree; `sums` is used up."""
    setup, executor = round.setup, round.executor
    if not sums:
        return {name: rule.empty() for name, rule in setup.method.gather.items()}
    root = (0, max(last for _, last in sums))
    if added_by_calls(round, len(sums), sum_bytes):
        merge(round, sums, root)
    return Summing(setup).summed(root, {node: executor.get(sums.pop(node)) for node in sorted(sums)})


def added_by_calls(round: Round, num_sums: int, sum_bytes: int) -> bool:
    """Whether calls add the sums: more than two workers, more than two sums, and more than few bytes.

    Messages that are collected and not added are all wanted in the end, and would travel again with every call.
    """
    setup, num_workers = round.setup, round.executor.num_workers
    collects = any(isinstance(rule, Collect) for name, rule in setup.method.gather.items() if name not in setup.relayed)
    return min(num_workers, num_sums) > MOST_ALONE and sum_bytes > FEW_BYTES and not collects


def merge(round: Round, sums: dict[Node, Ref], root: Node) -> None:
    """Add sums by calls until `root` alone is left; each wave adds the halves of every node that has both."""
    while root not in sums:
        works = [MergeJob(node, halves(node)) for node in ready_nodes(root, sums)]
        jobs = [Job(work, tuple(sums.pop(part) for part in work.parts), 1) for work in works]
        answers = round.run(jobs)
        sums |= {work.node: answer.outputs[0] for work, answer in zip(works, answers, strict=True)}

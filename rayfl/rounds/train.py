"""Local work of a round's participants: who takes part, who is back in time, and what arrived."""

from collections.abc import Mapping

import numpy as np

from rayfl.determinism.addition_order import Node, cut, nodes_within
from rayfl.gather import Aggregate, Handle, RobustMean
from rayfl.methods.base import Plan, Tree
from rayfl.population.fate import Fate
from rayfl.population.sampling import Participation
from rayfl.rounds.client_outputs import ClientOutputs
from rayfl.rounds.executor import Job, Ref
from rayfl.rounds.late_clients import cut_off_surplus
from rayfl.rounds.merge_sums import MOST_ALONE, merge_sums, robust_mean
from rayfl.rounds.running_round import Round
from rayfl.rounds.setup import Setup
from rayfl.rounds.worker_jobs import AddJob, TrainJob

FEW_WORKERS, EVEN = 2, 1.05
"""With at most FEW_WORKERS workers, each gets one call, if the longest call takes at most EVEN times the mean."""


def server_participants(setup: Setup, plan: Plan, participation: Participation) -> dict[int, Fate]:
    """Who downloads in a server round, with the fate drawn for each, by client in ascending order."""
    fates = dict(participation.fates)
    if plan.trainers == "all":
        others = set(range(setup.num_clients)) - {*fates, *participation.unavailable.tolist()}
        fates |= dict.fromkeys(others, Fate.NOT_SELECTED)
    return {client: fates[client] for client in sorted(fates) if fates[client] is not Fate.DROPPED_BEFORE_DOWNLOAD}


def train(round: Round, fates: Mapping[int, Fate]) -> tuple[dict[str, Aggregate], dict[int, Ref]]:
    """Local work of the participants, whose drawn `fates` are given by client in ascending order.

    Returns what arrived by message name, and, if `Setup.keeps_messages`, the messages of those who delivered.
    """
    setup = round.setup
    jobs = train_jobs(round, fates)
    answers = round.run(jobs)
    results = [result for answer in answers for result in answer.result.results]
    round.ledger.results |= cut_off_surplus(setup, round.inputs.plan, results)
    sum_bytes = sum(answer.result.sum_bytes for answer in answers)
    outputs: dict[int, ClientOutputs] = {}
    sums: dict[Node, Ref] = {}
    for job, answer in zip(jobs, answers, strict=True):
        if not setup.keeps_messages:
            # Taken out of the answers, so that a sum is free as soon as it has been added.
            sums |= {node: answer.outputs.pop() for node in reversed(job.work.nodes)}
        outputs |= ClientOutputs.unpack(setup.output_slots, job.work.trained, answer.outputs)
    fate_of = {client: round.ledger.results[client].fate for client in outputs}
    # A late client's answer is dropped: its message is not added, and its state stays that before the round.
    outputs = {client: one for client, one in outputs.items() if fate_of[client].keeps_state}
    delivered = {client: one for client, one in outputs.items() if fate_of[client] is Fate.DELIVERED}
    messages = {client: one.message for client, one in delivered.items()} if setup.keeps_messages else {}
    if setup.keeps_messages and not setup.is_peer:
        sums, sum_bytes = add_messages(round, messages)
    received = merge_sums(round, sums, sum_bytes)
    for name, one in received.items():
        if isinstance(one.gather, RobustMean) and one.count:
            received[name] = robust_mean(round, name, one, messages)
    for name in setup.relayed:
        received[name] = relayed(round, name, delivered)
    round.run_state = round.run_state.updated(setup.memory_slots, outputs)
    return received, messages


def train_jobs(round: Round, fates: Mapping[int, Fate]) -> list[Job]:
    """The calls that train the participants."""
    setup, clients, jobs = round.setup, list(fates), []
    for run in cut_into_calls(round, fates):
        nodes = nodes_within(run, (0, len(clients)))
        drawn = {client: fates[client] for client in clients[slice(*run)]}
        work = TrainJob(tuple(nodes), drawn, packets=round.executor.num_workers > MOST_ALONE)
        inputs = round.run_state.inputs(setup.memory_slots, work.clients)
        num_sums = 0 if setup.keeps_messages else len(nodes)
        size = len(work.trained)
        kept = setup.output_slots.kept(size)
        jobs.append(Job(work, inputs, len(setup.output_slots) * size + num_sums, kept, setup.together))
    return jobs


def relayed(round: Round, name: str, delivered: Mapping[int, ClientOutputs]) -> Aggregate:
    """The packets of one message name that the server sends on unopened, by sender."""
    sent: dict[int, Tree | Handle] = {
        client: round.executor.handle(one.packets[name])
        for client, one in delivered.items()
        if name in round.ledger.results[client].relayed
    }
    return Aggregate(round.setup.method.gather[name], count=len(sent), items=sent)


def cut_into_calls(round: Round, fates: Mapping[int, Fate]) -> list[Node]:
    """The participants of each training call, as runs of positions in `fates`.

    Every call costs some milliseconds. So if workers are few and calls would be about equally long, each worker gets
    one. If workers are many, each gets at most one. Otherwise there are as many calls as it takes to even out unequal
    clients and workers.
    """
    setup, num_workers = round.setup, round.executor.num_workers
    one_each = cut(len(fates), num_workers, setup.work_width)
    if len(one_each) == num_workers <= FEW_WORKERS:
        examples = planned_examples(setup, round.inputs.plan, fates)
        lengths = [examples[slice(*run)].sum() for run in one_each]
        if max(lengths) * len(lengths) <= EVEN * sum(lengths):
            return one_each
    return cut(len(fates), round.calls_per_wave, setup.work_width, round.has_many_workers)


def planned_examples(setup: Setup, plan: Plan, fates: Mapping[int, Fate]) -> np.ndarray:
    """The approximate number of examples that each participant trains on, float64, in the order of `fates`."""
    clients = list(fates)
    total, shares = np.zeros(len(clients)), setup.population.work_shares[clients]
    for stage in plan.stages:
        held = setup.partition.split(stage.split).sizes[clients]
        a_step = np.minimum(held, stage.batch_size or held) * stage.batches_per_step
        examples = held * stage.epochs if stage.epochs else a_step * (stage.steps or 0)
        total += examples * (shares * stage.share if stage.split == "train" else 1.0)
    return total * [fate.trains for fate in fates.values()]


def add_messages(
    round: Round, messages: Mapping[int, Ref], scales: Mapping[int, float] | None = None
) -> tuple[dict[Node, Ref], int]:
    """Add up messages that were kept until the server knew which of them count, times `scales` by client (None: 1).

    The sum is the same as if only these clients had been selected. Returns the sums of nodes that cover the tree, and
    their bytes.
    """
    clients = list(messages)
    root, jobs, factors = (0, len(clients)), list[Job](), tuple(scales[client] for client in clients) if scales else ()
    for run in cut(len(clients), round.calls_per_wave, at_most=round.has_many_workers):
        work = AddJob(tuple(nodes_within(run, root)), tuple(clients[slice(*run)]), factors[slice(*run)])
        jobs.append(Job(work, tuple(messages[client] for client in work.clients), len(work.nodes)))
    answers = round.run(jobs)
    added = zip(jobs, answers, strict=True)
    sums = {node: ref for job, answer in added for node, ref in zip(job.work.nodes, answer.outputs, strict=True)}
    return sums, sum(answer.result.sum_bytes for answer in answers)

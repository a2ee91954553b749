"""Local work of a round's participants: who takes part, who is back in time, and what arrived."""

from collections.abc import Mapping

import numpy as np

from rayfl.determinism.addition_order import Node, cut, nodes_within
from rayfl.gather import Aggregate, Handle
from rayfl.methods.base import Plan
from rayfl.population.fate import Fate
from rayfl.population.sampling import Participation
from rayfl.rounds.calls import AddJob, RoundInputs, TrainJob
from rayfl.rounds.client_outputs import ClientOutputs
from rayfl.rounds.cutoff import apply_over_selection
from rayfl.rounds.executor import Executor, Job, Ref
from rayfl.rounds.ledger import Ledger
from rayfl.rounds.run_state import RunState, calls_per_wave
from rayfl.rounds.setup import Setup
from rayfl.rounds.sum_up import MOST_ALONE, sum_up
from rayfl.tree import Tree

FEW_WORKERS, EVEN = 2, 1.05
"""Of so many workers, with calls of which the longest takes at most so many means, none waits long for the others."""


def server_participants(setup: Setup, plan: Plan, participation: Participation) -> dict[int, Fate]:
    """Who downloads in a server round, with the fate drawn for each, by client in ascending order."""
    fates = dict(participation.fates)
    if plan.trainers == "all":
        others = set(range(setup.num_clients)) - {*fates, *participation.unavailable}
        fates |= dict.fromkeys(others, Fate.NOT_SELECTED)
    return {client: fates[client] for client in sorted(fates) if fates[client] is not Fate.DROPPED_BEFORE_DOWNLOAD}


def train(
    setup: Setup,
    executor: Executor,
    run_state: RunState,
    round_inputs: RoundInputs,
    fates: Mapping[int, Fate],
    ledger: Ledger,
) -> tuple[RunState, dict[str, Aggregate], dict[int, Ref]]:
    """Local work of the participants, whose drawn `fates` are given by client in ascending order.

    Returns the new run state, what arrived by message name, and the messages of those who delivered where
    `Setup.keeps_messages`.
    """
    clients, jobs = list(fates), []
    for run in calls(setup, executor, round_inputs.plan, fates):
        nodes = nodes_within(run, (0, len(clients)))
        drawn = {client: fates[client] for client in clients[slice(*run)]}
        work = TrainJob(tuple(nodes), drawn, packets=executor.num_workers > MOST_ALONE)
        inputs = run_state.inputs(setup.memory_slots, work.clients)
        num_sums = 0 if setup.keeps_messages else len(nodes)
        jobs.append(Job(work, inputs, len(setup.output_slots) * len(work.trained) + num_sums))
    put = executor.put(round_inputs)
    done = executor.run("train", put, jobs)
    results = apply_over_selection(setup, round_inputs.plan, [one for answer in done for one in answer.result.results])
    ledger.results |= results
    sum_bytes = sum(answer.result.sum_bytes for answer in done)
    outputs: dict[int, ClientOutputs] = {}
    sums: dict[Node, Ref] = {}
    for job, answer in zip(jobs, done, strict=True):
        if not setup.keeps_messages:
            # Taken out of the answers, so that a sum is free as soon as it has been added.
            sums |= {node: answer.outputs.pop() for node in reversed(job.work.nodes)}
        outputs |= ClientOutputs.unpack(setup.output_slots, job.work.trained, answer.outputs)
    outputs = {client: one for client, one in outputs.items() if results[client].fate.counts}
    delivered = {client: one for client, one in outputs.items() if results[client].fate is Fate.DELIVERED}
    messages = {client: one.message for client, one in delivered.items()} if setup.keeps_messages else {}
    if setup.keeps_messages and not setup.is_peer:
        sums, sum_bytes = add_messages(setup, executor, put, messages)
    received = sum_up(setup, executor, put, sums, sum_bytes)
    for name in setup.relayed:
        sent: dict[int, Tree | Handle] = {
            client: executor.handle(one.packets[name])
            for client, one in delivered.items()
            if name in results[client].relayed
        }
        received[name] = Aggregate(setup.method.gather[name], count=len(sent), items=sent)
    return run_state.updated(setup.memory_slots, outputs), received, messages


def calls(setup: Setup, executor: Executor, plan: Plan, fates: Mapping[int, Fate]) -> list[Node]:
    """The run of participants of each call: one call a worker where workers are few and calls about equally long, as
    every call costs some milliseconds; else as many as even out unequal clients and workers."""
    one_each = cut(len(fates), executor.num_workers, setup.work_width)
    if len(one_each) == executor.num_workers <= FEW_WORKERS:
        examples = planned_examples(setup, plan, fates)
        lengths = [examples[slice(*run)].sum() for run in one_each]
        if max(lengths) * len(lengths) <= EVEN * sum(lengths):
            return one_each
    return cut(len(fates), calls_per_wave(setup, executor), setup.work_width)


def planned_examples(setup: Setup, plan: Plan, fates: Mapping[int, Fate]) -> np.ndarray:
    """About how many examples each participant is to train on, float64, in the order of `fates`."""
    clients = list(fates)
    total = np.zeros(len(clients))
    for stage in plan.stages:
        held = setup.partition.split(stage.split).sizes[clients]
        a_step = np.minimum(held, stage.batch_size or held) * stage.batches_per_step
        total += held * stage.epochs if stage.epochs else a_step * (stage.steps or 0)
    return total * setup.population.work_shares[clients] * [fate.trains for fate in fates.values()]


def add_messages(
    setup: Setup, executor: Executor, round_inputs: Ref, messages: Mapping[int, Ref]
) -> tuple[dict[Node, Ref], int]:
    """Add up messages that were kept until it was known whose count, as if nobody else had been selected.

    Returns the sums of nodes that cover the tree, and their bytes.
    """
    clients = list(messages)
    nodes = cut(len(clients), calls_per_wave(setup, executor))
    works = [AddJob((node,), tuple(clients[slice(*node)])) for node in nodes]
    jobs = [Job(work, tuple(messages[client] for client in work.clients), 1) for work in works]
    done = executor.run("add", round_inputs, jobs)
    sums = {node: answer.outputs[0] for node, answer in zip(nodes, done, strict=True)}
    return sums, sum(answer.result.sum_bytes for answer in done)

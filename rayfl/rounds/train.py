"""Local work of a round's participants: who takes part, how the work is cut into calls, and who is back in time."""

from collections.abc import Mapping

import numpy as np

from rayfl.determinism.addition_order import SumNode, cut, nodes_within
from rayfl.gather import Aggregate
from rayfl.methods.base import Plan
from rayfl.population.client import ClientStatus
from rayfl.population.sampling import Participation
from rayfl.rounds.aggregation import MOST_ALONE, aggregates
from rayfl.rounds.executor import Job, Ref
from rayfl.rounds.run_state import CurrentRound, RunState
from rayfl.rounds.setup import Setup
from rayfl.rounds.simulated_clock import cut_off_surplus
from rayfl.rounds.worker_jobs import ClientOutputs, TrainJob

FEW_WORKERS = 2
EVEN = 1.05
"""With at most FEW_WORKERS workers, each gets one call, if the longest call takes at most EVEN times the mean."""


def server_participants(setup: Setup, plan: Plan, participation: Participation) -> dict[int, ClientStatus]:
    """Who downloads in a server round, with the status drawn for each, by client in ascending order."""
    statuses = dict(participation.statuses)
    if plan.trainers == "all":
        others = set(range(setup.num_clients)) - {*statuses, *participation.unavailable.tolist()}
        statuses |= dict.fromkeys(others, ClientStatus.NOT_SELECTED)
    return {
        client: statuses[client]
        for client in sorted(statuses)
        if statuses[client] is not ClientStatus.DROPPED_BEFORE_DOWNLOAD
    }


def train(current: CurrentRound, statuses: Mapping[int, ClientStatus]) -> tuple[dict[str, Aggregate], dict[int, Ref]]:
    """Local work of the participants, whose drawn `statuses` are given by client in ascending order.

    Returns what arrived by message name, and, if `Setup.keeps_messages`, the messages of those who delivered.
    """
    setup = current.setup
    jobs = train_jobs(current, statuses)
    answers = current.run(jobs)
    results = [result for answer in answers for result in answer.result.results]
    current.ledger.results |= cut_off_surplus(setup, current.inputs.plan, results)
    sum_bytes = sum(answer.result.sum_bytes for answer in answers)
    outputs: dict[int, ClientOutputs] = {}
    sums: dict[SumNode, Ref] = {}
    for job, answer in zip(jobs, answers, strict=True):
        if not setup.keeps_messages:
            # The sums are taken out of the answers, so that each is freed as soon as it has been added.
            sums |= {node: answer.outputs.pop() for node in reversed(job.work.nodes)}
        outputs |= ClientOutputs.unpack(setup.output_slots, job.work.trained, answer.outputs)
    status_of = {client: current.ledger.results[client].status for client in outputs}
    # A late client's answer is dropped: its message is not added, and its state stays that before the round.
    outputs = {client: output for client, output in outputs.items() if status_of[client].keeps_state}
    delivered = {client: output for client, output in outputs.items() if status_of[client] is ClientStatus.DELIVERED}
    messages = {client: output.message for client, output in delivered.items()} if setup.keeps_messages else {}
    received = {} if setup.is_peer else aggregates(current, sums, sum_bytes, delivered)
    current.run_state = current.run_state.updated(setup.memory_slots, outputs)
    return received, messages


def train_jobs(
    current: CurrentRound,
    statuses: Mapping[int, ClientStatus],
    numbers: Mapping[int, int] | None = None,
    own_inputs: Ref = None,
    begun: RunState | None = None,
) -> list[Job]:
    """The calls that train the participants; `numbers` and `own_inputs` are those of flights, see `TrainJob`.

    begun: the run state with the clients' states before their training; None: the present one.
    """
    setup = current.setup
    clients = list(statuses)
    jobs = []
    first = () if own_inputs is None else (own_inputs,)
    for run in cut_into_calls(current, statuses):
        nodes = nodes_within(run, (0, len(clients)))
        drawn = {client: statuses[client] for client in clients[slice(*run)]}
        flown = {client: numbers[client] for client in drawn} if numbers else {}
        work = TrainJob(tuple(nodes), drawn, current.executor.num_workers > MOST_ALONE, flown, bool(first))
        num_sums = 0 if setup.keeps_messages else len(nodes)
        size = len(work.trained)
        inputs = (*first, *(begun or current.run_state).inputs(setup.memory_slots, work.clients))
        outputs = len(setup.output_slots) * size + num_sums
        jobs.append(Job(work, inputs, outputs, setup.output_slots.kept(size), setup.together))
    return jobs


def cut_into_calls(current: CurrentRound, statuses: Mapping[int, ClientStatus]) -> list[SumNode]:
    """The participants of each training call, as runs of positions in `statuses`.

    Every call costs some milliseconds. So if workers are few and calls would be about equally long, each worker gets
    one. If workers are many, each gets at most one. Otherwise there are as many calls as it takes to even out unequal
    clients and workers.
    """
    setup, num_workers = current.setup, current.executor.num_workers
    one_each = cut(len(statuses), num_workers, setup.work_width)
    if len(one_each) == num_workers <= FEW_WORKERS:
        examples = planned_examples(setup, current.inputs.plan, statuses)
        lengths = [examples[slice(*run)].sum() for run in one_each]
        if max(lengths) * len(lengths) <= EVEN * sum(lengths):
            return one_each
    return cut(len(statuses), current.calls_per_wave, setup.work_width, current.has_many_workers)


def planned_examples(setup: Setup, plan: Plan, statuses: Mapping[int, ClientStatus]) -> np.ndarray:
    """The approximate number of examples that each participant trains on, float64, in the order of `statuses`."""
    clients = list(statuses)
    total = np.zeros(len(clients))
    shares = setup.population.work_shares[clients]
    for stage in (stage for stage in plan.stages if not stage.free):
        held = stage.subset * setup.partition.split(stage.split).sizes[clients]
        a_step = np.minimum(held, stage.batch_size or held) * stage.batches_per_step
        examples = held * stage.epochs if stage.epochs else a_step * (stage.steps or 0)
        total += examples * (shares * stage.share if stage.split == "train" else 1.0)
    return total * [status.trains for status in statuses.values()]

"""Local work of a round's participants: who takes part, who is back in time, and what arrived."""

from collections.abc import Mapping, Sequence

from rayfl import gather
from rayfl.determinism.addition_order import cut, nodes_within, total
from rayfl.gather import Aggregate, Handle
from rayfl.methods.base import Plan
from rayfl.population.fate import Fate
from rayfl.population.sampling import Participation
from rayfl.rounds.calls import AddJob, PartialSums, RoundInputs, TrainJob
from rayfl.rounds.client_outputs import ClientOutputs
from rayfl.rounds.cutoff import apply_over_selection
from rayfl.rounds.executor import Executor, Job, JobResult, Ref
from rayfl.rounds.ledger import Ledger
from rayfl.rounds.run_state import RunState, calls_per_wave
from rayfl.rounds.setup import Setup
from rayfl.rounds.worker import merged
from rayfl.tree import Tree


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
    for run in cut(len(clients), calls_per_wave(setup, executor), setup.work_width):
        nodes = nodes_within(run, (0, len(clients)))
        work = TrainJob(tuple(nodes), {client: fates[client] for client in clients[slice(*run)]})
        inputs = run_state.inputs(setup.memory_slots, work.clients)
        jobs.append(Job(work, inputs, len(setup.output_slots) * len(work.trained)))
    put = executor.put(round_inputs)
    done = executor.run("train", put, jobs)
    results = apply_over_selection(setup, round_inputs.plan, [one for answer in done for one in answer.result.results])
    ledger.results |= results
    outputs: dict[int, ClientOutputs] = {}
    for job, answer in zip(jobs, done, strict=True):
        outputs |= ClientOutputs.unpack(setup.output_slots, job.work.trained, answer.outputs)
    outputs = {client: one for client, one in outputs.items() if results[client].fate.counts}
    delivered = {client: one for client, one in outputs.items() if results[client].fate is Fate.DELIVERED}
    messages = {client: one.message for client, one in delivered.items()} if setup.keeps_messages else {}
    if setup.keeps_messages and not setup.is_peer:
        sums = add_messages(setup, executor, put, messages)
    else:
        sums = sum_up(setup, done, len(clients))
    for name in setup.relayed:
        sent: dict[int, Tree | Handle] = {
            client: executor.handle(one.packets[name])
            for client, one in delivered.items()
            if name in results[client].relayed
        }
        sums[name] = Aggregate(setup.method.gather[name], count=len(sent), items=sent)
    return run_state.updated(setup.memory_slots, outputs), sums, messages


def add_messages(
    setup: Setup, executor: Executor, round_inputs: Ref, messages: Mapping[int, Ref]
) -> dict[str, Aggregate]:
    """Messages that were kept until it was known whose count, added as if nobody else had been selected."""
    clients = list(messages)
    nodes = cut(len(clients), calls_per_wave(setup, executor))
    works = [AddJob((node,), tuple(clients[slice(*node)])) for node in nodes]
    jobs = [Job(work, tuple(messages[client] for client in work.clients)) for work in works]
    return sum_up(setup, executor.run("add", round_inputs, jobs), len(clients))


def sum_up(setup: Setup, done: Sequence[JobResult], num_leaves: int) -> dict[str, Aggregate]:
    """The partial sums of all calls, merged along the rest of the summation tree."""
    if setup.is_peer or not num_leaves:
        return {name: rule.empty() for name, rule in setup.method.gather.items()}
    answers: list[PartialSums] = [answer.result for answer in done]
    sums = {
        node: {name: gather.from_wire(one) for name, one in by_name.items()}
        for answer in answers
        for node, by_name in answer.sums.items()
    }
    # What came from the calls is read-only on Ray.
    return total((0, num_leaves), sums, lambda one: {name: part.copied() for name, part in one.items()}, merged)

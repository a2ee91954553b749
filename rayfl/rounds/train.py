"""Local work of a round's participants: who has which part, who is back in time, and what arrived."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rayfl import gather
from rayfl.determinism.addition_order import chunks, cut, total
from rayfl.gather import Aggregate
from rayfl.methods.base import Plan
from rayfl.population.sampling import Participation, Status
from rayfl.rounds.calls import TRAINS, AddJob, ClientResult, Role, RoundInputs, Trained, TrainJob
from rayfl.rounds.executor import Done, Executor, Job, Ref
from rayfl.rounds.ledger import Ledger
from rayfl.rounds.run_state import RunState, calls_per_wave, input_refs, store_outputs
from rayfl.rounds.setup import Setup
from rayfl.rounds.simulated_clock import arrival_s, cut_off, moment
from rayfl.rounds.worker import merged

_SERVER_ROLES: Mapping[Status, Role] = {
    "delivered": "upload",
    "dropped_after_download": "download_only",
    "dropped_after_training": "train_only",
    "upload_lost": "upload_lost",
}
_PEER_ROLES: Mapping[Status, Role] = {
    "delivered": "upload",
    "dropped_before_download": "keep",
    "dropped_after_training": "train_only",
}


def server_roles(setup: Setup, plan: Plan, participation: Participation) -> dict[int, Role]:
    """Who takes part in a server round, by client in ascending order."""
    status = participation.status
    roles: dict[int, Role] = {
        client: _SERVER_ROLES[status[client]] for client in participation.with_status(*_SERVER_ROLES)
    }
    if plan.trainers == "all":
        away = {*participation.with_status("dropped_before_download"), *participation.unavailable}
        roles |= {client: "keep" for client in range(setup.num_clients) if client not in roles and client not in away}
    return dict(sorted(roles.items()))


def peer_roles(participation: Participation) -> dict[int, Role]:
    """Who does what in a peer round: who is away from the exchange trains for itself."""
    return {client: _PEER_ROLES[participation.status[client]] for client in participation.with_status(*_PEER_ROLES)}


def train(
    setup: Setup,
    executor: Executor,
    run_state: RunState,
    shared: RoundInputs,
    roles: Mapping[int, Role],
    ledger: Ledger,
    messages: dict[int, Ref] | None = None,
) -> tuple[RunState, dict[str, Aggregate]]:
    """Local work of all clients with a role: the new world, and what arrived by message name.

    `messages` collects the peers' messages by sender.
    """
    pieces = chunks(list(roles), setup.num_chunks(len(roles)))
    works = [
        TrainJob(node, {index: tuple((c, roles[c]) for c in pieces[index]) for index in range(*node)})
        for node in cut(len(pieces), calls_per_wave(setup, executor))
    ]
    jobs = []
    for work in works:
        present = [client for client, role in work.clients if role in TRAINS]
        inputs = input_refs(setup, run_state, [client for client, _ in work.clients])
        jobs.append(Job(work, inputs, setup.num_outputs * len(present)))
    put = executor.put(shared)
    done = executor.run("train", put, jobs)
    reports = apply_over_selection(
        setup, shared.plan, roles, [report for answer in done for report in answer.result.reports]
    )
    for client in roles:
        ledger.add(reports[client])
    run_state, kept, packets = store_client_outputs(setup, run_state, works, done, reports)
    if messages is not None:
        messages |= kept
    if setup.keeps_messages and not setup.is_peer:
        sums = add_up(setup, executor, put, {c: ref for c, ref in kept.items() if reports[c].sent})
    else:
        sums = sum_up(setup, done, len(pieces))
    for name in setup.relayed:
        sent = {c: executor.handle(ref) for c, ref in packets[name].items() if name in reports[c].relayed}
        sums[name] = Aggregate(setup.method.gather[name], count=len(sent), items=sent)
    return run_state, sums


def apply_over_selection(
    setup: Setup, plan: Plan, roles: Mapping[int, Role], reports: Sequence[ClientResult]
) -> dict[int, ClientResult]:
    """The reports by client; where only the first to finish are taken, the others' are cut off when these are back.

    Who finishes at the same moment is taken in the order of the ids. A client with nothing to say finishes, too; one
    that vanishes or whose update is lost does not, and is cut off as well if it is still busy then.
    """
    by_client = {report.client: report for report in sorted(reports, key=lambda report: report.client)}
    wanted = setup.population.settings.take_first
    if wanted is None or not plan.up:
        return by_client
    times = {client: arrival_s(setup.population.traits(client), report) for client, report in by_client.items()}
    back = sorted((moment(times[c]), c) for c, report in by_client.items() if roles[c] != "keep" and not report.undone)
    if len(back) < wanted:
        return by_client
    close, last = back[wanted - 1]
    surplus = {client for _, client in back[wanted:]}
    surplus |= {c for c in by_client if roles[c] != "keep" and moment(times[c]) > close}
    return {
        client: cut_off(setup, plan, report, times[last], "surplus") if client in surplus else report
        for client, report in by_client.items()
    }


def store_client_outputs(
    setup: Setup,
    run_state: RunState,
    works: Sequence[TrainJob],
    done: Sequence[Done],
    reports: Mapping[int, ClientResult],
) -> tuple[RunState, dict[int, Ref], dict[str, dict[int, Ref]]]:
    """The world with new states and links, the kept messages, and the relayed packets by name: of rounds that count."""
    states, server_memories, messages = dict(run_state.states), dict(run_state.server_memories), {}
    packets: dict[str, dict[int, Ref]] = {name: {} for name in setup.relayed}
    for work, answer in zip(works, done, strict=True):
        left = iter(answer.outputs)
        for client in (client for client, role in work.clients if role in TRAINS):
            outputs = iter([next(left) for _ in range(setup.num_outputs)])
            if reports[client].undone:
                continue
            store_outputs(setup, client, outputs, states, server_memories)
            if setup.keeps_messages:
                messages[client] = next(outputs)
            for name in setup.relayed:
                packets[name][client] = next(outputs)
    return replace(run_state, states=states, server_memories=server_memories), messages, packets


def add_up(setup: Setup, executor: Executor, shared: Ref, messages: Mapping[int, Ref]) -> dict[str, Aggregate]:
    """Messages that were kept until it was known whose count, added as if nobody else had been selected."""
    pieces = chunks(list(messages), setup.num_chunks(len(messages)))
    works = [
        AddJob(node, {index: pieces[index] for index in range(*node)})
        for node in cut(len(pieces), calls_per_wave(setup, executor))
    ]
    jobs = [Job(work, tuple(messages[client] for client in work.clients)) for work in works]
    return sum_up(setup, executor.run("add", shared, jobs), len(pieces))


def sum_up(setup: Setup, done: Sequence[Done], num_chunks: int) -> dict[str, Aggregate]:
    """The partial sums of all calls, merged along the rest of the summation tree."""
    if setup.is_peer or not num_chunks:
        return {name: rule.empty() for name, rule in setup.method.gather.items()}
    answers: list[Trained] = [answer.result for answer in done]
    known = {answer.node: {name: gather.from_wire(value) for name, value in answer.sums.items()} for answer in answers}
    return total((0, num_chunks), known.get, merged)

"""Participants of a round: who is chosen by the experiment's selection, which polls candidates before and is informed
afterwards; who takes part, how their local work is cut into calls, and who is back in time.

A polled client downloads the broadcast, computes the loss of the server's model on its train examples, and reports it
in 32 bits. Training begins when all reports are back; polled clients that are then chosen have the broadcast already.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from rayfl import tree
from rayfl.compress.base import message_bits
from rayfl.determinism.addition_order import SumNode, cut, nodes_within
from rayfl.errors import HookError, RayflError
from rayfl.gather import Aggregate
from rayfl.methods.base import Plan
from rayfl.population.client import ClientStatus
from rayfl.population.sampling import Participation
from rayfl.rounds import downlinks
from rayfl.rounds.aggregation import MOST_ALONE, aggregates
from rayfl.rounds.check_hooks import A_STATE, checked, checked_hook
from rayfl.rounds.executor import Job, Ref
from rayfl.rounds.run_state import CurrentRound, RunState
from rayfl.rounds.setup import Setup
from rayfl.rounds.simulated_clock import arrival_s, cut_off_surplus
from rayfl.rounds.worker_jobs import ClientOutputs, ClientResult, Missed, PollJob, Slots, TrainJob, num_values
from rayfl.selections.base import Answer, Seen, Selection

REPORT_BITS = 32
"""A loss, as float32."""
KEY = ("selection",)
LOSS = "train/loss"
"""The client metric that is reported to the server."""
FEW_WORKERS = 2
EVEN = 1.05
"""With at most FEW_WORKERS workers, each gets one call, if the longest call takes at most EVEN times the mean."""


def ask(current: CurrentRound) -> None:
    """Choose the clients of a server round, after a poll if the selection has candidates, into the round's ledger.

    The bills of the poll go into the ledger, and the seconds from which polled clients can train into the inputs.
    """
    setup, state, selection = current.setup, current.run_state.selection, current.setup.selection
    seen = setup.population.seen(current.number)

    def choose(available: np.ndarray, wanted: int, draws: np.random.Generator) -> Sequence[int]:
        candidates = clients_named(selection.candidates, state, seen, available, wanted, draws)
        losses = poll(current, candidates) if candidates else {}
        return clients_named(selection.choose, state, replace(seen, losses=losses), available, wanted, draws)

    current.ledger.participation = setup.population.sample_round(current.number, choose=choose)


def poll(current: CurrentRound, candidates: Sequence[int]) -> dict[int, float]:
    """The losses that candidates report, by client."""
    setup, message, server = current.setup, current.inputs.message, current.run_state.server
    if not (setup.method.capabilities.has_global_model and (model := checked_hook(setup.server_half.model)(server))):
        raise RayflError(
            " polls clients by the server's model, but with this method, or with [parts], no client has that model; "
            "choose another one",
            KEY,
        )
    current.change_inputs(message={}, model=tree.to_arrays(model))
    answers = current.run(current.client_jobs(PollJob, candidates, Slots()))
    polled = dict[int, ClientResult]()
    owed = downlinks.missed(current.run_state.downlink, message, candidates)
    bits, values = message_bits(message), num_values(message)
    for result in (result for answer in answers for result in answer.result):
        late = owed.get(result.client, Missed())
        polled[result.client] = replace(
            result, billed_bits=REPORT_BITS, downlink_bits=bits + late.bits, num_received=values + late.values
        )
    traits = {client: setup.population.traits(client) for client in polled}
    end = max(arrival_s(traits[client], result) for client, result in polled.items())
    # A polled client that trains downloads nothing more, but `arrival_s` will count its download.
    begins = {client: end - result.downlink_bits / traits[client].downlink_bps for client, result in polled.items()}
    current.change_inputs(message=message, model=None, begins=begins)
    current.ledger.polled = polled
    return {client: loss for client, result in polled.items() if (loss := result.metrics["poll/loss"]) is not None}


def learn(current: CurrentRound) -> None:
    """Bill the poll and the reports of this round, and let the selection observe the selected clients."""
    setup, ledger, selection = current.setup, current.ledger, current.setup.selection
    for client, polled in ledger.polled.items():
        result, traits = ledger.result(client), setup.population.traits(client)
        if client in ledger.results:
            # It has downloaded the broadcast only once, and the time of its poll lies before `begins_s`.
            ledger.results[client] = replace(
                result,
                billed_bits=result.billed_bits + polled.billed_bits,
                begins_s=result.begins_s - polled.billed_bits / traits.uplink_bps,
                work={**result.work, **polled.work},
                costs={**result.costs, **dict.fromkeys(polled.work, 0.0)},
            )
        else:
            ledger.results[client] = replace(polled, status=result.status, metrics={})
    if type(selection).observe is Selection.observe and not selection.hears_losses:
        return
    answers: list[Answer] = []
    for client in ledger.participation.selected:
        result = ledger.result(client)
        loss = None
        traits = setup.population.traits(client)
        if selection.hears_losses and result.status == "delivered":
            if (loss := result.metrics.get(LOSS)) is None:
                raise RayflError(
                    f" {selection.name!r} needs {LOSS}, which {type(setup.method).__name__} does not report", KEY
                )
            result = ledger.results[client] = replace(result, billed_bits=result.billed_bits + REPORT_BITS)
        answers.append(Answer(client, traits.num_examples, loss, arrival_s(traits, result)))
    observed = checked(selection.observe, *A_STATE)(current.run_state.selection, current.number, answers)
    current.run_state = replace(current.run_state, selection=observed)


def clients_named(
    hook: Callable[[tree.State, Seen, np.ndarray, int, np.random.Generator], Sequence[int]],
    state: tree.State,
    seen: Seen,
    available: np.ndarray,
    wanted: int,
    draws: np.random.Generator,
) -> list[int]:
    """The clients that a hook names, ascending. Raise HookError unless each is available, and named once."""
    named = checked(hook, "clients, by their numbers", lambda returned: [*map(int, returned)] == [*returned])
    clients = sorted(int(client) for client in named(state, seen, available, wanted, draws))
    if len({*clients}) < len(clients) or not np.isin(np.array(clients, np.int64), available, kind="table").all():
        raise HookError(f"{hook.__qualname__} names clients {clients}; name available clients, each once")
    return clients


def server_participants(setup: Setup, plan: Plan, participation: Participation) -> dict[int, ClientStatus]:
    """Who downloads in a server round, with the status drawn for each, by client in ascending order."""
    statuses = dict(participation.statuses)
    if plan.trainers == "all":
        statuses |= dict.fromkeys(
            set(range(setup.num_clients)) - {*statuses, *participation.unavailable.tolist()}, ClientStatus.NOT_SELECTED
        )
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
    results = (result for answer in answers for result in answer.result)
    current.ledger.results |= cut_off_surplus(setup, current.inputs.plan, results)
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
    received = {} if setup.is_peer else aggregates(current, sums, messages, delivered)
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
        jobs.append(
            Job(work, inputs, len(setup.output_slots) * size + num_sums, setup.output_slots.kept(size), setup.together)
        )
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

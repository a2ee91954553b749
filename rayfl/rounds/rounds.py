"""Runs the rounds of an experiment on an `Executor`.

No method's name appears here. Randomness is keyed by (seed, round, client, purpose) and additions follow
`determinism/addition_order.py`, so a round's result does not depend on where its jobs ran.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from rayfl import tree
from rayfl.compress.base import message_bits
from rayfl.determinism.global_draws import key, keyed, preserved
from rayfl.determinism.seeding import NOBODY
from rayfl.determinism.torch_flags import fixed
from rayfl.errors import NotFinite
from rayfl.population.client import Fate
from rayfl.population.sampling import Participation
from rayfl.rounds import downlinks, evaluation
from rayfl.rounds.check_hooks import A_STATE, Given, checked, checked_hook
from rayfl.rounds.errors import Diverged, HookError, MethodError
from rayfl.rounds.executor import Executor, Job, Ref
from rayfl.rounds.flights import await_replies, fly
from rayfl.rounds.ledger import Ledger, RoundRecord, record, server_comm
from rayfl.rounds.mask_comparison import compared
from rayfl.rounds.model_sums import BATCH, ModelSums, joined, values
from rayfl.rounds.peer_exchange import bill, in_calls, mix_job
from rayfl.rounds.run_state import Round, RunState, server_inputs
from rayfl.rounds.select_clients import ask, learn
from rayfl.rounds.setup import Setup
from rayfl.rounds.train import server_participants, train
from rayfl.rounds.worker_jobs import (
    EvaluateJob,
    MaskJob,
    MeanModelJob,
    PersonalModelJob,
    PooledJob,
    ReplyJob,
    RoundInputs,
)
from rayfl.settings_read import require_read
from rayfl.topology.graphs import graph_of, link_weights, mixing_weights, without_diagonal
from rayfl.topology.statistics import round_metrics

AT_ONCE = 4
"""Personal models made per worker in one wave of calls; all models together can be larger than memory."""


def first_run_state(setup: Setup) -> RunState:
    """The run state before round 0."""
    with naming_round(0), keyed(setup.seed, purpose="first server state"):
        server = {} if setup.is_peer else checked_hook(setup.server_half.init_server)(setup.initial)
    return RunState(server=server, selection=checked(setup.selection.init, *A_STATE)(setup.num_clients))


def simulate(
    setup: Setup,
    executor: Executor,
    on_round: Callable[[RoundRecord, RunState], None],
    run_state: RunState | None = None,
    rounds: int | None = None,
) -> RunState:
    """Run from `run_state` (None: from the start) to `rounds` (None: the experiment's); `on_round` after each round.

    Raise UnusedSetting after the first round that evaluates, if a setting of `Setup.unread` is still unread.
    """
    one_round = peer_round if setup.is_peer else server_round
    with fixed(setup.threads, torch.device("cpu")), preserved():
        # After a resume it is not known which settings the earlier rounds have read.
        unread = setup.unread if run_state is None else ()
        run_state = run_state or first_run_state(setup)
        while run_state.round < (setup.rounds if rounds is None else rounds):
            begun = time.perf_counter()
            with naming_round(run_state.round), keyed(setup.seed, run_state.round, purpose="round"):
                run_state, record = one_round(setup, executor, run_state)
            record = replace(record, row=replace(record.row, wall_s=time.perf_counter() - begun))
            on_round(record, run_state)
            if unread and setup.evaluated(record.row.round) and (read := executor.settings_read()) is not None:
                require_read(unread, read, record.row.round)
                unread = ()
    return run_state


@contextmanager
def naming_round(round: int) -> Iterator[None]:
    """Make errors of a third party's hook, and numbers that are not finite, name the round outside a client's work."""
    try:
        yield
    except HookError as error:
        raise MethodError(f"round {round}: {error}") from error
    except NotFinite as error:
        raise Diverged(f"round {round}: {error}") from error


def server_round(setup: Setup, executor: Executor, run_state: RunState) -> tuple[RunState, RoundRecord]:
    """One round of a server method: download, local work, upload, server update, replies, evaluation."""
    half, number, plan = setup.server_half, run_state.round, setup.plan(run_state.round)
    server, context = run_state.server, setup.context(number, plan, NOBODY, "server")
    message, downlink = downlinks.broadcast(setup, server, run_state.downlink, context) if plan.down else ({}, {})
    run_state = replace(run_state, downlink=downlink or run_state.downlink)
    inputs = server_inputs(setup, server, context, message)
    round = Round(setup, executor, run_state, inputs, Ledger(Participation({})))
    ledger = round.ledger
    if setup.schedule.in_rounds:
        ask(round)
        participants = server_participants(setup, plan, ledger.participation)
        round.change_inputs(missed=downlinks.missed(downlink, message, {*participants, *ledger.polled}))
        received, _ = train(round, participants)
    else:
        received = fly(round)
    learn(round)
    # A client that was cut off while it downloaded has not received it.
    whole = {client: message_bits(message) + one.bits for client, one in round.inputs.missed.items()}
    reached = [client for client, bits in whole.items() if ledger.result(client).downlink_bits >= bits > 0]
    round.run_state = replace(round.run_state, downlink=downlinks.received(round.run_state.downlink, reached))
    delivered = sorted(client for client, result in ledger.results.items() if result.fate is Fate.DELIVERED)
    # Sums that were added here may have drawn, and workers decide where sums are added.
    key(setup.seed, number, purpose="server update")
    given = Given(setup.method)
    given.note("the server's state", server)
    server, metrics = checked_hook(half.server_update)(server, received, delivered, context)
    given.require_unchanged()
    ledger.metrics |= metrics
    round.run_state = replace(round.run_state, server=server)
    if half.overrides("reply") and plan.down:
        reply(round, delivered)
    if not setup.schedule.in_rounds:
        await_replies(round)
    uploads = [ledger.results[client].num_values for client in delivered]
    downloads = [result.num_received for result in ledger.results.values()]
    ledger.metrics |= server_comm(uploads, downloads, setup.num_clients)
    evaluate(round)
    return replace(round.run_state, round=number + 1), record(setup, number, ledger)


def peer_round(setup: Setup, executor: Executor, run_state: RunState) -> tuple[RunState, RoundRecord]:
    """One round of a peer method: local work, exchange of messages with the neighbours, evaluation."""
    number, plan = run_state.round, setup.plan(run_state.round)
    participation = setup.population.sample_round(number, everyone=True)
    inputs = RoundInputs(round=number, plan=plan, evaluated=setup.evaluated(number))
    round = Round(setup, executor, run_state, inputs, Ledger(participation))
    _, messages = train(round, participation.fates)
    if setup.topology is not None and plan.up:
        mix(round, messages)
    round.run_state = replace(round.run_state, round=number + 1)
    evaluate(round)
    return round.run_state, record(setup, number, round.ledger)


def reply(round: Round, delivered: Sequence[int]) -> None:
    """Send the server's replies to the clients that delivered, which receive them in the same round."""
    slots = round.setup.memory_slots
    round.change_inputs(message={}, server=tree.to_arrays(round.run_state.server))
    jobs = round.client_jobs(ReplyJob, delivered, slots, len(slots), kept=True)
    answers = round.run(jobs)
    for answer in answers:
        round.ledger.add(answer.result)
    round.keep(slots, jobs, answers)


def mix(round: Round, messages: Mapping[int, Ref]) -> None:
    """The exchange among peers: every peer that is present reads its neighbours' messages and mixes them in.

    Both ends of a link are billed for it.
    """
    setup, ledger = round.setup, round.ledger
    assert setup.topology is not None
    present = np.zeros(setup.num_clients, dtype=bool)
    present[list(messages)] = True
    links = setup.topology.sparse(setup.num_clients, setup.seed, round.number).tocoo()
    counted = present[links.row] & present[links.col]
    graph = graph_of(setup.num_clients, links.row[counted], links.col[counted])
    weights = mixing_weights(graph, setup.topology.weights)
    ledger.metrics |= round_metrics(weights, present)
    if setup.peer_half.weighs_links:
        weights = link_weights(graph, setup.topology.weights)
    if not setup.peer_half.include_self:
        weights = without_diagonal(weights)
    bill(graph, messages, ledger)
    counted = [client for client, result in ledger.results.items() if result.fate.keeps_state]
    receivers = [client for client in counted if client in round.run_state.states or not setup.stateful]
    slots, jobs = setup.state_slots, []
    for part in in_calls(receivers, weights, round.executor.num_workers, 4 * tree.num_entries(setup.initial)):
        work = mix_job(part, weights, present)
        inputs = (*round.run_state.inputs(slots, part), *(messages[sender] for sender in work.senders))
        jobs.append(Job(work, inputs, len(slots) * len(part), slots.kept(len(part)), setup.together))
    round.keep(slots, jobs, round.run(jobs))


def evaluate(round: Round) -> None:
    """Evaluate the global model and the models of `Setup.judged`, if this round evaluates."""
    setup, settings, ledger = round.setup, round.setup.evaluation, round.ledger
    if not round.inputs.evaluated:
        return
    model = ship_model(round)
    personal = setup.method.personalized or bool(setup.method.eval_stages(round.number))
    splits = (settings.own and not personal) or (bool(setup.unseen) and setup.method.has_global_model)
    pooled: ModelSums | None = None
    if model and (settings.pooled or splits):
        pooled = evaluate_pooled(round, "test", splits)
        if settings.pooled:
            found = values(setup, pooled.total.sums)
            ledger.metrics |= {f"pooled/{name}": value for name, value in found.items()}
        if settings.own and not personal:
            ledger.add(evaluation.own_splits(setup, pooled, [*setup.judged], "own"))
    if model and settings.train and setup.method.has_global_model:
        found = values(setup, evaluate_pooled(round, "train").total.sums)
        ledger.metrics |= {f"pooled_train/{name}": value for name, value in found.items()}
    if personal and settings.by_client:
        for answer in round.run(round.client_jobs(EvaluateJob, [*setup.judged], setup.state_slots)):
            ledger.add(answer.result)
    if setup.unseen:
        evaluate_unseen(round, pooled)
    if settings.masks and round.number == setup.rounds - 1:
        compare_masks(round)


def evaluate_unseen(round: Round, pooled: ModelSums | None) -> None:
    """Evaluate the unseen clients; if each has a model of its own, the workers do it.

    `pooled`: the global model's sums on the pooled test set, None without a global model.
    """
    setup, plan, server = round.setup, round.inputs.plan, round.run_state.server
    takes_a_round = setup.method.for_newcomers() == "round"
    one_by_one = takes_a_round or setup.is_peer or bool(setup.method.eval_stages(round.number))
    where = "unseen_before_adapting" if one_by_one else "unseen"
    if pooled is not None and setup.method.has_global_model:
        round.ledger.add(evaluation.own_splits(setup, pooled, setup.unseen, where))
    if not one_by_one:
        return
    if takes_a_round:
        ctx, downlink = setup.context(round.number, plan, NOBODY, "newcomers"), round.run_state.downlink
        message, _ = downlinks.broadcast(setup, server, downlink, ctx) if plan.down else ({}, {})
        personal = tree.to_arrays(server) if setup.server_half.overrides("personal_message") else None
        round.change_inputs(message=message, server=personal)
    for answer in round.run(round.client_jobs(EvaluateJob, setup.unseen, setup.state_slots)):
        round.ledger.add(answer.result)


def ship_model(round: Round) -> tree.Tree:
    """Give the workers the model that an evaluation needs; returns the server's model, {} among peers.

    The workers get the server's model, or among peers the mean of all models if the method asks for it.
    """
    setup = round.setup
    model = {} if setup.is_peer else checked_hook(setup.server_half.model)(round.run_state.server)
    round.change_inputs(message={}, server=None, model=tree.to_arrays(model) if model else None)
    if setup.is_peer and setup.peer_half.evaluated_from_mean:
        round.change_inputs(model=mean_model(round))
    return model


def evaluate_pooled(round: Round, split: Literal["test", "train"], by_client: bool = False) -> ModelSums:
    """The metric sums of the global model on the pooled test set, or on the train splits of `Setup.judged`.

    by_client: whether clients' own splits are measured too.
    """
    setup = round.setup
    size = len(setup.dataset.test) if split == "test" else len(setup.judged_rows)
    parts = ((first, min(first + BATCH, size)) for first in range(0, size, BATCH))
    jobs = [Job(PooledJob(first, last, split, by_client)) for first, last in parts]
    return joined([answer.result for answer in round.run(jobs)])


def compare_masks(round: Round) -> None:
    """Compare the clients' masks pair by pair, beside their labels."""
    setup, masks = round.setup, {}
    for answer in round.run(round.client_jobs(MaskJob, range(setup.num_clients), setup.state_slots)):
        masks |= answer.result
    round.ledger.pairs, metrics = compared(setup, [masks[client] for client in range(setup.num_clients)])
    round.ledger.metrics |= metrics


def mean_model(round: Round) -> tree.Arrays:
    """The mean of all peers' models."""
    everyone = tuple(range(round.setup.num_clients))
    inputs = round.run_state.inputs(round.setup.state_slots, everyone)
    (answer,) = round.run([Job(MeanModelJob(everyone), inputs, num_outputs=1)])
    return round.executor.get(answer.outputs[0])


def personal_models(setup: Setup, executor: Executor, run_state: RunState) -> Iterator[tuple[int, tree.Tree]]:
    """Yield each client and its model at the end of a run, a few at a time.

    A client that keeps a model of its own and was never selected is left out.
    """
    number = setup.rounds - 1
    inputs = RoundInputs(number, setup.plan(number))
    round = Round(setup, executor, run_state, inputs, Ledger(setup.population.sample_round(number)))
    keeps_own = setup.method.personalized and setup.stateful
    with naming_round(number), keyed(setup.seed, number, purpose="models"):
        ship_model(round)
        round.change_inputs(server=None if setup.is_peer else tree.to_arrays(run_state.server))
        clients = sorted(run_state.states) if keeps_own else range(setup.num_clients)
        width = AT_ONCE * executor.num_workers
        for first in range(0, len(clients), width):
            jobs = round.client_jobs(PersonalModelJob, clients[first : first + width], setup.state_slots, 1)
            for job, made in zip(jobs, round.run(jobs), strict=True):
                for client, model in zip(job.work.clients, made.outputs, strict=True):
                    yield client, tree.to_tensors(executor.get(model))

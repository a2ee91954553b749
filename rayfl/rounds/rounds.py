"""The rounds of an experiment over an `Executor`: who works, in which order messages are added, what is recorded.

No method's name appears here. Randomness is keyed by (seed, round, client, purpose) and additions follow
`summation.py`, so a round's result does not depend on where its jobs ran.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from rayfl import tree
from rayfl.determinism.seeding import NOBODY
from rayfl.determinism.torch_flags import fixed
from rayfl.rounds import evaluation
from rayfl.rounds.calls import ClientJob, ClientResult, PooledJob, RoundInputs
from rayfl.rounds.exchange import bill, in_calls, mix_job
from rayfl.rounds.executor import Executor, Job, Ref
from rayfl.rounds.ledger import Ledger, RoundRecord, record
from rayfl.rounds.run_state import RunState, calls_per_wave, input_refs, parts, store_outputs
from rayfl.rounds.setup import Setup
from rayfl.rounds.train import peer_roles, server_roles, train
from rayfl.topology.graphs import mixing_weights
from rayfl.topology.statistics import round_metrics
from rayfl.tree import Arrays


def first_run_state(setup: Setup) -> RunState:
    """The world before round 0."""
    return RunState(server={} if setup.is_peer else setup.server_half.init_server(setup.initial))


def simulate(
    setup: Setup,
    executor: Executor,
    on_round: Callable[[RoundRecord, RunState], None],
    run_state: RunState | None = None,
    rounds: int | None = None,
) -> RunState:
    """Run from `run_state` (None: from the start) to `rounds` (None: the experiment's); `on_round` after each round."""
    play = peer_round if setup.is_peer else server_round
    with fixed(setup.threads, torch.device("cpu")):
        run_state = run_state or first_run_state(setup)
        while run_state.round < (setup.rounds if rounds is None else rounds):
            begun = time.perf_counter()
            run_state, record = play(setup, executor, run_state)
            record = replace(record, row=record.row._replace(wall_s=time.perf_counter() - begun))
            on_round(record, run_state)
    return run_state


def server_round(setup: Setup, executor: Executor, run_state: RunState) -> tuple[RunState, RoundRecord]:
    """One round of a server method: download, local work, upload, server update, replies, judging."""
    half, round, plan = setup.server_half, run_state.round, setup.plan(run_state.round)
    participation = setup.population.sample_round(round)
    ledger = Ledger(participation)
    server, context = run_state.server, setup.context(round, plan, NOBODY, "server")
    shared = RoundInputs(
        round=round,
        plan=plan,
        message=half.broadcast(server, context) if plan.down else {},
        server=tree.to_arrays(server) if half.overrides("personal_message") else None,
        evaluated=setup.evaluated(round),
    )
    roles = server_roles(setup, plan, participation)
    run_state, sums = train(setup, executor, run_state, shared, roles, ledger)
    delivered = sorted(client for client, report in ledger.reports.items() if report.sent)
    server, metrics = half.server_update(server, sums, delivered, context)
    ledger.metrics |= metrics
    run_state = replace(run_state, server=server, round=round + 1)
    if half.overrides("reply") and plan.down:
        run_state = reply(setup, executor, run_state, shared, delivered, ledger)
    evaluate(setup, executor, run_state, shared, ledger)
    return run_state, record(setup, round, ledger)


def peer_round(setup: Setup, executor: Executor, run_state: RunState) -> tuple[RunState, RoundRecord]:
    """One round of a peer method: local work, every message an object, mixing by the receivers, judging."""
    round, plan = run_state.round, setup.plan(run_state.round)
    participation = setup.population.sample_round(round, everyone=True)
    ledger = Ledger(participation)
    shared = RoundInputs(round=round, plan=plan, evaluated=setup.evaluated(round))
    messages: dict[int, Ref] = {}
    run_state, _ = train(setup, executor, run_state, shared, peer_roles(participation), ledger, messages)
    if setup.topology is not None and plan.up:
        senders = [client for client in messages if ledger.reports[client].sent]
        run_state = mix(setup, executor, run_state, shared, {client: messages[client] for client in senders}, ledger)
    run_state = replace(run_state, round=round + 1)
    evaluate(setup, executor, run_state, shared, ledger)
    return run_state, record(setup, round, ledger)


def reply(
    setup: Setup, executor: Executor, run_state: RunState, shared: RoundInputs, delivered: Sequence[int], ledger: Ledger
) -> RunState:
    """The server's answers to those who delivered, taken in at once."""
    shared = replace(shared, message={}, server=tree.to_arrays(run_state.server))
    works = [ClientJob(part) for part in parts(delivered, calls_per_wave(setup, executor))]
    per_client = setup.stateful + setup.has_server_memory
    jobs = [Job(work, input_refs(setup, run_state, work.clients), per_client * len(work.clients)) for work in works]
    states, server_memories = dict(run_state.states), dict(run_state.server_memories)
    for work, answer in zip(works, executor.run("reply", executor.put(shared), jobs), strict=True):
        outputs = iter(answer.outputs)
        for client, report in zip(work.clients, answer.result, strict=True):
            store_outputs(setup, client, outputs, states, server_memories)
            ledger.add(report)
    return replace(run_state, states=states, server_memories=server_memories)


def mix(
    setup: Setup,
    executor: Executor,
    run_state: RunState,
    shared: RoundInputs,
    messages: Mapping[int, Ref],
    ledger: Ledger,
) -> RunState:
    """The exchange among peers: everyone present reads its neighbours' messages; links are billed on both ends."""
    assert setup.topology is not None
    graph = setup.topology.receives(setup.num_clients, setup.seed, shared.round)
    present = np.zeros(setup.num_clients, dtype=bool)
    present[list(messages)] = True
    graph = graph & present[:, None] & present[None, :]
    weights = mixing_weights(graph, setup.topology.weights)
    ledger.metrics |= round_metrics(graph, weights, present)
    if not setup.peer_half.include_self:
        np.fill_diagonal(weights, 0.0)
    bill(graph, messages, ledger)
    there = [client for client, report in ledger.reports.items() if not report.undone]
    receivers = [client for client in there if client in run_state.states or not setup.stateful]
    model_bytes = 4 * tree.num_entries(setup.initial)
    shares = in_calls(receivers, weights, executor.num_workers, model_bytes)
    works = [mix_job(part, weights, present) for part in shares]
    jobs = [
        Job(
            work,
            (*input_refs(setup, run_state, tuple(work.rows)), *(messages[sender] for sender in work.senders)),
            setup.stateful * len(work.rows),
        )
        for work in works
    ]
    states = dict(run_state.states)
    for work, answer in zip(works, executor.run("mix", executor.put(shared), jobs), strict=True):
        outputs = iter(answer.outputs)
        for client in work.rows:
            store_outputs(setup, client, outputs, states, {})
    return replace(run_state, states=states)


def evaluate(setup: Setup, executor: Executor, run_state: RunState, shared: RoundInputs, ledger: Ledger) -> None:
    """Evaluate the global model and every client's model, if this round is judged."""
    if not shared.evaluated:
        return
    model = {} if setup.is_peer else setup.server_half.model(run_state.server)
    shared = replace(shared, message={}, server=None, model=tree.to_arrays(model) if model else None)
    settings, personal = setup.evaluation, setup.method.personalized or bool(setup.method.eval_stages(shared.round))
    if setup.is_peer and setup.peer_half.evaluated_from_mean:
        shared = replace(shared, model=mean_model(setup, executor, run_state, shared))
    if model and (settings.pooled or (settings.own and not personal)):
        pooled = evaluate_pooled(setup, executor, shared)
        if settings.pooled:
            ledger.metrics |= {f"pooled/{name}": float(values.mean()) for name, values in pooled.items()}
        if settings.own and not personal:
            for client, metrics in evaluation.own_splits(setup, pooled).items():
                ledger.add(ClientResult(client, metrics=metrics))
    if personal and (settings.own or settings.personal_on_pooled):
        evaluate_clients(setup, executor, run_state, shared, ledger)


def evaluate_pooled(setup: Setup, executor: Executor, shared: RoundInputs) -> dict[str, np.ndarray]:
    """Every metric of the global model for each example of the pooled test set."""
    size, batch = len(setup.dataset.test), evaluation.BATCH
    jobs = [Job(PooledJob(first, min(first + batch, size))) for first in range(0, size, batch)]
    results = [done.result for done in executor.run("evaluate_pooled", executor.put(shared), jobs)]
    return {name: np.concatenate([result[name] for result in results]) for name in results[0]}


def evaluate_clients(
    setup: Setup, executor: Executor, run_state: RunState, shared: RoundInputs, ledger: Ledger
) -> None:
    """Every client's own model."""
    everyone = parts(range(setup.num_clients), calls_per_wave(setup, executor))
    jobs = [Job(ClientJob(part), input_refs(setup, run_state, part, has_server_memory=False)) for part in everyone]
    for done in executor.run("evaluate", executor.put(shared), jobs):
        for report in done.result:
            ledger.add(report)


def mean_model(setup: Setup, executor: Executor, run_state: RunState, shared: RoundInputs) -> Arrays:
    """The mean of all peers' models."""
    everyone = tuple(range(setup.num_clients))
    job = Job(ClientJob(everyone), input_refs(setup, run_state, everyone, has_server_memory=False), num_outputs=1)
    (done,) = executor.run("mean_model", executor.put(shared), [job])
    return executor.get(done.outputs[0])

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
from rayfl.rounds.calls import ClientJob, PooledJob, Report, Shared
from rayfl.rounds.exchange import bill, in_calls, mix_job
from rayfl.rounds.executor import Executor, Job, Ref
from rayfl.rounds.ledger import Ledger, RoundRecord, record
from rayfl.rounds.run_state import World, calls, keep, memories, parts
from rayfl.rounds.setup import Setup
from rayfl.rounds.train import peer_roles, server_roles, train
from rayfl.topology.graphs import mixing_weights
from rayfl.topology.statistics import round_metrics
from rayfl.tree import Arrays


def first_world(setup: Setup) -> World:
    """The world before round 0."""
    return World(server={} if setup.is_peer else setup.server_half.init_server(setup.initial))


def simulate(
    setup: Setup,
    executor: Executor,
    on_round: Callable[[RoundRecord, World], None],
    world: World | None = None,
    rounds: int | None = None,
) -> World:
    """Run from `world` (None: from the start) to `rounds` (None: the experiment's); `on_round` after each round."""
    play = peer_round if setup.is_peer else server_round
    with fixed(setup.threads, torch.device("cpu")):
        world = world or first_world(setup)
        while world.round < (setup.rounds if rounds is None else rounds):
            begun = time.perf_counter()
            world, record = play(setup, executor, world)
            record = replace(record, row=record.row._replace(wall_s=time.perf_counter() - begun))
            on_round(record, world)
    return world


def server_round(setup: Setup, executor: Executor, world: World) -> tuple[World, RoundRecord]:
    """One round of a server method: download, local work, upload, server update, replies, judging."""
    half, round, plan = setup.server_half, world.round, setup.plan(world.round)
    participation = setup.population.draw(round)
    ledger = Ledger(participation)
    server, context = world.server, setup.context(round, plan, NOBODY, "server")
    shared = Shared(
        round=round,
        plan=plan,
        message=half.broadcast(server, context) if plan.down else {},
        server=tree.to_arrays(server) if half.gives("personal") else None,
        judged=setup.judged(round),
    )
    roles = server_roles(setup, plan, participation)
    world, sums = train(setup, executor, world, shared, roles, ledger)
    delivered = sorted(client for client, report in ledger.reports.items() if report.sent)
    server, metrics = half.server_update(server, sums, delivered, context)
    ledger.metrics |= metrics
    world = replace(world, server=server, round=round + 1)
    if half.gives("reply") and plan.down:
        world = reply(setup, executor, world, shared, delivered, ledger)
    judge(setup, executor, world, shared, ledger)
    return world, record(setup, round, ledger)


def peer_round(setup: Setup, executor: Executor, world: World) -> tuple[World, RoundRecord]:
    """One round of a peer method: local work, every message an object, mixing by the receivers, judging."""
    round, plan = world.round, setup.plan(world.round)
    participation = setup.population.draw(round, everyone=True)
    ledger = Ledger(participation)
    shared = Shared(round=round, plan=plan, judged=setup.judged(round))
    messages: dict[int, Ref] = {}
    world, _ = train(setup, executor, world, shared, peer_roles(participation), ledger, messages)
    if setup.topology is not None and plan.up:
        senders = [client for client in messages if ledger.reports[client].sent]
        world = mix(setup, executor, world, shared, {client: messages[client] for client in senders}, ledger)
    world = replace(world, round=round + 1)
    judge(setup, executor, world, shared, ledger)
    return world, record(setup, round, ledger)


def reply(
    setup: Setup, executor: Executor, world: World, shared: Shared, delivered: Sequence[int], ledger: Ledger
) -> World:
    """The server's answers to those who delivered, taken in at once."""
    shared = replace(shared, message={}, server=tree.to_arrays(world.server))
    works = [ClientJob(part) for part in parts(delivered, calls(setup, executor))]
    per_client = setup.stateful + setup.linked
    jobs = [Job(work, memories(setup, world, work.clients), per_client * len(work.clients)) for work in works]
    states, links = dict(world.states), dict(world.links)
    for work, answer in zip(works, executor.run("reply", executor.put(shared), jobs), strict=True):
        outputs = iter(answer.outputs)
        for client, report in zip(work.clients, answer.result, strict=True):
            keep(setup, client, outputs, states, links)
            ledger.add(report)
    return replace(world, states=states, links=links)


def mix(
    setup: Setup, executor: Executor, world: World, shared: Shared, messages: Mapping[int, Ref], ledger: Ledger
) -> World:
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
    receivers = [client for client in there if client in world.states or not setup.stateful]
    model_bytes = 4 * tree.num_entries(setup.initial)
    shares = in_calls(receivers, weights, executor.num_workers, model_bytes)
    works = [mix_job(part, weights, present) for part in shares]
    jobs = [
        Job(
            work,
            (*memories(setup, world, tuple(work.rows)), *(messages[sender] for sender in work.senders)),
            setup.stateful * len(work.rows),
        )
        for work in works
    ]
    states = dict(world.states)
    for work, answer in zip(works, executor.run("mix", executor.put(shared), jobs), strict=True):
        outputs = iter(answer.outputs)
        for client in work.rows:
            keep(setup, client, outputs, states, {})
    return replace(world, states=states)


def judge(setup: Setup, executor: Executor, world: World, shared: Shared, ledger: Ledger) -> None:
    """Evaluate the global model and every client's model, if this round is judged."""
    if not shared.judged:
        return
    model = {} if setup.is_peer else setup.server_half.model(world.server)
    shared = replace(shared, message={}, server=None, model=tree.to_arrays(model) if model else None)
    settings, personal = setup.evaluation, setup.method.personalized or bool(setup.method.eval_stages(shared.round))
    if setup.is_peer and setup.peer_half.judged_from_mean:
        shared = replace(shared, model=mean_model(setup, executor, world, shared))
    if model and (settings.pooled or (settings.own and not personal)):
        pooled = judge_pooled(setup, executor, shared)
        if settings.pooled:
            ledger.metrics |= {f"pooled/{name}": float(values.mean()) for name, values in pooled.items()}
        if settings.own and not personal:
            for client, metrics in evaluation.own_splits(setup, pooled).items():
                ledger.add(Report(client, metrics=metrics))
    if personal and (settings.own or settings.personal_on_pooled):
        judge_clients(setup, executor, world, shared, ledger)


def judge_pooled(setup: Setup, executor: Executor, shared: Shared) -> dict[str, np.ndarray]:
    """Every metric of the global model for each example of the pooled test set."""
    size, batch = len(setup.dataset.test), evaluation.BATCH
    jobs = [Job(PooledJob(first, min(first + batch, size))) for first in range(0, size, batch)]
    results = [done.result for done in executor.run("judge_pooled", executor.put(shared), jobs)]
    return {name: np.concatenate([result[name] for result in results]) for name in results[0]}


def judge_clients(setup: Setup, executor: Executor, world: World, shared: Shared, ledger: Ledger) -> None:
    """Every client's own model."""
    everyone = parts(range(setup.num_clients), calls(setup, executor))
    jobs = [Job(ClientJob(part), memories(setup, world, part, linked=False)) for part in everyone]
    for done in executor.run("judge", executor.put(shared), jobs):
        for report in done.result:
            ledger.add(report)


def mean_model(setup: Setup, executor: Executor, world: World, shared: Shared) -> Arrays:
    """The mean of all peers' models."""
    everyone = tuple(range(setup.num_clients))
    job = Job(ClientJob(everyone), memories(setup, world, everyone, linked=False), num_outputs=1)
    (done,) = executor.run("mean_model", executor.put(shared), [job])
    return executor.get(done.outputs[0])

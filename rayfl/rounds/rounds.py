"""The rounds of an experiment over an `Executor`: who works, in which order messages are added, what is recorded.

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
from rayfl.determinism.addition_order import runs
from rayfl.determinism.seeding import NOBODY
from rayfl.determinism.torch_flags import fixed
from rayfl.population.fate import Fate
from rayfl.rounds import evaluation
from rayfl.rounds.answers import checked
from rayfl.rounds.calls import ClientJob, ClientResult, PooledJob, RoundInputs
from rayfl.rounds.client_outputs import ClientOutputs
from rayfl.rounds.errors import HookError, MethodError
from rayfl.rounds.exchange import bill, in_calls, mix_job
from rayfl.rounds.executor import Executor, Job, Ref
from rayfl.rounds.ledger import Ledger, RoundRecord, record
from rayfl.rounds.mask_comparison import compared
from rayfl.rounds.paper_comm import server_comm
from rayfl.rounds.run_state import RunState, calls_per_wave
from rayfl.rounds.setup import Setup
from rayfl.rounds.train import server_participants, train
from rayfl.topology.graphs import link_weights, mixing_weights
from rayfl.topology.statistics import round_metrics
from rayfl.tree import Arrays


def first_run_state(setup: Setup) -> RunState:
    """The run state before round 0."""
    with naming_round(0):
        return RunState(server={} if setup.is_peer else checked(setup.server_half.init_server)(setup.initial))


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
            with naming_round(run_state.round):
                run_state, record = play(setup, executor, run_state)
            record = replace(record, row=record.row._replace(wall_s=time.perf_counter() - begun))
            on_round(record, run_state)
    return run_state


@contextmanager
def naming_round(round: int) -> Iterator[None]:
    """An error of somebody's own method inside, which no client had, names the round."""
    try:
        yield
    except HookError as error:
        raise MethodError(f"round {round}: {error}") from error


def server_round(setup: Setup, executor: Executor, run_state: RunState) -> tuple[RunState, RoundRecord]:
    """One round of a server method: download, local work, upload, server update, replies, evaluation."""
    half, round, plan = setup.server_half, run_state.round, setup.plan(run_state.round)
    participation = setup.population.sample_round(round)
    ledger = Ledger(participation)
    server, context = run_state.server, setup.context(round, plan, NOBODY, "server")
    round_inputs = RoundInputs(
        round=round,
        plan=plan,
        message=checked(half.broadcast)(server, context) if plan.down else {},
        server=tree.to_arrays(server) if half.overrides("personal_message") else None,
        evaluated=setup.evaluated(round),
    )
    fates = server_participants(setup, plan, participation)
    run_state, sums, _ = train(setup, executor, run_state, round_inputs, fates, ledger)
    delivered = sorted(client for client, result in ledger.results.items() if result.fate is Fate.DELIVERED)
    server, metrics = checked(half.server_update)(server, sums, delivered, context)
    ledger.metrics |= metrics
    run_state = replace(run_state, server=server, round=round + 1)
    if half.overrides("reply") and plan.down:
        run_state = reply(setup, executor, run_state, round_inputs, delivered, ledger)
    arrived = sum(ledger.results[client].num_values for client in delivered)
    received = [result.num_received for result in ledger.results.values()]
    ledger.metrics |= server_comm(arrived, received, setup.num_clients)
    evaluate(setup, executor, run_state, round_inputs, ledger)
    return run_state, record(setup, round, ledger)


def peer_round(setup: Setup, executor: Executor, run_state: RunState) -> tuple[RunState, RoundRecord]:
    """One round of a peer method: local work, every message an object, mixing by the receivers, evaluation."""
    round, plan = run_state.round, setup.plan(run_state.round)
    participation = setup.population.sample_round(round, everyone=True)
    ledger = Ledger(participation)
    round_inputs = RoundInputs(round=round, plan=plan, evaluated=setup.evaluated(round))
    run_state, _, messages = train(setup, executor, run_state, round_inputs, participation.fates, ledger)
    if setup.topology is not None and plan.up:
        run_state = mix(setup, executor, run_state, round_inputs, messages, ledger)
    run_state = replace(run_state, round=round + 1)
    evaluate(setup, executor, run_state, round_inputs, ledger)
    return run_state, record(setup, round, ledger)


def reply(
    setup: Setup,
    executor: Executor,
    run_state: RunState,
    round_inputs: RoundInputs,
    delivered: Sequence[int],
    ledger: Ledger,
) -> RunState:
    """The server's answers to those who delivered, taken in at once."""
    round_inputs = replace(round_inputs, message={}, server=tree.to_arrays(run_state.server))
    slots, outputs = setup.memory_slots, {}
    works = [ClientJob(run) for run in runs(delivered, calls_per_wave(setup, executor))]
    jobs = [Job(work, run_state.inputs(slots, work.clients), len(slots) * len(work.clients)) for work in works]
    for work, answer in zip(works, executor.run("reply", executor.put(round_inputs), jobs), strict=True):
        outputs |= ClientOutputs.unpack(slots, work.clients, answer.outputs)
        for result in answer.result:
            ledger.add(result)
    return run_state.updated(slots, outputs)


def mix(
    setup: Setup,
    executor: Executor,
    run_state: RunState,
    round_inputs: RoundInputs,
    messages: Mapping[int, Ref],
    ledger: Ledger,
) -> RunState:
    """The exchange among peers: everyone present reads its neighbours' messages; links are billed on both ends."""
    assert setup.topology is not None
    graph = setup.topology.receives(setup.num_clients, setup.seed, round_inputs.round)
    present = np.zeros(setup.num_clients, dtype=bool)
    present[list(messages)] = True
    graph = graph & present[:, None] & present[None, :]
    weights = mixing_weights(graph, setup.topology.weights)
    ledger.metrics |= round_metrics(graph, weights, present)
    if setup.peer_half.weighs_links:
        weights = link_weights(graph, setup.topology.weights)
    if not setup.peer_half.include_self:
        np.fill_diagonal(weights, 0.0)
    bill(graph, messages, ledger)
    counted = [client for client, result in ledger.results.items() if result.fate.counts]
    receivers = [client for client in counted if client in run_state.states or not setup.stateful]
    model_bytes = 4 * tree.num_entries(setup.initial)
    slots, outputs = setup.state_slots, {}
    jobs = []
    for run in in_calls(receivers, weights, executor.num_workers, model_bytes):
        work = mix_job(run, weights, present)
        inputs = (*run_state.inputs(slots, run), *(messages[sender] for sender in work.senders))
        jobs.append(Job(work, inputs, len(slots) * len(run)))
    for job, answer in zip(jobs, executor.run("mix", executor.put(round_inputs), jobs), strict=True):
        outputs |= ClientOutputs.unpack(slots, tuple(job.work.rows), answer.outputs)
    return run_state.updated(slots, outputs)


def evaluate(setup: Setup, executor: Executor, run_state: RunState, round_inputs: RoundInputs, ledger: Ledger) -> None:
    """Evaluate the global model and every client's model, if this round evaluates."""
    if not round_inputs.evaluated:
        return
    model = {} if setup.is_peer else checked(setup.server_half.model)(run_state.server)
    round_inputs = replace(round_inputs, message={}, server=None, model=tree.to_arrays(model) if model else None)
    settings = setup.evaluation
    personal = setup.method.personalized or bool(setup.method.eval_stages(round_inputs.round))
    if setup.is_peer and setup.peer_half.evaluated_from_mean:
        round_inputs = replace(round_inputs, model=mean_model(setup, executor, run_state, round_inputs))
    if model and (settings.pooled or (settings.own and not personal)):
        pooled = evaluate_pooled(setup, executor, round_inputs)
        if settings.pooled:
            ledger.metrics |= {f"pooled/{name}": float(values.mean()) for name, values in pooled.items()}
        if settings.own and not personal:
            for client, metrics in evaluation.own_splits(setup, pooled).items():
                ledger.add(ClientResult(client, metrics=metrics))
    if model and settings.train:
        trained_on = evaluate_pooled(setup, executor, round_inputs, "train")
        ledger.metrics |= {f"pooled_train/{name}": float(values.mean()) for name, values in trained_on.items()}
    if personal and (settings.own or settings.personal_on_pooled or settings.train):
        evaluate_clients(setup, executor, run_state, round_inputs, ledger)
    if settings.masks and round_inputs.round == setup.rounds - 1:
        compare_masks(setup, executor, run_state, round_inputs, ledger)


def evaluate_pooled(
    setup: Setup, executor: Executor, round_inputs: RoundInputs, split: Literal["test", "train"] = "test"
) -> dict[str, np.ndarray]:
    """Every metric of the global model for each example of the pooled test set, or of all clients' train splits."""
    size = len(setup.dataset.test if split == "test" else setup.partition.train.indices)
    batch = evaluation.BATCH
    jobs = [Job(PooledJob(first, min(first + batch, size), split)) for first in range(0, size, batch)]
    results = [done.result for done in executor.run("evaluate_pooled", executor.put(round_inputs), jobs)]
    return {name: np.concatenate([result[name] for result in results]) for name in results[0]}


def evaluate_clients(
    setup: Setup, executor: Executor, run_state: RunState, round_inputs: RoundInputs, ledger: Ledger
) -> None:
    """Every client's own model."""
    slots = setup.state_slots
    everyone = runs(range(setup.num_clients), calls_per_wave(setup, executor))
    jobs = [Job(ClientJob(run), run_state.inputs(slots, run)) for run in everyone]
    for done in executor.run("evaluate", executor.put(round_inputs), jobs):
        for result in done.result:
            ledger.add(result)


def compare_masks(
    setup: Setup, executor: Executor, run_state: RunState, round_inputs: RoundInputs, ledger: Ledger
) -> None:
    """The clients' masks pair by pair, beside their labels."""
    slots, masks = setup.state_slots, {}
    everyone = runs(range(setup.num_clients), calls_per_wave(setup, executor))
    jobs = [Job(ClientJob(run), run_state.inputs(slots, run)) for run in everyone]
    for done in executor.run("masks", executor.put(round_inputs), jobs):
        masks |= done.result
    ledger.pairs, metrics = compared(setup, [masks[client] for client in range(setup.num_clients)])
    ledger.metrics |= metrics


def mean_model(setup: Setup, executor: Executor, run_state: RunState, round_inputs: RoundInputs) -> Arrays:
    """The mean of all peers' models."""
    everyone = tuple(range(setup.num_clients))
    job = Job(ClientJob(everyone), run_state.inputs(setup.state_slots, everyone), num_outputs=1)
    (done,) = executor.run("mean_model", executor.put(round_inputs), [job])
    return executor.get(done.outputs[0])

"""Evaluates the models of a round, and makes every client's model at the end of a run: the calls on the workers.

evaluation.py says which models are evaluated on which examples, and under which names.
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from rayfl import tree
from rayfl.data.partition import label_counts
from rayfl.determinism.global_draws import keyed
from rayfl.determinism.seeding import NOBODY
from rayfl.errors import naming_round
from rayfl.metrics.masks import compared
from rayfl.rounds import downlinks, evaluation
from rayfl.rounds.check_hooks import checked_hook
from rayfl.rounds.executor import Executor, Job
from rayfl.rounds.ledger import Ledger
from rayfl.rounds.model_sums import BATCH, ModelSums, joined, values
from rayfl.rounds.run_state import CurrentRound, RunState
from rayfl.rounds.setup import Setup
from rayfl.rounds.worker_jobs import (
    EvaluateJob,
    MaskJob,
    MeanModelJob,
    NewcomerJob,
    PersonalModelJob,
    PooledJob,
    RoundInputs,
    Slots,
)

AT_ONCE = 4
"""Personal models made per worker in one wave of calls; all models together can be larger than memory."""


def evaluate(current: CurrentRound) -> None:
    """Evaluate the global model and the models of `Setup.evaluated_clients`, if this round evaluates."""
    setup, settings, ledger = current.setup, current.setup.evaluation, current.ledger
    if not current.inputs.evaluated:
        return
    if settings.pooled and not setup.is_peer:
        evaluate_further(current)
    model = ship_model(current)
    personal = setup.method.capabilities.personalized or bool(setup.method.eval_stages(current.number))
    splits = (settings.own and not personal) or (bool(setup.unseen) and setup.method.capabilities.has_global_model)
    pooled: ModelSums | None = None
    if model and (settings.pooled or splits):
        pooled = evaluate_pooled(current, "test", splits)
        if settings.pooled:
            metrics = values(setup, pooled.total.sums)
            ledger.metrics |= {f"pooled/{name}": value for name, value in metrics.items()}
        if settings.own and not personal:
            ledger.add(evaluation.own_splits(setup, pooled, [*setup.evaluated_clients], "own"))
    if model and settings.train and setup.method.capabilities.has_global_model:
        metrics = values(setup, evaluate_pooled(current, "train").total.sums)
        ledger.metrics |= {f"pooled_train/{name}": value for name, value in metrics.items()}
    if personal and settings.by_client:
        for answer in current.run(current.client_jobs(EvaluateJob, [*setup.evaluated_clients], setup.state_slots)):
            ledger.add(answer.result)
    if setup.unseen:
        evaluate_unseen(current, pooled)


def evaluate_unseen(current: CurrentRound, pooled: ModelSums | None) -> None:
    """Evaluate the unseen clients; if each has a model of its own, the workers do it.

    `pooled`: the global model's sums on the pooled test set, None without a global model.
    """
    setup = current.setup
    server = current.run_state.server
    takes_a_round = setup.method.capabilities.newcomer == "round"
    one_by_one = takes_a_round or setup.is_peer or bool(setup.method.eval_stages(current.number))
    where = "unseen_before_adapting" if one_by_one else "unseen"
    if pooled is not None and setup.method.capabilities.has_global_model:
        current.ledger.add(evaluation.own_splits(setup, pooled, setup.unseen, where))
    if not one_by_one:
        return
    if takes_a_round:
        ctx = setup.context(current.number, current.inputs.plan, NOBODY, "newcomers")
        message, _ = downlinks.broadcast(setup, server, current.run_state.downlink, ctx)
        current.change_inputs(
            message=message, server=tree.to_arrays(server) if setup.server_half.overrides("personal_message") else None
        )
    kind, slots = (NewcomerJob, Slots()) if takes_a_round else (EvaluateJob, setup.state_slots)
    for answer in current.run(current.client_jobs(kind, setup.unseen, slots)):
        current.ledger.add(answer.result)


def evaluate_further(current: CurrentRound) -> None:
    """Evaluate the method's further models on the pooled test set."""
    for name, model in current.setup.server_half.further_models(current.run_state.server).items():
        current.change_inputs(message={}, server=None, model=tree.to_arrays(model))
        measured = values(current.setup, evaluate_pooled(current, "test").total.sums)
        current.ledger.metrics |= {f"pooled/{metric}_at_{name}": value for metric, value in measured.items()}


def ship_model(current: CurrentRound) -> tree.Tree:
    """Give the workers the model that an evaluation needs; returns the server's model, {} among peers.

    The workers get the server's model, or among peers the mean of all models if the method asks for it.
    """
    setup = current.setup
    model = {} if setup.is_peer else checked_hook(setup.server_half.model)(current.run_state.server)
    current.change_inputs(message={}, server=None, model=tree.to_arrays(model) if model else None)
    if setup.is_peer and setup.method.capabilities.evaluated_from_mean:
        current.change_inputs(model=mean_model(current))
    return model


def evaluate_pooled(current: CurrentRound, split: Literal["test", "train"], by_client: bool = False) -> ModelSums:
    """The metric sums of the global model on the pooled test set, or on the train splits of `Setup.evaluated_clients`.

    by_client: whether clients' own splits are measured too.
    """
    setup = current.setup
    size = len(setup.dataset.test) if split == "test" else len(setup.evaluated_rows)
    firsts = range(0, size, BATCH)
    jobs = [Job(PooledJob(first, min(first + BATCH, size), split, by_client)) for first in firsts]
    return joined([answer.result for answer in current.run(jobs)])


def compare_masks(current: CurrentRound) -> None:
    """Compare the clients' masks pair by pair, beside their labels."""
    setup = current.setup
    masks = {}
    for answer in current.run(current.client_jobs(MaskJob, range(setup.num_clients), setup.state_slots)):
        masks |= answer.result
    labels, counts = setup.dataset.train.labels, None
    if np.issubdtype(labels.dtype, np.integer) and labels.ndim == 1:
        counts = label_counts(labels, setup.partition.train, setup.dataset.num_classes)[: setup.num_clients]
    current.ledger.pairs, metrics = compared([masks[client] for client in range(setup.num_clients)], counts)
    current.ledger.metrics |= metrics


def mean_model(current: CurrentRound) -> tree.ArrayTree:
    """The mean of all peers' models."""
    everyone = tuple(range(current.setup.num_clients))
    (answer,) = current.run(
        [Job(MeanModelJob(everyone), current.run_state.inputs(current.setup.state_slots, everyone), num_outputs=1)]
    )
    return current.executor.get(answer.outputs[0])


def personal_models(setup: Setup, executor: Executor, run_state: RunState) -> Iterator[tuple[int, tree.Tree]]:
    """Yield each client and its model at the end of a run, a few at a time.

    A client that keeps a model of its own and was never selected is left out.
    """
    round_number = run_state.round - 1
    inputs = RoundInputs(round_number, setup.plan(round_number))
    current = CurrentRound(setup, executor, run_state, inputs, Ledger(setup.population.sample_round(round_number)))
    keeps_own = setup.method.capabilities.personalized and setup.stateful
    with naming_round(round_number), keyed(setup.seed, round_number, purpose="models"):
        ship_model(current)
        current.change_inputs(server=None if setup.is_peer else tree.to_arrays(run_state.server))
        clients = sorted(run_state.states) if keeps_own else range(setup.num_clients)
        width = AT_ONCE * executor.num_workers
        for first in range(0, len(clients), width):
            jobs = current.client_jobs(PersonalModelJob, clients[first : first + width], setup.state_slots, 1)
            for job, made in zip(jobs, current.run(jobs), strict=True):
                for client, model in zip(job.work.clients, made.outputs, strict=True):
                    yield client, tree.to_tensors(executor.get(model))

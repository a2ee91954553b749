"""Evaluates models on the pooled test set and on each client's own split, after the exchange and after local training.

Metric names are `<where>/<what>`: `pooled/accuracy` (the global model on the pooled test set), `own/accuracy` (each
client's model on its own test split, after the exchange), `own_after_training/accuracy` (the same after local
training, over those that trained in the round), `personal_pooled/accuracy` and
`personal_pooled_after_training/accuracy` (personal models on the pooled set), `pooled_train/accuracy` (the global model
on all training examples), `own_train/accuracy` and `own_train_after_training/accuracy` (each client's model on those
that it trains on). Where clients form groups of one retention ratio, each accuracy has their means beside it, as
`own/accuracy_at_retention_0.4`. Clients that no round asks have `unseen...` in place of `own...`: rounds/unseen.py.
"""

from collections.abc import Iterable, Mapping
from inspect import signature

import numpy as np
import torch

from rayfl.data.batches import Batch
from rayfl.data.datasets import Samples
from rayfl.data.transfer import to_device, to_memory
from rayfl.methods.base import Carry, Context
from rayfl.rounds.check_hooks import checked_hook
from rayfl.rounds.engines import LocalTask, run_loop
from rayfl.rounds.setup import Setup
from rayfl.tree import State, Tree

BATCH = 1000
"""Number of examples evaluated at once."""
MOST_GROUPS = 12
"""With more different retention ratios than this, clients are not grouped by ratio."""


def evaluate_client(
    setup: Setup, state: State, model: Tree | None, carry: Carry | None, ctx: Context
) -> dict[str, float]:
    """The metrics of one client's model; `carry` is given if it is evaluated right after local training."""
    suffix = "" if carry is None else "_after_training"
    params = _adapted(setup, state, model, carry, ctx)
    test = setup.dataset.test
    metrics: dict[str, float] = {}
    is_unseen = ctx.traits.id in setup.unseen
    where = "unseen" if is_unseen else "own"
    own, trained_on = setup.partition.test[ctx.traits.id], setup.partition.train[ctx.traits.id]
    if (setup.evaluation.own or is_unseen) and len(own):
        metrics |= _named(f"{where}{suffix}", means(setup, params, test, own))
    if setup.evaluation.train and len(trained_on):
        metrics |= _named(f"{where}_train{suffix}", means(setup, params, setup.dataset.train, trained_on))
    adapts = setup.method.personalized or setup.method.eval_stages(ctx.round)
    if setup.evaluation.personal_on_pooled and adapts and not is_unseen:
        metrics |= _named(f"personal_pooled{suffix}", means(setup, params, test, np.arange(len(test))))
    return metrics


def personal_model(setup: Setup, state: State, server: State, model: Tree | None, ctx: Context) -> Tree:
    """A client's model at the end of the run: the method's `final_model`, else what `evaluate_client` judges."""
    hook = setup.method.final_model
    # A method that was written before the server's state was given takes the client's alone.
    given = (state, server)[: len(signature(hook).parameters)]
    own = checked_hook(hook)(*given)
    return own if own is not None else to_memory(_adapted(setup, state, model, None, ctx), setup.device)


def means(setup: Setup, params: Tree, samples: Samples, indices: np.ndarray) -> dict[str, float]:
    """Every metric's mean over the given examples."""
    return {name: float(values.mean()) for name, values in per_example(setup, params, samples, indices).items()}


def per_example(setup: Setup, params: Tree, samples: Samples, indices: np.ndarray) -> dict[str, np.ndarray]:
    """Every metric's value for each of the given examples, float64 [len(indices)]."""
    params = to_device(params, setup.device)
    held, parts = setup.device_data.of(samples), dict[str, list[torch.Tensor]]()
    for rows in held.order(indices).split(BATCH):
        inputs, labels = held.take(rows)
        batch = Batch(setup.device_data.normalise(inputs), labels)
        for name, values in setup.method.task.metrics(params, batch).items():
            parts.setdefault(name, []).append(values)
    return {name: torch.cat(values).double().cpu().numpy() for name, values in parts.items()}


def own_splits(
    setup: Setup, values: Mapping[str, np.ndarray], clients: range, where: str
) -> dict[int, dict[str, float]]:
    """One model's metrics on the clients' own test splits, from its values on the pooled test set."""
    splits = {client: setup.partition.test[client] for client in clients}
    return {
        client: _named(where, {name: float(value[rows].mean()) for name, value in values.items()})
        for client, rows in splits.items()
        if len(rows)
    }


def means_by_retention(setup: Setup, metrics: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Each accuracy's mean over the clients of one retention ratio (Dis-PFL, Figure 4), from the metrics by client.

    {} if all clients have one ratio, or if there are more than MOST_GROUPS ratios.
    """
    ratios = setup.retention_ratios
    groups = sorted(set(ratios.values()))
    if not 2 <= len(groups) <= MOST_GROUPS:
        return {}
    found: dict[str, float] = {}
    for ratio in groups:
        means = mean_over_clients(row for client, row in metrics.items() if ratios[client] == ratio)
        found |= {f"{name}_at_retention_{ratio:g}": mean for name, mean in means.items() if name.endswith("/accuracy")}
    return found


def mean_over_clients(metrics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Each metric's unweighted mean over the clients that have it."""
    values: dict[str, list[float]] = {}
    for row in metrics:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return {name: float(np.mean(value)) for name, value in values.items()}


def _adapted(setup: Setup, state: State, model: Tree | None, carry: Carry | None, ctx: Context) -> Tree:
    """The parameters to evaluate: those of `eval_begin`, after the method's evaluation stages, which are not kept."""
    method, stages = setup.method, setup.method.eval_stages(ctx.round)
    begun = checked_hook(method.eval_begin)(state, model, carry, ctx)
    if not stages:
        return begun["params"]
    task = LocalTask(
        client=ctx.traits.id,
        round=ctx.round,
        seed=setup.seed,
        begin=lambda: begun,
        data=setup.data(ctx.traits.id),
        stages=stages,
        device=setup.device,
        purpose="judge" if carry is None else "judge after training",
        on_device=setup.hooks_on_device,
    )
    ((adapted, _),) = run_loop(method, [task])
    return adapted["params"]


def _named(where: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{where}/{name}": value for name, value in values.items()}

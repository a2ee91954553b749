"""Evaluates models on the pooled test set and on each client's own split, after the exchange and after local training.

Metric names are `<where>/<what>`: `pooled/accuracy` (the global model on the pooled test set), `own/accuracy` (each
client's model on its own test split, after the exchange), `own_after_training/accuracy` (the same after local
training, over those that trained in the round), `personal_pooled/accuracy` and
`personal_pooled_after_training/accuracy` (personal models on the pooled set), `pooled_train/accuracy` (the global model
on all training examples), `own_train/accuracy` and `own_train_after_training/accuracy` (each client's model on those
that it trains on).

Unseen clients (`clients.unseen`) take part in no round and are evaluated as new. `Capabilities.newcomer` says what
the method does for such a client; nothing of that is kept, sent or billed. Their metrics have `unseen...` in place of
`own...`: `unseen_after_training/accuracy` is measured right after the local work of their first round. If new clients
adapt the global model or train a model of their own, `unseen_before_adapting/accuracy` is that of the global model
before this, on the same test splits.

A round's value of a client's metric is the mean over the clients for which it is defined; `own_merged/...` is the
metric of all their examples together, `own_weighted/...` their mean weighted by examples. `own_deviation/...`,
`own_worst_tenth/...`, `own_worst/...`, `own_difference/...` and `own_jain/...` measure how evenly the metric is
distributed over clients (metrics/fairness.py).
With `evaluation.clients`, clients' values are those of an example that is drawn once from the seed: `own/...` of its
clients, `own_after_training/...` of those among them that trained in the round, `pooled_train/...` of their training
examples. Unseen clients are all evaluated.
If clients form groups by retention ratio, the mean of each group is recorded for every metric that ranks runs, as
`own/accuracy_at_retention_0.4`.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from rayfl.data.transfer import to_memory
from rayfl.methods.base import Carry, Context, State, Tree
from rayfl.metrics.facts import PLACES
from rayfl.metrics.fairness import RECORDED, fairness
from rayfl.rounds.check_hooks import checked_hook
from rayfl.rounds.engines import LocalTask, run_loop
from rayfl.rounds.model_sums import ModelSums, model_sums, of_client, values
from rayfl.rounds.setup import Setup
from rayfl.rounds.worker_jobs import ClientResult, EvaluatedSplit, SplitSums

Values = Mapping[str, float | None]
"""Values by name, None where they are undefined."""
MOST_GROUPS = 12
"""With more different retention ratios than this, clients are not grouped by ratio."""


AFTER_TRAINING, SUFFIX = "judge after training", "_after_training"
"""The purpose of the draws for models that are evaluated as they are after local training, and the end of the names of
their places."""


def evaluate_model(setup: Setup, params: Tree, client: int, round_number: int, suffix: str = "") -> ClientResult:
    """The metrics of one client's model in a round; `suffix`: "" or `SUFFIX`."""
    adapts = setup.method.capabilities.personalized or bool(setup.method.eval_stages(round_number))
    is_unseen = client in setup.unseen
    where = "unseen" if is_unseen else "own"
    everything = np.arange(len(setup.dataset.test) if adapts and not is_unseen else 0)
    places: list[tuple[bool, str, EvaluatedSplit, np.ndarray]] = [
        (setup.evaluation.own or is_unseen, where, "test", setup.partition.test[client]),
        (setup.evaluation.train, f"{where}_train", "train", setup.partition.train[client]),
        (setup.evaluation.personal_on_pooled, "personal_pooled", "test", everything),
    ]
    evaluated = {
        f"{place}{suffix}": model_sums(setup, params, split, indices).total
        for is_wanted, place, split, indices in places
        if is_wanted and len(indices)
    }
    # A page draws the clients' own models together.
    drawn = [index for index, metric in enumerate(setup.metrics) if metric.drawn]
    return client_result(setup, client, evaluated, () if suffix else drawn)


def client_result(
    setup: Setup, client: int, evaluated: Mapping[str, SplitSums], drawn: Collection[int] = ()
) -> ClientResult:
    """The values of a client's model in each place, and the sums that are added over clients: those of the metrics
    `drawn`, or of all with `evaluation.merged`."""
    metrics = {
        f"{where}/{name}": value
        for where, split in evaluated.items()
        for name, value in values(setup, split.sums, of_client=True).items()
    }
    kept = range(len(setup.metrics)) if setup.evaluation.merged else drawn
    return ClientResult(
        client, metrics=metrics, sums={where: split.only(kept) for where, split in evaluated.items()} if kept else {}
    )


def personal_model(setup: Setup, state: State, server: State, model: Tree | None, ctx: Context) -> Tree:
    """A client's model at the end of the run: the method's `final_model`, else what is evaluated."""
    final_model = checked_hook(setup.method.final_model)(state, server)
    return final_model if final_model is not None else to_memory(adapted(setup, state, model, None, ctx), setup.device)


def own_splits(setup: Setup, pooled: ModelSums, clients: Sequence[int], where: str) -> list[ClientResult]:
    """One model's metrics on the clients' own test splits, from its sums `pooled` on the pooled test set."""
    evaluated = np.asarray(clients)[setup.partition.test.sizes[clients] > 0].tolist()
    return [client_result(setup, client, {where: of_client(setup, pooled, client)}) for client in evaluated]


def over_clients(setup: Setup, results: Sequence[ClientResult]) -> dict[str, float | None]:
    """The values of the sums of all clients, added in the clients' order, as `own_merged/...` for the place "own".

    With `evaluation.merged` those of all metrics, and also the means of the clients' values weighted by their examples,
    as `own_weighted/...`; otherwise only those of the metrics that the report draws.
    """
    summaries: dict[str, float | None] = {}
    for where in dict.fromkeys(where for result in results for where in result.sums):
        splits = [(result.metrics, split) for result in results if (split := result.sums.get(where)) is not None]
        merged = values(setup, SplitSums.added([split for _, split in splits]).sums)
        summaries |= {f"{where}_merged/{name}": value for name, value in merged.items()}
        if setup.evaluation.merged:
            names = (name for metrics, _ in splits for name in metrics if name.partition("/")[0] == where)
            for name in dict.fromkeys(names):
                rows = ((metrics.get(name), split.num_examples) for metrics, split in splits)
                known = [(value, n) for value, n in rows if value is not None]
                mean = sum(value * n for value, n in known) / sum(n for _, n in known) if known else None
                summaries[f"{where}_weighted/{name.partition('/')[2]}"] = mean
    return summaries


def means_by_retention(setup: Setup, metrics: Mapping[int, Values]) -> dict[str, float | None]:
    """The mean of each metric that ranks runs over the clients of one retention ratio (Dis-PFL, Figure 4).

    {} if all clients have one ratio, or if there are more than MOST_GROUPS ratios.
    """
    groups, traits = setup.population.retention_groups, setup.population.traits
    if not 2 <= len(groups) <= MOST_GROUPS:
        return {}
    ranking = {name for name, facts in setup.metric_facts.items() if facts.ranks}
    summaries: dict[str, float | None] = {}
    for ratio in groups:
        means = mean_over_clients(row for client, row in metrics.items() if traits(client).retention_ratio == ratio)
        ranked = {name: mean for name, mean in means.items() if name.partition("/")[2] in ranking}
        summaries |= {f"{name}_at_retention_{ratio:g}": mean for name, mean in ranked.items()}
    return summaries


def mean_over_clients(metrics: Iterable[Values]) -> dict[str, float | None]:
    """Each metric's unweighted mean over the clients for which it is defined; None if it is for none."""
    return {name: float(np.mean(known)) if known else None for name, known in _defined(metrics).items()}


def _defined(metrics: Iterable[Values]) -> dict[str, list[float]]:
    """The defined values of each metric by name, in the order of clients."""
    known: dict[str, list[float]] = {}
    for row in metrics:
        for name, value in row.items():
            known.setdefault(name, []).extend([] if value is None else [value])
    return known


def fairness_over_clients(setup: Setup, metrics: Iterable[Values]) -> dict[str, float | None]:
    """How evenly values that rank runs are distributed over clients, as `own_worst/accuracy` (metrics/fairness.py).

    None if no client's value is defined. Values of the training itself (`train/loss`) are left out.
    """
    summaries: dict[str, float | None] = {}
    for name, known in _defined(metrics).items():
        place, _, what = name.partition("/")
        facts = setup.metric_facts.get(what)
        if place in PLACES and facts is not None and facts.higher_is_better is not None:
            spread = fairness(np.array(known), facts)
            summaries |= {f"{place}_{word}/{what}": spread.get(word) for word in RECORDED}
    return summaries


def adapted(setup: Setup, state: State, model: Tree | None, carry: Carry | None, ctx: Context) -> Tree:
    """A client's model to evaluate: that of `eval_begin`, after the method's evaluation stages, which are not kept.

    `carry` is given right after local training.
    """
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
        purpose=ctx.draws.key[-1],
        on_device=setup.hooks_on_device,
        graphs=setup.step_graphs,
    )
    ((ended, _),) = run_loop(method, [task])
    return ended["params"]

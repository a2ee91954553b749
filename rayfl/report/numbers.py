"""The numbers of runs by name, as columns of tables: metrics, costs, and the costs of reaching a target.

NAME is a metric as the run recorded it ("own/accuracy"), or one of `COSTS` ("megabytes"). NAME:best, NAME:final,
NAME:mean, NAME:sum and NAME:oscillation say how a metric's values become one number. COST@0.8 is the cost up to the
first evaluation at which the metric that ranks the runs has reached 0.8; COST@own/accuracy=0.8 names another metric.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from rayfl.errors import RayflError, did_you_mean
from rayfl.experiment.report_options import ReportOptions
from rayfl.metrics.facts import Facts
from rayfl.report import wording
from rayfl.report.groups import Group, Score, facts_of, has_seeds, over
from rayfl.report.page_tables import Column, metric_column, run_columns, score_column, sortable
from rayfl.report.series import (
    MEGABYTE_BITS,
    Series,
    consensus_distance,
    cost,
    mean_over,
    metric_names,
    series,
    total,
    workers,
)
from rayfl.run_directory.record import Run
from rayfl.untyped import Anything


class Number(NamedTuple):
    """A number of a run. facts: its title, its unit and whether higher is better; read: NaN if a run lacks it."""

    name: str
    facts: Facts
    read: Callable[[Run], float]


def _busiest(run: Run) -> float:
    """The megabytes that the client with the most sent and received in the whole run; NaN without clients."""
    bits = run.clients.group_by("client").aggregate([("uplink_bits", "sum"), ("downlink_bits", "sum")])
    each = bits["uplink_bits_sum"].to_numpy() + bits["downlink_bits_sum"].to_numpy()
    return float(each.max() / MEGABYTE_BITS) if len(each) else np.nan


COSTS: Mapping[str, tuple[str, str, Callable[[Run], float]]] = {
    "rounds": ("Rounds", "", lambda run: float(len(run.rounds))),
    "megabytes": ("Sent up and down", "MB", lambda run: float(cost(run).total_megabytes[-1:].sum())),
    "uplink_megabytes": ("Sent up", "MB", partial(total, column="uplink_bits", unit=MEGABYTE_BITS)),
    "downlink_megabytes": ("Sent down", "MB", partial(total, column="downlink_bits", unit=MEGABYTE_BITS)),
    "busiest_megabytes": ("Sent and received by the busiest client", "MB", _busiest),
    "consensus_distance": ("Distance of final models", "", consensus_distance),
    "simulated_s": ("Simulated time", "s", partial(total, column="simulated_s")),
    "wall_s": ("Wall-clock time", "s", partial(total, column="wall_s")),
    "clients_per_round": ("Clients per round", "", workers),
    "steps_per_client_round": (
        "Steps per client per round",
        "",
        partial(mean_over, column="num_steps", having="num_samples"),
    ),
    "examples_per_client_round": (
        "Examples per client per round",
        "",
        partial(mean_over, column="num_samples", having="num_samples"),
    ),
}
"""Costs of whole runs by name: title, unit, and how they are read."""
SPENT = {
    "Up": ("uplink_megabytes", wording.megabytes),
    "Down": ("downlink_megabytes", wording.megabytes),
    "Simulated time": ("simulated_s", wording.seconds),
    "Wall-clock time": ("wall_s", wording.seconds),
}
"""The columns of bytes and seconds in tables of runs: the cost, and its words."""
WORKED = {
    "Clients": ("clients_per_round", wording.amount),
    "Steps": ("steps_per_client_round", wording.amount),
    "Examples": ("examples_per_client_round", wording.amount),
}
"""The columns of the work of clients: those that worked in a round, and the steps and examples of each."""
_TO_TARGET = ("rounds", "megabytes", "uplink_megabytes", "simulated_s")
"""The costs that `spent` gives, in its order."""
_AT_TARGET = re.compile(rf"({'|'.join(_TO_TARGET)})@(?:(.+)=)?(-?\d*\.?\d+(?:e-?\d+)?)")
_WAYS: Mapping[str, Callable[[Series, Facts, int], float]] = {
    "": lambda evaluations, facts, last: float(evaluations.values[-last:].mean()),
    "best": lambda evaluations, facts, last: evaluations.best(facts)[0],
    "final": lambda evaluations, facts, last: evaluations.final,
    "mean": lambda evaluations, facts, last: float(evaluations.values.mean()),
    "sum": lambda evaluations, facts, last: float(evaluations.values.sum()),
    # The mean change to and fro from one evaluation to the next: 0 if a curve only rises or only falls.
    "oscillation": lambda evaluations, facts, last: float(
        (np.abs(np.diff(evaluations.values)).sum() - abs(evaluations.values[-1] - evaluations.values[0]))
        / max(len(evaluations.values) - 1, 1)
    ),
}


def number(name: str, groups: Sequence[Group], metric: str | None = None, last: int = 3) -> Number:
    """The number that `name` stands for.

    A metric without ":best" or another way is the mean of its last `last` values, or of all of them if it
    is a cost per round ("comm/busiest_megabytes"). metric: the metric of a target whose name gives none. Raise
    RayflError if no run has the number.
    """
    if name in COSTS:
        title, unit, read = COSTS[name]
        return Number(name, Facts(title=title, unit=unit, higher_is_better=False), read)
    known = [*dict.fromkeys(recorded for group in groups for run in group.runs for recorded in metric_names(run))]
    at = _AT_TARGET.fullmatch(name)
    base, _, way = (at[2] or metric or "" if at else name).partition(":")
    if base not in known or way not in _WAYS:
        words = did_you_mean(base, [*known, *COSTS, *(f"{cost_name}@TARGET" for cost_name in _TO_TARGET)])
        ways = ", ".join(filter(None, _WAYS))
        raise RayflError(f"no run has the number {name!r}; {words if base not in known else f'after : comes {ways}'}")
    facts = facts_of(groups, base)
    if at is not None:
        (title, unit, _) = COSTS[at[1]]
        index = _TO_TARGET.index(at[1])
        title += f" to {target_words(float(at[3]), facts)}" + f" ({wording.title(base, facts)})" * bool(at[2])
        number_facts = Facts(title=title, unit=unit, higher_is_better=False)
        return Number(name, number_facts, lambda run: spent(run, base, float(at[3]), facts)[index])
    text = wording.metric(base, facts)
    number_facts = facts.model_copy(
        update={"title": text.title + f", {way}" * bool(way), "unit": facts.unit or text.unit}
    )
    chosen = _WAYS[way or "mean" * text.unit.endswith("per round")]
    return Number(
        name,
        number_facts,
        lambda run: np.nan if (evaluations := series(run, base)) is None else chosen(evaluations, facts, last),
    )


def further_columns(groups: Sequence[Group], metric: str | None, options: ReportOptions) -> list[Column]:
    """The columns of `[report] values`; one that no run has yet is empty."""
    columns = []
    for name in options.values:
        try:
            shown = number(name, groups, metric, options.last)
            columns.append(score_column(shown.facts.title, groups, shown.facts, shown.read))
        except RayflError:
            columns.append(Column(name, [wording.NONE] * len(groups)))
    return columns


def ranking(groups: Sequence[Group], names: Sequence[str], options: ReportOptions) -> dict[str, Anything]:
    """The table of runs with the metrics `names`, sorted by the mean of the last values of the first one."""
    titles = {name: wording.title(name, facts_of(groups, name)) for name in names}
    smooth = [metric_column(f"Final, smoothed: {titles[name]}", groups, name, options.last) for name in names[:1]]
    finals = [metric_column(f"Final: {titles[name]}", groups, name, 1) for name in names]
    further = further_columns(groups, next(iter(names), None), options)
    columns = [*run_columns(groups), *smooth, *finals, *cost_columns(groups, SPENT), *further]
    return sortable(groups, columns, smooth[0].head if smooth else "")


def cost_columns(groups: Sequence[Group], shown: Mapping[str, tuple[str, Callable[[float], str]]]) -> list[Column]:
    """Columns of `COSTS`, means over seeds: those of `shown`, which has their names and words by their headings."""
    return [
        Column(head, [*map(words, amounts)], [(amount,) for amount in amounts])
        for head, (name, words) in shown.items()
        for amounts in [[float(np.mean([*map(COSTS[name][2], group.runs)])) for group in groups]]
    ]


def spent(run: Run, name: str, target: float, facts: Facts) -> tuple[float, ...]:
    """The costs (`_TO_TARGET`) of a run up to its first evaluation that reached the target; NaN if none did."""
    values = series(run, name)
    if values is None or not (reached := facts.sign * values.values >= facts.sign * target).any():
        return (np.nan,) * len(_TO_TARGET)
    at = values.rounds[reached][:1]
    done = np.searchsorted(run.rounds["round"].to_numpy(), at, side="right")
    return (float(done[0]), *(float(amount[0]) for amount in cost(run).at(at)[1:]))


def target_words(target: float, facts: Facts) -> str:
    """A target: 80 %, 12.5 nats."""
    return f"{100 * target:.6g} %" if facts.is_percent else facts.words(target)


def costs_to_target(groups: Sequence[Group], name: str, target: float) -> dict[str, Sequence[Score]]:
    """A score for each group and cost (`_TO_TARGET`): of the seeds that reached the target, up to the first evaluation
    at it. "rounds" counts rounds, so that reaching it in round 0 takes 1."""
    facts = facts_of(groups, name)
    costs = [zip(*(spent(run, name, target, facts) for run in group.runs), strict=True) for group in groups]
    return dict(zip(_TO_TARGET, zip(*(map(over, of_group) for of_group in costs), strict=True), strict=True))


def targets(groups: Sequence[Group], name: str, target: float, last: int) -> dict[str, Anything]:
    """The table of costs, sorted by megabytes; columns of costs sort first by the share of seeds that reached the
    target."""
    costs = costs_to_target(groups, name, target)
    reached = [(-rounds.count / len(group.runs),) for rounds, group in zip(costs["rounds"], groups, strict=True)]
    words = [_reached(rounds.count, group, name) for rounds, group in zip(costs["rounds"], groups, strict=True)]
    of_costs = [
        Column(
            head,
            [score.words(decimals=decimals(score), unit=unit, counted=has_seeds(groups)) for score in costs[cost_name]],
            [(*share, score.mean) for share, score in zip(reached, costs[cost_name], strict=True)],
        )
        for head, cost_name, decimals, unit in (
            ("Rounds", "rounds", lambda score: int(score.deviation > 0 or score.mean % 1 > 0), ""),
            ("Up", "uplink_megabytes", lambda score: wording.megabyte_decimals(score.mean), " MB"),
            ("Up and down", "megabytes", lambda score: wording.megabyte_decimals(score.mean), " MB"),
            ("Simulated time", "simulated_s", lambda score: 1, " s"),
        )
    ]
    final = metric_column("Final, smoothed", groups, name, last)
    return sortable(groups, [Column("Reached", words, reached), *of_costs, final], "Up and down")


def _reached(count: int, group: Group, name: str) -> str:
    """Whether the target was reached, by `count` of the group's seeds; else the best value of any seed."""
    if count:
        return "yes" if len(group.runs) == 1 else f"{count} of {len(group.runs)} seeds"
    facts = facts_of([group], name)
    every = [evaluations.values for run in group.runs if (evaluations := series(run, name)) is not None]
    best = facts.sign * np.fmax.reduce(facts.sign * np.concatenate([[np.nan], *every]))
    return wording.NONE if math.isnan(best) else f"not reached (best {facts.words(float(best))})"

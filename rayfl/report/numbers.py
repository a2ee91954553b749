"""The numbers of runs by name, as columns of tables: metrics, costs, and the costs of reaching a target.

NAME is a metric as the run recorded it ("own/accuracy"), or one of `COSTS` ("megabytes"). NAME:best, NAME:final,
NAME:mean and NAME:sum say how a metric's values become one number. COST@0.8 is the cost up to the first evaluation at
which the metric that ranks the runs has reached 0.8; COST@own/accuracy=0.8 names another metric.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from rayfl.errors import RayflError, did_you_mean
from rayfl.experiment.report_options import ReportOptions
from rayfl.metrics.facts import Facts
from rayfl.report import wording
from rayfl.report.groups import Group, Score, facts_of, has_seeds, in_words, over, rank_value
from rayfl.report.page_tables import Column, metric_column, sortable
from rayfl.report.series import MEGABYTE_BITS, Series, cost, metric_names, series, work_done
from rayfl.run_directory.record import Run


class Number(NamedTuple):
    """A number of a run. facts: its title, its unit and whether higher is better; read: NaN if a run lacks it."""

    name: str
    facts: Facts
    read: Callable[[Run], float]


def _total(column: str, unit: float, run: Run) -> float:
    return float(run.rounds[column].to_numpy().sum() / unit)


COSTS: Mapping[str, tuple[str, str, Callable[[Run], float]]] = {
    "rounds": ("Rounds", "", lambda run: float(len(run.rounds))),
    "megabytes": ("Sent up and down", "MB", lambda run: float(cost(run).total_megabytes[-1:].sum())),
    "uplink_megabytes": ("Sent up", "MB", partial(_total, "uplink_bits", MEGABYTE_BITS)),
    "downlink_megabytes": ("Sent down", "MB", partial(_total, "downlink_bits", MEGABYTE_BITS)),
    "simulated_s": ("Simulated time", "s", partial(_total, "simulated_s", 1)),
    "wall_s": ("Wall-clock time", "s", partial(_total, "wall_s", 1)),
    "clients_per_round": ("Clients per round", "", lambda run: work_done(run).clients),
    "steps_per_client_round": ("Steps per client per round", "", lambda run: work_done(run).steps),
    "examples_per_client_round": ("Examples per client per round", "", lambda run: work_done(run).examples),
}
"""Costs of whole runs by name: title, unit, and how they are read."""
_TO_TARGET = ("rounds", "megabytes", "uplink_megabytes", "simulated_s")
"""The costs that `spent` gives, in its order."""
_AT_TARGET = re.compile(rf"({'|'.join(_TO_TARGET)})@(?:(.+)=)?(-?\d*\.?\d+(?:e-?\d+)?)")
_WAYS: Mapping[str, Callable[[Series, Facts, int], float]] = {
    "": lambda found, facts, last: float(found.values[-last:].mean()),
    "best": lambda found, facts, last: found.best(facts)[0],
    "final": lambda found, facts, last: found.final,
    "mean": lambda found, facts, last: float(found.values.mean()),
    "sum": lambda found, facts, last: float(found.values.sum()),
}


def number(name: str, found: Sequence[Group], metric: str | None = None, last: int = 3) -> Number:
    """The number that `name` stands for.

    A metric without ":best", ":final", ":mean" or ":sum" is the mean of its last `last` values, or of all of them if it
    is a cost per round ("comm/busiest_megabytes"). metric: the metric of a target whose name gives none. Raise
    RayflError if no run has the number.
    """
    if name in COSTS:
        title, unit, read = COSTS[name]
        return Number(name, Facts(title=title, unit=unit, higher_is_better=False), read)
    known = list(dict.fromkeys(one for group in found for run in group.runs for one in metric_names(run)))
    at = _AT_TARGET.fullmatch(name)
    base, _, way = (at[2] or metric or "" if at else name).partition(":")
    if base not in known or way not in _WAYS:
        words = did_you_mean(base, [*known, *COSTS, *(f"{one}@TARGET" for one in _TO_TARGET)])
        ways = ", ".join(filter(None, _WAYS))
        raise RayflError(f"no run has the number {name!r}; {words if base not in known else f'after : comes {ways}'}")
    facts = facts_of(found, base)
    if at is not None:
        (title, unit, _), place = COSTS[at[1]], _TO_TARGET.index(at[1])
        title += f" to {target_words(float(at[3]), facts)}" + f" ({wording.title(base, facts)})" * bool(at[2])
        cost_of = partial(spent, name=base, target=float(at[3]), facts=facts)
        own = Facts(title=title, unit=unit, higher_is_better=False)
        return Number(name, own, lambda run: np.nan if (costs := cost_of(run)) is None else costs[place])
    text = wording.metric(base, facts)
    own = facts.model_copy(update={"title": text.title + f", {way}" * bool(way), "unit": facts.unit or text.unit})
    chosen = _WAYS[way or "mean" * text.unit.endswith("per round")]
    return Number(name, own, lambda run: np.nan if (one := series(run, base)) is None else chosen(one, facts, last))


def number_column(found: Sequence[Group], shown: Number) -> Column:
    """A column of a number: means over seeds with their deviations, the best first."""
    scores = [over(map(shown.read, group.runs)) for group in found]
    words = [in_words(score, shown.facts, has_seeds(found)) for score in scores]
    return Column(shown.facts.title, words, [(-rank_value(score, shown.facts),) for score in scores])


def further_columns(found: Sequence[Group], metric: str | None, options: ReportOptions) -> list[Column]:
    """The columns of `[report] values`; one that no run has yet is empty."""
    columns = []
    for name in options.values:
        try:
            columns.append(number_column(found, number(name, found, metric, options.last)))
        except RayflError:
            columns.append(Column(name, [wording.NONE] * len(found)))
    return columns


def spent(run: Run, name: str, target: float, facts: Facts) -> tuple[float, ...] | None:
    """The costs (`_TO_TARGET`) of a run up to its first evaluation that reached the target; None if none did."""
    found = series(run, name)
    at = np.empty(0) if found is None else found.rounds[facts.sign * found.values >= facts.sign * target][:1]
    total, done = cost(run).at(at), np.searchsorted(run.rounds["round"].to_numpy(), at, side="right")
    return (float(done[0]), *(float(amount[0]) for amount in total[1:])) if len(at) else None


def target_words(target: float, facts: Facts) -> str:
    """A target: 80 %, 12.5 nats."""
    return f"{100 * target:.6g} %" if facts.is_percent else facts.words(target)


_DECIDES = "Up and down"
"""The column that sorts the table at first."""


@dataclass(frozen=True)
class CostToTarget:
    """Costs of the seeds that reached the target, up to the first evaluation at the target.

    `rounds` counts the rounds, so reaching it in round 0 takes 1; `best` is the best value of any seed, NaN if nothing
    was measured.
    """

    rounds: Score
    megabytes: Score
    uplink_megabytes: Score
    simulated_s: Score
    best: float


def cost_to_target(group: Group, name: str, target: float) -> CostToTarget:
    """The group's costs up to the first evaluation with a value as good as the target."""
    facts = facts_of([group], name)
    found = [one for run in group.runs if (one := series(run, name)) is not None]
    costs = [one for run in group.runs if (one := spent(run, name, target, facts)) is not None]
    best = facts.sign * float(np.fmax.reduce([facts.sign * one.best(facts)[0] for one in found], initial=np.nan))
    rounds, both, up, seconds = (over(one[column] for one in costs) for column in range(4))
    return CostToTarget(rounds, both, up, seconds, best)


def targets(found: Sequence[Group], name: str, target: float, last: int) -> dict[str, object]:
    """The table of costs, sorted by the share of seeds that reached the target, then by megabytes."""
    return sortable(
        found,
        _columns(found, name, target, last),
        _DECIDES,
        metric=wording.title(name, facts_of(found, name)),
        target=target_words(target, facts_of(found, name)),
        last=last,
        with_seeds=has_seeds(found),
    )


def _columns(found: Sequence[Group], name: str, target: float, last: int) -> list[Column]:
    """The columns; those of costs sort first by the share of seeds that reached the target."""
    spent = [cost_to_target(group, name, target) for group in found]
    reached = [(-one.rounds.count / len(group.runs),) for one, group in zip(spent, found, strict=True)]
    counted, facts = has_seeds(found), facts_of(found, name)
    columns = [Column("Reached", [_reached(*one, facts) for one in zip(spent, found, strict=True)], reached)]
    for head, scores, decimals, unit in (
        ("Rounds", [one.rounds for one in spent], lambda one: int(one.deviation > 0 or one.mean % 1 > 0), ""),
        ("Up", [one.uplink_megabytes for one in spent], lambda one: wording.megabyte_decimals(one.mean), " MB"),
        (_DECIDES, [one.megabytes for one in spent], lambda one: wording.megabyte_decimals(one.mean), " MB"),
        ("Simulated time", [one.simulated_s for one in spent], lambda one: 1, " s"),
    ):
        by = [(*share, score.mean) for share, score in zip(reached, scores, strict=True)]
        words = [score.words(decimals=decimals(score), unit=unit, counted=counted) for score in scores]
        columns.append(Column(head, words, by))
    return [*columns, metric_column("Final, smoothed", found, name, last)]


def _reached(one: CostToTarget, group: Group, facts: Facts) -> str:
    if not one.rounds.count:
        return wording.NONE if math.isnan(one.best) else f"not reached (best {facts.words(one.best)})"
    return "yes" if len(group.runs) == 1 else f"{one.rounds.count} of {len(group.runs)} seeds"

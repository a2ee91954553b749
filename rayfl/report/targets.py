"""Rounds, bytes and simulated time to a target: a value of the metric that ranks the runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rayfl.metrics.facts import Facts
from rayfl.report import wording
from rayfl.report.groups import Group, Score, facts_of, has_seeds, over, rank_value, smoothed
from rayfl.report.page_tables import Column, metric_column, sortable
from rayfl.report.series import cost, series

_SHARE = 0.95
_DECIDES = "Up and down"
"""The column that sorts the table at first."""


@dataclass(frozen=True)
class CostToTarget:
    """Costs of the seeds that reached the target, up to the first evaluation at the target.

    `reached` of `count` seeds reached it; `rounds` counts the rounds, so reaching it in round 0 takes 1; `best` is the
    best value of any seed, NaN if nothing was measured.
    """

    reached: int
    count: int
    rounds: Score
    megabytes: Score
    uplink_megabytes: Score
    simulated_s: Score
    best: float


def default_target(found: Sequence[Group], name: str, last: int) -> float | None:
    """95 % of the median group's smoothed final value, rounded down to a whole percent; None without any value.

    Of a metric that falls, it is that value / 0.95; of one without a smallest value, the distance to the largest one
    takes its place. Values that are no shares are rounded to two digits.

    For an even number of groups the median is the lower of the two in the middle: then half of the groups end above the
    target, and a few groups that learned nothing do not lower it. None also if every group reached it at the first
    evaluation, because reaching it then shows nothing.
    """
    facts = facts_of(found, name)
    scores = [score for group in found if (score := smoothed(group, name, last)).count]
    finals = sorted(scores, key=lambda score: -rank_value(score, facts))
    exact = _share_of(finals[len(finals) // 2].mean, facts) if finals else None
    if exact is None or not math.isfinite(exact):
        return None
    curves = (series(run, name) for group in found for run in group.runs)
    firsts = [float(one.values[0]) for one in curves if one is not None and len(one.values) > 1]
    if (firsts and all(facts.reaches(first, exact) for first in firsts)) or (exact == 0 and facts.is_percent):
        return None
    if facts.is_percent and facts.sign > 0:
        # The addend keeps a whole percent from being rounded down; a value below a percent is not rounded.
        return math.floor(100 * exact + 1e-9) / 100 or exact
    return float(f"{exact:.2g}")


def _share_of(final: float, facts: Facts) -> float | None:
    """What is 5 % worse than a final value; None if the metric has no bound to measure that from."""
    worse = _SHARE if (facts.sign > 0) is (facts.low is not None) else 1 / _SHARE
    bound = facts.high if facts.low is None else facts.low
    return None if bound is None else bound + (final - bound) * worse


def cost_to_target(group: Group, name: str, target: float) -> CostToTarget:
    """The group's costs up to the first evaluation with a value as good as the target."""
    facts = facts_of([group], name)
    costs: list[tuple[float, ...]] = []
    found = [(run, one) for run in group.runs if (one := series(run, name)) is not None]
    for run, one in found:
        at = one.rounds[facts.sign * one.values >= facts.sign * target][:1]
        if len(at):
            spent = cost(run)
            played = np.searchsorted(spent.round, at, side="right")
            costs.append(tuple(float(amount[0]) for amount in (played, *spent.at(at)[1:])))
    best = facts.sign * float(np.fmax.reduce([facts.sign * one.best(facts)[0] for _, one in found], initial=np.nan))
    rounds, both, up, seconds = (over(one[column] for one in costs) for column in range(4))
    return CostToTarget(len(costs), len(group.runs), rounds, both, up, seconds, best)


def targets(found: Sequence[Group], name: str, target: float | None, last: int) -> dict[str, object] | None:
    """The table of costs, sorted by the share of seeds that reached the target, then by megabytes.

    None if nothing was measured.
    """
    wanted = default_target(found, name, last) if target is None else target
    if wanted is None:
        return None
    return sortable(
        found,
        _columns(found, name, wanted, last),
        _DECIDES,
        metric=wording.title(name, facts_of(found, name)),
        target=target_words(wanted, facts_of(found, name)),
        default=target is None,
        last=last,
        with_seeds=has_seeds(found),
    )


def target_words(target: float, facts: Facts) -> str:
    """A target: 80 %, 12.5 nats."""
    return f"{100 * target:.6g} %" if facts.is_percent else facts.words(target)


def _columns(found: Sequence[Group], name: str, target: float, last: int) -> list[Column]:
    """The columns; those of costs sort first by the share of seeds that reached the target."""
    spent = [cost_to_target(group, name, target) for group in found]
    reached = [(-one.reached / one.count,) for one in spent]
    counted, facts = has_seeds(found), facts_of(found, name)
    columns = [Column("Reached", [_reached(one, facts) for one in spent], reached)]
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


def _reached(one: CostToTarget, facts: Facts) -> str:
    if not one.reached:
        return wording.NONE if math.isnan(one.best) else f"not reached (best {facts.words(one.best)})"
    return "yes" if one.count == 1 else f"{one.reached} of {one.count} seeds"

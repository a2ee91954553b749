"""Rounds, bytes and simulated time to a target accuracy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rayfl.report import wording
from rayfl.report.colors import key
from rayfl.report.ranking import Column, has_seeds, sortable
from rayfl.report.scores import Score, over, percent, rank_value, smoothed
from rayfl.report.series import Group, cost, series

_SHARE = 0.95
_DECIDES = "Up and down"
"""The column that sorts the table at first."""


@dataclass(frozen=True)
class CostToTarget:
    """Costs of the seeds that reached the target, up to the first evaluation at the target.

    `reached` of `count` seeds reached it; `rounds` counts the rounds, so reaching it in round 0 takes 1; `best` is the
    largest accuracy of any seed, NaN if nothing was measured.
    """

    reached: int
    count: int
    rounds: Score
    uplink_megabytes: Score
    megabytes: Score
    simulated_s: Score
    best: float


def default_target(found: Sequence[Group], name: str, last: int) -> float | None:
    """95 % of the median group's smoothed final accuracy, rounded down to a whole percent; None without any value.

    For an even number of groups the median is the lower of the two in the middle: then half of the groups end above the
    target, and a few groups that learned nothing do not lower it. None also if every group reached it at the first
    evaluation, because reaching it then shows nothing.
    """
    finals = sorted((score.mean for group in found if (score := smoothed(group, name, last)).count), reverse=True)
    if not finals:
        return None
    exact = _SHARE * finals[len(finals) // 2]
    curves = [one for group in found for run in group.runs if (one := series(run, name))]
    if exact <= min((float(one.values[0]) for one in curves if len(one.values) > 1), default=0.0):
        return None
    # The addend keeps a whole percent from being rounded down; a value below a percent is not rounded.
    return math.floor(100 * exact + 1e-9) / 100 or exact


def cost_to_target(group: Group, name: str, target: float) -> CostToTarget:
    """The group's costs up to the first evaluation with at least the target accuracy."""
    costs: list[tuple[float, ...]] = []
    best = math.nan
    for run in group.runs:
        if (found := series(run, name)) is None:
            continue
        best = max(found.best[0], best) if not math.isnan(best) else found.best[0]
        at = found.rounds[found.values >= target][:1]
        if len(at):
            played = int((run.rounds["round"].to_numpy() <= at[0]).sum())
            costs.append((played, *(float(spent[0]) for spent in cost(run).at(at)[1:])))
    rounds, up, both, seconds = (over(one[column] for one in costs) for column in range(4))
    return CostToTarget(len(costs), len(group.runs), rounds, up, both, seconds, best)


def targets(found: Sequence[Group], name: str, target: float | None, last: int) -> dict[str, object] | None:
    """The table of costs; None if nothing was measured.

    Sorted by the share of seeds that reached the target, then by megabytes.
    """
    wanted = default_target(found, name, last) if target is None else target
    if wanted is None:
        return None
    spent = [cost_to_target(group, name, wanted) for group in found]
    order = sorted(range(len(found)), key=lambda place: (*_cost_order(spent[place]), place))
    with_seeds = has_seeds(found)
    return sortable(
        [key(found[place].label, place) for place in order],
        _columns(
            [spent[place] for place in order], [smoothed(found[place], name, last) for place in order], with_seeds
        ),
        _DECIDES,
        metric=wording.title(name),
        target=wording.short_percent(wanted),
        default=target is None,
        last=last,
        with_seeds=with_seeds,
    )


def _columns(spent: Sequence[CostToTarget], finals: Sequence[Score], counted: bool) -> list[Column]:
    """The columns; all sort first by the share of seeds that reached the target."""
    reached = [(-one.reached / one.count,) for one in spent]
    costs = {
        "Rounds": ([one.rounds for one in spent], _rounds),
        "Up": ([one.uplink_megabytes for one in spent], _megabytes),
        _DECIDES: ([one.megabytes for one in spent], _megabytes),
        "Simulated time": ([one.simulated_s for one in spent], _seconds),
    }
    columns = [
        Column(
            head,
            [words(score, counted) for score in scores],
            [(*share, score.mean) for share, score in zip(reached, scores, strict=True)],
        )
        for head, (scores, words) in costs.items()
    ]
    last = [percent(score, counted) for score in finals]
    return [
        Column("Reached", [_reached(one) for one in spent], reached),
        *columns,
        Column("Final, smoothed", last, [(-rank_value(score),) for score in finals]),
    ]


def _cost_order(one: CostToTarget) -> tuple[float, float, float]:
    """Sorts by the share of seeds that reached the target, then by megabytes and rounds, or by the best accuracy."""
    if one.reached:
        return (-one.reached / one.count, one.megabytes.mean, one.rounds.mean)
    return (0.0, -one.best if not math.isnan(one.best) else math.inf, 0.0)


def _reached(one: CostToTarget) -> str:
    if not one.reached:
        return wording.NONE if math.isnan(one.best) else f"not reached (best {wording.percent(one.best)})"
    if one.count == 1:
        return "yes"
    return f"{one.reached} of {one.count} seeds"


def _rounds(score: Score, counted: bool) -> str:
    whole = score.count and score.mean == round(score.mean) and score.deviation == 0
    return score.words(decimals=0 if whole else 1, counted=counted)


def _megabytes(score: Score, counted: bool) -> str:
    return score.words(decimals=wording.megabyte_decimals(score.mean), unit=" MB", counted=counted)


def _seconds(score: Score, counted: bool) -> str:
    return score.words(unit=" s", counted=counted)

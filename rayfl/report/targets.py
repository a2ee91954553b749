"""Rounds, bytes and simulated time to a target: a value of the metric that ranks the runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rayfl.metrics.facts import Facts
from rayfl.report import wording
from rayfl.report.groups import Group, Score, facts_of, has_seeds, over
from rayfl.report.numbers import spent, target_words
from rayfl.report.page_tables import Column, metric_column, sortable
from rayfl.report.series import series

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

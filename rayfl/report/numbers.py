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
from rayfl.report.consensus import consensus_distance
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


def _busiest(run: Run) -> float:
    """The megabytes that the client with the most sent and received in the whole run; NaN without clients."""
    bits = run.clients.group_by("client").aggregate([("uplink_bits", "sum"), ("downlink_bits", "sum")])
    each = bits["uplink_bits_sum"].to_numpy() + bits["downlink_bits_sum"].to_numpy()
    return float(each.max() / MEGABYTE_BITS) if len(each) else np.nan


COSTS: Mapping[str, tuple[str, str, Callable[[Run], float]]] = {
    "rounds": ("Rounds", "", lambda run: float(len(run.rounds))),
    "megabytes": ("Sent up and down", "MB", lambda run: float(cost(run).total_megabytes[-1:].sum())),
    "uplink_megabytes": ("Sent up", "MB", partial(_total, "uplink_bits", MEGABYTE_BITS)),
    "downlink_megabytes": ("Sent down", "MB", partial(_total, "downlink_bits", MEGABYTE_BITS)),
    "busiest_megabytes": ("Sent and received by the busiest client", "MB", _busiest),
    "consensus_distance": ("Distance of final models", "", consensus_distance),
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
    "": lambda evaluations, facts, last: float(evaluations.values[-last:].mean()),
    "best": lambda evaluations, facts, last: evaluations.best(facts)[0],
    "final": lambda evaluations, facts, last: evaluations.final,
    "mean": lambda evaluations, facts, last: float(evaluations.values.mean()),
    "sum": lambda evaluations, facts, last: float(evaluations.values.sum()),
}


def number(name: str, groups: Sequence[Group], metric: str | None = None, last: int = 3) -> Number:
    """The number that `name` stands for.

    A metric without ":best", ":final", ":mean" or ":sum" is the mean of its last `last` values, or of all of them if it
    is a cost per round ("comm/busiest_megabytes"). metric: the metric of a target whose name gives none. Raise
    RayflError if no run has the number.
    """
    if name in COSTS:
        title, unit, read = COSTS[name]
        return Number(name, Facts(title=title, unit=unit, higher_is_better=False), read)
    known = list(dict.fromkeys(recorded for group in groups for run in group.runs for recorded in metric_names(run)))
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
        cost_of = partial(spent, name=base, target=float(at[3]), facts=facts)
        number_facts = Facts(title=title, unit=unit, higher_is_better=False)
        return Number(name, number_facts, lambda run: np.nan if (costs := cost_of(run)) is None else costs[index])
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


def number_column(groups: Sequence[Group], shown: Number) -> Column:
    """A column of a number: means over seeds with their deviations, the best first."""
    scores = [over(map(shown.read, group.runs)) for group in groups]
    words = [in_words(score, shown.facts, has_seeds(groups)) for score in scores]
    return Column(shown.facts.title, words, [(-rank_value(score, shown.facts),) for score in scores])


def further_columns(groups: Sequence[Group], metric: str | None, options: ReportOptions) -> list[Column]:
    """The columns of `[report] values`; one that no run has yet is empty."""
    columns = []
    for name in options.values:
        try:
            columns.append(number_column(groups, number(name, groups, metric, options.last)))
        except RayflError:
            columns.append(Column(name, [wording.NONE] * len(groups)))
    return columns


def spent(run: Run, name: str, target: float, facts: Facts) -> tuple[float, ...] | None:
    """The costs (`_TO_TARGET`) of a run up to its first evaluation that reached the target; None if none did."""
    values = series(run, name)
    at = np.empty(0) if values is None else values.rounds[facts.sign * values.values >= facts.sign * target][:1]
    total = cost(run).at(at)
    done = np.searchsorted(run.rounds["round"].to_numpy(), at, side="right")
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
    measured = [evaluations for run in group.runs if (evaluations := series(run, name)) is not None]
    costs = [amounts for run in group.runs if (amounts := spent(run, name, target, facts)) is not None]
    best = facts.sign * float(
        np.fmax.reduce([facts.sign * evaluations.best(facts)[0] for evaluations in measured], initial=np.nan)
    )
    return CostToTarget(*(over(amounts[column] for amounts in costs) for column in range(len(_TO_TARGET))), best=best)


def targets(groups: Sequence[Group], name: str, target: float, last: int) -> dict[str, object]:
    """The table of costs, sorted by the share of seeds that reached the target, then by megabytes."""
    return sortable(
        groups,
        _columns(groups, name, target, last),
        _DECIDES,
        metric=wording.title(name, facts_of(groups, name)),
        target=target_words(target, facts_of(groups, name)),
        last=last,
        with_seeds=has_seeds(groups),
    )


def _columns(groups: Sequence[Group], name: str, target: float, last: int) -> list[Column]:
    """The columns; those of costs sort first by the share of seeds that reached the target."""
    spent = [cost_to_target(group, name, target) for group in groups]
    reached = [(-cost.rounds.count / len(group.runs),) for cost, group in zip(spent, groups, strict=True)]
    counted = has_seeds(groups)
    facts = facts_of(groups, name)
    columns = [Column("Reached", [_reached(*row, facts) for row in zip(spent, groups, strict=True)], reached)]
    for head, scores, decimals, unit in (
        ("Rounds", [costs.rounds for costs in spent], lambda score: int(score.deviation > 0 or score.mean % 1 > 0), ""),
        ("Up", [costs.uplink_megabytes for costs in spent], lambda score: wording.megabyte_decimals(score.mean), " MB"),
        (_DECIDES, [costs.megabytes for costs in spent], lambda score: wording.megabyte_decimals(score.mean), " MB"),
        ("Simulated time", [costs.simulated_s for costs in spent], lambda score: 1, " s"),
    ):
        by = [(*share, score.mean) for share, score in zip(reached, scores, strict=True)]
        words = [score.words(decimals=decimals(score), unit=unit, counted=counted) for score in scores]
        columns.append(Column(head, words, by))
    return [*columns, metric_column("Final, smoothed", groups, name, last)]


def _reached(cost: CostToTarget, group: Group, facts: Facts) -> str:
    if not cost.rounds.count:
        return wording.NONE if math.isnan(cost.best) else f"not reached (best {facts.words(cost.best)})"
    return "yes" if len(group.runs) == 1 else f"{cost.rounds.count} of {len(group.runs)} seeds"

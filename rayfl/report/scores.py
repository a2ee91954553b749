"""One number per run, and its mean and deviation over the seeds of a group."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rayfl.report import wording
from rayfl.report.series import Group, curve, is_accuracy, is_personal, metric_names, series
from rayfl.run_directory.record import Run

_PREFERRED = ("pooled/accuracy", "own/accuracy", "own_after_training/accuracy")
"""Accuracies after the exchange come before those after local training."""
_OWN = "own/accuracy"
"""The accuracy that ranks personal methods. The pooled test set evaluates only the server's model."""


@dataclass(frozen=True)
class Score:
    """Mean and sample standard deviation (0 for one value) of `count` values; NaN if there are none."""

    mean: float
    deviation: float
    count: int

    def words(self, scale: float = 1.0, decimals: int = 1, unit: str = "", counted: bool = True) -> str:
        """ "50.0 +- 2.8 % (2)": mean, deviation, count; one value has no deviation, and (1) only if `counted`."""
        if not self.count:
            return wording.NONE
        mean = f"{scale * self.mean:,.{decimals}f}"
        if self.count == 1:
            return f"{mean}{unit}{' (1)' * counted}"
        return f"{mean} {wording.PLUS_MINUS} {scale * self.deviation:,.{decimals}f}{unit} ({self.count})"


def over(values: Iterable[float]) -> Score:
    """The score of all values that are not NaN."""
    found = np.array([value for value in values if not np.isnan(value)])
    if not len(found):
        return Score(np.nan, 0.0, 0)
    return Score(float(found.mean()), float(found.std(ddof=1)) if len(found) > 1 else 0.0, len(found))


def percent(score: Score, counted: bool = True) -> str:
    """An accuracy's score: "50.0 +- 2.8 % (2)"."""
    return score.words(100, 1, " %", counted)


def last_mean(run: Run, name: str, last: int) -> float:
    """The mean of the run's last `last` evaluations of `name`, or of all if it has fewer; NaN without any."""
    found = series(run, name)
    return float(found.values[-last:].mean()) if found is not None else np.nan


def smoothed(group: Group, name: str, last: int) -> Score:
    """The mean of the last evaluations over the group's seeds: a run's final accuracy without most of its noise."""
    return over(last_mean(run, name, last) for run in group.runs)


def best_first(groups: Sequence[Group], name: str, last: int) -> list[Group]:
    """The groups by their smoothed final `name`, the largest first; equal groups are sorted by their labels."""
    # Rounded, because the last bits of a mean over seeds depend on their order.
    return sorted(groups, key=lambda group: (-round(rank_value(smoothed(group, name, last)), 9), group.label))


def rank_value(score: Score) -> float:
    """The mean, for sorting by the largest first; a group without a value comes last."""
    return score.mean if score.count else -np.inf


def accuracy_names(groups: Sequence[Group], metric: str | None = None) -> list[str]:
    """All accuracies; the first one ranks the runs.

    It is `metric` if that was recorded, else own/accuracy if the method of a run is personal and more than half of the
    groups have it. The others are sorted by the number of groups that have them, and then pooled before own.
    """
    counts: dict[str, int] = {}
    for group in groups:
        for name in metric_names(group.runs[0]):
            if is_accuracy(name) and curve(group, name) is not None:
                counts[name] = counts.get(name, 0) + 1
    rank = {name: place for place, name in enumerate(_PREFERRED)}
    personal = 2 * counts.get(_OWN, 0) > len(groups) and any(is_personal(group.runs[0]) for group in groups)
    first = metric if metric in counts else _OWN if personal else None
    return sorted(counts, key=lambda name: (name != first, -counts[name], rank.get(name, len(rank)), name))


def measured(group: Group) -> Group:
    """Drop runs without any evaluation; keep all of them if none has one."""
    return group._replace(runs=tuple(run for run in group.runs if run.metrics.num_rows) or group.runs)

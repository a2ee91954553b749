"""Runs that differ only in their seed, as one group: its label, its mean curve, and its scores; and which groups a
comparison shows: of those that differ only in a tuned setting, the best one."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from os.path import commonprefix
from typing import NamedTuple

import numpy as np

from rayfl.choices import plugins
from rayfl.experiment.identity import determining_settings, lies_in
from rayfl.experiment.report_options import ReportOptions
from rayfl.metrics.facts import Facts
from rayfl.report import wording
from rayfl.report.series import (
    Cost,
    cost,
    facts,
    is_personal,
    last_of_clients,
    ranking_names,
    run_label,
    series,
)
from rayfl.run_directory.record import Run

_DIGEST = "data.digest."
_FEW = 3
"""The most settings that a label names."""
_PREFERRED = ("pooled", "own", "own_after_training", "unseen")
"""Models after the exchange come before those after local training."""


class Group(NamedTuple):
    """Runs with the same `identity.determining_settings` and different seeds."""

    label: str
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> list[object]:
        """The seeds, as the experiments give them."""
        return [run.experiment.get("seed") for run in self.runs]

    @property
    def settings(self) -> dict[str, object]:
        """The settings that all runs of the group have, by dotted keys."""
        return determining_settings(self.runs[0].experiment)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group runs with the same `identity.determining_settings` and different seeds; labels are unique."""
    together: dict[object, list[Run]] = {}
    counts = Counter[str]()
    for run in runs:
        settings = repr(sorted(determining_settings(run.experiment).items()))
        seed = f"{settings} {run.experiment.get('seed')}"
        # Two runs of one seed are two runs, not two draws: the second starts a group of its own.
        together.setdefault((settings, counts[seed]), []).append(run)
        counts[seed] += 1
    groups = [Group(_shared_name([*map(run_label, members)]), tuple(members)) for members in together.values()]
    labels: list[str] = []
    for group in groups:
        namesakes = [other.settings for other in groups if other.label == group.label]
        label = group.label + (_difference(group, namesakes) if len(namesakes) > 1 else "")
        if label in labels:
            label = f"{group.label} ({group.runs[0].directory.name})"
        while label in labels:
            label += "'"
        labels.append(label)
    return [group._replace(label=label) for label, group in zip(labels, groups, strict=True)]


def has_seeds(groups: Sequence[Group]) -> bool:
    """Whether a group has several seeds."""
    return any(len(group.runs) > 1 for group in groups)


def _difference(group: Group, namesakes: Sequence[Mapping[str, object]]) -> str:
    """The settings that tell a group from others of the same name: " (convnet2, per_round=10)".

    "" if they differ in no setting that all have, or in more than three.
    """
    shared = [
        (key, value)
        for key, value in group.settings.items()
        if all(key in other for other in namesakes) and any(other[key] != value for other in namesakes)
    ]
    # The last part of a dotted key; of a digest the name of the file.
    words = [
        plugins.short(str(value))
        if key.endswith(".name")
        else f"{key.removeprefix(_DIGEST) if key.startswith(_DIGEST) else key.rpartition('.')[2]}={value}"
        for key, value in shared
    ]
    return f" ({', '.join(words)})" if 0 < len(words) <= _FEW else ""


def _shared_name(names: Sequence[str]) -> str:
    """ "fedpse" for "fedpse-seed1" and "fedpse-seed2"."""
    shared = commonprefix(names).rstrip("0123456789-_ ./=")  # noqa: RUF071 (the common letters are wanted)
    return (shared.removesuffix("seed").rstrip("-_ ./=") if len(set(names)) > 1 else "") or names[0]


class Curve(NamedTuple):
    """Mean and example standard deviation over a group's seeds (0 for one seed), with the mean cost by each round."""

    cost: Cost
    mean: np.ndarray
    deviation: np.ndarray


def curve(group: Group, name: str) -> Curve | None:
    """The metric over the rounds that all runs of the group have; None if a run lacks it or they share no round."""
    recorded = [evaluations for run in group.runs if (evaluations := series(run, name)) is not None]
    if len(recorded) < len(group.runs):
        return None
    rounds = reduce(np.intersect1d, [evaluations.rounds for evaluations in recorded])
    values = np.stack([evaluations.values[np.isin(evaluations.rounds, rounds)] for evaluations in recorded])
    deviation = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(len(rounds))
    spent = np.mean([cost(run).at(rounds)[1:] for run in group.runs], axis=0)
    return Curve(Cost(rounds, *spent), values.mean(axis=0), deviation) if len(rounds) else None


def last_over_seeds(group: Group, name: str) -> np.ndarray:
    """The clients' values at the last evaluation of each run of the group; empty if no client has one."""
    return np.concatenate([last_of_clients(run, name)[1] for run in group.runs])


@dataclass(frozen=True)
class Score:
    """Mean and example standard deviation (0 for one value) of `count` values; NaN if there are none."""

    mean: float
    deviation: float
    count: int

    def words(self, scale: float = 1.0, decimals: int = 1, unit: str = "", counted: bool = True) -> str:
        """ "50.0 +- 2.8 % (2)": mean, deviation, count; one value has no deviation, and (1) only if `counted`."""
        mean, deviation = (f"{scale * value:,.{decimals}f}" for value in (self.mean, self.deviation))
        beside = f" {wording.PLUS_MINUS} {deviation}" * (self.count > 1)
        number = f" ({self.count})" * (counted or self.count > 1)
        return f"{mean}{beside}{unit}{number}" if self.count else wording.NONE


def over(values: Iterable[float]) -> Score:
    """The score of all values that are not NaN."""
    defined = [value for value in values if not np.isnan(value)]
    deviation = float(np.std(defined, ddof=1)) if len(defined) > 1 else 0.0
    return Score(float(np.mean(defined)) if defined else np.nan, deviation, len(defined))


def in_words(score: Score, facts: Facts, counted: bool = True, decimals: int = 1) -> str:
    """The score of a metric: "50.0 +- 2.8 % (2)", "0.4312"; four digits where it is not a share in percent."""
    if facts.is_percent:
        return score.words(100, decimals, " %", counted)
    digits = 3 - math.floor(math.log10(abs(score.mean))) if score.mean and math.isfinite(score.mean) else 3
    return score.words(1.0, min(max(digits, 0), 9), f" {facts.unit}".rstrip(), counted)


def facts_of(groups: Sequence[Group], name: str) -> Facts:
    """The facts of a value, as the first run of the groups has them that knows it."""
    every = (facts(run, name) for group in groups for run in group.runs)
    return next((known for known in every if known.title != name), Facts(title=name))


def last_mean(run: Run, name: str, last: int) -> float:
    """The mean of the run's last `last` evaluations of `name`, or of all if it has fewer; NaN without any."""
    evaluations = series(run, name)
    return float(evaluations.values[-last:].mean()) if evaluations is not None else np.nan


def smoothed(group: Group, name: str, last: int) -> Score:
    """The mean of the last evaluations over the group's seeds: a run's final value without most of its noise."""
    return over(last_mean(run, name, last) for run in group.runs)


def rank_value(score: Score, facts: Facts) -> float:
    """The mean, for sorting by the largest first: the better, the larger. A group without a value comes last."""
    # Rounded, because the last bits of a mean over seeds depend on their order.
    return facts.sign * round(score.mean, 9) if score.count else -np.inf


def ranked_names(groups: Sequence[Group], metric: str | None = None) -> list[str]:
    """All values by which runs are compared; the first one ranks them.

    It is `metric` if that was recorded and has a better direction, else the first metric of the clients' own models if
    the method of a run is personal and more than half of the groups have it. The others are sorted by the number of
    groups that have them, then by metric, and then pooled before own.
    """
    ranked = [ranking_names(group.runs[0]) for group in groups]
    counts = Counter(
        name
        for group, names in zip(groups, ranked, strict=True)
        for name in [*names, *([metric] if metric is not None and metric not in names else [])]
        if curve(group, name) is not None and facts(group.runs[0], name).higher_is_better is not None
    )
    whats = [*dict.fromkeys(name.partition("/")[2] or name for names in ranked for name in names)]
    # The pooled test set evaluates only the server's model, which personal methods do not aim at.
    own_metric = f"own/{whats[0]}" if whats else ""
    personal = 2 * counts[own_metric] > len(groups) and any(is_personal(group.runs[0]) for group in groups)
    first = metric if metric in counts else own_metric if personal else None

    def key(name: str) -> tuple[bool, int, int, int, str]:
        model, _, what = name.partition("/")
        place, preference = [*whats, what or name].index(what or name), [*_PREFERRED, model].index(model)
        return name != first, -counts[name], place, preference, name

    return sorted(counts, key=key)


class TunedGroups(NamedTuple):
    """`grid`: the groups that differ only in the tuned settings, ordered by value. `winner`: the best of them."""

    winner: Group
    grid: tuple[Group, ...]


def compared(groups: Sequence[Group], options: ReportOptions) -> tuple[list[Group], list[str], list[TunedGroups]]:
    """The groups that a comparison shows, in their order; the metrics, of which the first one ranks them; and the
    choices by which tuned groups were left out.

    Seeds without any evaluation are left out, unless their group has no other. Groups that `options.order` names come
    first, in its order.
    """
    groups = [
        group._replace(runs=tuple(run for run in group.runs if run.metrics.num_rows) or group.runs)
        for group in sorted(groups, key=lambda group: [*options.order, group.label].index(group.label))
    ]
    names = ranked_names(groups, options.metric)
    choices = choose(groups, options.best_over, names[0], options.last) if names and options.best_over else []
    return [choice.winner for choice in choices] or groups, names, choices


def best_first(groups: Sequence[Group], name: str | None, last: int) -> list[Group]:
    """The groups by the mean of the last evaluations of `name`; equal groups by their labels."""
    if name is None:
        return [*groups]
    facts = facts_of(groups, name)
    return sorted(groups, key=lambda group: (-rank_value(smoothed(group, name, last), facts), group.label))


def choose(groups: Sequence[Group], tuned: Sequence[str], name: str, last: int) -> list[TunedGroups]:
    """Of the groups that agree in all settings but `tuned`, choose the best mean of the last evaluations of `name`.

    If groups tie or none has a value, the smallest tuned value wins, or else the first group.
    """
    families: dict[str, list[Group]] = {}
    for group in groups:
        rest = [item for item in group.settings.items() if not any(lies_in(item[0], key) for key in tuned)]
        families.setdefault(repr(sorted(rest)), []).append(group)
    facts = facts_of(groups, name)

    def tuned_values(group: Group) -> list[float]:
        """Numbers, to sort by size; other values keep their order."""
        return [value if isinstance(value := setting(group.settings, key), int | float) else 0 for key in tuned]

    return [
        TunedGroups(max(grid, key=lambda group: rank_value(smoothed(group, name, last), facts)), tuple(grid))
        for grid in (sorted(family, key=tuned_values) for family in families.values())
    ]


def setting(settings: Mapping[str, object], name: str) -> object:
    """The value of one setting of those by dotted key; for a table, its settings as text."""
    inside = {key: value for key, value in settings.items() if lies_in(key, name)}
    if set(inside) == {name}:
        return inside[name]
    words = [f"{key.removeprefix(name + '.')} {wording.value(value)}" for key, value in inside.items()]
    return ", ".join(words) or wording.NONE

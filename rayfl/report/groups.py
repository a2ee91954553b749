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
    ranking_names,
    run_label,
    series,
    spread,
)
from rayfl.run_directory.record import Run

_DIGEST = "data.digest."
_FEW = 3
"""The most settings that a label names."""
_PREFERRED = ("pooled", "own", "own_after_training", "unseen")
"""Models after the exchange come before those after local training."""
_OWN = "own"
"""Where personal methods are ranked. The pooled test set evaluates only the server's model."""


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
    together: dict[str, list[Run]] = {}
    for run in runs:
        # Two runs of one seed are two runs, not two draws: the second starts a group of its own.
        key = repr(sorted(determining_settings(run.experiment).items()))
        while any(other.experiment.get("seed") == run.experiment.get("seed") for other in together.get(key, ())):
            key += "'"
        together.setdefault(key, []).append(run)
    groups = [Group(_shared_name([run_label(run) for run in members]), tuple(members)) for members in together.values()]
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
    settings = group.settings
    shared = [key for key in settings if all(key in other for other in namesakes)]
    keys = [key for key in shared if any(other[key] != settings[key] for other in namesakes)]
    # The last part of a dotted key; of a digest the name of the file.
    short = {key: key.removeprefix(_DIGEST) if key.startswith(_DIGEST) else key.rpartition(".")[2] for key in keys}
    words = [
        plugins.short(str(settings[key])) if key.endswith(".name") else f"{short[key]}={settings[key]}" for key in keys
    ]
    return f" ({', '.join(words)})" if 0 < len(keys) <= _FEW else ""


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
    rounds = (
        reduce(np.intersect1d, [evaluations.rounds for evaluations in recorded])
        if len(recorded) == len(group.runs)
        else np.empty(0)
    )
    if not len(rounds):
        return None
    values = np.stack([evaluations.values[np.isin(evaluations.rounds, rounds)] for evaluations in recorded])
    deviation = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(len(rounds))
    spent = np.mean([cost(run).at(rounds)[1:] for run in group.runs], axis=0)
    return Curve(Cost(rounds, *spent), values.mean(axis=0), deviation)


def last_of_clients(group: Group, name: str) -> np.ndarray:
    """The clients' values at the last evaluation of each run of the group; empty if no client has one."""
    by_run = [spread(run, name) for run in group.runs]
    return np.concatenate([np.empty(0), *(clients.last for clients in by_run if clients is not None)])


@dataclass(frozen=True)
class Score:
    """Mean and example standard deviation (0 for one value) of `count` values; NaN if there are none."""

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
    defined = np.array([value for value in values if not np.isnan(value)])
    mean = float(defined.mean()) if len(defined) else np.nan
    return Score(mean, float(defined.std(ddof=1)) if len(defined) > 1 else 0.0, len(defined))


def in_words(score: Score, facts: Facts, counted: bool = True, decimals: int = 1) -> str:
    """The score of a metric: "50.0 +- 2.8 % (2)", "0.4312"; four digits where it is not a share in percent."""
    if facts.is_percent:
        return score.words(100, decimals, " %", counted)
    size = abs(score.mean) if score.count and math.isfinite(score.mean) else 0.0
    digits = 3 - math.floor(math.log10(size)) if size else 3
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
    whats = list(dict.fromkeys(_what(name) for names in ranked for name in names))
    own_metric = f"{_OWN}/{whats[0]}" if whats else ""
    personal = 2 * counts[own_metric] > len(groups) and any(is_personal(group.runs[0]) for group in groups)
    first = metric if metric in counts else own_metric if personal else None
    order = {what: number for number, what in enumerate(whats)}
    rank = {model: index for index, model in enumerate(_PREFERRED)}

    def key(name: str) -> tuple[bool, int, int, int, str]:
        preference = rank.get(name.partition("/")[0], len(rank))
        return name != first, -counts[name], order.get(_what(name), len(order)), preference, name

    return sorted(counts, key=key)


def _what(name: str) -> str:
    return name.partition("/")[2] or name


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
    order = {label: position for position, label in enumerate(options.order)}
    groups = sorted(groups, key=lambda group: order.get(group.label, len(order)))
    measured = [tuple(run for run in group.runs if run.metrics.num_rows) for group in groups]
    groups = [group._replace(runs=runs or group.runs) for group, runs in zip(groups, measured, strict=True)]
    names = ranked_names(groups, options.metric)
    choices = choose(groups, options.best_over, names[0], options.last) if names and options.best_over else []
    return [choice.winner for choice in choices] or groups, names, choices


def best_first(groups: Sequence[Group], name: str | None, last: int) -> list[Group]:
    """The groups by the mean of the last evaluations of `name`; equal groups by their labels."""
    if name is None:
        return list(groups)
    facts = facts_of(groups, name)
    return sorted(groups, key=lambda group: (-rank_value(smoothed(group, name, last), facts), group.label))


def choose(groups: Sequence[Group], tuned: Sequence[str], name: str, last: int) -> list[TunedGroups]:
    """Of the groups that agree in all settings but `tuned`, choose the best mean of the last evaluations of `name`.

    If groups tie or none has a value, the smallest tuned value wins, or else the first group.
    """
    families: dict[str, list[Group]] = {}
    for group in groups:
        rest = {
            key: value
            for key, value in group.settings.items()
            if not any(lies_in(key, tuned_key) for tuned_key in tuned)
        }
        families.setdefault(repr(sorted(rest.items())), []).append(group)
    facts = facts_of(groups, name)

    def tuned_values(group: Group) -> list[float]:
        """Numbers, to sort by size; other values keep their order."""
        values = (setting(group.settings, key) for key in tuned)
        return [value if isinstance(value, int | float) else 0 for value in values]

    grids = (tuple(sorted(family, key=tuned_values)) for family in families.values())
    return [
        TunedGroups(max(grid, key=lambda group: rank_value(smoothed(group, name, last), facts)), grid) for grid in grids
    ]


def setting(settings: Mapping[str, object], name: str) -> object:
    """The value of one setting of those by dotted key; for a table, its settings as text."""
    inside = {key: value for key, value in settings.items() if lies_in(key, name)}
    if set(inside) == {name}:
        return inside[name]
    words = [f"{key.removeprefix(name + '.')} {wording.value(value)}" for key, value in inside.items()]
    return ", ".join(words) or wording.NONE


def tuning(choices: Sequence[TunedGroups], tuned: Sequence[str], name: str, last: int, styles: Sequence[Group]) -> dict:
    """Return the table of the values that were tried and of the winners; rows begin with (label, style).

    `styles`: all groups as the page lists them; the position decides the colour.
    """
    position = {id(group): number for number, group in enumerate(styles)}
    facts = facts_of(styles, name)
    rows = []
    for choice in sorted(choices, key=lambda choice: position[id(choice.winner)]):
        tried = [
            f"{', '.join(wording.value(setting(group.settings, key)) for key in tuned)}: "
            f"{in_words(smoothed(group, name, last), facts)}{' *' * (group is choice.winner)}"
            for group in choice.grid
        ]
        cells = [*(_cell(choice, key) for key in tuned), "\n".join(tried)]
        rows.append(((choice.winner.label, position[id(choice.winner)]), cells))
    return {
        "head": ["Run", *(f"Best {key}" for key in tuned), "All that were tried (* the best)"],
        "rows": rows,
        "settings": tuned,
        "metric": wording.title(name, facts),
        "last": last,
    }


def _cell(choice: TunedGroups, name: str) -> str:
    """The winning value, and whether the best value may lie beyond the values that were tried."""
    value = setting(choice.winner.settings, name)
    tried = [setting(group.settings, name) for group in choice.grid]
    numbers = {value for value in tried if isinstance(value, int | float) and not isinstance(value, bool)}
    if len(numbers) < 2 or value not in (min(numbers), max(numbers)):
        return wording.value(value)
    return f"{wording.value(value)}, the {'smallest' if value == min(numbers) else 'largest'} tried"

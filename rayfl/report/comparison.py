"""Runs side by side as plain text: what a terminal shows of the page that compares them. Nothing here draws."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rayfl.errors import RayflError, nearest
from rayfl.experiment.identity import determining_settings, require_settings
from rayfl.experiment.report_options import ReportOptions
from rayfl.report import wording
from rayfl.report.scores import accuracy_names, best_first, final, measured, percent, smoothed
from rayfl.report.series import MEGABYTE_BITS, Group, groups
from rayfl.run_directory.record import Run


@dataclass(frozen=True)
class TextTable:
    """A table: the headings, and the cells of each row, the first of which says what the row is about."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Comparison:
    """Runs with the best first, by the accuracy `metric` (None: nothing was evaluated), and the settings in which they
    differ. Runs that differ only in their seed are one row."""

    metric: str | None
    results: TextTable
    differences: TextTable


def require(runs: Sequence[Run], options: ReportOptions) -> None:
    """RayflError if `options` names a setting or an accuracy that no run has."""
    require_settings([run.experiment for run in runs], options.best_over)
    known = accuracy_names(groups(runs))
    if options.metric is not None and options.metric not in known:
        raise RayflError(f"no run has recorded the accuracy {options.metric!r}: {nearest(options.metric, known)}")


def comparison(runs: Sequence[Run], options: ReportOptions) -> Comparison:
    """The comparison of runs by the `[report]` options, as their page has it."""
    found = [measured(group) for group in groups(runs)]
    names = accuracy_names(found, options.metric)
    metric = names[0] if names else None
    if metric is not None:
        if options.best_over:
            # What chooses lies beside what draws, which takes a second to load.
            from rayfl.report.tuning import choose

            found = [choice.winner for choice in choose(found, options.best_over, metric, options.last)]
        found = best_first(found, metric, options.last)
    columns = [*_results(found, metric, options), *_spent(found)]
    labels = [group.label for group in found]
    return Comparison(metric, _table("run", labels, columns), _differences(found))


def _table(head: str, labels: Sequence[str], columns: Sequence[tuple[str, Sequence[str]]]) -> TextTable:
    rows = [[label, *(cells[row] for _, cells in columns)] for row, label in enumerate(labels)]
    return TextTable([head, *(head for head, _ in columns)], rows)


def _results(found: Sequence[Group], metric: str | None, options: ReportOptions) -> list[tuple[str, list[str]]]:
    """Seeds where there are several, rounds, accuracies, and what a target took."""
    several = any(len(group.runs) > 1 for group in found)
    columns = [("seeds", [", ".join(str(seed) for seed in group.seeds) for group in found])] if several else []
    rounds = [" / ".join(dict.fromkeys(str(len(run.rounds)) for run in group.runs)) for group in found]
    columns.append(("rounds", rounds))
    if metric is None:
        return columns
    if options.last > 1:
        means = [percent(smoothed(group, metric, options.last), several) for group in found]
        columns.append((f"mean of last {options.last}", means))
    columns.append(("final", [percent(final(group, metric), several) for group in found]))
    if options.target is not None:
        from rayfl.report.targets import cost_to_target

        costs = [cost_to_target(group, metric, options.target) for group in found]
        target = wording.short_percent(options.target)
        columns.append((f"rounds to {target}", [cost.rounds.words(decimals=0, counted=several) for cost in costs]))
        columns.append((f"MB to {target}", [cost.megabytes.words(decimals=2, counted=several) for cost in costs]))
    return columns


def _spent(found: Sequence[Group]) -> list[tuple[str, list[str]]]:
    """Bytes and seconds of whole runs, means over seeds."""
    up, down, simulated = (
        [float(np.mean([run.rounds[column].to_numpy().sum() for run in group.runs])) for group in found]
        for column in ("uplink_bits", "downlink_bits", "simulated_s")
    )
    return [
        ("up", [wording.megabytes(bits / MEGABYTE_BITS) for bits in up]),
        ("down", [wording.megabytes(bits / MEGABYTE_BITS) for bits in down]),
        ("simulated", [wording.seconds(amount) for amount in simulated]),
    ]


def _differences(found: Sequence[Group]) -> TextTable:
    """The settings in which groups differ, a row a setting."""
    flat = [determining_settings(group.runs[0].experiment) for group in found]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    rows = [[key, *(wording.value(one[key]) if key in one else wording.NONE for one in flat)] for key in keys]
    return TextTable(["setting", *(group.label for group in found)], [row for row in rows if len(set(row[1:])) > 1])

"""Runs side by side as plain text: the tables that a terminal shows. Nothing here draws."""

from collections.abc import Sequence
from typing import NamedTuple

from rayfl.errors import RayflError, did_you_mean
from rayfl.experiment.identity import require_settings
from rayfl.experiment.report_options import ReportOptions, require_target
from rayfl.report.fairness import fairness_tables
from rayfl.report.groups import Group, facts_of, groups, has_seeds, ranked_names
from rayfl.report.page_tables import Column, cost_columns, differing, metric_column, run_columns, work_columns
from rayfl.report.targets import cost_to_target, target_words
from rayfl.report.tuning import compared
from rayfl.run_directory.record import Run


class TextTable(NamedTuple):
    """A table: the headings, and the cells of each row, of which the first names the row."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


class Comparison(NamedTuple):
    """Runs with the best first, by `metric` (None: nothing was evaluated), the settings in which they differ, and how
    evenly the metric lies over clients (that of their own data, if it has no clients). Runs that differ only in their
    seed are one row."""

    metric: str | None
    results: TextTable
    differences: TextTable
    fairness: Sequence[tuple[str, TextTable]]


def require(runs: Sequence[Run], options: ReportOptions) -> None:
    """Raise RayflError if `options` names a setting or a metric that no run has, or a target that it cannot reach."""
    require_settings([run.experiment for run in runs], options.best_over)
    found = groups(runs)
    known = ranked_names(found, options.metric)
    if options.metric is not None and options.metric not in known:
        raise RayflError(f"no run has recorded the metric {options.metric!r}: {did_you_mean(options.metric, known)}")
    if options.target is not None and known:
        require_target(options.target, known[0], facts_of(found, known[0]))


def comparison(runs: Sequence[Run], options: ReportOptions) -> Comparison:
    """The comparison of runs by the `[report]` options, with the runs of its page in the same order."""
    found, names, _ = compared(groups(runs), options)
    metric = names[0] if names else None
    columns = [
        *run_columns(found),
        *work_columns(found),
        *_values(found, metric, options),
        *cost_columns(found)[:3],
    ]
    labels = [group.label for group in found]
    rows = [[label, *(column.cells[row] for column in columns)] for row, label in enumerate(labels)]
    results = TextTable(["Run", *(column.head for column in columns)], rows)
    settings = differing([group.settings for group in found])
    differences = TextTable(["Setting", *labels], [[name, *cells] for name, cells in settings])
    first = [] if metric is None else [metric, f"own/{metric.partition('/')[2]}"]
    return Comparison(metric, results, differences, over_clients(found, first, others=False)[:1])


def over_clients(found: Sequence[Group], first: Sequence[str] = (), others: bool = True) -> list[tuple[str, TextTable]]:
    """The tables of `fairness.fairness_tables`, with titles."""
    return [
        (
            f"over clients, {one['title']}".rstrip(", "),
            TextTable(one["head"], [[getattr(row, "label", row), *cells] for row, cells in one["rows"]]),
        )
        for one in fairness_tables(found, first, others)
    ]


def _values(found: Sequence[Group], metric: str | None, options: ReportOptions) -> list[Column]:
    """The metric's last values, and the costs of a target."""
    if metric is None:
        return []
    unseen = f"unseen/{metric.partition('/')[2]}"
    shown = [(f"Mean of last {options.last}", metric, options.last)] * (options.last > 1) + [("Final", metric, 1)]
    shown += [("Unseen", unseen, 1)] * (unseen != metric and unseen in ranked_names(found))
    columns = [metric_column(head, found, name, last) for head, name, last in shown]
    if options.target is not None:
        costs = [cost_to_target(group, metric, options.target) for group in found]
        target, counted = target_words(options.target, facts_of(found, metric)), has_seeds(found)
        columns += [
            Column(f"Rounds to {target}", [cost.rounds.words(decimals=0, counted=counted) for cost in costs]),
            Column(f"MB to {target}", [cost.megabytes.words(decimals=2, counted=counted) for cost in costs]),
        ]
    return columns

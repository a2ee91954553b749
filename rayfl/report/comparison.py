"""Runs side by side as plain text: the tables that a terminal shows. Nothing here draws."""

from collections.abc import Sequence
from typing import NamedTuple

from rayfl.errors import RayflError, did_you_mean
from rayfl.experiment.identity import require_settings
from rayfl.experiment.report_options import ReportOptions, require_clients, require_targets
from rayfl.report import wording
from rayfl.report.groups import Group, best_first, compared, facts_of, group_runs, has_seeds, ranked_names
from rayfl.report.numbers import (
    SPENT,
    WORKED,
    cost_columns,
    costs_to_target,
    further_columns,
    number,
    target_words,
)
from rayfl.report.page_tables import Column, differing, fairness_tables, metric_column, run_columns
from rayfl.run_directory.record import Run
from rayfl.settings import dotted

_MOST_DIFFERENCES = 12
"""The most differing settings that a terminal shows."""
_MOST_RUNS = 6
"""The most runs whose settings fit side by side into a terminal."""


class TextTable(NamedTuple):
    """A table: the headings, and the cells of each row, of which the first names the row; `note`: what it shows."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def require(runs: Sequence[Run], options: ReportOptions) -> None:
    """Raise RayflError if `options` names a setting or a metric that no run has, or a target that it cannot reach."""
    require_settings([run.experiment for run in runs], options.best_over)
    if options.mask_clients:
        if len(runs) > 1:
            raise RayflError("mask_clients does nothing for several runs: masks are drawn on the page of one run")
        require_clients(options.mask_clients, int(str(dotted(runs[0].experiment).get("clients.count", 0))))
    groups = group_runs(runs)
    known = ranked_names(groups, options.metric)
    if options.metric is not None and options.metric not in known:
        raise RayflError(f"no run has recorded the metric {options.metric!r}: {did_you_mean(options.metric, known)}")
    if known:
        require_targets(options.targets, known[0], facts_of(groups, known[0]))
    for name in options.values:
        number(name, groups, known[0] if known else None)


def comparison(runs: Sequence[Run], options: ReportOptions) -> list[tuple[str, TextTable]]:
    """The comparison of runs by the `[report]` options: tables with their titles.

    The runs, the best first, as on their page; how much the metric differs between clients (if the metric is not one of
    single clients: the same metric on clients' own data); the methods' ranks over data sets, if several were swept; for
    a few runs, the first settings in which they differ. Runs that differ only in their seed are one row.
    """
    # A run loads this file, and pandas only for a comparison.
    from rayfl.report.pivot import tables_or_problems

    every = group_runs(runs)
    shown, names, _ = compared(every, options)
    metric = names[0] if names else None
    groups = best_first(shown, metric, options.last)
    columns = [
        *run_columns(groups),
        *cost_columns(groups, WORKED),
        *_values(groups, metric, options),
        *cost_columns(groups, SPENT)[:3],
        *further_columns(groups, metric, options),
    ]
    labels = [group.label for group in groups]
    rows = [[label, *(column.cells[row] for column in columns)] for row, label in enumerate(labels)]
    title = wording.counted(len(runs), "run") + f" by {metric}" * bool(metric) + ", best first" * (len(rows) > 1)
    tables = [
        (title, TextTable(["Run", *(column.head for column in columns)], rows)),
        *over_clients(groups, [] if metric is None else [metric, f"own/{metric.partition('/')[2]}"], others=False)[:1],
        *(
            (
                f"ranks over data sets: {ranks.title}",
                TextTable([*ranks.frame], [[name, *cells] for name, cells in ranks.rows], ranks.note),
            )
            for table in tables_or_problems(every, options)[0]
            for ranks in table.ranks
        ),
    ]
    settings = [[name, *cells] for name, cells in differing([group.settings for group in groups])]
    if settings and len(labels) <= _MOST_RUNS:
        more = len(settings) - _MOST_DIFFERENCES
        title = "what differs" + f" ({more} more settings do)" * (more > 0)
        tables.append((title, TextTable(["Setting", *labels], settings[:_MOST_DIFFERENCES])))
    return tables


def over_clients(
    groups: Sequence[Group], first: Sequence[str] = (), others: bool = True
) -> list[tuple[str, TextTable]]:
    """The tables of `page_tables.fairness_tables`, with titles."""
    return [
        (
            f"over clients, {described['title']}".rstrip(", "),
            TextTable(
                described["head"],
                [[row if isinstance(row, str) else row[0], *cells] for row, cells in described["rows"]],
            ),
        )
        for described in fairness_tables(groups, first, others)
    ]


def _values(groups: Sequence[Group], metric: str | None, options: ReportOptions) -> list[Column]:
    """The metric's last values, and the costs of a target."""
    if metric is None:
        return []
    unseen = f"unseen/{metric.partition('/')[2]}"
    shown = [(f"Mean of last {options.last}", metric, options.last)] * (options.last > 1) + [("Final", metric, 1)]
    shown += [("Unseen", unseen, 1)] * (unseen != metric and unseen in ranked_names(groups))
    columns = [metric_column(head, groups, name, last) for head, name, last in shown]
    for target in options.targets:
        costs = costs_to_target(groups, metric, target)
        to = target_words(target, facts_of(groups, metric))
        for head, name, decimals in (("Rounds", "rounds", 0), ("MB", "megabytes", 2)):
            words = [score.words(decimals=decimals, counted=has_seeds(groups)) for score in costs[name]]
            columns.append(Column(f"{head} to {to}", words))
    return columns

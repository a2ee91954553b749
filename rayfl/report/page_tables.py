"""The tables of a page: runs with their metrics and costs, how much metrics differ between clients, what became of
clients, settings, and origins."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc

from rayfl.choices import plugins
from rayfl.experiment.identity import NOT_DETERMINING
from rayfl.metrics.facts import PLACES
from rayfl.metrics.fairness import fairness
from rayfl.report import wording
from rayfl.report.groups import Group, facts_of, has_seeds, in_words, over, rank_value, smoothed
from rayfl.report.series import facts, method_of, metric_names, run_label
from rayfl.run_directory.description import ORIGIN, read_origin
from rayfl.run_directory.record import Run
from rayfl.settings import dotted
from rayfl.untyped import Anything

_FEW = 4
"""A comparison of settings has a column per run up to this number of runs, else a row per run."""
_MOST_ORIGINS = 100
_STATUSES = {
    "delivered": "its update arrived",
    "silent": "it had nothing to send",
    "not_selected": "it trained for itself, without an upload",
    "not_asked": "the server asked it for nothing",
    "dropped_before_download": "it vanished before anything was sent",
    "dropped_after_download": "it vanished with the model, before it had trained",
    "dropped_after_training": "it vanished after it had trained",
    "upload_lost": "its update was sent and never arrived",
    "late": "it had not finished by the deadline",
    "surplus": "enough other clients were faster",
    "stale": "its message was too many updates old",
    "at_work": "it was training all the time",
}
"""The meaning of each status of a client, in the order in which a page shows them."""

_OVER_CLIENTS = {
    "mean": "Mean",
    "deviation": "Deviation",
    "worst_tenth": "Worst 10 %",
    "worst": "Worst",
    "best": "Best",
    "difference": "Best - worst",
    "jain": "Jain's index",
    "left_out": "Left out",
}
Spreads = Sequence[Mapping[str, Mapping[str, float]]]
"""`fairness_of` of each run of a group."""
MOST_PARTS = 60
"""The most parts of metrics (recall/3) that a page lists; the records have all."""


class Column(NamedTuple):
    """A column: its heading, the text of each row, and the numbers that sort the rows (None: it is not sortable).

    Rows are sorted by their first number, smallest first and NaN last, then by the next one.
    """

    head: str
    cells: Sequence[str]
    by: Sequence[tuple[float, ...]] | None = None


def sortable(groups: Sequence[Group], columns: Sequence[Column], chosen: str, **more: object) -> dict[str, object]:
    """A table with a row per group that a reader can sort, in the order of the column with the heading `chosen`.

    A row is ((label, style), cells, places): the number `style` decides its colour and dash on the page; places
    [num_columns] are the row's place in the order of each column. Rows that tie
    keep the order of `groups`.
    """
    orders = [_places(column.by, len(groups)) for column in columns]
    rows = [
        ((group.label, row), [column.cells[row] for column in columns], [order[row] for order in orders])
        for row, group in enumerate(groups)
    ]
    heads = [(column.head, column.by is not None, column.head == chosen) for column in columns]
    rows.sort(key=lambda row: [order for order, (_, _, is_chosen) in zip(row[2], heads, strict=True) if is_chosen])
    return {"heads": heads, "rows": rows, **more}


def _places(by: Sequence[tuple[float, ...]] | None, count: int) -> list[int]:
    if by is None:
        return list(range(count))
    order = sorted(range(count), key=lambda row: [(math.isnan(value), value) for value in by[row]])
    return sorted(range(count), key=order.__getitem__)


def run_columns(groups: Sequence[Group]) -> list[Column]:
    """The seeds, if a group has several, and the rounds."""
    seeds = Column("Seeds", [", ".join(str(seed) for seed in group.seeds) for group in groups])
    rounds = [[len(run.rounds) for run in group.runs] for group in groups]
    words = [" / ".join(map(str, dict.fromkeys(counts))) for counts in rounds]
    return [*([seeds] if has_seeds(groups) else []), Column("Rounds", words, [(max(counts),) for counts in rounds])]


def metric_column(head: str, groups: Sequence[Group], name: str, last: int) -> Column:
    """Means of the last evaluations, best first; equal ones by the groups' labels."""
    labels = sorted(group.label for group in groups)
    scores = [smoothed(group, name, last) for group in groups]
    facts = facts_of(groups, name)
    counted = has_seeds(groups)
    return Column(
        head,
        [in_words(score, facts, counted) for score in scores],
        [(-rank_value(score, facts), labels.index(group.label)) for score, group in zip(scores, groups, strict=True)],
    )


def fairness_of(run: Run) -> dict[str, dict[str, float]]:
    """What `fairness` gives at the last evaluation, for every metric of single clients that is to rise or to fall."""
    names = [name for name in metric_names(run) if name.partition("/")[0] in PLACES]
    ways = {name: metric_facts for name in names if (metric_facts := facts(run, name)).higher_is_better is not None}
    rows = run.metrics.filter(pc.field("client").is_valid()).to_pandas()
    rows = rows[rows["name"].isin([*ways])]
    last = rows.groupby("name", observed=True)["round"].transform("max")
    values = dict(iter(rows[rows["round"] == last].groupby("name", observed=True)["value"]))
    every = {
        name: fairness(values[name].to_numpy(float), metric_facts)
        for name, metric_facts in ways.items()
        if name in values
    }
    return {name: statistics for name, statistics in every.items() if statistics}


def fairness_tables(groups: Sequence[Group], first: Sequence[str], others: bool = True) -> list[dict[str, Anything]]:
    """Metrics over clients, means over seeds: first those named in `first`, then, with `others`, all others.

    One table for one group, else a table of each value, of which all but the first are `folded`; parts of a metric come
    after the others, and are `folded`, too.
    """
    seeds = [[fairness_of(run) for run in group.runs] for group in groups]
    known = dict.fromkeys(name for every in seeds for spread in every for name in spread)
    names = [name for name in dict.fromkeys([*first, *(known if others else ())]) if name in known]
    metrics, parts = ([name for name in names if (name.count("/") > 1) is is_part] for is_part in (False, True))
    rows = {name: _fairness_rows(groups, seeds, name) for name in names}
    titles = {
        name: wording.title(name, metric_facts) + f" ({metric_facts.unit})" * (metric_facts.unit not in ("", "%"))
        for name in names
        for metric_facts in (facts_of(groups, name),)
    }
    shown = [(titles[name], rows[name], position > 0) for position, name in enumerate([*metrics, *parts[:MOST_PARTS]])]
    if len(groups) == 1:
        few = parts[:MOST_PARTS]
        kinds = [("", metrics)] * bool(metrics) + [(f"Parts of metrics, {len(few)} of {len(parts)}", few)] * bool(few)
        shown = [(kind, [(titles[name], rows[name][0][1]) for name in some], bool(kind)) for kind, some in kinds]
    head = ["Metric" if len(groups) == 1 else "Run", *_OVER_CLIENTS.values()]
    # The last column says how many clients were left out, if any were.
    ends = [None if any(cells[-1] != "0" for _, cells in rows) else -1 for _, rows, _ in shown]
    return [
        {"title": title, "head": head[:end], "rows": [(row, cells[:end]) for row, cells in rows], "folded": folded}
        for (title, rows, folded), end in zip(shown, ends, strict=True)
    ]


def _fairness_rows(
    groups: Sequence[Group], seeds: Sequence[Spreads], name: str
) -> list[tuple[tuple[str, int], list[str]]]:
    """A row for each group that has the value `name` for single clients, as means over seeds."""
    metric_facts = facts_of(groups, name)
    rows = []
    for style, (group, every) in enumerate(zip(groups, seeds, strict=True)):
        if measured := [spread[name] for spread in every if name in spread]:
            scores = [over(statistics.get(column, np.nan) for statistics in measured) for column in _OVER_CLIENTS]
            # Another unit than % is in the title.
            unit = f" {metric_facts.unit}" * (metric_facts.unit not in ("", "%"))
            words = [in_words(score, metric_facts, counted=False).replace(unit, "") for score in scores[:6]]
            last = [scores[6].words(decimals=3, counted=False), f"{scores[7].mean:.3g}"]
            rows.append(((group.label, style), [*words, *last]))
    return rows


def statuses(groups: Sequence[Group]) -> dict[str, object] | None:
    """What became of the clients that were chosen, counted over all rounds, as means over seeds: a row per status.

    None if every chosen client delivered.
    """
    counts = [[Counter(run.clients["status"].to_pylist()) for run in group.runs] for group in groups]
    names = [name for name in _STATUSES if any(count[name] for group in counts for count in group)]
    if set(names) <= {"delivered"}:
        return None
    times = np.array([[np.mean([count[name] for count in group]) for name in names] for group in counts])
    rows = []
    for name, column in zip(names, times.T, strict=True):
        counted = zip(column, times.sum(axis=1), strict=True)
        cells = [f"{count:,.10g} ({wording.percent(count / (total or 1))})" for count, total in counted]
        rows.append((name.replace("_", " "), [*cells, _STATUSES[name]]))
    return {"head": ["What became of a client", *(group.label for group in groups), "Why"], "rows": rows}


def run_and_seed(run: Run) -> str:
    """The label of one run of a group."""
    return f"{run_label(run)}, seed {run.experiment.get('seed')}"


def origins(groups: Sequence[Group]) -> dict[str, object] | None:
    """A row per run, for at most 100 runs; None if no run has recorded its origin."""
    runs = [(style, run) for style, group in enumerate(groups) for run in group.runs][:_MOST_ORIGINS]
    rows = [
        ((run_and_seed(run), style), [told.get(name, wording.NONE) for name in ORIGIN])
        for style, run in runs
        if (told := read_origin(run.directory))
    ]
    return {"head": ["Run", *(name.capitalize() for name in ORIGIN)], "rows": rows} if rows else None


def shared_settings(groups: Sequence[Group]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The settings that all runs share, a row per table of the experiment: [(table, [(key, value), ...]), ...]."""
    flat = [_all_settings(run) for group in groups for run in group.runs]
    rows: dict[str, list[tuple[str, str]]] = {}
    for name, value in flat[0].items():
        *table, inner = name.split(".", 1)
        if table != ["report"] and all(name in settings and settings[name] == value for settings in flat):
            rows.setdefault("".join(table) or "experiment", []).append((inner, _words(name, [value])[0]))
    return list(rows.items())


def _all_settings(run: Run) -> dict[str, object]:
    """The experiment and the platform as dotted keys.

    If the method is one of ours that compresses by itself, `uplink` and `downlink` are shown as 'fixed by the method'.
    """
    method = method_of(run)
    fixed = ("uplink", "downlink") if method is not None and method.capabilities.own_compression else ()
    unused = {name: {"name": "fixed by the method"} for name in fixed}
    return dotted({**run.experiment, **unused, "platform": dict(run.platform)})


def differing(flat: Sequence[Mapping[str, object]]) -> list[tuple[str, list[str]]]:
    """The settings whose values differ, each with its value for each run."""
    keys = list(dict.fromkeys(name for settings in flat for name in settings))
    rows = [(name, _words(name, [settings.get(name, wording.NONE) for settings in flat])) for name in keys]
    return [(name, cells) for name, cells in rows if len(set(cells)) > 1]


def _words(name: str, values: Sequence[object]) -> list[str]:
    """The values of a setting; of third-party classes only their names, unless different ones have the same name."""
    cells = [wording.value(value) for value in values]
    short = [plugins.short(cell) for cell in cells] if name.endswith(".name") else cells
    return short if len(set(short)) == len(set(cells)) else cells


def differences(groups: Sequence[Group]) -> dict[str, object]:
    """The settings in which runs differ: a row per setting and a column per run, or the other way for many runs."""
    table = differing([_all_settings(group.runs[0]) for group in groups])
    table = [(name, cells) for name, cells in table if name.partition(".")[0] not in NOT_DETERMINING]
    if len(groups) <= _FEW:
        return {"head": ["Setting", *(group.label for group in groups)], "rows": table}
    rows = [((group.label, style), [cells[style] for _, cells in table]) for style, group in enumerate(groups)]
    return {"head": ["Run", *(name for name, _ in table)], "rows": rows}

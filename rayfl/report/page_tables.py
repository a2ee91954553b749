"""The tables of a page: runs with their metrics and costs, how much metrics differ between clients, what became of
clients, settings, and origins."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc

from rayfl.choices import plugins
from rayfl.experiment.identity import NOT_DETERMINING
from rayfl.metrics.facts import PLACES, Facts
from rayfl.metrics.fairness import fairness
from rayfl.report import wording
from rayfl.report.groups import (
    Group,
    TunedGroups,
    facts_of,
    has_seeds,
    in_words,
    last_mean,
    over,
    rank_value,
    setting,
    smoothed,
)
from rayfl.report.series import facts, method_of, metric_names
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


class TextTable(NamedTuple):
    """A table: the headings, and the cells of each row, of which the first names the row.

    note: what it shows. title: its heading. folded: whether a page shows its title alone at first.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    title: str = ""
    folded: bool = False


class Column(NamedTuple):
    """A column: its heading, the text of each row, and the numbers that sort the rows (None: it is not sortable).

    Rows are sorted by their first number, smallest first and NaN last, then by the next one.
    """

    head: str
    cells: Sequence[str]
    by: Sequence[tuple[float, ...]] | None = None


def sortable(groups: Sequence[Group], columns: Sequence[Column], chosen: str) -> dict[str, Anything]:
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
    return {"heads": heads, "rows": rows}


def _places(by: Sequence[tuple[float, ...]] | None, count: int) -> list[int]:
    keys = by or [()] * count
    order = sorted(range(count), key=lambda row: [(math.isnan(value), value) for value in keys[row]])
    return sorted(range(count), key=order.__getitem__)


def run_columns(groups: Sequence[Group]) -> list[Column]:
    """The seeds, if a group has several, and the rounds."""
    seeds = Column("Seeds", [", ".join(map(str, group.seeds)) for group in groups])
    rounds = [[len(run.rounds) for run in group.runs] for group in groups]
    words = [" / ".join(map(str, dict.fromkeys(counts))) for counts in rounds]
    return [*[seeds] * has_seeds(groups), Column("Rounds", words, [(max(counts),) for counts in rounds])]


def score_column(head: str, groups: Sequence[Group], facts: Facts, read: Callable[[Run], float]) -> Column:
    """Means over seeds of the numbers that `read` gives of runs, with their deviations, the best first; equal ones by
    the groups' labels."""
    labels = sorted(group.label for group in groups)
    scores = [over(map(read, group.runs)) for group in groups]
    by = [(-rank_value(score, facts), labels.index(group.label)) for score, group in zip(scores, groups, strict=True)]
    return Column(head, [in_words(score, facts, has_seeds(groups)) for score in scores], by)


def metric_column(head: str, groups: Sequence[Group], name: str, last: int) -> Column:
    """The column of the means of a metric's last evaluations."""
    return score_column(head, groups, facts_of(groups, name), partial(last_mean, name=name, last=last))


def fairness_of(run: Run) -> dict[str, dict[str, float]]:
    """What `fairness` gives at the last evaluation, for every metric of single clients that is to rise or to fall."""
    known = {name: facts(run, name) for name in metric_names(run) if name.partition("/")[0] in PLACES}
    rows = run.metrics.filter(pc.field("client").is_valid()).to_pandas()
    last = rows["round"] == rows.groupby("name", observed=True)["round"].transform("max")
    values = dict(iter(rows[last].groupby("name", observed=True)["value"]))
    return {
        name: statistics
        for name, metric_facts in known.items()
        if metric_facts.higher_is_better is not None and name in values
        if (statistics := fairness(values[name].to_numpy(float), metric_facts))
    }


def fairness_tables(groups: Sequence[Group], first: Sequence[str] = (), others: bool = True) -> list[TextTable]:
    """Metrics over clients, means over seeds: first those named in `first`, then, with `others`, all others.

    One table for one group, else a table of each value; parts of a metric come after the others. All but the first
    table are folded.
    """
    seeds = [[fairness_of(run) for run in group.runs] for group in groups]
    known = dict.fromkeys(name for every in seeds for spread in every for name in spread)
    names = [name for name in dict.fromkeys([*first, *(known if others else ())]) if name in known]
    metrics, parts = ([name for name in names if (name.count("/") > 1) is is_part] for is_part in (False, True))
    few = parts[:MOST_PARTS]
    kinds = [("", metrics), (f"Parts of metrics, {len(few)} of {len(parts)}", few)]
    if len(groups) > 1:
        kinds = [(_fairness_title(groups, name), [name]) for name in [*metrics, *few]]
    heads = ["Metric" if len(groups) == 1 else "Run", *_OVER_CLIENTS.values()]
    tables = [
        # The last column says how many clients were left out, if any were.
        TextTable(heads[:end], [row[:end] for row in rows], "", title)
        for title, some in kinds
        if (rows := [row for name in some for row in _fairness_rows(groups, seeds, name)])
        for end in [None if any(row[-1] != "0" for row in rows) else -1]
    ]
    return [table._replace(folded=position > 0) for position, table in enumerate(tables)]


def _fairness_title(groups: Sequence[Group], name: str) -> str:
    """The title of a metric, with its unit if it is not shown beside each value."""
    metric_facts = facts_of(groups, name)
    return wording.title(name, metric_facts) + f" ({metric_facts.unit})" * (metric_facts.unit not in ("", "%"))


def _fairness_rows(groups: Sequence[Group], seeds: Sequence[Spreads], name: str) -> list[list[str]]:
    """A row for each group that has the value `name` for single clients, as means over seeds; the metric names the row
    of a group that is alone."""
    metric_facts = facts_of(groups, name)
    # Another unit than % is in the title.
    shown = metric_facts if metric_facts.is_percent else metric_facts.model_copy(update={"unit": ""})
    rows = []
    for group, every in zip(groups, seeds, strict=True):
        if measured := [spread[name] for spread in every if name in spread]:
            scores = [over(statistics.get(column, np.nan) for statistics in measured) for column in _OVER_CLIENTS]
            words = [in_words(score, shown, counted=False) for score in scores[:6]]
            words += [scores[6].words(decimals=3, counted=False), f"{scores[7].mean:.3g}"]
            rows.append([group.label if len(groups) > 1 else _fairness_title(groups, name), *words])
    return rows


def statuses(groups: Sequence[Group]) -> TextTable | None:
    """What became of the clients that were chosen, counted over all rounds, as means over seeds: a row per status.

    None if every chosen client delivered.
    """
    import pandas as pd

    of_runs = {group.label: [run.clients["status"].to_pylist() for run in group.runs] for group in groups}
    means = {
        label: pd.Series([*chain(*every)], dtype=object).value_counts() / len(every) for label, every in of_runs.items()
    }
    times = pd.DataFrame(means).reindex([*_STATUSES]).fillna(0)
    shares = (times / times.sum().replace(0, 1)).map(wording.percent)
    cells = times.map("{:,.10g}".format) + " (" + shares + ")"
    rows = [[name.replace("_", " "), *cells.loc[name], why] for name, why in _STATUSES.items() if times.loc[name].any()]
    everyone_delivered = {name for name, *_ in rows} <= {"delivered"}
    return None if everyone_delivered else TextTable(["What became of a client", *means, "Why"], rows)


def origins(groups: Sequence[Group]) -> TextTable | None:
    """A row per run, for at most 100 runs; None if no run has recorded its origin."""
    rows = [
        [f"{group.label}, seed {run.experiment.get('seed')}", *(told.get(name, wording.NONE) for name in ORIGIN)]
        for group, run in [(group, run) for group in groups for run in group.runs][:_MOST_ORIGINS]
        if (told := read_origin(run.directory))
    ]
    return TextTable(["Run", *map(str.capitalize, ORIGIN)], rows) if rows else None


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
    is_fixed = method is not None and method.capabilities.own_compression
    unused = {name: {"name": "fixed by the method"} for name in ("uplink", "downlink") if is_fixed}
    return dotted({**run.experiment, **unused, "platform": dict(run.platform)})


def differing(flat: Sequence[Mapping[str, object]]) -> list[tuple[str, list[str]]]:
    """The settings whose values differ, each with its value for each run."""
    keys = dict.fromkeys(chain(*flat))
    rows = [(name, _words(name, [settings.get(name, wording.NONE) for settings in flat])) for name in keys]
    return [(name, cells) for name, cells in rows if len({*cells}) > 1]


def _words(name: str, values: Sequence[object]) -> list[str]:
    """The values of a setting; of third-party classes only their names, unless different ones have the same name."""
    cells = [wording.value(value) for value in values]
    short = [plugins.short(cell) for cell in cells] if name.endswith(".name") else cells
    return short if len(set(short)) == len(set(cells)) else cells


def differences(groups: Sequence[Group]) -> TextTable:
    """The settings in which runs differ: a row per setting and a column per run, or the other way for many runs."""
    table = differing([_all_settings(group.runs[0]) for group in groups])
    rows = [[name, *cells] for name, cells in table if name.partition(".")[0] not in NOT_DETERMINING]
    if len(groups) <= _FEW:
        return TextTable(["Setting", *(group.label for group in groups)], rows)
    heads, *columns = zip(["Run", *(group.label for group in groups)], *rows, strict=True)
    return TextTable(heads, columns)


def tuning(choices: Sequence[TunedGroups], tuned: Sequence[str], name: str, last: int) -> TextTable:
    """The winners, in the order of the page, and the values of the settings `tuned` that were tried."""
    facts = facts_of([choice.winner for choice in choices], name)
    rows = [
        [
            choice.winner.label,
            *(_best(choice, key) for key in tuned),
            "\n".join(
                f"{', '.join(wording.value(setting(group.settings, key)) for key in tuned)}: "
                f"{in_words(smoothed(group, name, last), facts)}{' *' * (group is choice.winner)}"
                for group in choice.grid
            ),
        ]
        for choice in choices
    ]
    return TextTable(["Run", *(f"Best {key}" for key in tuned), "All that were tried (* the best)"], rows)


def _best(choice: TunedGroups, name: str) -> str:
    """The winning value, and whether the best value may lie beyond the values that were tried."""
    value = setting(choice.winner.settings, name)
    tried = (setting(group.settings, name) for group in choice.grid)
    numbers = {number for number in tried if isinstance(number, int | float) and not isinstance(number, bool)}
    ends = {min(numbers): ", the smallest tried", max(numbers): ", the largest tried"} if len(numbers) > 1 else {}
    return wording.value(value) + next((words for end, words in ends.items() if end == value), "")

"""Tables of how much metrics differ between clients, from the values of single clients that a run has recorded.

Clients whose value is undefined are left out and counted.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow.compute as pc

from rayfl.metrics.facts import PLACES
from rayfl.metrics.fairness import fairness
from rayfl.report import wording
from rayfl.report.charts import Key, key
from rayfl.report.groups import Group, facts_of, in_words, over
from rayfl.report.series import facts, metric_names
from rayfl.run_directory.record import Run
from rayfl.untyped import Anything

_COLUMNS = {
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
"""`of_run` of each run of a group."""
MOST_PARTS = 60
"""The most parts of metrics (recall/3) that a page lists; the records have all."""


def of_run(run: Run) -> dict[str, dict[str, float]]:
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

    One table for one group, else a table of each value; parts of a metric come after the others, and are `folded`.
    """
    seeds = [[of_run(run) for run in group.runs] for group in groups]
    known = dict.fromkeys(name for every in seeds for spread in every for name in spread)
    names = [name for name in dict.fromkeys([*first, *(known if others else ())]) if name in known]
    metrics, parts = ([name for name in names if (name.count("/") > 1) is is_part] for is_part in (False, True))
    rows = {name: _rows(groups, seeds, name) for name in names}
    titles = {
        name: wording.title(name, metric_facts) + f" ({metric_facts.unit})" * (metric_facts.unit not in ("", "%"))
        for name in names
        for metric_facts in (facts_of(groups, name),)
    }
    shown = [(titles[name], rows[name], name in parts) for name in [*metrics, *parts[:MOST_PARTS]]]
    if len(groups) == 1:
        few = parts[:MOST_PARTS]
        kinds = [("", metrics)] * bool(metrics) + [(f"Parts of metrics, {len(few)} of {len(parts)}", few)] * bool(few)
        shown = [(kind, [(titles[name], rows[name][0][1]) for name in some], bool(kind)) for kind, some in kinds]
    head = ["Metric" if len(groups) == 1 else "Run", *_COLUMNS.values()]
    return [{"title": title, "head": head, "rows": some, "folded": folded} for title, some, folded in shown]


def _rows(groups: Sequence[Group], seeds: Sequence[Spreads], name: str) -> list[tuple[Key, list[str]]]:
    """A row for each group that has the value `name` for single clients, as means over seeds."""
    metric_facts = facts_of(groups, name)
    rows = []
    for style, (group, every) in enumerate(zip(groups, seeds, strict=True)):
        if measured := [spread[name] for spread in every if name in spread]:
            scores = [over(statistics.get(column, np.nan) for statistics in measured) for column in _COLUMNS]
            # Another unit than % is in the title.
            unit = f" {metric_facts.unit}" * (metric_facts.unit not in ("", "%"))
            words = [in_words(score, metric_facts, counted=False).replace(unit, "") for score in scores[:6]]
            last = [scores[6].words(decimals=3, counted=False), f"{scores[7].mean:.3g}"]
            rows.append((key(group.label, style), [*words, *last]))
    return rows

"""How evenly a metric's values lie over clients, from the values of single clients that a run has recorded.

Clients whose value is undefined are left out and counted. A worst tenth is rounded up to whole clients.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc

from rayfl.metrics.facts import Facts
from rayfl.report import wording
from rayfl.report.colors import key
from rayfl.report.groups import Group, Score, facts_of, in_words, over
from rayfl.report.series import facts, ranking_names, spread
from rayfl.run_directory.record import Run

_HEAD = ("Mean", "Deviation", "Worst 10 %", "Worst", "Best", "Best - worst", "Jain's index", "Left out")


class Fairness(NamedTuple):
    """The spread of a metric over clients at the last evaluation.

    mean, deviation: over clients (the population's deviation). worst_tenth: the mean of the worst 10 %. worst, best: of
    a client; difference: between the two. jain: Jain's index, (sum a)^2 / (n sum a^2), from 1/n to 1 (all equal, also
    where all are 0), NaN where a value is negative. left_out: the number of clients whose value is undefined.
    """

    mean: float
    deviation: float
    worst_tenth: float
    worst: float
    best: float
    difference: float
    jain: float
    left_out: int


def fairness(values: np.ndarray, found: Facts, left_out: int = 0) -> Fairness | None:
    """The spread of clients' values [n]; None without any."""
    if not len(values):
        return None
    # The worst first.
    ordered = np.sort(found.sign * values) * found.sign
    squares = float((values**2).sum())
    jain = float(values.sum()) ** 2 / (len(values) * squares) if squares else 1.0
    jain = math.nan if (values < 0).any() else jain
    tenth = ordered[: math.ceil(len(values) / 10)]
    worst, best = float(ordered[0]), float(ordered[-1])
    spread = float(values.mean()), float(values.std()), float(tenth.mean()), worst, best, abs(best - worst)
    return Fairness(*spread, jain, left_out)


def of_run(run: Run, name: str) -> Fairness | None:
    """The fairness of a run's metric; None if it has no value of a single client."""
    found = spread(run, name)
    if found is None:
        return None
    rows = run.metrics.filter((pc.field("name") == name) & (pc.field("round") == int(found.rounds[-1])))
    undefined = rows.filter(pc.field("client").is_valid() & pc.field("value").is_null())
    return fairness(found.last, facts(run, name), undefined.num_rows)


def fairness_tables(found: Sequence[Group], names: Sequence[str]) -> list[dict[str, object]]:
    """The metrics over clients, means over seeds: one table for one group, else a table of each metric."""
    by_metric = []
    for name in names:
        own = facts_of(found, name)
        rows = []
        for style, group in enumerate(found):
            if seeds := [one for run in group.runs if (one := of_run(run, name)) is not None]:
                rows.append((key(group.label, style), _cells(seeds, own)))
        if rows:
            by_metric.append((wording.title(name, own), rows))
    if len(found) == 1 and by_metric:
        rows = [(title, cells) for title, [(_, cells)] in by_metric]
        return [{"title": "", "head": ["Metric", *_HEAD], "rows": rows}]
    return [{"title": title, "head": ["Run", *_HEAD], "rows": rows} for title, rows in by_metric]


def _cells(seeds: Sequence[Fairness], found: Facts) -> list[str]:
    scores = [over(column) for column in zip(*seeds, strict=True)]
    words = [in_words(score, found, counted=False) for score in scores[:6]]
    return [*words, _plain(scores[6], 3), _plain(scores[7], 0 if scores[7].mean == round(scores[7].mean) else 1)]


def _plain(score: Score, decimals: int) -> str:
    return score.words(decimals=decimals, counted=False)


def by_name(run: Run) -> dict[str, dict[str, float]]:
    """The fairness of every metric that ranks runs and has values of single clients."""
    found = {name: of_run(run, name) for name in ranking_names(run)}
    known = {name: one._asdict() for name, one in found.items() if one is not None}
    return {name: {key: value for key, value in one.items() if not math.isnan(value)} for name, one in known.items()}

"""Ablations: the effect of switching a setting on, measured on pairs of runs that differ in nothing else.

A pair has the same seed, hence the same data and clients, so the spread of its difference leaves out what seeds share.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from rayfl.experiment.identity import determining_settings, lies_in
from rayfl.report import wording
from rayfl.report.charts import key
from rayfl.report.scores import Score, last_mean, over, percent
from rayfl.report.series import Group
from rayfl.run_directory.record import Run


@dataclass(frozen=True)
class Pair:
    """Two groups that differ in `setting` alone: `off` goes without it (missing, none or false), `on` has it."""

    setting: str
    off: Group
    on: Group


@dataclass(frozen=True)
class Difference:
    """Scores of both sides and of their difference (on - off) over the seeds that both have; `better` of them rose."""

    off: Score
    on: Score
    difference: Score
    better: int


def pairs(found: Sequence[Group], tuned: Sequence[str] = ()) -> list[Pair]:
    """All pairs, by the setting; `tuned` settings may differ too, as each side has its own best."""
    on = [
        {
            setting: value
            for setting, value in determining_settings(group.runs[0].experiment).items()
            if value is not None and value is not False
        }
        for group in found
    ]
    return [
        Pair(setting, found[without], found[having])
        for without in range(len(found))
        for having in range(len(found))
        if without != having and (setting := _switched(on[without], on[having], tuned))
    ]


def _switched(without: dict[str, object], having: dict[str, object], tuned: Sequence[str]) -> str:
    """The one setting or table that `having` has and `without` lacks, "" where they do not differ just so."""
    differ = [setting for setting in {**without, **having} if without.get(setting) != having.get(setting)]
    differ = [setting for setting in differ if not any(lies_in(setting, one) for one in tuned)]
    if not differ or any(setting in without for setting in differ):
        return ""
    parts = [setting.split(".") for setting in differ]
    shared = takewhile(lambda words: len(set(words)) == 1, zip(*parts, strict=False))
    name = ".".join(words[0] for words in shared)
    return name if name and not any(lies_in(setting, name) for setting in without) else ""


def difference(pair: Pair, name: str, last: int) -> Difference:
    """The means of the last evaluations of `name`, seed by seed."""
    off, on = _by_seed(pair.off, name, last), _by_seed(pair.on, name, last)
    both = [seed for seed in off if seed in on]
    gains = [on[seed] - off[seed] for seed in both]
    return Difference(
        over(off[seed] for seed in both),
        over(on[seed] for seed in both),
        over(gains),
        sum(gain > 0 for gain in gains),
    )


def _by_seed(group: Group, name: str, last: int) -> dict[object, float]:
    found = {_seed(run): last_mean(run, name, last) for run in group.runs}
    return {seed: value for seed, value in found.items() if not np.isnan(value)}


def _seed(run: Run) -> object:
    return run.experiment.get("seed")


def ablations(
    found: Sequence[Group], names: Sequence[str], last: int, tuned: Sequence[str] = ()
) -> list[dict[str, object]]:
    """A table for each switched setting; differences of the first of `names` in full, of the others in short."""
    place = {id(group): number for number, group in enumerate(found)}
    by_setting: dict[str, list[Pair]] = {}
    for pair in pairs(found, tuned):
        by_setting.setdefault(pair.setting, []).append(pair)
    head = ["Run", "Without", "With", "Difference", "Higher in"]
    head += [f"Difference: {wording.title(name)}" for name in names[1:]]
    tables = []
    for setting, some in by_setting.items():
        # Several runs with the setting may share one without it; then their names tell the rows apart.
        repeated = len({id(pair.off) for pair in some}) < len(some)
        shown = [(pair.on if repeated else pair.off, _cells(pair, names, last)) for pair in some]
        rows = [(key(group.label, place[id(group)]), cells) for group, cells in shown if cells is not None]
        if rows:
            words = {"setting": setting, "metric": wording.title(names[0]), "last": last}
            tables.append({"head": head, "rows": rows, **words})
    return tables


def _cells(pair: Pair, names: Sequence[str], last: int) -> list[str] | None:
    """A row; None where the two sides have no seed in common that was measured."""
    found = [difference(pair, name, last) for name in names]
    if not any(one.difference.count for one in found):
        return None
    first = found[0]
    higher = f"{first.better} of {first.difference.count}" if first.difference.count else wording.NONE
    return [percent(first.off), percent(first.on), points(first.difference), higher] + [
        points(one.difference) for one in found[1:]
    ]


def points(score: Score) -> str:
    """A difference of accuracies in percentage points, with its sign: "+1.3 +- 0.4 (3)"."""
    words = score.words(100, 2)
    return f"+{words}" if score.count and score.mean > 0 else words.replace("-", "\u2212", 1)

"""Ablations: the effect of switching a setting on, measured on pairs of runs that differ in nothing else.

The runs of a pair have the same seed, so the same data and clients. Their difference therefore varies less than the
values of the runs.
"""

from collections.abc import Sequence
from os.path import commonprefix
from typing import NamedTuple

import pandas as pd

from rayfl.experiment.identity import lies_in
from rayfl.metrics.facts import Facts
from rayfl.report import wording
from rayfl.report.colors import key
from rayfl.report.groups import Group, Score, facts_of, in_words, last_mean, over


class Pair(NamedTuple):
    """Two groups that differ in `setting` alone: `off` lacks it (missing, none or false), `on` has it."""

    setting: str
    off: Group
    on: Group


class Difference(NamedTuple):
    """Scores of both groups and of their difference (on - off) over shared seeds, which is good in `better` seeds."""

    off: Score
    on: Score
    difference: Score
    better: int


def pairs(found: Sequence[Group], tuned: Sequence[str] = ()) -> list[Pair]:
    """All pairs of groups of which one has a setting on and the other off.

    `tuned` settings may differ too, because each side was tuned by itself.
    """
    on = [
        {setting: value for setting, value in group.settings.items() if value is not None and value is not False}
        for group in found
    ]
    return [
        Pair(setting, found[without], found[having])
        for without in range(len(found))
        for having in range(len(found))
        if without != having and (setting := _switched(on[without], on[having], tuned))
    ]


def _switched(without: dict[str, object], having: dict[str, object], tuned: Sequence[str]) -> str:
    """The one setting or table that `having` has and `without` lacks; "" if they differ in anything else."""
    differ = [setting for setting in {**without, **having} if without.get(setting) != having.get(setting)]
    differ = [setting for setting in differ if not any(lies_in(setting, one) for one in tuned)]
    if not differ or any(setting in without for setting in differ):
        return ""
    name = ".".join(commonprefix([setting.split(".") for setting in differ]))  # noqa: RUF071 (lists, not paths)
    return name if name and not any(lies_in(setting, name) for setting in without) else ""


def difference(pair: Pair, name: str, last: int, facts: Facts) -> Difference:
    """Compare the means of the last `last` evaluations of `name`, seed by seed."""
    off, on = (
        pd.Series([last_mean(run, name, last) for run in group.runs], index=group.seeds, dtype=float)
        for group in (pair.off, pair.on)
    )
    # Of the seeds of both, in the order of `off`.
    gains = (on.reindex(off.index) - off).dropna()
    better = int((facts.sign * gains > 0).sum())
    return Difference(over(off.loc[gains.index]), over(on.loc[gains.index]), over(gains), better)


def ablations(
    found: Sequence[Group], names: Sequence[str], last: int, tuned: Sequence[str] = ()
) -> list[dict[str, object]]:
    """A table per switched setting; the first of `names` has all columns, the others only a difference."""
    style = {id(group): number for number, group in enumerate(found)}
    every_facts = [facts_of(found, name) for name in names]
    titles = [wording.title(name, facts) for name, facts in zip(names, every_facts, strict=True)]
    head = ["Run", "Without", "With", "Difference", "Better in", *(f"Difference: {title}" for title in titles[1:])]
    every = pairs(found, tuned)
    tables = []
    for setting in dict.fromkeys(pair.setting for pair in every):
        some = [pair for pair in every if pair.setting == setting]
        # If several runs with the setting share one run without it, their labels tell the rows apart.
        repeated = len({id(pair.off) for pair in some}) < len(some)
        rows = []
        for pair in some:
            group = pair.on if repeated else pair.off
            effects = [difference(pair, name, last, facts) for name, facts in zip(names, every_facts, strict=True)]
            if any(effect.difference.count for effect in effects):
                rows.append((key(group.label, style[id(group)]), _cells(effects, every_facts)))
        if rows:
            tables.append({"head": head, "rows": rows, "setting": setting, "metric": titles[0], "last": last})
    return tables


def _cells(effects: Sequence[Difference], facts: Sequence[Facts]) -> list[str]:
    """A row: the first metric in full, the differences of the others."""
    first, count = effects[0], effects[0].difference.count
    better = f"{first.better} of {count}" if count else wording.NONE
    differences = [points(one.difference, own) for one, own in zip(effects, facts, strict=True)]
    off, on = (in_words(score, facts[0]) for score in (first.off, first.on))
    return [off, on, differences[0], better, *differences[1:]]


def points(score: Score, facts: Facts) -> str:
    """A difference with its sign, of a share in percentage points: "+1.3 +- 0.4 (3)"."""
    words = score.words(100, 2) if facts.is_percent else in_words(score, facts)
    return f"+{words}" if score.count and score.mean > 0 else words.replace("-", "\u2212", 1)

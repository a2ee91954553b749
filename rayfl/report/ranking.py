"""Tables that compare runs: accuracies and costs, and the settings in which runs differ."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rayfl.experiment.identity import NOT_DETERMINING, determining_settings
from rayfl.report import wording
from rayfl.report.colors import Key, key
from rayfl.report.scores import percent, rank_value, smoothed
from rayfl.report.series import MEGABYTE_BITS, Group, method_of
from rayfl.run_directory.record import Run
from rayfl.settings import dotted

_FEW = 4
"""A comparison of settings has a column per run up to this number of runs, else a row per run."""


class Column(NamedTuple):
    """A column: its heading, the text of each row, and the numbers that sort the rows (None: it is not sortable).

    Rows are sorted by their first number, smallest first and NaN last, then by the next one.
    """

    head: str
    cells: Sequence[str]
    by: Sequence[tuple[float, ...]] | None = None


def sortable(keys: Sequence[Key], columns: Sequence[Column], chosen: str, **more: object) -> dict[str, object]:
    """A table whose rows a reader can sort; they are now in the order of the column with the heading `chosen`.

    A row is (key, cells, places); places [num_columns] are the row's place in the order of each column. Rows that tie
    keep their order.
    """
    places = [_places(column.by, len(keys)) for column in columns]
    rows = [
        (key, [column.cells[row] for column in columns], [place[row] for place in places])
        for row, key in enumerate(keys)
    ]
    heads = [(column.head, column.by is not None, column.head == chosen) for column in columns]
    return {"heads": heads, "rows": rows, **more}


def _places(by: Sequence[tuple[float, ...]] | None, count: int) -> list[int]:
    if by is None:
        return list(range(count))
    order = sorted(range(count), key=lambda row: [(math.isnan(value), value) for value in by[row]])
    return sorted(range(count), key=order.__getitem__)


def ranking(found: Sequence[Group], names: Sequence[str], last: int = 3) -> dict[str, object]:
    """The table of runs, in their order, with the accuracies `names`; the first also as the mean of its last values."""
    smooth = [accuracy_column(f"Final, smoothed: {wording.title(name)}", found, name, last) for name in names[:1]]
    columns = [
        *run_columns(found),
        *smooth,
        *(accuracy_column(f"Final: {wording.title(name)}", found, name, 1) for name in names),
        *cost_columns(found),
        *_against_dense(found),
    ]
    return sortable(
        [key(group.label, style) for style, group in enumerate(found)],
        columns,
        smooth[0].head if smooth else "",
        with_seeds=has_seeds(found),
        by=wording.title(names[0]) if names else "",
        last=last,
    )


def has_seeds(found: Sequence[Group]) -> bool:
    """Whether a group has several seeds."""
    return any(len(group.runs) > 1 for group in found)


def run_columns(found: Sequence[Group]) -> list[Column]:
    """The seeds, if a group has several, and the rounds."""
    seeds = Column("Seeds", [", ".join(str(seed) for seed in group.seeds) for group in found])
    rounds = [[len(run.rounds) for run in group.runs] for group in found]
    words = [" / ".join(map(str, dict.fromkeys(counts))) for counts in rounds]
    return [*([seeds] if has_seeds(found) else []), Column("Rounds", words, [(max(counts),) for counts in rounds])]


def accuracy_column(head: str, found: Sequence[Group], name: str, last: int) -> Column:
    """Means of the last evaluations, largest first."""
    scores = [smoothed(group, name, last) for group in found]
    words = [percent(score, has_seeds(found)) for score in scores]
    return Column(head, words, [(-rank_value(score),) for score in scores])


def cost_columns(found: Sequence[Group]) -> list[Column]:
    """Bytes and seconds of whole runs, means over seeds."""
    shown = {
        "Up": ("uplink_bits", MEGABYTE_BITS, wording.megabytes),
        "Down": ("downlink_bits", MEGABYTE_BITS, wording.megabytes),
        "Simulated time": ("simulated_s", 1, wording.seconds),
        "Wall-clock time": ("wall_s", 1, wording.seconds),
    }
    columns = []
    for head, (column, unit, words) in shown.items():
        amounts = [_mean(group, column) / unit for group in found]
        columns.append(Column(head, [words(amount) for amount in amounts], [(amount,) for amount in amounts]))
    return columns


def _mean(group: Group, column: str) -> float:
    """The mean over seeds of a column's sum over rounds."""
    return float(np.mean([run.rounds[column].to_numpy().sum() for run in group.runs]))


def _against_dense(found: Sequence[Group]) -> list[Column]:
    """Bytes up per round against the dense run of the same settings, if there is one."""
    dense = [_dense_twin(group, found) for group in found]
    if all(twin is None or twin is group for twin, group in zip(dense, found, strict=True)):
        return []
    ratios = [_ratio(group, twin) for group, twin in zip(found, dense, strict=True)]
    words = [wording.NONE if np.isnan(ratio) else wording.times_less(ratio) for ratio in ratios]
    return [Column("Up, against dense", words, [(-ratio,) for ratio in ratios])]


def _dense_twin(group: Group, found: Sequence[Group]) -> Group | None:
    """The group that differs from this one in nothing but an uplink that sends all entries at full precision."""
    wanted = _but_uplink(group.runs[0])
    twins = (other for other in found if _is_dense(other.runs[0]) and _but_uplink(other.runs[0]) == wanted)
    return next(twins, None)


def _is_dense(run: Run) -> bool:
    uplink = run.experiment.get("uplink")
    table = {"name": uplink} if isinstance(uplink, str) else uplink
    return not _fixes_messages(run) and table in ({"name": "dense"}, {"name": "dense", "dtype": "fp32"})


def _but_uplink(run: Run) -> dict[str, object]:
    settings = determining_settings(run.experiment)
    return {name: value for name, value in settings.items() if name.partition(".")[0] != "uplink"}


def _ratio(group: Group, dense: Group | None) -> float:
    """Bytes up per round of the dense twin over those of this group; NaN if there is no such ratio."""
    if dense is None:
        return np.nan
    ours, theirs = (_mean(one, "uplink_bits") / max(1, len(one.runs[0].rounds)) for one in (group, dense))
    return theirs / ours if ours and theirs else np.nan


def all_settings(run: Run) -> dict[str, object]:
    """The experiment and the platform as dotted keys.

    If the method compresses by itself, `uplink` and `downlink` are shown as 'fixed by the method'.
    """
    unused = {name: {"name": "fixed by the method"} for name in ("uplink", "downlink") if _fixes_messages(run)}
    return dotted({**run.experiment, **unused, "platform": dict(run.platform)})


def _fixes_messages(run: Run) -> bool:
    """Whether the run's method is one of ours that compresses by itself, so that `uplink` has no effect."""
    found = method_of(run)
    return found is not None and found.own_compression


def differing(flat: Sequence[Mapping[str, object]]) -> list[tuple[str, list[str]]]:
    """The settings whose values differ, each with its value for each run."""
    keys = list(dict.fromkeys(name for one in flat for name in one))
    rows = [(name, [wording.value(one[name]) if name in one else wording.NONE for one in flat]) for name in keys]
    return [(name, cells) for name, cells in rows if len(set(cells)) > 1]


def differences(found: Sequence[Group]) -> dict[str, object]:
    """The settings in which runs differ: a row per setting and a column per run, or the other way for many runs."""
    table = differing([all_settings(group.runs[0]) for group in found])
    table = [(name, cells) for name, cells in table if name.partition(".")[0] not in NOT_DETERMINING]
    if len(found) <= _FEW:
        return {"head": ["Setting", *(group.label for group in found)], "rows": table}
    rows = [(key(group.label, style), [cells[style] for _, cells in table]) for style, group in enumerate(found)]
    return {"head": ["Run", *(name for name, _ in table)], "rows": rows}

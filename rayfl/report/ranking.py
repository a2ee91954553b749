"""The tables of a page that compares runs: accuracies and costs, and the settings in which runs differ."""

from collections.abc import Mapping, Sequence

import numpy as np

from rayfl.choices.kinds import named
from rayfl.experiment.identity import NOT_DETERMINING, determining_settings
from rayfl.methods.base import Method
from rayfl.report import wording
from rayfl.report.charts import key
from rayfl.report.scores import percent, rank_value, smoothed
from rayfl.report.series import MEGABYTE_BITS, Group
from rayfl.report.sortable_table import Column, sortable
from rayfl.run_directory.record import Run
from rayfl.settings import dotted

_FEW = 4
"""Runs that are compared in a column each; more of them get a row each."""


def ranking(found: Sequence[Group], names: Sequence[str], last: int = 3) -> dict[str, object]:
    """The table of runs, in their order, with the accuracies `names`; the first also as the mean of its last ones."""
    with_seeds = any(len(group.runs) > 1 for group in found)
    seeds = [", ".join(str(seed) for seed in group.seeds) for group in found]
    rounds = [" / ".join(dict.fromkeys(str(len(run.rounds)) for run in group.runs)) for group in found]
    smooth = [_accuracy(f"Final, smoothed: {wording.title(name)}", found, name, last) for name in names[:1]]
    columns = [
        *([Column("Seeds", seeds)] if with_seeds else []),
        Column("Rounds", rounds, _each([max(len(run.rounds) for run in group.runs) for group in found])),
        *smooth,
        *(_accuracy(f"Final: {wording.title(name)}", found, name, 1) for name in names),
        *_spent(found),
    ]
    return sortable(
        "ranking",
        [key(group.label, style) for style, group in enumerate(found)],
        columns,
        smooth[0].head if smooth else "",
        with_seeds=with_seeds,
        by=wording.title(names[0]) if names else "",
        last=last,
    )


def _accuracy(head: str, found: Sequence[Group], name: str, last: int) -> Column:
    """Means of the last evaluations, largest first."""
    scores = [smoothed(group, name, last) for group in found]
    counted = any(len(group.runs) > 1 for group in found)
    return Column(head, [percent(score, counted) for score in scores], _each([-rank_value(score) for score in scores]))


def _spent(found: Sequence[Group]) -> list[Column]:
    """Bytes and seconds of whole runs, bytes up also against the dense run of the same settings."""
    dense = [_dense_twin(group, found) for group in found]
    compared = any(twin is not None and twin is not group for twin, group in zip(dense, found, strict=True))
    up, down, simulated, wall = (
        [_mean(group, column) for group in found]
        for column in ("uplink_bits", "downlink_bits", "simulated_s", "wall_s")
    )
    ratios = [_ratio(group, twin) for group, twin in zip(found, dense, strict=True)]
    less = Column("Up, against dense", [_times_less(ratio) for ratio in ratios], _each([-ratio for ratio in ratios]))
    return [
        Column("Up", [wording.megabytes(bits / MEGABYTE_BITS) for bits in up], _each(up)),
        *([less] if compared else []),
        Column("Down", [wording.megabytes(bits / MEGABYTE_BITS) for bits in down], _each(down)),
        Column("Simulated time", [wording.seconds(amount) for amount in simulated], _each(simulated)),
        Column("Wall-clock time", [wording.seconds(amount) for amount in wall], _each(wall)),
    ]


def _each(values: Sequence[float]) -> list[tuple[float]]:
    return [(value,) for value in values]


def _mean(group: Group, column: str) -> float:
    """The mean over seeds of a column's sum over rounds."""
    return float(np.mean([run.rounds[column].to_numpy().sum() for run in group.runs]))


def _dense_twin(group: Group, found: Sequence[Group]) -> Group | None:
    """The group that differs from this one in nothing but an uplink that sends all entries at full precision."""
    wanted = _but_uplink(group.runs[0])
    twins = (other for other in found if _is_dense(other.runs[0]) and _but_uplink(other.runs[0]) == wanted)
    return next(twins, None)


def _is_dense(run: Run) -> bool:
    uplink = run.experiment.get("uplink")
    if _compresses_itself(run):
        return False
    return uplink == "dense" or (isinstance(uplink, dict) and uplink in ({"name": "dense"}, _DENSE))


_DENSE = {"name": "dense", "dtype": "fp32"}


def _but_uplink(run: Run) -> dict[str, object]:
    return {
        key: value for key, value in determining_settings(run.experiment).items() if key.partition(".")[0] != "uplink"
    }


def _ratio(group: Group, dense: Group | None) -> float:
    """Bytes up a round of the dense twin over those of this group; NaN where there is no such ratio."""
    if dense is None:
        return np.nan
    ours, theirs = (_mean(one, "uplink_bits") / max(1, len(one.runs[0].rounds)) for one in (group, dense))
    return theirs / ours if ours and theirs else np.nan


def _times_less(ratio: float) -> str:
    return wording.NONE if np.isnan(ratio) else wording.times_less(ratio)


def described(run: Run) -> dict[str, object]:
    """The experiment and the platform as dotted keys; what a method that compresses by itself does not use says so."""
    unused = {name: {"name": "fixed by the method"} for name in ("uplink", "downlink") if _compresses_itself(run)}
    return dotted({**run.experiment, **unused, "platform": dict(run.platform)})


def _compresses_itself(run: Run) -> bool:
    """Whether the method, one of ours, fixes what is sent, so that `uplink` stands in the experiment for nothing."""
    method = run.experiment.get("method")
    name = method.get("name") if isinstance(method, Mapping) else method
    found = named(Method).get(name) if isinstance(name, str) else None
    return found is not None and found.own_compression


def differences(found: Sequence[Group]) -> dict[str, object]:
    """The settings in which runs differ: a row a setting and a column a run, or the other way where runs are many."""
    flat = [described(group.runs[0]) for group in found]
    keys = [
        name
        for name in dict.fromkeys(name for one in flat for name in one)
        if name.partition(".")[0] not in NOT_DETERMINING
    ]
    table = [(name, [wording.value(one[name]) if name in one else wording.NONE for one in flat]) for name in keys]
    table = [(name, cells) for name, cells in table if len(set(cells)) > 1]
    if len(found) <= _FEW:
        return {"head": ["Setting", *(group.label for group in found)], "rows": table}
    rows = [(key(group.label, style), [cells[style] for _, cells in table]) for style, group in enumerate(found)]
    return {"head": ["Run", *(name for name, _ in table)], "rows": rows}

"""The tables of a page that compares runs: who got how far, what it took, and how the runs differ."""

from collections.abc import Sequence

import numpy as np

from rayfl import wording
from rayfl.plots import key
from rayfl.record import Run
from rayfl.series import MEGABYTE_BITS, NOT_SCIENCE, Group, Reached, curve, flatten, reached, science

_TARGETS = (0.8, 0.9, 0.95)
_FEW = 4
"""Runs that are compared in a column each; more of them get a row each."""


def final(group: Group, name: str) -> float:
    """The mean final value, to sort by: a run that has none comes last."""
    found = curve(group, name)
    return float(found.mean[-1]) if found is not None and not np.isnan(found.mean[-1]) else -np.inf


def ranking(found: Sequence[Group], names: Sequence[str]) -> dict[str, object]:
    """The table of runs, in their order, with the accuracies `names`."""
    with_seeds = any(len(group.runs) > 1 for group in found)
    dense = [_dense_twin(group, found) for group in found]
    compared = any(twin is not None and twin is not group for twin, group in zip(dense, found, strict=True))
    rows = []
    for style, (group, twin) in enumerate(zip(found, dense, strict=True)):
        cells = [", ".join(str(seed) for seed in group.seeds)] if with_seeds else []
        cells.append(" / ".join(dict.fromkeys(str(len(run.rounds)) for run in group.runs)))
        cells += [_finals(group, name) for name in names]
        cells.append(wording.megabytes(_mean(group, "uplink_bits") / MEGABYTE_BITS))
        if compared:
            cells.append(_ratio(group, twin))
        cells.append(wording.megabytes(_mean(group, "downlink_bits") / MEGABYTE_BITS))
        cells += [wording.seconds(_mean(group, column)) for column in ("simulated_s", "wall_s")]
        rows.append((key(group.label, style), cells))
    head = ["Run", *(["Seeds"] if with_seeds else []), "Rounds", *(f"Final: {wording.title(name)}" for name in names)]
    spent = ["Up", *(["Up, against dense"] if compared else []), "Down", "Simulated time", "Wall-clock time"]
    return {
        "head": [*head, *spent],
        "rows": rows,
        "with_seeds": with_seeds,
        "by": wording.title(names[0]) if names else "",
    }


def _mean(group: Group, column: str) -> float:
    """The mean over seeds of a column's sum over rounds."""
    return float(np.mean([run.rounds[column].to_numpy().sum() for run in group.runs]))


def _finals(group: Group, name: str) -> str:
    found = curve(group, name)
    if found is None:
        return wording.NONE
    if len(group.runs) == 1:
        return wording.percent(found.mean[-1])
    return f"{100 * found.mean[-1]:.1f} {wording.PLUS_MINUS} {100 * found.deviation[-1]:.1f} %"


def _dense_twin(group: Group, found: Sequence[Group]) -> Group | None:
    """The group that differs from this one in nothing but an uplink that sends all entries at full precision."""
    wanted = _but_uplink(group.runs[0])
    twins = (other for other in found if _is_dense(other.runs[0]) and _but_uplink(other.runs[0]) == wanted)
    return next(twins, None)


def _is_dense(run: Run) -> bool:
    uplink = run.experiment.get("uplink")
    return uplink == "dense" or (isinstance(uplink, dict) and uplink in ({"name": "dense"}, _DENSE))


_DENSE = {"name": "dense", "dtype": "fp32"}


def _but_uplink(run: Run) -> dict[str, object]:
    return {key: value for key, value in science(run.experiment).items() if key.partition(".")[0] != "uplink"}


def _ratio(group: Group, dense: Group | None) -> str:
    """What the dense twin sends up a round, over what this group does."""
    if dense is None:
        return wording.NONE
    ours, theirs = (_mean(one, "uplink_bits") / max(1, len(one.runs[0].rounds)) for one in (group, dense))
    return wording.times_less(theirs / ours) if ours and theirs else wording.NONE


def targets(found: Sequence[Group], name: str) -> dict[str, object]:
    """What each run had spent when it first reached a share of the best final accuracy."""
    best = max(final(group, name) for group in found)
    wanted = [share * best for share in _TARGETS] if np.isfinite(best) else []
    rows = [
        (key(group.label, style), [_spent([reached(run, name, target) for run in group.runs]) for target in wanted])
        for style, group in enumerate(found)
    ]
    head = [
        f"{wording.percent(target)} ({share:.0%} of the best)" for share, target in zip(_TARGETS, wanted, strict=False)
    ]
    return {"name": wording.title(name), "head": ["Run", *head], "rows": rows}


def _spent(found: Sequence[Reached | None]) -> str:
    there = [one for one in found if one is not None]
    if not there:
        return "not reached"
    if len(there) < len(found):
        return f"reached by {len(there)} of {len(found)} seeds"
    up, both, seconds = np.mean([(one.uplink_megabytes, one.megabytes, one.simulated_s) for one in there], axis=0)
    rounds = f"{np.mean([one.round for one in there]):.1f}".removesuffix(".0")
    spent = f"{wording.megabytes(both)} ({wording.megabytes(up)} up)"
    return f"{spent}\n{wording.seconds(seconds)}, round {rounds}"


def described(run: Run) -> dict[str, object]:
    """The experiment and the platform as dotted keys."""
    return flatten({**run.experiment, "platform": dict(run.platform)})


def differences(found: Sequence[Group]) -> dict[str, object]:
    """The settings in which runs differ: a row a setting and a column a run, or the other way where runs are many."""
    flat = [described(group.runs[0]) for group in found]
    keys = [name for name in dict.fromkeys(name for one in flat for name in one) if name not in NOT_SCIENCE]
    table = [(name, [wording.value(one[name]) if name in one else wording.NONE for one in flat]) for name in keys]
    table = [(name, cells) for name, cells in table if len(set(cells)) > 1]
    if len(found) <= _FEW:
        return {"head": ["Setting", *(group.label for group in found)], "rows": table}
    rows = [(key(group.label, style), [cells[style] for _, cells in table]) for style, group in enumerate(found)]
    return {"head": ["Run", *(name for name, _ in table)], "rows": rows}

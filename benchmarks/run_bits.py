"""What a run leaves behind that must not depend on how it was played: records, models and the states of its end."""

from collections.abc import Iterator, Mapping
from itertools import count, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from rayfl.run_directory import disk
from rayfl.run_directory.record import read_tables
from rayfl.run_directory.states import load_states
from rayfl.testing.executors import leaves


def held(place: Path) -> dict[str, np.ndarray]:
    """Every array in a checkpoint. Which states are in which file depends on the checkpoints before."""
    arrays: dict[str, np.ndarray] = {}
    # Of a client's states the one in the file with the highest number counts.
    for path in sorted(place.glob("*.safetensors"), key=lambda path: (len(path.name), path.name)):
        for key, state in load_states(path):
            arrays |= leaves(f"{path.name.partition('-')[0]} {key}", state)
    return arrays


def difference(calm: Path, other: Path, *, same_evaluations: bool = True) -> str:
    """The first thing in which a run differs from the calm one, in words; "" if there is none.

    same_evaluations: whether both evaluate in the same rounds; if not, only metrics that both have are compared. Their
    last checkpoints are compared if both have one after the last round.
    """
    return next(_differences(calm, other, same_evaluations), "")


def _differences(calm: Path, other: Path, same_evaluations: bool) -> Iterator[str]:
    tables, others = read_tables(calm), read_tables(other)
    for name in ("rounds", "clients"):
        rows, other_rows = (
            table[name].drop_columns(["wall_s"] if name == "rounds" else []) for table in (tables, others)
        )
        for row, other_row in zip_longest(rows.to_pylist(), other_rows.to_pylist()):
            if repr(row) != repr(other_row):
                yield f"records/{name}: {other_row} for {row}"
    values, other_values = _metrics(tables["metrics"].to_pylist()), _metrics(others["metrics"].to_pylist())
    for key in values if same_evaluations else [key for key in values if key in other_values]:
        if repr(values[key]) != repr(other_values.get(key, "nothing")):
            yield f"records/metrics, {_where(key)}: {other_values.get(key, 'nothing')} for {values[key]}"
    if same_evaluations and (more := [key for key in other_values if key not in values]):
        yield f"records/metrics, {_where(more[0])}: {other_values[more[0]]} for nothing"
    files = [{path.name for path in (run / "models").glob("*.safetensors")} for run in (calm, other)]
    if files[0] != files[1]:
        yield f"models: {sorted(files[1])} for {sorted(files[0])}"
    for name in sorted(files[0]):
        yield from _arrays(f"models/{name}", *(load_file(run / "models" / name) for run in (calm, other)))
    last = [max(disk.checkpoints(run), default=-1) for run in (calm, other)]
    if last[0] == last[1] == len(tables["rounds"]):
        yield from _arrays("last state", *(held(disk.checkpoints(run)[last[0]]) for run in (calm, other)))


# Any: rows and values of a table.
def _metrics(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], Any]:
    """The values of metrics by round, client, name, and their number among those that share these."""
    values: dict[tuple[Any, ...], Any] = {}
    for row in rows:
        key = row["round"], row["client"], row["name"]
        values[next((*key, at) for at in count() if (*key, at) not in values)] = row["value"]
    return values


# Any: a key of `_metrics`.
def _where(key: tuple[Any, ...]) -> str:
    return f"round {key[0]}{'' if key[1] is None else f', client {key[1]}'}, {key[2]}"


def _arrays(place: str, calm: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> Iterator[str]:
    """The arrays of a file that differ."""
    for name in sorted({*calm, *other}):
        expected, actual = calm.get(name), other.get(name)
        if expected is None or actual is None:
            yield f"{place}: {name} is {'missing' if actual is None else 'new'}"
        elif (expected.dtype, expected.shape) != (actual.dtype, actual.shape):
            yield f"{place}: {name} is {actual.dtype} {list(actual.shape)} for {expected.dtype} {list(expected.shape)}"
        elif expected.tobytes() != actual.tobytes():
            wrong = np.flatnonzero(expected.reshape(-1).view() != actual.reshape(-1).view())
            first = wrong[0] if len(wrong) else 0
            values = (
                f"; entry {first} is {actual.reshape(-1)[first]!r} for {expected.reshape(-1)[first]!r}"
                if expected.size
                else ""
            )
            yield f"{place}: {len(wrong)} of {expected.size} entries of {name} differ{values}"

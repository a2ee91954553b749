"""The rounds on record, as they were reported while the run went on."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow.compute as pc

from rayfl.rounds.ledger import RoundRow
from rayfl.run_directory.tables import read_records


def recorded_rounds(directory: Path, after: int = -1) -> Iterator[tuple[RoundRow, Mapping[str, float]]]:
    """Each recorded round with a number above `after`, and the means of its metrics. RayflError for damaged records."""
    # A round's metrics are written before its row.
    rounds = read_records(directory, "rounds").filter(pc.field("round") > after)
    metrics = read_records(directory, "metrics").filter((pc.field("round") > after) & pc.field("client").is_null())
    means: dict[int, dict[str, float]] = {}
    for round, name, value in zip(*(metrics[key].to_pylist() for key in ("round", "name", "value")), strict=True):
        means.setdefault(round, {})[name] = value
    for row in rounds.to_pylist():
        yield RoundRow(**row), means.get(row["round"], {})

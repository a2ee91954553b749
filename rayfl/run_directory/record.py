"""The records of a run: a recorder writes its rounds, and `read_run` reads them.

The tables are Arrow streams while the run runs, and Parquet once it is finished (tables.py). Everything in a run
directory is Arrow, JSON, safetensors or text; nothing is pickled.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from rayfl.errors import RayflError
from rayfl.metrics.facts import RECORDED_BEFORE, Facts
from rayfl.run_directory.description import is_run, read_experiment, read_metric_facts, read_platform
from rayfl.run_directory.disk import locked, sync_directory, write_whole, writing
from rayfl.run_directory.tables import (
    SCHEMAS,
    Stream,
    first_rounds,
    read_records,
    read_tables,
    table_path,
)

# A list of runs loads no torch.
if TYPE_CHECKING:
    from rayfl.rounds.ledger import ClientRow, MetricRow, RoundRow


@dataclass(frozen=True)
class Run:
    """The contents of a run directory. Tables have the columns of `SCHEMAS`, rows in the order they were recorded."""

    directory: Path
    experiment: Mapping[str, object]
    platform: Mapping[str, object]
    rounds: pa.Table
    clients: pa.Table
    metrics: pa.Table
    finished: bool
    facts: Mapping[str, Facts] = field(default_factory=lambda: RECORDED_BEFORE)
    """The facts of every value that is evaluated, by its name without the place: "accuracy"."""


def read_run(directory: Path, leave_out: Collection[str] = ()) -> Run:
    """Read a run, whether it is finished, running or interrupted. Raise RayflError if the directory holds no run.

    Of an interrupted run, the tables have the rows that can be read. Tables in `leave_out` are not read and appear
    empty; the table of the clients can be long.
    """
    return Run(
        directory=directory,
        experiment=read_experiment(directory),
        platform=read_platform(directory),
        facts=read_metric_facts(directory),
        finished=all(table_path(directory, name, "parquet").exists() for name in SCHEMAS),
        **read_tables(directory, leave_out),
    )


def run_directories(directory: Path) -> list[Path]:
    """The run directories of a sweep, sorted by name. Any other directory is returned as the only one."""
    if is_run(directory) or not directory.is_dir():
        return [directory]
    return sorted(path for path in directory.iterdir() if is_run(path)) or [directory]


class Recorder(AbstractContextManager["Recorder"]):
    """Writes the records of one run; the only writer of its directory's records.

    Leaving the `with` block finishes the run (Parquet); leaving it by an exception keeps the streams, to be resumed.
    Every method raises DiskError if writing fails; then at most the last round is incomplete.
    """

    def __init__(self, directory: Path, earlier: Mapping[str, pa.Table] | None = None, rounds: int = 0) -> None:
        """Start new records, or go on after the first `rounds` of the tables `earlier`, which replace the records.

        Raise RayflError if new records would replace others.
        """
        self._directory, self._last, self._streams = directory, rounds - 1, dict[str, Stream]()
        records = directory / "records"
        with self._writing(), ExitStack() as opened:
            opened.enter_context(locked(directory))
            records.mkdir(exist_ok=True)
            if earlier is None and any(records.iterdir()):
                raise RayflError(f"{records} holds the records of an earlier run: resume that run or name another")
            tables = earlier or {name: schema.empty_table() for name, schema in SCHEMAS.items()}
            for name, table in first_rounds(tables, rounds).items():
                self._streams[name] = Stream(table_path(directory, name, "arrows"), table)
                opened.callback(self._streams[name].close)
                table_path(directory, name, "parquet").unlink(missing_ok=True)
            sync_directory(records)
            self._opened = opened.pop_all()

    def _writing(self) -> AbstractContextManager[None]:
        return writing(self._directory, f"go on with: rayfl resume {self._directory}")

    @property
    def num_rows(self) -> dict[str, int]:
        """Rows of each table so far."""
        return {name: stream.num_rows for name, stream in self._streams.items()}

    def round(self, row: "RoundRow", clients: Sequence["ClientRow"], metrics: Sequence["MetricRow"]) -> None:
        """Record one round. A kill afterwards does not lose it; a loss of power may (see `sync`)."""
        assert row.round > self._last, f"round {row.round} recorded after round {self._last}"
        self._last = row.round
        with self._writing():
            # The rounds table comes last: if it has a round, the other tables have that round's rows too.
            self._streams["metrics"].append(row.round, metrics)
            self._streams["clients"].append(row.round, clients)
            self._streams["rounds"].append(row.round, [astuple(row)[1:]])

    def sync(self) -> None:
        """Make all rounds so far survive a loss of power. Call it before a checkpoint, which relies on them."""
        with self._writing():
            for stream in self._streams.values():
                stream.sync()

    def close(self) -> None:
        """Finish: compact the streams to Parquet and remove them."""
        with self._writing(), self._opened:
            for name, stream in self._streams.items():
                stream.close()
                table = read_records(self._directory, name)
                write_whole(
                    table_path(self._directory, name, "parquet"),
                    # Checksums, so that a reader notices damage.
                    lambda path, table=table: pq.write_table(table, path, write_page_checksum=True),
                )
            for name in self._streams:
                table_path(self._directory, name, "arrows").unlink(missing_ok=True)

    def stop(self) -> None:
        """End without finishing: the streams stay as they are, to be resumed."""
        with self._writing():
            self._opened.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            # Report the error that ended the run, not the failure to write it.
            with suppress(OSError):
                self.stop()

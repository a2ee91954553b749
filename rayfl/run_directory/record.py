"""The records of a run: a recorder writes its rounds into three tables, and `read_run` reads them.

While a run runs its tables are Arrow streams (.arrows): if a stream is cut, only its last batch is lost, while an
unclosed Parquet file cannot be read. Once the run is finished they are Parquet files. If both exist because one was
just replacing the other, the Parquet file is complete and counts. Everything in a run directory is Arrow, JSON,
safetensors or text; nothing is pickled.
"""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayfl.errors import RayflError, reason
from rayfl.limits import memory
from rayfl.limits.regular_files import Unopened, require_regular
from rayfl.metrics.facts import RECORDED_BEFORE, Facts
from rayfl.run_directory.description import is_run, read_as, read_experiment, read_metric_facts, read_platform
from rayfl.run_directory.disk import RunFiles, locked, sync_directory, write_whole, writing

# A list of runs loads no torch.
if TYPE_CHECKING:
    from rayfl.rounds.ledger import ClientRow, MetricRow, RoundRow

MOST = 2.0**62
"""The totals of all columns stay below this."""
_WORD = pa.dictionary(pa.int32(), pa.string())
SCHEMAS: Mapping[str, pa.Schema] = {
    "rounds": pa.schema(
        {
            "round": pa.int32(),
            "selected": pa.int32(),
            "delivered": pa.int32(),
            "uplink_bits": pa.int64(),
            "downlink_bits": pa.int64(),
            "simulated_s": pa.float64(),
            "wall_s": pa.float64(),
        }
    ),
    "clients": pa.schema(
        {
            "round": pa.int32(),
            "client": pa.int32(),
            "status": _WORD,
            "uplink_bits": pa.int64(),
            "downlink_bits": pa.int64(),
            "num_samples": pa.int64(),
            "num_steps": pa.int64(),
            "simulated_s": pa.float64(),
        }
    ),
    "metrics": pa.schema({"round": pa.int32(), "client": pa.int32(), "name": _WORD, "value": pa.float64()}),
}
"""The columns of each table. `client` of a metric is null if the value is of the round, of the server or a mean."""

PART = RunFiles(
    (rf"records/({'|'.join(SCHEMAS)})\.(arrows|parquet)",),
    {
        "`records/rounds.parquet`": "a row per round: numbers of clients selected and delivered, bits up and down, "
        "simulated and real seconds",
        "`records/clients.parquet`": "a row per client and round: status, bits, examples, steps, simulated seconds",
        "`records/metrics.parquet`": "every metric, of the round or of one client",
    },
)


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


ORDER = "order.json"
"""The file of a sweep's directory that has the names of its runs, in the order of the sweep's file."""


def run_directories(directory: Path) -> list[Path]:
    """The run directories of a sweep, in the order of its file, others after them by name. Any other directory is
    returned as the only one."""
    if is_run(directory) or not directory.is_dir():
        return [directory]
    order = {name: position for position, name in enumerate(read_order(directory))}
    runs = sorted(path for path in directory.iterdir() if is_run(path))
    return sorted(runs, key=lambda path: order.get(path.name, len(order))) or [directory]


def read_order(directory: Path) -> list[str]:
    """The names of a sweep's run directories in the order of its file; empty if they are not written there."""
    return [str(name) for name in _listed(directory, "runs")]


class Refused(NamedTuple):
    """A combination of a sweep that cannot run: its label, its swept settings in words by key, and the reason."""

    label: str
    swept: Mapping[str, str]
    why: str


def read_refused(directories: Iterable[Path]) -> list[Refused]:
    """The combinations that were refused by the sweeps whose directories hold these runs."""
    listed = [entry for home in dict.fromkeys(run.parent for run in directories) for entry in _listed(home, "refused")]
    return [
        Refused(str(entry.get("label")), swept, str(entry.get("why")))
        for entry in listed
        if isinstance(entry, Mapping) and isinstance(swept := entry.get("swept"), Mapping)
    ]


def _listed(directory: Path, name: str) -> list[object]:
    """A list of a sweep's ORDER file; empty if it is not written there."""
    entries = read_as(dict, directory / ORDER, {}).get(name)
    return entries if isinstance(entries, list) else []


class Recorder(AbstractContextManager["Recorder"]):
    """Writes the records of one run; the only writer of its directory's records.

    Leaving the `with` block finishes the run (Parquet); leaving it by an exception keeps the streams, to be resumed.
    Every method raises DiskError if writing fails; then at most the last round is incomplete.
    """

    def __init__(self, directory: Path, earlier: Mapping[str, pa.Table] | None = None, rounds: int = 0) -> None:
        """Start new records, or go on after the first `rounds` of the tables `earlier`, which replace the records.

        Raise RayflError if new records would replace others.
        """
        self._directory = directory
        self._last = rounds - 1
        self._streams = dict[str, Stream]()
        records = directory / "records"
        with self._writing(), ExitStack() as opened:
            opened.enter_context(locked(directory))
            records.mkdir(exist_ok=True)
            if earlier is None and any(records.iterdir()):
                raise RayflError(f"{records} holds the records of an earlier run: resume that run or name another")
            tables = earlier or {name: schema.empty_table() for name, schema in SCHEMAS.items()}
            for name, table in tables.items():
                kept = tidy(table.filter(pc.field("round") < rounds))
                self._streams[name] = Stream(table_path(directory, name, "arrows"), kept)
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


class Stream:
    """An Arrow IPC stream to append to."""

    def __init__(self, path: Path, before: pa.Table) -> None:
        """Write a stream with the rows of `before` in place of the file `path`. Raise OSError if writing fails."""
        self._schema = before.schema
        self.num_rows = len(before)
        write_whole(path, lambda partial: self._begin(partial, before))

    def _begin(self, path: Path, before: pa.Table) -> None:
        # A large buffer and a flush per batch: one system call, so that a kill seldom cuts inside a batch.
        self._file = open(path, "wb", buffering=1 << 20)  # noqa: SIM115 (open from round to round)
        with ExitStack() as failed:
            failed.callback(self._file.close)
            self._writer = pa.ipc.new_stream(self._file, self._schema)
            self._writer.write_table(before)
            self._file.flush()
            failed.pop_all()

    def append(self, round_number: int, rows: Sequence[tuple]) -> None:
        """Add `rows` as one batch; a row has all columns except the first, which is the round."""
        if not rows:
            return
        columns = [[round_number] * len(rows), *zip(*rows, strict=True)]
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
        self._file.flush()
        self.num_rows += len(rows)

    def sync(self) -> None:
        """Make all rows so far survive a loss of power."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """End the stream, once. Its file is closed even if writing the rest fails."""
        if not self._file.closed:
            with self._file:
                self._writer.close()


def table_path(directory: Path, name: str, suffix: str) -> Path:
    """The path of the table `name` of the run in `directory`; `suffix`: "arrows" or "parquet"."""
    return directory / "records" / f"{name}.{suffix}"


def read_records(directory: Path, name: str) -> pa.Table:
    """Return all readable rows of a table, whether the run is finished, running or interrupted; none without a table.

    Raise RayflError if the table is damaged before its last rows, or holds a value that no run records.
    """
    parquet, stream = (table_path(directory, name, suffix) for suffix in ("parquet", "arrows"))
    # True for a dangling link too.
    if os.path.lexists(parquet.parent) and not parquet.parent.is_dir():
        raise _unreadable(parquet.parent, "it is not a folder")
    # The Parquet file is tried again, because a run that finishes meanwhile replaces its stream by it.
    for path, read in ((parquet, _read_parquet), (stream, _read_stream), (parquet, _read_parquet)):
        try:
            require_regular(path)
            return _checked(path, tidy(read(path, SCHEMAS[name])))
        except FileNotFoundError:
            continue
        except RayflError:
            raise
        except OSError as error:
            # Arrow reports a damaged file as an OSError without a number.
            raise _unreadable(
                path, reason(error) if error.errno or isinstance(error, Unopened) else "it is damaged"
            ) from None
        except (pa.ArrowException, ValueError, KeyError, TypeError):
            raise _unreadable(path, f"it is not a table of {name}") from None
    return SCHEMAS[name].empty_table()


def _read_parquet(path: Path, schema: pa.Schema) -> pa.Table:
    # pyarrow would read all files of a directory, so it gets an open file. It uses this thread alone: a thread of
    # Arrow's that still runs when the process ends can abort the process (apache/arrow issue 34314).
    with pa.OSFile(str(path)) as file:
        _require_memory(path, pq.read_metadata(file))
        file.seek(0)
        table = pq.read_table(file, schema=schema, page_checksum_verification=True, use_threads=False, pre_buffer=False)
    table.validate(full=True)
    return table


def read_tables(directory: Path, leave_out: Collection[str] = ()) -> dict[str, pa.Table]:
    """All tables of a run by name, as `read_records` reads them; those of `leave_out` are empty."""
    return {
        name: schema.empty_table() if name in leave_out else read_records(directory, name)
        for name, schema in SCHEMAS.items()
    }


def _unreadable(path: Path, what: str) -> RayflError:
    return RayflError(f"{path} cannot be read ({what}): restore it, or run the experiment again")


def _require_memory(path: Path, metadata: pq.FileMetaData) -> None:
    """Raise RayflError if the content of a file would be larger than this machine's memory."""
    row_groups = (metadata.row_group(index) for index in range(metadata.num_row_groups))
    # A number takes at most eight bytes in memory, and often fewer in the file.
    num_bytes = sum(max(group.total_byte_size, 8 * group.num_rows * group.num_columns) for group in row_groups)
    memory.require(num_bytes, f"{path} cannot be read: it", "restore it, or run the experiment again")


def _checked(path: Path, table: pa.Table) -> pa.Table:
    """Return the table. Raise RayflError, which names column and row, for a value that no run records.

    Metrics may be NaN and infinite.
    """
    for column in table.schema.names:
        values = table[column]
        if column == "client" and path.stem == "metrics":
            values = values.fill_null(0)
        # A value is null where it is undefined, as the recall of a class that does not occur.
        if values.null_count and column != "value":
            raise _unreadable(path, f"{column} has no value in row {values.is_null().to_numpy().argmax()}")
        if column in ("status", "name", "value"):
            continue
        # The total of all rows must not overflow.
        numbers = values.to_numpy()
        if (strange := ~((numbers >= 0) & (numbers < MOST / max(1, len(numbers))))).any():
            row = int(strange.argmax())
            raise _unreadable(path, f"row {row} has {column}={values[row].as_py()}, which no run records")
    least = 1 if path.stem == "rounds" else 0
    if (disordered := np.flatnonzero(np.diff(table["round"].to_numpy()) < least)).size:
        raise _unreadable(path, f"its rounds do not increase in row {disordered[0] + 1}")
    return table


def _read_stream(path: Path, schema: pa.Schema) -> pa.Table:
    batches = []
    # An error says that the writer was cut inside a batch or is writing one: earlier batches are whole.
    with pa.OSFile(str(path)) as file, suppress(pa.ArrowException, OSError):
        for batch in pa.ipc.open_stream(file):
            batch.validate(full=True)
            if batch.schema != schema:
                break
            batches.append(batch)
    return pa.Table.from_batches(batches, schema)


def tidy(table: pa.Table) -> pa.Table:
    """The same rows in one chunk, with words numbered by first appearance, so that equal tables have equal bytes."""
    for index, column in enumerate(table.schema):
        if column.type == _WORD:
            words = table[column.name].cast(pa.string()).combine_chunks().dictionary_encode()
            table = table.set_column(index, column, words)
    return table.combine_chunks()

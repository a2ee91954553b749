"""The three tables of a run: their columns, their Arrow streams, and a reader of streams and Parquet files.

While a run runs its tables are streams (.arrows): if a stream is cut, only its last batch is lost, while an unclosed
Parquet file cannot be read. Once the run is finished they are Parquet files. If both exist because one was just
replacing the other, the Parquet file is complete and counts.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayfl.errors import RayflError, reason
from rayfl.limits import memory
from rayfl.limits.regular_files import Unopened, require_regular
from rayfl.run_directory.disk import RunFiles, write_whole

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


class Stream:
    """An Arrow IPC stream to append to."""

    def __init__(self, path: Path, before: pa.Table) -> None:
        """Write a stream with the rows of `before` in place of the file `path`. Raise OSError if writing fails."""
        self._schema, self.num_rows = before.schema, len(before)
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

    def append(self, round: int, rows: Sequence[tuple]) -> None:
        """Add `rows` as one batch; a row has all columns except the first, which is the round."""
        if not rows:
            return
        columns = [[round] * len(rows), *zip(*rows, strict=True)]
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
            told = error.errno or isinstance(error, Unopened)
            raise _unreadable(path, reason(error) if told else "it is damaged") from None
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


def first_rounds(tables: Mapping[str, pa.Table], rounds: int) -> dict[str, pa.Table]:
    """The rows of the first `rounds` rounds, tidy."""
    return {name: tidy(table.filter(pc.field("round") < rounds)) for name, table in tables.items()}


def _unreadable(path: Path, what: str) -> RayflError:
    return RayflError(f"{path} cannot be read ({what}): restore it, or run the experiment again")


def _require_memory(path: Path, metadata: pq.FileMetaData) -> None:
    """Raise RayflError if the content of a file would be larger than this machine's memory."""
    row_groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
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
            row = values.is_null().to_numpy().argmax()
            raise _unreadable(path, f"{column} has no value in row {row}")
        if column in ("status", "name", "value"):
            continue
        # The total of all rows must not overflow.
        numbers = values.to_numpy()
        if (strange := ~((numbers >= 0) & (numbers < MOST / max(1, len(numbers))))).any():
            row = int(strange.argmax())
            raise _unreadable(path, f"row {row} has {column}={values[row].as_py()}, which no run records")
    rounds = table["round"].to_numpy()
    least = 1 if path.stem == "rounds" else 0
    if (disordered := np.flatnonzero(np.diff(rounds) < least)).size:
        raise _unreadable(path, f"its rounds do not increase in row {disordered[0] + 1}")
    return table


def _read_stream(path: Path, schema: pa.Schema) -> pa.Table:
    batches = []
    with pa.OSFile(str(path)) as file:
        try:
            reader = pa.ipc.open_stream(file)
            while True:
                batch = reader.read_next_batch()
                batch.validate(full=True)
                if batch.schema != schema:
                    break
                batches.append(batch)
        except (StopIteration, pa.ArrowException, OSError):
            # This is the end, or the writer was cut inside a batch or is writing one: earlier batches are whole.
            pass
    return pa.Table.from_batches(batches, schema)


def tidy(table: pa.Table) -> pa.Table:
    """The same rows in one chunk, with words numbered by first appearance, so that equal tables have equal bytes."""
    for index, field in enumerate(table.schema):
        if field.type == _WORD:
            words = table[field.name].cast(pa.string()).combine_chunks().dictionary_encode()
            table = table.set_column(index, field, words)
    return table.combine_chunks()

"""Records: the three tables of a run, read by `rayfl report --json` and `rayfl resume`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayfl.run_directory.record import SCHEMAS
from tests.hostile.case import Case, Content
from tests.hostile.kinds.damage import (
    GARBAGE,
    column,
    endless,
    fifo,
    folder,
    half,
    link_to_itself,
    link_to_nothing,
    without_column,
)


def finished(
    name: str,
    content: Content,
    table: str = "metrics",
    command: tuple[object, ...] = ("report", "run", "--json"),
    in_suite: bool = False,
    in_process: bool = False,
) -> Case:
    """A finished run with one table changed, which is named."""
    return Case(
        "records",
        f"{table}.parquet {name}",
        command,
        [f"{table}.parquet"],
        {f"run/records/{table}.parquet": content},
        start="done",
        in_suite=in_suite,
        in_process=in_process,
    )


def cut(name: str, content: Content, table: str = "rounds", in_suite: bool = False) -> Case:
    """A cut run with one stream changed so that it cannot be read at all."""
    return Case(
        "records",
        f"{table}.arrows {name}",
        ["report", "run", "--json"],
        [f"{table}.arrows"],
        {f"run/records/{table}.arrows": content},
        start="cut",
        in_suite=in_suite,
    )


def shorter(name: str, content: Content, table: str = "rounds", in_suite: bool = False) -> Case:
    """A cut run whose stream lost rows: it goes on from where its records reach, with the same bits."""
    return Case(
        "records",
        f"{table}.arrows {name}",
        ["resume", "run"],
        [],
        {f"run/records/{table}.arrows": content},
        start="cut",
        code=0,
        may_write=["run"],
        same_bits=True,
        in_suite=in_suite,
    )


# Any: what pyarrow takes.
def table(**columns: Any) -> Callable[[Path], None]:
    """A Parquet file of this table."""
    return lambda path: pq.write_table(pa.table(columns), path)


def rows_twice(path: Path) -> None:
    found = pq.read_table(path, use_threads=False)
    pq.write_table(pa.concat_tables([found, found]), path)


def backwards(path: Path) -> None:
    found = pq.read_table(path, use_threads=False)
    pq.write_table(found.take(list(range(len(found)))[::-1]), path)


def stream_of(schema: pa.Schema) -> Callable[[Path], None]:
    """An Arrow stream of other columns."""

    def write(path: Path) -> None:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
            stream.write_table(schema.empty_table())

    return write


RESUME = ("resume", "run", "--rounds", 8)

CASES = [
    Case("records", "valid", ["report", "run", "--json"], start="done", code=0),
    Case("records", "valid: cut", ["report", "run", "--json"], start="cut", code=0),
    shorter("valid: half a stream", half),
    shorter("valid: no stream", b""),
    shorter("valid: half the metrics", half, "metrics"),
    shorter("valid: other columns", stream_of(pa.schema({"a": pa.int32()}))),
    # What no reader takes.
    *[
        finished(word, content, name)
        for name in SCHEMAS
        for word, content in (("empty", b""), ("garbage", GARBAGE), ("half", half), ("a folder", folder))
    ],
    finished("zeros", b"\0" * 1000),
    finished("a magic number and nothing else", b"PAR1PAR1", in_process=True),
    finished("a footer of 4 GB", b"PAR1" + b"\xff\xff\xff\x7f" + b"PAR1"),
    finished("a FIFO", fifo),
    finished("a device", endless),
    finished("a link to itself", link_to_itself),
    finished("a link to nothing", link_to_nothing),
    finished("of other columns", table(a=[1, 2, 3])),
    finished("without a column", without_column("value")),
    finished("with a column of text", column("value", "x", pa.string())),
    finished("with rounds of text", column("round", "x", pa.string()), "rounds"),
    finished("resumed without a column", without_column("round"), "rounds", RESUME),
    finished("resumed from garbage", GARBAGE, "clients", RESUME),
    # What can be read and cannot be.
    finished("null rounds", column("round", None), "rounds", in_suite=True),
    finished("null rounds of metrics", column("round", None)),
    finished("null names", column("name", None)),
    finished("null values", column("value", None)),
    finished("null bits", column("uplink_bits", None), "rounds"),
    finished("null clients", column("client", None), "clients"),
    finished("null statuses", column("status", None), "clients"),
    finished("bits below zero", column("uplink_bits", -5), "rounds"),
    finished("bits of 2^63", column("uplink_bits", 2**63 - 1), "rounds"),
    finished("rounds below zero", column("round", -1), "rounds"),
    finished("the same round twice", rows_twice, "rounds"),
    finished("rounds backwards", backwards, "rounds"),
    finished("seconds infinite", column("wall_s", float("inf")), "rounds"),
    finished("seconds NaN", column("wall_s", float("nan")), "rounds"),
    finished("simulated seconds infinite", column("simulated_s", float("inf")), "rounds"),
    finished("seconds below zero", column("simulated_s", -1.0), "rounds"),
    finished("clients below zero", column("client", -7)),
    finished("null rounds, resumed", column("round", None), "rounds", RESUME),
    # Streams.
    cut("a folder", folder),
    cut("a FIFO", fifo),
    cut("a device", endless),
    cut("a link to itself", link_to_itself),
]

"""Reads CSV files as people write them: their separator, encoding, header, decimal mark and packing."""

import codecs
import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.csv
from pyarrow import compute

from rayfl.errors import RayflError
from rayfl.limits import memory
from rayfl.limits.regular_files import read_bytes, require_regular
from rayfl.settings import shown

Separator = Literal[",", ";", "tab", "\t", "|", ":", "whitespace"]
_GUESSED: tuple[Separator, ...] = (",", ";", "\t", "|", "whitespace")
"""Separators that are found, the most usual first."""
GAPS = ("", "?", *(word for word in pyarrow.csv.ConvertOptions().null_values if word))
"""What stands for a missing number; where gaps are filled or dropped, also for a missing text."""
_HEAD_BYTES, _HEAD_ROWS = 1 << 18, 100
"""The part of a file by which its separator and decimal mark are found."""
_PIECE = 1 << 20
_LARGEST_BLOCK = (1 << 31) - 1
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\x28\xb5\x2f\xfd": "zstd"}
_NOT_UNPACKED = {b"PK\x03\x04": "zip", b"\xfd7zXZ": "xz", b"7z\xbc\xaf": "7z"}
_NUMERAL = r"[-+]?(\d+[.,]?\d*|[.,]\d+)([eE][-+]?\d+)?"
_MARKS = "#|%"
_MARKS_ALONE = ";/!"
"""The first characters of lines of comment above a table; after one of the second there is no separator."""


@dataclass(frozen=True)
class Dialect:
    """How a CSV file is written; None: found by its first rows.

    header: the names of the columns of a file without a header; "numbered": they are called 0, 1, ...
    texts: columns that are texts, even if they look like numbers. names: columns that are texts if whole numbers with
    leading zeros would lose them, so that 007 and 7 became one.
    """

    separator: Separator | None = None
    header: tuple[str, ...] | Literal["numbered"] | None = None
    encoding: str = "utf-8"
    decimal: Literal[".", ","] | None = None
    texts: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


def read_csv(path: Path, dialect: Dialect) -> pa.Table:
    """The table in a CSV file, which may be packed by gzip, bzip2 or zstd; blanks around texts are removed.

    Raise RayflError, OSError, ValueError or ArrowException if it cannot be read.
    """
    content = unpacked(path)
    if dialect.encoding.lower().replace("_", "-") not in ("utf-8", "utf8", "utf-8-sig"):
        content = _decoded(path, read_bytes(path) if content is None else content, dialect.encoding).encode()
    lines = _first_lines(path, content)
    skipped = _comments(lines)
    noted = _noted_separator(lines[skipped:])
    skipped += noted is not None
    separator = dialect.separator or noted or _separator(lines[skipped:])
    cells = _cells(lines[skipped:], separator)
    if separator == "whitespace":
        content = _tabulated(read_bytes(path) if content is None else content)
    names = _names(path, dialect, cells)
    if names is None and _lacks_a_name(cells):
        names = _names_with_one_more(path, cells)
        skipped += 1
    decimal = dialect.decimal or _decimal(separator, cells)
    try:
        table = _parsed(path, content, _Layout(separator, skipped, names, decimal), dialect)
        columns = [_trimmed(column) for column in table.columns]
        # numpy.savetxt writes a header as a comment.
        return pa.table(columns, names=[name.strip().removeprefix("# ") for name in table.column_names])
    except pa.ArrowInvalid as error:
        if "UTF8" in str(error):
            _decoded(path, read_bytes(path) if content is None else content, "utf-8")
        raise
    except UnicodeDecodeError:
        raise RayflError(
            f"{path} has a header (row 0) that is no UTF-8 text; give data.encoding that of the file, such as 'latin-1'"
        ) from None


@dataclass(frozen=True)
class _Layout:
    """How a file's lines become columns. skipped: lines before the names, or before the rows if `names` are given."""

    separator: Separator
    skipped: int
    names: Sequence[str] | None
    decimal: str


def _parsed(path: Path, content: bytes | None, layout: _Layout, dialect: Dialect) -> pa.Table:
    """The table of a file, or of its content, with its texts as they stand there. Raise ArrowInvalid, or
    UnicodeDecodeError for the names."""
    source_size = path.stat().st_size if content is None else len(content)
    parse = pyarrow.csv.ParseOptions(delimiter=_delimiter(layout.separator), newlines_in_values=True)
    texts = dict.fromkeys(dialect.texts, pa.string())
    convert = pyarrow.csv.ConvertOptions(null_values=GAPS, decimal_point=layout.decimal, column_types=texts)

    def parsed(block_size: int, convert: pyarrow.csv.ConvertOptions) -> pa.Table:
        threads = block_size == _PIECE
        read = pyarrow.csv.ReadOptions(
            skip_rows=layout.skipped, column_names=layout.names, block_size=block_size, use_threads=threads
        )
        return pyarrow.csv.read_csv(path if content is None else pa.BufferReader(content), read, parse, convert)

    try:
        table = parsed(_PIECE, convert)
    except pa.ArrowInvalid:
        # The first block decides the types of columns. One thread knows the number of a wrong row.
        table = parsed(min(source_size + 1, _LARGEST_BLOCK), convert)
    columns = [
        column if name in dialect.texts else _without_blank_gaps(column, layout.decimal)
        for name, column in zip(table.column_names, table.columns, strict=True)
    ]
    table = pa.table(columns, names=table.column_names)
    if numerals := [name for name in dict.fromkeys(dialect.names) if _is_of_whole_numbers(table, name)]:
        types = dict.fromkeys(numerals, pa.string())
        as_texts = pyarrow.csv.ConvertOptions(include_columns=numerals, column_types=types)
        table = _with_zeros(table, parsed(_PIECE, as_texts))
    return table


def _names_with_one_more(path: Path, cells: Sequence[Sequence[str]]) -> list[str]:
    """The names of columns whose header has one name less than the rows have fields."""
    if not any(row[-1] for row in cells[1:]):
        # Each row but the header ends in a separator.
        return [*cells[0], ""]
    if len({row[0] for row in cells[1:]}) < len(cells) - 1:
        raise RayflError(
            f"{path} has {len(cells[0])} names in its header and {len(cells[1])} fields in its rows, and the first "
            "ones are no names of rows, which all differ; if a comma is also the decimal mark, or separates "
            "thousands, give data.separator, or write such fields in quotes"
        )
    # R's write.table gives the names of the rows no name.
    return ["", *cells[0]]


def _first_lines(path: Path, content: bytes | None) -> list[str]:
    """The first whole lines of a file, or of its content; bytes that are not UTF-8 are replaced."""
    if content is None:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
    else:
        head = content[:_HEAD_BYTES]
    _refuse_utf_16(path, head)
    lines = codecs.getincrementaldecoder("utf-8-sig")("replace").decode(head).splitlines()
    return lines[:-1] if len(head) == _HEAD_BYTES and len(lines) > 1 else lines


def unpacked(path: Path) -> bytes | None:
    """The content of a packed file, piece by piece, so that a small one cannot fill the memory; None for others."""
    require_regular(path)
    with open(path, "rb") as file:
        start = file.read(8)
    if what := next((word for magic, word in _NOT_UNPACKED.items() if start.startswith(magic)), None):
        raise RayflError(f"{path} is packed ({what}); unpack it, or pack it with gzip")
    if not (packing := next((word for magic, word in _PACKED.items() if start.startswith(magic)), None)):
        return None
    parts = list[bytes]()
    size = 0
    with pa.CompressedInputStream(pa.OSFile(str(path)), packing) as stream:
        while part := stream.read(_PIECE):
            parts.append(part)
            size += len(part)
            memory.require(2 * size, f"{path}, unpacked,", "give less data")
    return b"".join(parts)


def _decoded(path: Path, content: bytes, encoding: str) -> str:
    try:
        return content.decode(encoding)
    except LookupError:
        raise RayflError(
            f"data.encoding={encoding!r} is unknown; give one of Python's, such as utf-8, latin-1, cp1252 or utf-16"
        ) from None
    except UnicodeDecodeError as error:
        raise RayflError(
            f"{path} is no {encoding} text (row {content[: error.start].count(10)}, counted from 0 with the header); "
            "give data.encoding another one, such as 'latin-1'"
        ) from None


def _refuse_utf_16(path: Path, head: bytes) -> None:
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise RayflError(f"{path} is UTF-16 text; set data.encoding='utf-16'")


def _comments(lines: Sequence[str]) -> int:
    """The number of lines above the table: blank ones, and comments that have fewer fields than the line after them."""
    for row, line in enumerate(lines[:-1]):
        most = {**dict.fromkeys(_MARKS, _width(lines[row + 1])), **dict.fromkeys(_MARKS_ALONE, 1)}
        if line.strip() and _width(line) >= min(most.get(line[0], 0), _width(lines[row + 1])):
            return row
    return 0


def _noted_separator(lines: Sequence[str]) -> Separator | None:
    """The separator in a first line of Excel's, sep=; for instance."""
    noted = re.fullmatch(r'"?sep=(.)"?', lines[0].strip(" \r\n")) if lines else None
    return next((separator for separator in _GUESSED if noted and separator == noted[1]), None)


def _is_of_whole_numbers(table: pa.Table, name: str) -> bool:
    return table.column_names.count(name) == 1 and pa.types.is_integer(table.schema.field(name).type)


def _with_zeros(table: pa.Table, texts: pa.Table) -> pa.Table:
    """The table with the `texts` of its columns of whole numbers, where numbers with leading zeros became others."""
    for name in texts.column_names:
        written = _trimmed(texts.column(name))
        with_zeros = compute.call_function(
            "match_substring_regex", [written], compute.MatchSubstringOptions(pattern=r"^-?0\d")
        )
        if compute.call_function("any", [with_zeros]).as_py() and len(written.unique()) > len(
            table.column(name).unique()
        ):
            table = table.set_column(table.column_names.index(name), name, written)
    return table


def _width(line: str) -> int:
    return len(re.findall(r"[,;\t|]", line[1:]))


def _separator(lines: Sequence[str]) -> Separator:
    """The first separator that cuts all lines into one number of fields; a comma if none does."""
    rows = [_cells(lines, separator) for separator in _GUESSED]
    fitting: list[Separator] = [
        _GUESSED[guess] for guess, cells in enumerate(rows) if _is_even(cells) and len(cells[0]) > 1
    ]
    fitting.extend(_GUESSED[guess] for guess, cells in enumerate(rows) if _lacks_a_name(cells))
    if fitting[:2] == ["\t", "whitespace"] and any("  " in line.split("\t")[0].strip() for line in lines):
        # Columns of blanks, and one tab among them.
        return "whitespace"
    return fitting[0] if fitting else ","


def _lacks_a_name(cells: Sequence[Sequence[str]]) -> bool:
    """Whether the first of several fields in a row has no name: the first row has one field less than all others."""
    return _is_even(cells[1:]) and 1 < len(cells[0]) == len(cells[1]) - 1


def _is_even(cells: Sequence[Sequence[str]]) -> bool:
    return len({len(row) for row in cells}) == 1


def _delimiter(separator: Separator) -> str:
    return "\t" if separator in ("tab", "whitespace") else separator


def _cells(lines: Sequence[str], separator: Separator) -> list[list[str]]:
    """The fields of the first rows."""
    if separator == "whitespace":
        lines = _tabulated("\n".join(lines[:_HEAD_ROWS]).encode()).decode().splitlines()
    rows = csv.reader(lines, delimiter=_delimiter(separator))
    try:
        return [row for row in islice(rows, _HEAD_ROWS) if row]
    except csv.Error:
        return []


def _tabulated(content: bytes) -> bytes:
    """A text whose fields are separated by runs of blanks, with one tab for each run outside quotes."""
    lines = re.sub(rb"(?m)^[ \t]+|[ \t\r]+$", b"", content)
    return re.sub(rb'("[^"\n]*")|[ \t]+', lambda match: match[1] or b"\t", lines)


def _decimal(separator: Separator, cells: Sequence[Sequence[str]]) -> Literal[".", ","]:
    """A comma if it cannot separate fields and numbers in the first rows have one, and none has a point."""
    numbers = [cell.strip() for row in cells for cell in row] if separator != "," else []
    has = {mark: any(re.fullmatch(rf"[-+]?\d*{re.escape(mark)}\d+", cell) for cell in numbers) for mark in (".", ",")}
    return "," if has[","] and not has["."] else "."


def _names(path: Path, dialect: Dialect, cells: Sequence[Sequence[str]]) -> list[str] | None:
    """The names of the columns of a file without a header; None if it has one."""
    if dialect.header is None:
        return None
    width = len(cells[0]) if cells else 0
    if _has_header(cells) or (cells and [*dialect.header] == [cell.strip() for cell in cells[0]]):
        raise RayflError(f"{path} has a header, {shown(cells[0])}; remove data.header")
    if dialect.header == "numbered":
        return [*map(str, range(width))]
    if len(dialect.header) != width:
        raise RayflError(
            f"data.header names {len(dialect.header)} columns, and {path} has {width}: "
            f"{shown(cells[0] if cells else [])}"
        )
    return [*dialect.header]


def _has_header(cells: Sequence[Sequence[str]]) -> bool:
    """Whether the first row has words above each column whose other fields are numbers, and there are such columns."""
    if len(cells) < 3 or not _is_even(cells):
        return False
    columns = [
        [re.fullmatch(_NUMERAL, cell.strip()) is not None for cell in column] for column in zip(*cells, strict=True)
    ]
    of_numbers = [column[0] for column in columns if all(column[1:])]
    gaps = any(cell.strip() in GAPS for cell in cells[0])
    return bool(of_numbers) and not any(of_numbers) and not gaps


def _trimmed(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return compute.call_function("utf8_trim_whitespace", [column]) if pa.types.is_string(column.type) else column


def _without_blank_gaps(column: pa.ChunkedArray, decimal: str) -> pa.ChunkedArray:
    """A column of texts as numbers, if it has only numbers beside gaps with blanks around them (`5, ?, 7`)."""
    if not pa.types.is_string(column.type):
        return column
    texts = _trimmed(column)
    are_gaps = compute.call_function("is_in", [texts], compute.SetLookupOptions(value_set=pa.array(GAPS)))
    are_all = compute.call_function("all", [are_gaps]).as_py()
    if are_all or not compute.call_function("any", [are_gaps]).as_py():
        return column
    numerals = compute.call_function("if_else", [are_gaps, pa.scalar(None, pa.string()), texts])
    point = compute.ReplaceSubstringOptions(pattern=decimal, replacement=".")
    numerals = compute.call_function("replace_substring", [numerals], point)
    for kind in (pa.int64(), pa.float64()):
        try:
            return numerals.cast(kind)
        except pa.ArrowInvalid:
            continue
    return column

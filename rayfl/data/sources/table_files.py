"""Reads tables from files and folders: CSV, JSON, JSON lines, Parquet, Feather, and what Hugging Face's datasets save.

A folder is one table, or one for each split: its files and folders are splits if their names say so (splits.py).
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from logging import WARNING
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.json
from pyarrow import parquet

from rayfl.data.sources.csv_files import Dialect, read_csv, unpacked
from rayfl.data.sources.splits import FileSplit, chosen, leave_out, split_files, split_folders, split_of
from rayfl.errors import RayflError, log_once
from rayfl.limits import memory
from rayfl.limits.regular_files import expanded, files_below, read_bytes, reading, require_regular
from rayfl.settings import listed, shown

FILE = "file"
"""The column that says from which file of a folder a row is, for data.owners."""
LENGTHS = b"rayfl.lengths"
"""In the schema's metadata of the table of a folder: the name and the number of rows of each file, in their order."""
FORMATS: Mapping[str, str] = {
    **dict.fromkeys((".csv", ".tsv", ".tab", ".txt", ".dat", ".data", ".test", ".train", ".tra", ".tes"), "csv"),
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "json"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".feather", ".arrow", ".ipc"), "feather"),
}
_KNOWN = "CSV (.csv, .tsv, .txt, .data), JSON (.json, .jsonl), .parquet or .feather"
OTHER_FORMATS = {
    ".mat": "a file of MATLAB's; write its arrays in Python: numpy.savez('my_data.npz', inputs=mat['X'], "
    "labels=mat['y'].ravel()) with mat = scipy.io.loadmat(FILE), and set data.name='arrays'",
    ".npz": "an archive of numpy's; set data.name='arrays'",
    ".npy": "an array of numpy's; put it into an .npz file with its labels, and set data.name='arrays'",
    **dict.fromkeys(
        (".xlsx", ".xls", ".ods"), "a spreadsheet; save its sheet as .csv, or write it as .parquet or .json"
    ),
    ".arff": "a file of Weka's; write its rows as CSV, with a first row of the attributes' names",
    **dict.fromkeys((".h5", ".hdf5"), "an HDF5 file; write its arrays with numpy.savez, and set data.name='arrays'"),
    **dict.fromkeys((".zip", ".7z", ".xz", ".tar", ".tgz", ".rar"), "packed; unpack it, and give what is in it"),
    **dict.fromkeys(
        (".pkl", ".pickle"), "a pickle, which is a program that rayfl does not run; write it as Parquet or CSV"
    ),
}
"""What files of other formats are, and what to do with them."""
_PACKINGS = ".gz", ".bz2", ".zst"
_SHARD = r"[-_.]?(part[-_.]?)?\d+(-of-\d+)?(-[0-9a-f]+)?"
"""What the names of shards have after that of their split: train-00000-of-00002."""
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""What pandas and Spark write in place of a missing value in the name of a folder, KEY=VALUE."""
_NO_DATA = r"cache-.*\.arrow|(dataset_info|dataset_dict|state|config)\.json|[_.].*|(README|LICENSE).*"
"""The names of files in folders of data that are no data."""
JSON_FACTOR = 12
"""Memory that a JSON text takes as Python objects, in times of its bytes. A guess, on the safe side."""

Tables = dict[FileSplit, pa.Table]
"""The train split, and the test split if there is one."""


def ending(path: Path) -> str:
    """A file's ending in small letters, without that of its packing."""
    name = path.name.lower()
    return Path(next((name.removesuffix(packing) for packing in _PACKINGS if name.endswith(packing)), name)).suffix


def form(path: Path) -> str | None:
    """The format of a file by its ending; None if it is unknown."""
    # UCI's german.data-numeric and sonar.all-data.
    return FORMATS.get(re.sub(r"^\.data-.*|^\.all-data$", ".data", ending(path)))


def read_tables(path: str, setting: str, dialect: Dialect, with_file: bool = False) -> Tables:
    """The table in a file, or the tables of the splits in a folder or in a JSON file.

    with_file: whether the tables of a folder get the column `FILE`.
    Raise RayflError if it cannot be read, if a folder has no table, or if a setting of CSV files does nothing.
    """
    file = expanded(path)
    if not file.is_dir():
        return _read_file(file, path, setting, dialect)
    splits = folder_splits(file, _is_table)
    if not splits:
        raise RayflError(f"{path} has no files of tables: {_KNOWN}; give {setting} another folder")
    parts: dict[FileSplit, list[tuple[Path, pa.Table]]] = {}
    columns = _folder_columns(file, [inner for files in splits.values() for _, inner in files])
    for split, files in splits.items():
        for owner, inner in files:
            named = {**columns[inner], **({FILE: owner} if with_file else {})}
            tables = _of_folder(inner, named, setting, dialect)
            if len(tables) > 1 and len(splits) > 1:
                raise RayflError(f"{inner} has splits of its own, and is one itself; give {setting} a single file")
            for inner_split, table in tables.items():
                parts.setdefault(split if len(tables) == 1 else inner_split, []).append((inner, table))
    widths = {table.num_columns for tables in parts.values() for _, table in tables}
    if dialect.header == "numbered" and len(widths) > 1:
        names = listed([inner.name for files in splits.values() for _, inner in files][:4], "and")
        raise RayflError(
            f"{path} has files of unlike numbers of columns ({names}), which data.header='numbered' cannot name; put "
            f"what belongs together into one file, or give {setting} one file"
        )
    return {split: _joined(path, tables) for split, tables in parts.items()}


def _joined(folder: str, parts: Sequence[tuple[Path, pa.Table]]) -> pa.Table:
    """The rows of several files, columns by their names. Raise RayflError if types or the names of classes differ."""
    first, schema = parts[0][0], parts[0][1].schema
    names = dict.fromkeys(name for _, table in parts for name in table.column_names)
    for file, table in parts:
        for name in (name for name in names if name in schema.names and name in table.column_names):
            require_class_names(file, table.schema, first, schema, name)
        if lacking := [name for name in names if name not in table.column_names]:
            log_once(
                WARNING,
                f"{file} has no column {listed([*map(repr, lacking)], 'and')}, as other files of {folder} do; its rows "
                "have gaps there",
            )
        with reading(file, f"write its columns as {first.name} has them", pa.ArrowException):
            schema = pa.unify_schemas([schema, table.schema], promote_options="permissive")
    joined = pa.concat_tables([table for _, table in parts], promote_options="permissive")
    lengths = [(str(file.relative_to(expanded(folder))), table.num_rows) for file, table in parts]
    return joined.replace_schema_metadata({**(joined.schema.metadata or {}), LENGTHS: json.dumps(lengths)})


def row_in_words(table: pa.Table, row: int) -> str:
    """A row of a table as a sentence names it: by its file and its number in that file, if the table is a folder's."""
    lengths = json.loads((table.schema.metadata or {}).get(LENGTHS, b"[]"))
    # Rows may have been left out since.
    if len(lengths) > 1 and sum(length for _, length in lengths) == table.num_rows:
        for name, length in lengths:
            if row < length:
                return f"row {row} of {name} (counted from 0)"
            row -= length
    return f"row {row} (counted from 0)"


def class_names(schema: pa.Schema, name: str) -> tuple[str, ...]:
    """The names that Hugging Face's datasets gives the numbers of a column; () if it gives none."""
    try:
        # Any: what a file's JSON says.
        noted: Any = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        feature = noted["info"]["features"][name]
        names = feature.get("names") or feature.get("feature", {}).get("names") or ()
    except (ValueError, KeyError, TypeError, AttributeError):
        return ()
    return tuple(map(str, names)) if isinstance(names, list) else ()


def require_class_names(file: Path | str, schema: pa.Schema, other: Path | str, before: pa.Schema, name: str) -> None:
    """Raise RayflError if both files name the classes of a column, and not in one order: their numbers differ."""
    names, others = class_names(schema, name), class_names(before, name)
    if names and others and names != others:
        raise RayflError(
            f"{file} numbers the classes of column {name!r} as {shown([*names])}, and {other} as {shown([*others])}; "
            "write both with the same class names in one order"
        )


def _is_table(file: Path) -> bool:
    return form(file) is not None and not re.fullmatch(_NO_DATA, file.name)


def folder_splits(folder: Path, is_data: Callable[[Path], bool]) -> dict[FileSplit, list[tuple[str, Path]]]:
    """The files of each split of a folder at any depth, in the order of their names, each with its owner's name.

    Splits are folders called train and test, files called so (also their shards, train-00000-of-00002), or those of an
    owner, ann_train.csv or ann/train.csv. All else is train. The owner is the file's name without its split and its
    ending, or if nothing is left, that of its folder.
    """
    splits: dict[FileSplit, list[tuple[str, Path]]] = {}
    if (homes := split_folders(folder)) is not None:
        for split, home in homes.items():
            splits[split] = [(_stem(file), file) for file in files_below(home) if is_data(file)]
        return splits
    files = [file for file in files_below(folder) if is_data(file)]
    named: dict[FileSplit, list[Path]] = {}
    for file in files:
        if (split := split_of(_unsharded(file))) is not None:
            named.setdefault(split, []).append(file)
    if "train" in named and len(named) > 1:
        for split, first in chosen(folder, [(split, paths[0]) for split, paths in named.items()]).items():
            paths = next(paths for paths in named.values() if paths[0] == first)
            splits[split] = [(file.parent.name, file) for file in paths]
        if others := [str(file.relative_to(folder)) for file in files if split_of(_unsharded(file)) is None]:
            leave_out(folder, others, named["train"][0])
        return splits
    _refuse_deeper_splits(folder, files)
    if all(file.parent == folder for file in files):
        for owner, owner_files in split_files(files, _stem).items():
            for split, file in owner_files.items():
                splits.setdefault(split, []).append((owner, file))
    stems = [*map(_stem, files)]
    owners = stems if len({*stems}) == len(stems) else [file.parent.name for file in files]
    return splits or ({"train": [*zip(owners, files, strict=True)]} if files else {})


def _refuse_deeper_splits(folder: Path, files: Iterable[Path]) -> None:
    """Raise RayflError if folders called train and test lie deeper than in `folder`, where they are no splits."""
    homes = sorted({parent for file in files for parent in file.parents if folder in parent.parents})
    for train in (path for path in homes if split_of(path.name) == "train"):
        beside = [
            path.name for path in homes if path.parent == train.parent and split_of(path.name) not in ("train", None)
        ]
        if beside:
            inner = train.parent.relative_to(folder)
            raise RayflError(
                f"{folder} has {train.name} and {beside[0]} in its folder {inner}, where they are no splits; give "
                f"data.path the folder {train.parent}"
            )


def _unsharded(file: Path) -> str:
    return re.sub(rf"{_SHARD}$", "", _stem(file))


def _stem(file: Path) -> str:
    """A file's name without the endings of its format and packing."""
    stem = file.name
    for endings in (_PACKINGS, (*FORMATS, ".npz", ".npy")):
        stem = next((stem[: -len(ending)] for ending in endings if stem.lower().endswith(ending)), stem)
    return stem


def _folder_columns(folder: Path, files: Sequence[Path]) -> dict[Path, dict[str, int | str | None]]:
    """What the folders called KEY=VALUE around each file say: numbers, if all values of KEY are; None for no value."""
    texts = {
        file: dict(part.split("=", 1) for part in file.relative_to(folder).parts[:-1] if "=" in part) for file in files
    }
    values = [(name, value) for named in texts.values() for name, value in named.items() if value != _NO_VALUE]
    others = {name for name, value in values if not re.fullmatch(r"0|[1-9]\d{0,17}", value)}

    def typed(name: str, value: str) -> int | str | None:
        if value == _NO_VALUE:
            return None
        return unquote(value) if name in others else int(value)

    return {file: {name: typed(name, value) for name, value in named.items()} for file, named in texts.items()}


def _of_folder(file: Path, named: Mapping[str, int | str | None], setting: str, dialect: Dialect) -> Tables:
    """The tables of one file of a folder, with further columns of one value each."""
    tables = _read_file(file, str(file), setting, dialect)
    for split, table in tables.items():
        for name, value in named.items():
            if name not in table.column_names:
                table = table.append_column(name, pa.array([value] * table.num_rows))
        tables[split] = table
    return tables


def _read_file(file: Path, path: str, setting: str, dialect: Dialect) -> Tables:
    kind = form(file)
    if kind is None:
        if cure := OTHER_FORMATS.get(ending(file)):
            raise RayflError(f"{setting}={path!r} is {cure}")
        raise RayflError(
            f"{setting}={path!r} is not allowed; it must be a file with one of the endings of {_KNOWN} (CSV and JSON "
            "also packed, .gz, .bz2, .zst), or a folder of such files"
        )
    if kind != "csv" and dialect != Dialect(texts=dialect.texts, names=dialect.names):
        raise RayflError(
            f"{setting}={path!r} is no CSV file, so that data.separator, header, encoding and decimal do nothing"
        )
    advice = f"give {setting} the path of a .csv, .json, .jsonl, .parquet or .feather file"
    if kind == "json" and file.exists():
        advice = "write one object for each row, and values of one type under each name"
    if kind == "csv" and file.exists():
        advice = "give each row as many fields as its header has, without lines of titles, notes or sums"
    # pyarrow takes no whole numbers of more than 64 bits, and fails in several ways at damaged files.
    with reading(file, advice, pa.ArrowException, OverflowError, LookupError):
        require_regular(file)
        try:
            if kind == "csv":
                table = read_csv(file, dialect)
                if dialect.header is None:
                    _require_header(file, table.column_names)
                return {"train": table}
            if kind == "json":
                return _read_json(file)
            table = _read_parquet(file) if kind == "parquet" else _read_feather(file)
            table.validate(full=True)
            return {"train": table}
        except pa.ArrowMemoryError:
            raise ValueError("it asks for more memory than there is, or is damaged") from None


def _require_header(file: Path, names: Sequence[str]) -> None:
    """Raise RayflError if the first row of a CSV file is one of numbers, and not of columns that are counted."""
    numbers = [name for name in names if re.fullmatch(r"[-+]?\d*\.?\d+([eE][-+]?\d+)?", name)]
    if len(numbers) > 1 and len(numbers) == len(names):
        are_counted = all(map(str.isdecimal, names)) and len({*names}) == len(names)
        if not are_counted:
            raise RayflError(
                f"{file} has numbers in its first row, {shown([*names])}, which would be its header; give data.header "
                "the names of its columns, or 'numbered' to call them '0', '1', ..."
            )


def _read_parquet(file: Path) -> pa.Table:
    groups = parquet.read_metadata(file)
    unpacked_bytes = sum(groups.row_group(group).total_byte_size for group in range(groups.num_row_groups))
    memory.require(unpacked_bytes, str(file), "give less data")
    # `read_table` would take folders called KEY=VALUE for columns.
    return parquet.ParquetFile(file).read()


def _read_feather(file: Path) -> pa.Table:
    """The table in a file of Arrow's: Feather, or the stream that Hugging Face's datasets save."""
    with pa.memory_map(str(file)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        batches = list[pa.RecordBatch]()
        reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        size = 0
        for batch in _batches(reader):
            size += batch.nbytes
            memory.require(size, str(file), "give less data")
            batches.append(batch)
    return pa.Table.from_batches(batches, reader.schema)


# Any: readers of pyarrow.
def _batches(reader: Any) -> Iterator[pa.RecordBatch]:
    if hasattr(reader, "num_record_batches"):
        return map(reader.get_batch, range(reader.num_record_batches))
    return iter(reader)


def _read_json(file: Path) -> Tables:
    """JSON lines, a list of objects, {"training": [...], "validation": [...]}, or pandas' {column: {row: value}}."""
    content = unpacked(file)
    content = read_bytes(file) if content is None else content
    content.decode()
    if (start := content.lstrip()[:1]) not in (b"[", b"{"):
        raise ValueError("it has neither objects nor a list of them")
    document = whole_json(file, content) if start == b"[" or ending(file) == ".json" else None
    if document is None:
        options = pyarrow.json.ParseOptions(newlines_in_values=True)
        return {"train": pyarrow.json.read_json(pa.BufferReader(content), parse_options=options)}
    if isinstance(document, list):
        return {"train": _of_rows(file, document)}
    listed_splits = {
        name: rows for name, rows in document.items() if split_of(name) is not None and isinstance(rows, list)
    }
    if listed_splits:
        named: list[tuple[FileSplit, Path]] = [
            (split, file / name) for name in listed_splits if (split := split_of(name)) is not None
        ]
        return {split: _of_rows(file, listed_splits[place.name]) for split, place in chosen(file, named).items()}
    if (rows := _rows_of(document)) is not None:
        return {"train": _of_rows(file, rows)}
    columns = document
    if document and all(isinstance(cells, dict) for cells in document.values()):
        # The rows of pandas' columns have names, and may be in another order in each.
        names = dict.fromkeys(row for cells in document.values() for row in cells)
        columns = {name: [cells.get(row) for row in names] for name, cells in document.items()}
    if not columns or not all(isinstance(cells, list) for cells in columns.values()):
        raise ValueError("it is no list of objects, but one object, none of whose names is data or that of a split")
    return {"train": pa.table(columns)}


# Any: what JSON holds.
def _rows_of(document: Mapping[str, Any]) -> list[Any] | None:
    """The rows of {"data": [...]}, or as pandas writes them by orient "split" or "index"; None for anything else."""
    rows, names = document.get("data"), document.get("columns")
    if isinstance(rows, list) and isinstance(names, list):
        return [dict(zip(names, row, strict=True)) if isinstance(row, list) else row for row in rows]
    if isinstance(rows, list):
        return rows
    are_numbered = all(name.isdecimal() and isinstance(row, dict) for name, row in document.items())
    has_names = any(not name.isdecimal() for row in document.values() if isinstance(row, dict) for name in row)
    return [*document.values()] if are_numbered and has_names else None


# Any: what JSON holds.
def whole_json(file: Path, content: bytes) -> Any:
    """The value of a JSON text; None if there are several, line after line. Raise ValueError if it is none."""
    memory.require(JSON_FACTOR * len(content), f"{file}, as JSON,", "give less data, or JSON lines")
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("its lists are nested too deep") from None
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return None
        raise


# Any: what JSON holds.
def _of_rows(file: Path, rows: Iterable[Any]) -> pa.Table:
    rows = [*rows]
    if wrong := [row for row in rows if not isinstance(row, dict)][:1]:
        raise ValueError(f"{shown(wrong[0])} is among its objects, one for each row")
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: [row.get(name) for row in rows] for name in names})

"""The figures of a benchmark: a table for the terminal and the same numbers, unrounded, for a JSON file."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from rayfl.errors import RayflError
from rayfl.run_directory.run_files import OutputKind, require_replaceable, write_output


def gigabytes(size: float) -> str:
    """Bytes as a cell."""
    return f"{size / 1e9:.2f}"


@dataclass(frozen=True)
class Column:
    """A column: its key in the JSON file, its heading in the terminal, and the format of its values there.

    A column without a heading is only in the file.
    """

    key: str
    heading: str = ""
    shown: str | Callable[[Any], str] = "{}"

    # Any: whatever JSON holds.
    def cell(self, value: Any) -> str:
        """A value as the terminal shows it; "" for None."""
        if value is None:
            return ""
        return self.shown.format(value) if isinstance(self.shown, str) else self.shown(value)


@dataclass
class Figures:
    """Rows of numbers under columns. `name`: their key in the JSON file."""

    name: str
    columns: Sequence[Column]
    title: str | None = None
    caption: str | None = None
    # Any: whatever JSON holds.
    rows: list[dict[str, Any]] = field(default_factory=list)
    _bold: set[int] = field(default_factory=set)

    def add(self, *values: Any, bold: bool = False) -> None:
        """Add a row, with one value per column."""
        self._bold |= {len(self.rows)} if bold else set()
        self.rows.append({column.key: value for column, value in zip(self.columns, values, strict=True)})

    def table(self) -> Table:
        """The rows for the terminal."""
        shown = [column for column in self.columns if column.heading]
        table = Table(*(column.heading for column in shown), title=self.title, caption=self.caption)
        for number, row in enumerate(self.rows):
            style = "bold" if number in self._bold else None
            table.add_row(*(column.cell(row[column.key]) for column in shown), style=style)
        return table


@dataclass(frozen=True)
class Results:
    """The JSON file of a benchmark. Without `overwrite` it only replaces a file of the same benchmark."""

    name: str
    path: Path
    overwrite: bool = False

    @property
    def kind(self) -> OutputKind:
        """The kind of file that this benchmark writes, with its mark."""
        return OutputKind(f"a file of `{self._command}`", f'"written_by": "{self._command}"'.encode())

    @property
    def _command(self) -> str:
        return f"python -m benchmarks {self.name}"

    def require(self) -> None:
        """Raise RayflError if the file cannot be written; call before anything is measured."""
        if not self.path.parent.is_dir():
            raise RayflError(
                f"--json {self.path}: there is no directory {self.path.parent}; make it, or name another place"
            )
        require_replaceable(self.path, self.kind, self.overwrite)

    # Any: whatever JSON holds.
    def save(self, *figures: Figures, **facts: Any) -> None:
        """Write facts and the rows of all figures. Raise the errors of `write_output`."""
        content = {"written_by": self._command, **facts, **{each.name: each.rows for each in figures}}
        write_output(self.path, f"{json.dumps(content, indent=2)}\n".encode(), self.kind, self.overwrite)

    # Any: whatever JSON holds.
    def write(self, *figures: Figures, **facts: Any) -> None:
        """`save`, and print the path."""
        self.save(*figures, **facts)
        print(f"figures: {self.path}")

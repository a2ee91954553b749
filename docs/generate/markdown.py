"""Docstrings, tables and settings as Markdown."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from jobs.catalogue import setting_rows


def as_markdown(text: str) -> str:
    """A docstring as Markdown: plain text, `- ` lists, and lines indented by four spaces unchanged."""
    lines: list[str] = []
    for line in text.splitlines():
        verbatim, item, follows = line.startswith("    "), line.startswith("- "), line.startswith("  ")
        before = lines[-1] if lines else ""
        if before and (
            (item and not before.startswith(("- ", "  ")))
            or (not item and not follows and before.startswith(("- ", "  ")))
            or verbatim != before.startswith("    ")
        ):
            lines.append("")
        lines.append(
            line if verbatim else f"- {escaped(line[2:])}" if item else f"{line[: 2 * follows]}{escaped(line)}"
        )
    return "\n".join(lines)


def escaped(text: str) -> str:
    """A line with Markdown and HTML escaped, except `code`."""
    parts = re.split(r"(`[^`]*`)", text.strip())
    return "".join(
        part if number % 2 else re.sub(r"([\\*_{}\[\]#])", r"\\\1", part.replace("&", "&amp;").replace("<", "&lt;"))
        for number, part in enumerate(parts)
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the cells are Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines) + "\n"


def _cell(text: str) -> str:
    """A cell with its pipes escaped; those in `code` separate no cells."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if number % 2 else part.replace("|", "&#124;") for number, part in enumerate(parts))


def code(text: str) -> str:
    """Text as code; "" stays ""."""
    return f"`{text}`" if text else ""


# Any: a class of a kind, or of settings.
def settings_table(found: Any) -> str:
    """A table of the settings of a class; "" if it has none."""
    rows = [
        [code(name), code(default), escaped(allowed), escaped(description)]
        for name, default, allowed, description in setting_rows(found)
    ]
    return table(["setting", "default", "allowed", "what it is"], rows) if rows else ""

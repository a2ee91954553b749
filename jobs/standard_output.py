"""Standard output: prints text and tables, and copes with a reader that leaves early, as `head` does.

If its reader leaves, the command ends, and a run can be resumed.
"""

import re
import select
import sys
from io import StringIO
from typing import TextIO

from rich.console import Console
from rich.table import Table

from rayfl.errors import printable


def first_sentence(text: str) -> str:
    """The first sentence of a text, in one line; "" if there is none."""
    words = " ".join(text.split())
    # "..." does not end a sentence.
    return re.split(r"(?<=[^.\s])\.\s", words)[0].rstrip(".") + "." * bool(words)


def say(text: str, stream: TextIO | None = None) -> None:
    """Print text, by default to standard output. Characters that would command a terminal are escaped."""
    print(printable(text), file=stream, flush=True)


def line_width(width: int) -> int:
    """The letters of a line: of the terminal, or `width` if the output is a file."""
    return Console().width if sys.stdout.isatty() else width


def print_table(table: Table, width: int = 110) -> None:
    """Print a table as wide as the terminal, or `width` letters wide if the output is a file; escaped as by `say`."""
    text = StringIO()
    Console(file=text, width=line_width(width), color_system=None, markup=False).print(table)
    say(text.getvalue().removesuffix("\n"))


def reader_has_left() -> bool:
    """Whether standard output is a pipe that nobody reads any more."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError):
        return False

"""Standard output: prints text and tables, and copes with a reader that leaves early, as `head` does.

If its reader leaves, a command that prints a list ends, and a run goes on.
"""

import os
import re
import select
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, redirect_stdout
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
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


def print_table(table: Table, width: int = 110) -> None:
    """Print a table as wide as the terminal, or `width` letters wide if the output is a file; escaped as by `say`."""
    _TextConsole(width=None if sys.stdout.isatty() else width, markup=False, emoji=False).print(table)


class _TextConsole(Console):
    """A console that takes nothing in its text for a command."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich's, with escaped text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def on_broken_pipe(self) -> None:
        """Raise the error, where rich's console ends the process."""
        raise BrokenPipeError


def reader_has_left() -> bool:
    """Whether standard output is a pipe that nobody reads any more."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError):
        return False


def discard_output() -> None:
    """Discard all further output, also the text that Python flushes at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def outliving_its_reader() -> AbstractContextManager[object]:
    """Within this context, code may print although nobody reads the output any more."""
    return redirect_stdout(_Outliving(sys.stdout))


class _Outliving:
    """A stream that discards its text once its reader has left."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text, or discard it if nobody reads."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            discard_output()
            return len(text)

    def flush(self) -> None:
        """Flush what was written."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            discard_output()

    # Any: any other attribute of a stream.
    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

"""Standard output: prints text and tables, to any terminal, and after the reader has left, as `head` does."""

import codecs
import os
import re
import sys
from io import BufferedWriter, FileIO, StringIO, TextIOWrapper
from typing import TextIO

from rich.console import Console
from rich.table import Table

from rayfl.errors import printable
from rayfl.untyped import Foreign

_PLAIN = {"\N{PLUS-MINUS SIGN}": "+-", "\N{EN DASH}": "-", "\N{HORIZONTAL ELLIPSIS}": "..."}
"""How a terminal that lacks them shows the characters that rayfl and rich print themselves, but for lines of tables."""


def _plainly(error: UnicodeError) -> tuple[str, int]:
    """A handler of codecs: characters that an encoding lacks become those of `_PLAIN`, or what Python writes."""
    assert isinstance(error, UnicodeEncodeError)
    letters = error.object[error.start : error.end]
    return "".join(_PLAIN.get(letter, ascii(letter)[1:-1]) for letter in letters), error.end


codecs.register_error(_plainly.__name__, _plainly)


class _Patient(FileIO):
    """A file that drops what is written once nobody reads it any more."""

    def write(self, data: Foreign, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def serve_any_reader() -> None:
    """Let standard output and errors outlive their reader, and show any character in any encoding.

    So `rayfl run | head -2` plays to its end, and a name in Greek ends no run on a terminal that has only ASCII.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # The caller has closed it.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
            continue
        stream.flush()
        file = BufferedWriter(_Patient(stream.fileno(), "w", closefd=False))
        setattr(sys, name, TextIOWrapper(file, stream.encoding, _plainly.__name__, line_buffering=True))


class _AsEncoded(StringIO):
    """Text for standard output: rich draws tables in ASCII if the encoding has no other lines."""

    @property
    def encoding(self) -> str:
        return sys.stdout.encoding


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
    text = _AsEncoded()
    Console(file=text, width=line_width(width), color_system=None, markup=False).print(table)
    say(text.getvalue().removesuffix("\n"))

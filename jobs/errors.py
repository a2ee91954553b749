"""What a command says of an exception: one sentence and an exit code, whatever it is.

A user's mistake raises `RayflError`. Any other ValueError is a bug, of rayfl's or of somebody's plug-in.
"""

import os
import traceback

from actors.errors import ClusterError
from jobs.exit_codes import FAILED, MISTAKE
from rayfl.errors import RayflError, reason
from rayfl.rounds.errors import ClientError, HookError, MethodError, out_of_memory
from rayfl.run_directory.atomic_files import DiskError

TRACEBACK = "RAYFL_TRACEBACK"
"""The environment variable that shows tracebacks too, where it is not empty."""
_LONGEST = 300
"""Letters of an unexpected error that are shown."""


def described(error: Exception) -> tuple[str, int]:
    """A line for the user, and the command's exit code. The traceback is printed where `RAYFL_TRACEBACK` is set."""
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    sentence, code = _sentence(error)
    return one_line(sentence), code


def one_line(text: str) -> str:
    """The text with what a terminal does not show written as Python writes it: a line break becomes \\n."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def _sentence(error: Exception) -> tuple[str, int]:
    """See `described`."""
    if isinstance(error, MethodError | HookError):
        return f"the run failed: {error}{_advice()}", FAILED
    if isinstance(error, ClientError | ClusterError | DiskError):
        return f"the run failed: {error}", FAILED
    if isinstance(error, RayflError):
        return str(error), MISTAKE
    if isinstance(error, OSError) and (error.filename or error.errno):
        return f"{error.filename or 'a file'} cannot be written: {reason(error)}; name another place", MISTAKE
    words = " ".join(str(error).split())[:_LONGEST]
    if out_of_memory(error):
        lack = f" ({words})" if words else ""
        return f"this machine's memory ran out{lack}; make the model or the data smaller, or use a larger one", FAILED
    return (f"an error that rayfl did not expect: {type(error).__name__}{f': {words}' if words else ''}{_advice()}"), (
        MISTAKE if isinstance(error, ValueError) else FAILED
    )


def _advice() -> str:
    """How to see the traceback, where it is not shown already."""
    return "" if os.environ.get(TRACEBACK) else f"; set {TRACEBACK}=1 to see where it comes from"

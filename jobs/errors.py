"""What a command says of an exception: one sentence and an exit code, whatever it is.

A user's mistake raises `SettingsError`, or ValueError in a `raise` of ours. A ValueError of Python's or numpy's says
nothing to a user, and is as unexpected as any other exception.
"""

import dis
import os
import sysconfig
import traceback

from actors.errors import ClusterError
from jobs.exit_codes import FAILED, MISTAKE
from rayfl.rounds.errors import ClientError, HookError, MethodError, out_of_memory
from rayfl.run_directory.atomic_files import DiskError
from rayfl.settings import SettingsError, reason

TRACEBACK = "RAYFL_TRACEBACK"
"""The environment variable that shows tracebacks too, where it is not empty."""
_OURS = ("rayfl", "actors", "jobs")
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
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
    if isinstance(error, ValueError) and _is_sentence(error):
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


def _is_sentence(error: ValueError) -> bool:
    """Whether the error was written for a user: raised by a `raise`, and not by one of a library."""
    if isinstance(error, SettingsError) or error.__traceback__ is None:
        return True
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    frame = last.tb_frame
    if frame.f_code.co_code[last.tb_lasti] != dis.opmap["RAISE_VARARGS"]:
        return False
    is_ours = frame.f_globals.get("__name__", "").partition(".")[0] in _OURS
    return is_ours or not frame.f_code.co_filename.startswith(_LIBRARIES)

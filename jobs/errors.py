"""What a command says of an exception: one sentence and an exit code.

A `RayflError` is a user's mistake. Any other ValueError is a bug, of rayfl or of somebody's plug-in.
"""

import os
import traceback

from actors.errors import ClusterError
from actors.parent_process import TRACEBACK
from jobs.exit_codes import FAILED, MISTAKE
from rayfl.errors import RayflError, reason
from rayfl.rounds.errors import ClientError, HookError, MethodError, out_of_memory
from rayfl.run_directory.atomic_files import DiskError

_LONGEST = 300
"""Letters of an unexpected error that are shown."""


def described(error: Exception) -> tuple[str, int]:
    """A line for the user, and the command's exit code. Prints the traceback if `RAYFL_TRACEBACK` is set."""
    advice = f"; set {TRACEBACK}=1 to see where it comes from"
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
        advice = ""
    words = " ".join(str(error).split())[:_LONGEST]
    if isinstance(error, MethodError | HookError):
        sentence, code = f"the run failed: {error}{advice}", FAILED
    elif isinstance(error, ClientError | ClusterError | DiskError):
        sentence, code = f"the run failed: {error}", FAILED
    elif isinstance(error, RayflError):
        sentence, code = str(error), MISTAKE
    elif isinstance(error, OSError) and (error.filename or error.errno):
        place = error.filename or "a file"
        sentence, code = f"{place} cannot be written: {reason(error)}; name another place", MISTAKE
    elif out_of_memory(error):
        lack = f" ({words})" if words else ""
        sentence = f"this machine's memory ran out{lack}; make the model or the data smaller, or use a larger one"
        code = FAILED
    else:
        name = type(error).__name__
        sentence, code = f"an error that rayfl did not expect: {name}{f': {words}' if words else ''}{advice}", FAILED
    return one_line(sentence), code


def one_line(text: str) -> str:
    """The text with what a terminal does not show written as Python writes it: a line break becomes \\n."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)

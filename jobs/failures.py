"""One sentence for the user, and an exit code, for every exception of a command.

A `RayflError` is a user's mistake. Any other ValueError is a bug, of rayfl or of somebody's plug-in.
"""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import click

from actors.errors import ClusterError
from actors.supervision import TRACEBACK, way_back
from jobs.display import say
from rayfl.errors import (
    ClientError,
    ExitError,
    HookError,
    MethodError,
    RayflError,
    one_line,
    out_of_memory,
    plugin_line,
    reason,
    refusing_exits,
)
from rayfl.limits.regular_files import require_current_folder
from rayfl.run_directory.disk import DiskError

FAILED = 1
"""An error of a client, Ray, the cluster or the disk ended a run, or some runs of a sweep failed."""
MISTAKE = 2
"""The command refused a value of the user."""
INTERRUPTED = 130
"""A signal ended the run: the shells' code for a command that SIGINT ended."""
LIMIT = 75
"""`runtime.limit_s` ended the run, or the sweep: "try again" of sysexits.h, as the same command continues it."""
_LONGEST = 300
"""The number of letters shown of an unexpected error."""


@contextmanager
def sentences() -> Iterator[None]:
    """Print each exception as one sentence and exit: code 2 after a user's mistake, 130 after Ctrl-C, otherwise 1."""
    try:
        with refusing_exits():
            require_current_folder()
            yield
    except (click.ClickException, click.Abort, click.exceptions.Exit):
        raise
    # The one handler of all commands: the user sees a sentence and no traceback.
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001
        sentence, code = sentence_and_code(error)
        say(f"rayfl: {sentence}", sys.stderr)
        sys.exit(code)


def sentence_and_code(error: BaseException) -> tuple[str, int]:
    """Return a line for the user, and the exit code. Print the traceback if `RAYFL_TRACEBACK` is set."""
    if _is_interrupt(error):
        return one_line(f"interrupted; {way_back()}"), INTERRUPTED
    advice = f"; set {TRACEBACK}=1 to see where it comes from"
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
        advice = ""
    words, code = " ".join(str(error).split())[:_LONGEST], FAILED
    match error:
        case MethodError() | HookError() | ExitError():
            sentence = f"the run failed: {error}{advice}"
        case ClientError() | ClusterError() | DiskError():
            sentence = f"the run failed: {error}"
        case RayflError():
            sentence, code = str(error), MISTAKE
        case OSError() if error.filename or error.errno:
            sentence = f"{error.filename or 'a file'} cannot be used: {reason(error)}; name another place"
            code = MISTAKE
        case _ if out_of_memory(error):
            lack = f" ({words})" if words else ""
            sentence = f"this machine's memory ran out{lack}; use a smaller model, less data or a larger machine"
        case _:
            cause = f"{type(error).__name__}{f': {words}' if words else ''}{plugin_line(error)}"
            sentence = f"an error that rayfl did not expect: {cause}{advice}"
    return one_line(sentence), code


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C is the error or its origin: a library that was being imported may have raised another one."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None

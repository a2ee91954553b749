"""The errors for a user's mistake and of a client's work, the words that their sentences share, and the log with
warnings and notices. Does not import torch, so that mistakes are reported at once."""

import difflib
import logging
import os
import re
import textwrap
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache

log = logging.getLogger("rayfl")
"""What a user is told beside errors. Commands print it; in Python it is a logger like any other."""
log_once = cache(log.log)
"""Logs a line once in a process: every run of a sweep has it."""


class RayflError(ValueError):
    """One sentence for the user: what was given, what is allowed, what to change.

    An error about one setting has that setting's path as `key` (("method", "lr")), and the sentence shows it between
    `lead` and `reason`; `under` puts the names of outer tables before it.
    """

    def __init__(self, reason: str, key: tuple[str, ...] = (), lead: str = "") -> None:
        super().__init__(reason, key, lead)
        self.reason, self.key, self.lead = reason, key, lead

    def __str__(self) -> str:
        return f"{self.lead}{'.'.join(self.key)}{self.reason}"

    def under(self, *tables: str) -> "RayflError":
        """The same mistake, with the path of the outer `tables` before its key."""
        if self.key:
            return type(self)(self.reason, (*tables, *self.key), self.lead)
        return RayflError(f": {self.reason}", tables) if tables else self


class UnknownName(RayflError):
    """An unknown method, model, compressor, ...; its sentence names the kind itself, so no path goes before it."""

    def under(self, *tables: str) -> RayflError:
        return self


class UnknownKey(RayflError):
    """A key that its table does not have; `known` are the keys that it has."""

    def __init__(self, key: tuple[str, ...], known: Iterable[str]) -> None:
        self.known = sorted(known)
        super().__init__(f"': {did_you_mean(key[-1], self.known)}", key, "unknown key '")
        # The arguments for pickle.
        self.args = (key, self.known)

    def under(self, *tables: str) -> RayflError:
        return UnknownKey((*tables, *self.key), self.known)


class NotFinite(RayflError):
    """Numbers became NaN, infinite, or too large for their type: the model has diverged, or a setting lets it."""


class UnusedSetting(RayflError):
    """A setting was given that does nothing beside the others."""


def refuse_if(mistakes: Iterable[tuple[object, str, str]]) -> None:
    """Raise the first RayflError of these: whether it is one, the setting's dotted key ("" if it is about none), and
    the sentence after the key."""
    for is_wrong, key, words in mistakes:
        if is_wrong:
            raise RayflError(words, tuple(filter(None, key.split("."))))


PLUGIN_MODULES = "rayfl_plugin_"
"""The beginning of the names of the modules that plug-in files become."""


def plugin_line(error: BaseException) -> str:
    """The innermost line of a plug-in file that led to an error, as " (my_methods.py:12)"; "" if none did."""
    frames = [
        f" ({frame.f_code.co_filename}:{line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).startswith(PLUGIN_MODULES)
    ]
    return frames[-1] if frames else ""


class ExitError(RuntimeError):
    """Third-party code called sys.exit; the message says where."""


@contextmanager
def refusing_exits() -> Iterator[None]:
    """Context manager and decorator: raise ExitError if third-party code in the block calls sys.exit or its like.

    Otherwise somebody's model could end a run with exit code 0 and without a result.
    """
    try:
        yield
    except (SystemExit, GeneratorExit) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        words = f"{type(error).__name__}{f': {error}' if str(error) else ''}"
        raise ExitError(
            f"{place.filename}:{place.lineno} raises {words}, which would end rayfl without a result; raise an error"
        ) from error


def one_line(text: str) -> str:
    """The text with what a terminal does not show written as Python writes it: a line break becomes \\n, ESC \\x1b."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def printable(text: str) -> str:
    """`one_line` of every line, so that names from files and runs of others cannot command a terminal."""
    return "\n".join(one_line(line) for line in text.split("\n"))


def reason(error: Exception) -> str:
    """The cause of a file's error, in the system's words if the system has refused it."""
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number).lower() if number else str(error)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown `name`: the closest known name, or all known names (as many as
    fit into a sentence).

    A name without its table is closest to the key in a table: lr to method.lr. Of a family, all are named.
    """
    known = sorted(known)
    family = [key for key in known if name and key.startswith(f"{name}-")]
    if len(family) > 1:
        return f"did you mean {', '.join(map(repr, family[:-1]))} or {family[-1]!r}?"
    inside_table = [key for key in known if key.rpartition(".")[2] == name]
    # Swapped letters come before missing ones.
    swapped = [key for key in known if sorted(key) == sorted(name)]
    if close := inside_table or swapped or difflib.get_close_matches(name, known, n=1, cutoff=0.5):
        return f"did you mean {close[0]!r}?"
    return f"known are: {some_of(known) or 'none'}"


def some_of(names: Iterable[str]) -> str:
    """As many of the names as fit into a sentence."""
    return textwrap.shorten(", ".join(sorted(names)), 500, placeholder=" and more", break_on_hyphens=False)


class ClientError(RuntimeError):
    """A client's work failed; the message names the round, the client and the cause."""


class OutOfMemory(ClientError):
    """A client's work ran out of memory. Its code is not at fault, and another worker may have more memory."""


class Diverged(ClientError):
    """Numbers of a client or the server are not finite; the message names the round."""


class HookError(RuntimeError):
    """A third party's hook failed or returned the wrong type; the message does not name the round yet."""


class MethodError(ClientError):
    """A `HookError` whose message names the round and the client."""


SMALLER = "start a new run with a smaller method.batch_size, or with engine='vmap' a smaller runtime.stack_width"
"""Settings that make local work need less memory. They change the results, so a resumed run cannot change them."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the machine or its GPU ran out of memory."""
    # torch's allocators and CUDA's libraries raise a RuntimeError or a subclass.
    is_of_torch = isinstance(error, RuntimeError) and re.search("out of memory|can't allocate memory", str(error))
    return isinstance(error, MemoryError | OutOfMemory) or bool(is_of_torch)


def error_text(error: BaseException) -> str:
    """An exception's type and the first line of its message, as part of a sentence."""
    return ": ".join(filter(None, (type(error).__name__, str(error).partition("\n")[0].strip())))


@contextmanager
def naming_round(round_number: int) -> Iterator[None]:
    """Make errors of a third party's hook, and numbers that are not finite, name the round outside a client's work."""
    try:
        yield
    except HookError as error:
        raise MethodError(f"round {round_number}: {error}") from error
    except NotFinite as error:
        raise Diverged(f"round {round_number}: {error}") from error


class naming_round_and_client:
    """Wrap errors in a ClientError that pickles and names the round and the client; OutOfMemory if memory ran out."""

    # A class, because a generator takes three times as long, and each client has several of them.
    def __init__(self, round_number: int, client: int) -> None:
        self.place = round_number, client

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, ClientError | KeyboardInterrupt):
            return
        place = "round {}, client {}".format(*self.place)
        if isinstance(error, HookError):
            raise MethodError(f"{place}: {error}") from error
        if isinstance(error, NotFinite):
            raise Diverged(f"{place}: {error}") from error
        # SystemExit too: a model must not end the process.
        if out_of_memory(error):
            raise OutOfMemory(f"{place}: out of memory ({error_text(error)})") from error
        raise ClientError(f"{place}: {type(error).__name__}: {error}{plugin_line(error)}") from error

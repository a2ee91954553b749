"""Errors of a client's work, and their messages. Does not import torch, so that mistakes are reported at once."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rayfl.errors import NotFinite, plugin_line


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
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError | OutOfMemory) or (torch and isinstance(error, torch.cuda.OutOfMemoryError)):
        return True
    # torch's allocator on the CPU and CUDA's libraries raise a plain RuntimeError.
    return isinstance(error, RuntimeError) and bool(re.search("out of memory|can't allocate memory", str(error)))


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

"""Errors of a client's work, and the words for them. Nothing here loads torch: a refused mistake comes at once."""

import re
import sys


class ClientError(RuntimeError):
    """A client's work failed; the message names the round, the client and the cause."""


class OutOfMemory(ClientError):
    """A client's work found no memory: nothing is wrong with its code, and another worker may have more."""


class HookError(RuntimeError):
    """A hook of somebody's own method raised, or gave back something else than it must; the round is not named yet."""


class MethodError(ClientError):
    """The same, with its round and client."""


SMALLER = "start a new run with a smaller method.batch_size, or with engine='vmap' a smaller runtime.stack_width"
"""What makes local work need less memory; it changes the numbers, so that a resumed run cannot have it."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that there was no memory, of the machine or of its GPU."""
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError | OutOfMemory) or (torch and isinstance(error, torch.cuda.OutOfMemoryError)):
        return True
    # What torch's own allocator on the CPU raises, and CUDA's libraries, has no type of its own.
    return isinstance(error, RuntimeError) and bool(re.search("out of memory|can't allocate memory", str(error)))


def error_text(error: BaseException) -> str:
    """An exception's type and the first of its lines, as part of a sentence."""
    return ": ".join(filter(None, (type(error).__name__, str(error).partition("\n")[0].strip())))

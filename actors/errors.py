"""Errors that cross from actors to the user: the exception that was raised, without Ray's wrapping."""

from typing import TYPE_CHECKING

# A command that is refused says so before it loads Ray.
if TYPE_CHECKING:
    from ray.exceptions import RayTaskError


class ClusterError(RuntimeError):
    """Ray or a machine failed, and the experiment is not to blame. The message says what to change."""


class LostObjects(ClusterError):
    """States or messages were lost with a node; the run can go on from its last checkpoint."""


def final_error(error: "RayTaskError", resume: str) -> BaseException:
    """The exception that ends a run whose coordinator raised: the one it raised, or ClusterError where Ray failed or
    memory ran out. `resume` is the command that goes on."""
    from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError

    from rayfl.rounds.errors import ClientError, error_text, out_of_memory

    cause = unwrapped(error)
    if isinstance(cause, ObjectStoreFullError):
        advice = "raise runtime.object_store_memory_mb"
        return ClusterError(f"Ray's object store is full ({error_text(cause)}); {advice}, then go on with: {resume}")
    if isinstance(cause, OutOfDiskError):
        advice = "free some space where Ray spills to (/tmp/ray unless it was told otherwise)"
        return ClusterError(f"the disk below Ray's object store is full; {advice}, then go on with: {resume}")
    if isinstance(cause, RayError):
        return ClusterError(f"Ray failed ({error_text(cause)}); go on with: {resume}")
    if out_of_memory(cause) and not isinstance(cause, ClientError | ClusterError):
        advice = "use a machine with more, or fewer actors (runtime.actors)"
        return ClusterError(f"the coordinator ran out of memory ({error_text(cause)}); {advice}; go on with: {resume}")
    if isinstance(cause, ClusterError) and resume not in str(cause):
        return ClusterError(f"{cause}; then go on with: {resume}")
    return cause


def unwrapped(error: "RayTaskError") -> BaseException:
    """The exception that was raised in the actor. The traceback from there is among its `__notes__`, for a log."""
    cause = error.cause
    # An error that crossed two actors has a note of the first one already, and Ray's text repeats it.
    cause.__notes__ = [str(error)]
    return cause

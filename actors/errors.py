"""Errors that reach the user from actors: the exception that was raised, without Ray's wrapper."""

from typing import TYPE_CHECKING

# A mistake in a command is reported before Ray is loaded.
if TYPE_CHECKING:
    from ray.exceptions import RayTaskError


class ClusterError(RuntimeError):
    """Ray or a machine failed, not the experiment. The message says what to change."""


class LostObjects(ClusterError):
    """States or messages were lost with a node; the run can go on from its last checkpoint."""


def final_error(error: "RayTaskError", resume: str) -> BaseException:
    """The exception that ends a run: the one that its coordinator raised, or ClusterError if Ray failed or memory ran
    out. `resume` is the command that continues the run."""
    from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError

    from rayfl.rounds.errors import ClientError, error_text, out_of_memory

    cause = unwrapped(error)
    if isinstance(cause, ObjectStoreFullError):
        advice = "raise runtime.object_store_memory_mb"
        return ClusterError(f"Ray's object store is full ({error_text(cause)}); {advice}, then go on with: {resume}")
    if isinstance(cause, OutOfDiskError):
        advice = "free some space in the folder to which Ray spills (by default /tmp/ray)"
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
    """The exception that was raised in the actor, with the actor's traceback in its `__notes__`."""
    cause = error.cause
    # An error that came through two actors already has a note of the first one, which Ray's text repeats.
    cause.__notes__ = [str(error)]
    return cause

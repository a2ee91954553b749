"""How errors cross from actors to whoever reads them: as what they were, without Ray's wrapping."""

from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError, RayTaskError


class ClusterError(RuntimeError):
    """Ray or a machine failed where nothing is wrong with the experiment: what happened, and what to change."""


class LostObjects(ClusterError):
    """States or messages went away with a node; the last checkpoint has what is needed to go on."""


def final_error(error: RayTaskError, resume: str) -> BaseException:
    """What a run ends with where its coordinator raised: the exception itself, or ClusterError where Ray or the
    machine's memory is what failed; `resume` says how to go on."""
    from rayfl.rounds.calls import ClientError, described, out_of_memory

    cause = unwrapped(error)
    if isinstance(cause, ObjectStoreFullError):
        advice = "raise runtime.object_store_memory_mb"
        return ClusterError(f"Ray's object store is full ({described(cause)}); {advice}, then go on with: {resume}")
    if isinstance(cause, OutOfDiskError):
        advice = "free some space where Ray spills to (/tmp/ray unless it was told otherwise)"
        return ClusterError(f"the disk below Ray's object store is full; {advice}, then go on with: {resume}")
    if isinstance(cause, RayError):
        return ClusterError(f"Ray failed ({described(cause)}); go on with: {resume}")
    if out_of_memory(cause) and not isinstance(cause, ClientError | ClusterError):
        advice = "use a machine with more, or fewer actors (runtime.actors)"
        return ClusterError(f"the coordinator ran out of memory ({described(cause)}); {advice}; go on with: {resume}")
    return cause


def unwrapped(error: RayTaskError) -> BaseException:
    """The exception that was raised in the actor. The traceback from there is among its `__notes__`, for a log."""
    cause = error.cause
    # An error that crossed two actors has a note of the first one already, and Ray's text repeats it.
    cause.__notes__ = [str(error)]
    return cause

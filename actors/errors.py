"""How errors cross from actors to whoever reads them: as what they were, without Ray's wrapping."""

from dataclasses import dataclass

from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError, RayTaskError

DEATHS = 10
"""How often in a row a process or objects may be lost, for no reason that is known, before a run is given up."""


class ClusterError(RuntimeError):
    """Ray or a machine failed where nothing is wrong with the experiment: what happened, and what to change."""


class LostObjects(ClusterError):
    """States or messages went away with a node; the last checkpoint has what is needed to go on."""


@dataclass
class Losses:
    """How often in a row a run was thrown back without getting further than before."""

    count: int = 0
    reached: int = -1

    def add(self, reached: int) -> int:
        """Count a loss after round `reached` (-1: none): rounds that are played again are no way forward."""
        self.count = self.count + 1 if reached <= self.reached else 1
        self.reached = max(reached, self.reached)
        return self.count


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

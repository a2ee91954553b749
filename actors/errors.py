"""How errors cross from actors to whoever reads them: as what they were, without Ray's wrapping."""

from ray.exceptions import RayTaskError


class ClusterError(RuntimeError):
    """Ray or a machine failed where nothing is wrong with the experiment: what happened, and what to change."""


class LostObjects(ClusterError):
    """States or messages went away with a node; the last checkpoint has what is needed to go on."""


def unwrapped(error: RayTaskError) -> BaseException:
    """The exception that was raised in the actor. The traceback from there is among its `__notes__`, for a log."""
    cause = error.cause
    # An error that crossed two actors has a note of the first one already, and Ray's text repeats it.
    cause.__notes__ = [str(error)]
    return cause

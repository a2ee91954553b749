"""Errors that reach the user from actors: the exception that was raised, without Ray's wrapper."""

from typing import TYPE_CHECKING

# A mistake in a command is reported before Ray is loaded.
if TYPE_CHECKING:
    from ray.exceptions import RayTaskError


class ClusterError(RuntimeError):
    """Ray or a machine failed, not the experiment. The message says what to change."""


class LostObjects(ClusterError):
    """States or messages were lost with a node; the run can go on from its last checkpoint."""


def unwrapped(error: "RayTaskError") -> BaseException:
    """The exception that was raised in the actor, with the actor's traceback in its `__notes__`."""
    cause = error.cause
    # An error that came through two actors already has a note of the first one, which Ray's text repeats.
    cause.__notes__ = [str(error)]
    return cause

"""Errors of Ray that reach the user, and the policy for losses: whether to try again or give up, and in which words.

This file does not use Ray. The policy is applied to calls by actors/ray_executor.py, to actors that are starting by
actors/pool.py, to objects by actors/coordinator.py, and to coordinators by actors/driver.py.
"""

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rayfl.errors import SMALLER, log

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


Cause = Literal["memory", "time", "death", "start", "objects", "coordinator"]
"""Why a call lost its actor: no memory, no answer in time, or the actor died. Or what else was lost: an actor that was
still starting, objects in a node's store, or the coordinator."""

TRIES: dict[Cause, int] = {"memory": 4, "time": 4, "death": 10, "start": 10, "objects": 10, "coordinator": 10}
"""How many such losses in a row end the run. A lack of memory or time rarely goes away by itself."""

ADVICE = (
    "go on with fewer actors (rayfl resume DIR --actors N) or a larger share of a GPU for each (runtime.num_gpus), or "
    f"{SMALLER}"
)
"""The advice about memory."""


@dataclass(frozen=True)
class Failure:
    """A loss, the `times`-th of its kind in a row.

    `reason`: the error of Ray or the actor. `about`: a call's round, step and clients, or the command that resumes a
    coordinator's run. `pid`: the process of a call's actor.
    """

    cause: Cause
    times: int
    reason: str
    about: str = ""
    pid: int | None = None


@dataclass
class Setbacks:
    """Counts consecutive losses without progress.

    The count restarts at 1 after a loss in a later round than before.
    """

    count: int = 0
    reached: int = -1

    def add(self, reached: int) -> int:
        """Count a loss after round `reached` (-1: before the first round ended). Repeated rounds are not progress."""
        self.count = self.count + 1 if reached <= self.reached else 1
        self.reached = max(reached, self.reached)
        return self.count


def try_again(loss: Failure, error: type[Exception] = ClusterError) -> None:
    """Log that the run tries again. Raise `error` if this was the last loss that its cause allows."""
    if loss.times >= TRIES[loss.cause]:
        raise error(_error(loss))
    log.warning(_notice(loss))


def _notice(loss: Failure) -> str:
    reason = textwrap.shorten(loss.reason.split("\n")[0], 120, placeholder="...")
    next_try = f"try {loss.times + 1} of {TRIES[loss.cause]}"
    notices = {
        "start": f"a client actor died while it started ({reason}); another one starts, {next_try}",
        "objects": f"objects were lost with a node ({reason}); the run continues from its last checkpoint, {next_try}",
        "coordinator": f"the coordinator died; another one continues the run from its last checkpoint, {next_try}",
    }
    return notices.get(
        loss.cause, f"{loss.about}: client actor {loss.pid} is gone ({reason}); its call is sent again, {next_try}"
    )


def _error(loss: Failure) -> str:
    errors = {
        "memory": f"{loss.reason}, {loss.times} times; {ADVICE}",
        "start": f"{loss.times} client actors died while they started; if memory ran out, use fewer (--actors); the "
        f"last one said: {loss.reason}",
        "objects": f"objects were lost {loss.times} times in a row, the last time: {loss.reason}",
        "coordinator": f"the coordinator died {loss.times} times; go on with: {loss.about} (the last time Ray said: "
        f"{loss.reason})",
    }
    lost_call = f"{loss.about}: the actor died or did not answer in {loss.times} tries; if memory ran out, {ADVICE}. "
    return errors.get(loss.cause, f"{lost_call}The last time: {loss.reason}")

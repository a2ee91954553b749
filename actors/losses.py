"""What to do about a loss: try again or give up, and the sentence that says so.

This is policy alone and knows no Ray. actors/pool.py acts on it for client actors and their calls,
actors/coordinator.py for objects, actors/session.py for coordinators.
"""

from dataclasses import dataclass
from typing import Literal

from rayfl.rounds.errors import SMALLER

Cause = Literal["memory", "time", "death", "start", "objects", "coordinator"]
"""Why a call lost its actor (no memory, no answer in time, or the actor died); or what else was lost: an actor that was
still starting, objects that lay on a node, or the coordinator."""

TRIES: dict[Cause, int] = {"memory": 4, "time": 4, "death": 10, "start": 10, "objects": 10, "coordinator": 10}
"""How often in a row each loss may come. A lack of memory or time rarely goes away by itself."""

ADVICE = (
    "go on with fewer actors (rayfl resume DIR --actors N) or a larger share of a GPU for each (runtime.num_gpus), or "
    f"{SMALLER}"
)
"""What to do about memory."""


@dataclass(frozen=True)
class Loss:
    """Something was lost, for the `times`-th time in a row.

    `reason`: what Ray or the actor said. `about`: a call's round, step and clients, or the command that goes on with
    the run of a coordinator. `pid`: the process of a call's actor.
    """

    cause: Cause
    times: int
    reason: str
    about: str = ""
    pid: int | None = None


@dataclass(frozen=True)
class Decision:
    """Whether to try again; `sentence` is a notice if so, and otherwise the error that ends the run."""

    again: bool
    sentence: str


@dataclass
class Setbacks:
    """Counts how often in a row a run was thrown back without getting further than before."""

    count: int = 0
    reached: int = -1

    def add(self, reached: int) -> int:
        """Count a loss after round `reached` (-1: none). Rounds that are played again are no progress."""
        self.count = self.count + 1 if reached <= self.reached else 1
        self.reached = max(reached, self.reached)
        return self.count


def decide(loss: Loss) -> Decision:
    """Try again, unless this was the last loss that its cause allows."""
    again = loss.times < TRIES[loss.cause]
    return Decision(again, _notice(loss) if again else _error(loss))


def _notice(loss: Loss) -> str:
    next_try = f"try {loss.times + 1} of {TRIES[loss.cause]}"
    match loss.cause:
        case "start":
            return f"a client actor died while it started ({_shortened(loss.reason)}); another one starts, {next_try}"
        case "objects":
            return f"objects were lost with a node ({_shortened(loss.reason)}); playing again from the disk"
        case "coordinator":
            return f"the coordinator is gone; another one takes the run from the disk, {next_try}"
        case _:
            gone = f"client actor {loss.pid} is gone ({_shortened(loss.reason)})"
            return f"{loss.about}: {gone}; its call is sent again, {next_try}"


def _error(loss: Loss) -> str:
    match loss.cause:
        case "memory":
            return f"{loss.reason}, {loss.times} times; {ADVICE}"
        case "start":
            died = f"{loss.times} client actors died while they started; if memory ran out, use fewer (--actors)"
            return f"{died}; the last one said: {loss.reason}"
        case "objects":
            return f"objects were lost {loss.times} times in a row, the last time: {loss.reason}"
        case "coordinator":
            died = f"the coordinator died {loss.times} times; go on with: {loss.about}"
            return f"{died} (the last time Ray said: {loss.reason})"
        case _:
            died = f"{loss.about}: the actor died or did not answer in {loss.times} tries"
            return f"{died}; if memory ran out, {ADVICE}. The last time: {loss.reason}"


def _shortened(reason: str) -> str:
    first_line = reason.split("\n")[0]
    return first_line if len(first_line) <= 120 else f"{first_line[:117]}..."

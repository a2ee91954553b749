"""Rounds: the server selects some clients and waits for all of them, as in McMahan et al., AISTATS 2017."""

from rayfl.schedules.base import NOT_YET, Now, Schedule


class Synchronous(Schedule):
    """The server selects `clients.per_round` clients and waits until all are back, gone, or later than the deadline."""

    name = "synchronous"
    in_rounds = True

    def due(self, now: Now) -> float:
        return NOT_YET

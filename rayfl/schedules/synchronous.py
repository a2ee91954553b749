"""Schedules with a fixed order: rounds, as in McMahan et al., AISTATS 2017, and updates at fixed intervals, of which
each uses the messages that have arrived since the one before."""

from rayfl.schedules.base import NOT_YET, Field, Flying, Now, Schedule


class Synchronous(Schedule):
    """The server selects `clients.per_round` clients and waits until all are back, gone, or later than the deadline."""

    name = "synchronous"
    collects = "rounds"

    def due(self, now: Now) -> float:
        return NOT_YET


class SemiSynchronous(Flying):
    """The server updates every `period_s` seconds with the messages that have arrived since the last update.

    After each update it selects idle clients until `clients.per_round` are under way.
    """

    name = "semi-synchronous"
    period_s: float = Field(default=10.0, gt=0, description="simulated seconds between two updates")

    def begins(self, now: Now) -> int:
        return now.places - now.under_way if now.second == now.updated_s else 0

    def due(self, now: Now) -> float:
        return now.updated_s + self.period_s

"""Updates at fixed intervals; a late message is used in the update after its arrival."""

from pydantic import Field

from rayfl.schedules.base import Flying, Now


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

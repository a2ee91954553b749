"""A schedule of your own: the server updates when enough messages have arrived, or after some seconds.

rayfl run jobs/experiments/demo.toml schedule=jobs/examples/number_or_time.py:NumberOrTime clients.per_round=5
"""

from pydantic import Field

from rayfl.schedules.base import AT_ONCE, NOT_YET, Now, Schedule


class NumberOrTime(Schedule):
    """Update with `buffer` messages, or with fewer after `patience_s` seconds. Messages with staleness count half."""

    buffer: int = Field(default=3, ge=1, description="messages of an update")
    patience_s: float = Field(default=5.0, gt=0, description="simulated seconds after which fewer are enough")

    def due(self, now: Now) -> float:
        if now.arrived >= self.buffer:
            return AT_ONCE
        return now.updated_s + self.patience_s if now.arrived else NOT_YET

    def scale(self, staleness: int) -> float:
        return 0.5 if staleness else 1.0

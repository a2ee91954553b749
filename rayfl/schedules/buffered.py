"""FedBuff: Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022, Algorithm 1."""

from pydantic import Field

from rayfl.errors import RayflError
from rayfl.schedules.base import AT_ONCE, NOT_YET, Flying, Now


class Buffered(Flying):
    """`clients.per_round` clients are under way; the server updates whenever `buffer` messages have arrived.

    When a client is back, another one begins at once. The paper's K is `buffer`, its concurrency `per_round`, and its
    staleness scaling `polynomial` with power 0.5. The paper draws any client at random; here a client is drawn from
    those that are idle and have not come back since the last update, so an update has at most one message of each.
    """

    name = "buffered"
    buffer: int | None = Field(
        default=None, ge=1, description="number of messages of an update, K; default: half of clients.per_round"
    )

    def messages(self, places: int) -> int:
        """The number of messages that make an update."""
        return self.buffer or max(1, places // 2)

    def due(self, now: Now) -> float:
        return AT_ONCE if now.arrived >= self.messages(now.places) else NOT_YET

    def check(self, places: int, num_clients: int) -> None:
        if self.messages(places) > num_clients:
            raise RayflError(
                f"={self.buffer} is more than the {num_clients} clients, of which each sends one message an update; "
                "lower it",
                ("schedule", "buffer"),
            )

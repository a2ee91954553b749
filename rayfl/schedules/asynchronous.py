"""Schedules without rounds, in which messages make updates as they arrive: FedAsync and FedBuff."""

from rayfl.errors import RayflError
from rayfl.schedules.base import AT_ONCE, NOT_YET, Field, Flying, Now


class Asynchronous(Flying):
    """Every message makes an update: x <- (1 - a) x + a x_i, with a = `mixing` times the factor of its staleness.

    FedAsync: Xie, Koyejo, Gupta, Asynchronous Federated Optimization, OPT 2020 (arXiv 1903.03934), Algorithm 1.

    x_i is the client's model after its training. In `rayfl` clients send delta_i = x_v - x_i, where x_v is the model of
    the version v with which they began, so the server subtracts a (delta_i + x - x_v). `clients.per_round` clients are
    at work. The paper's local objective has a proximal term, which the method `fedprox` adds.
    """

    name = "asynchronous"
    mixes_models = True
    mixing: float = Field(default=0.6, gt=0, le=1, description="share of a fresh model in the update, alpha")

    def due(self, now: Now) -> float:
        return AT_ONCE if now.arrived else NOT_YET

    def scale(self, staleness: int) -> float | None:
        factor = super().scale(staleness)
        return None if factor is None else self.mixing * factor


class Buffered(Flying):
    """`clients.per_round` clients are under way; the server updates whenever `buffer` messages have arrived.

    FedBuff: Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022, Algorithm 1.

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

"""Schedule: when clients begin, which messages make an update of the server, and how stale messages are scaled."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from rayfl.choices.kinds import Choice
from rayfl.settings import unused_with

AT_ONCE, NOT_YET = -math.inf, math.inf
"""Values of `Schedule.due`: update now, before anything else; and no update until something else has happened."""


@dataclass(frozen=True)
class Now:
    """What a server knows at a moment between two updates.

    second: simulated seconds from the start of the run. updated_s: the second of the last update, or 0. version: the
    number of updates so far. under_way: the number of clients that download, train or send. arrived: the number of
    messages since the last update. places: `clients.per_round`, the number of clients that may be under way at once.
    """

    second: float
    updated_s: float
    version: int
    under_way: int
    arrived: int
    places: int


class Schedule(Choice):
    """A rule for when clients begin and the server updates. It is pure: the engine keeps the clock and the flights."""

    label = "schedule"
    package = "rayfl.schedules"
    renamed = {"in_rounds": "collects"}
    # Declared, as older pydantic would else refuse it in words of its own.
    in_rounds: ClassVar[bool]
    collects: ClassVar[Literal["rounds", "flights", "clocks"]] = "flights"
    """How messages are collected: in rounds, in which the server waits for all selected clients, or peers for each
    other, and no hook of the schedule is called; from flights of a server's clients, of which each ends at its own
    time; or by peers on their own clocks (`PeerSchedule`)."""
    mixes_models: ClassVar[bool] = False
    """Whether an update moves the server's model towards those of clients, by `scale` (FedAsync). If False, the scaled
    messages are given to the method."""

    def begins(self, now: Now) -> int:
        """The number of clients that should begin now; fewer begin if fewer are idle.

        Called at the start, and when everything has happened that happens at one moment: the arrivals, and the updates
        that were due with them. Called again for clients that drop out before the download. By default every free place
        is filled.
        """
        return now.places - now.under_way

    @abstractmethod
    def due(self, now: Now) -> float:
        """The second of the next update, if nothing else happens; messages that arrive in that second are in it.

        `AT_ONCE`: now, before anything else. `NOT_YET`: not before another client is back. Called after each arrival,
        also of several at one moment, and after clients have begun. While no message has arrived, a second that is not
        later than the last update means `NOT_YET`, because such empty updates would never end.
        """

    def scale(self, staleness: int) -> float | None:
        """The factor of a message from a client that began `staleness` updates ago; None: the message is dropped.

        It multiplies the message itself and not its weight in a mean, which would cancel in an update by one message.
        """
        return 1.0

    def check(self, places: int, num_clients: int) -> None:
        """Raise RayflError if the settings do not fit `clients.per_round` or the number of clients."""


class Flying(Schedule):
    """A schedule of flights, with settings for how stale messages are scaled."""

    staleness: Literal["constant", "polynomial", "hinge"] = Field(
        default="polynomial",
        description="factor of a message that is s updates old: 1, (1 + s)^-power, or 1 up to hinge and then "
        "1 / (slope (s - hinge) + 1)",
    )
    power: float = Field(
        default=0.5,
        gt=0,
        description="exponent of polynomial",
        json_schema_extra=unused_with(staleness=["constant", "hinge"]),
    )
    slope: float = Field(
        default=10.0,
        gt=0,
        description="slope of hinge",
        json_schema_extra=unused_with(staleness=["constant", "polynomial"]),
    )
    hinge: int = Field(
        default=4,
        ge=0,
        description="staleness up to which the factor of hinge is 1",
        json_schema_extra=unused_with(staleness=["constant", "polynomial"]),
    )
    most_staleness: int | None = Field(
        default=None, ge=0, description="messages older than this number of updates are dropped; default: none are"
    )

    def scale(self, staleness: int) -> float | None:
        if self.most_staleness is not None and staleness > self.most_staleness:
            return None
        if self.staleness == "polynomial":
            return (1.0 + staleness) ** -self.power
        return 1.0 / (self.slope * max(0, staleness - self.hinge) + 1) if self.staleness == "hinge" else 1.0


class PeerSchedule(Schedule):
    """A schedule of peers that train and exchange at their own times, without a server.

    Whenever a peer's training ends, the peer sends its message to its neighbours, mixes the newest messages that have
    arrived from them, and trains again. With `partners` = 1 it averages models with one neighbour instead.
    """

    collects = "clocks"
    partners: Literal[1] | None = Field(
        default=None,
        description="1: after each training a peer averages models with one random neighbour, as AD-PSGD; default: it "
        "hears all its neighbours",
    )
    latency_s: float = Field(default=0.0, ge=0, description="simulated seconds that a link adds to each transfer")

    def due(self, now: Now) -> float:
        return NOT_YET

    def scale(self, staleness: float) -> float | None:
        """The share in [0, 1] of a neighbour's weight that its newest message keeps; the peer itself gets the rest.

        staleness: trainings of all peers that have ended since the message was made, divided by the number of peers.
        None: the message is left out, and so are all messages that are older.
        """
        return 1.0

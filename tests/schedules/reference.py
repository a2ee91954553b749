"""An event-driven simulator in numpy of FedAvg under each schedule, on quadratics, written from the papers.

FedBuff: Nguyen et al., AISTATS 2022, Algorithm 1. The paper's server does two things side by side: it keeps a number of
clients at work, each of which downloads the model that the server has at that moment, and it adds what arrives to a
buffer, and updates the model as soon as that holds K messages. FedAsync: Xie et al., OPT 2020, Algorithm 1, has K = 1
and x <- (1 - a) x + a x_i. The papers do not say what comes first at one moment of a clock: here clients that are back
arrive in the order of their numbers, and the server starts others after all of them.

Nothing of rayfl computes here but the draws that both sides must share: who begins, and the order of the batches.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rayfl.determinism import seeding
from rayfl.rounds.setup import Setup
from tests.contracts.seams.closed_form import batches, start
from tests.contracts.seams.quadratic import TRAIN

BITS = 10 * 32
UP_BITS = BITS + 64
"""The update, and the number of examples."""


class Arrival(NamedTuple):
    """A client that comes back at `second` with the model that it trained from that of version `version`."""

    second: float
    client: int
    version: int
    began: float
    model: np.ndarray


class Update(NamedTuple):
    """An update of the server: its second, x after it, and (client, version, began, second) of its messages."""

    second: float
    x: np.ndarray
    messages: tuple[tuple[int, int, float, float], ...]


def trained(here: Setup, number: int, client: int, x: np.ndarray) -> np.ndarray:
    """The model of a client after one epoch of SGD from x, with the batches of flight or round `number`."""
    hyper = here.method.hyper.model_dump()
    for batch in batches(here, number, client, epochs=hyper["epochs"] or 1, batch_size=hyper["batch_size"] or 99):
        x = x - hyper["lr"] * batch.gradient(x)
    return x


def seconds(here: Setup, client: int) -> float:
    """Download, one epoch, upload."""
    traits = here.population.traits(client)
    return BITS / traits.downlink_bps + TRAIN[client] / traits.examples_per_s + UP_BITS / traits.uplink_bps


def twelve_digits(second: float) -> float:
    """Times that differ only by rounding are one moment."""
    return float(np.format_float_scientific(second, precision=11))


@dataclass
class Server:
    """The two loops of the paper's server. `mixes`: each message moves x to x + a (x_i - x), with a = factor."""

    here: Setup
    factor: Callable[[int], float]
    mixes: bool
    second: float = 0.0
    num_begun: int = 0
    models: list[np.ndarray] = field(default_factory=list)
    under_way: list[Arrival] = field(default_factory=list)
    buffer: list[Arrival] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)

    def fill_places(self) -> None:
        """Start idle clients in all free places. Who is back since the last update waits for the next one."""
        missing = self.here.population.settings.num_selected - len(self.under_way)
        busy = {one.client for one in (*self.under_way, *self.buffer)}
        idle = np.array([client for client in range(len(TRAIN)) if client not in busy], int)
        if not missing or not len(idle):
            return
        draws = seeding.generator(self.here.seed, self.num_begun, purpose="participants")
        chosen = draws.choice(idle, missing, replace=False) if missing < len(idle) else idle
        for client in sorted(chosen.tolist()):
            model = trained(self.here, self.num_begun, client, self.models[-1])
            ends = twelve_digits(self.second + seconds(self.here, client))
            self.under_way.append(Arrival(ends, client, len(self.updates), self.second, model))
            self.num_begun += 1

    def update(self) -> None:
        """x <- x - sum_i w_i s(t - t_i) (x_{t_i} - y_i), the weighted mean of the buffer, which is then empty."""
        now, x, used = len(self.updates), self.models[-1], sorted(self.buffer, key=lambda one: one.client)
        moves = [
            self.factor(now - one.version) * ((x if self.mixes else self.models[one.version]) - one.model)
            for one in used
        ]
        x = x - np.average(moves, axis=0, weights=[TRAIN[one.client] for one in used]) if used else x
        rows = tuple((one.client, one.version, one.began, one.second) for one in used)
        self.buffer = []
        self.models.append(x)
        self.updates.append(Update(self.second, x, rows))


def simulated(
    here: Setup,
    factor: Callable[[int], float],
    *,
    buffer: int | None = None,
    period: float | None = None,
    mixes: bool = False,
) -> list[Update]:
    """All updates: by every `buffer` messages, or every `period` seconds."""
    server = Server(here, factor, mixes, models=[start(here)])
    server.fill_places()
    while len(server.updates) < here.rounds:
        ends = min((one.second for one in server.under_way), default=np.inf)
        tick = (
            np.inf
            if period is None
            else twelve_digits((server.updates or [Update(0, np.zeros(0), ())])[-1][0] + period)
        )
        server.second = min(ends, tick)
        back = sorted((one for one in server.under_way if one.second == server.second), key=lambda one: one.client)
        for one in back:
            server.under_way.remove(one)
            server.buffer.append(one)
            if len(server.buffer) == buffer:
                server.update()
        if server.second == tick:
            server.update()
        if period is None or server.second == tick:
            server.fill_places()
    return server.updates[: here.rounds]

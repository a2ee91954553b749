"""An event-driven simulator in numpy of FedAvg under each schedule, on quadratics.

Nothing of rayfl computes here but the draws that both sides must share: who begins, and the order of the batches.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rayfl.determinism import seeding
from rayfl.rounds.setup import Setup
from tests.contracts.seams.closed_form import batches, start
from tests.contracts.seams.quadratic import TRAIN

BITS = 10 * 32
UP_BITS = BITS + 64
"""The update, and the number of examples."""


class Event(NamedTuple):
    """A client that comes back at `second` with what it trained from version `version`."""

    second: float
    client: int
    version: int
    began: float
    delta: np.ndarray


class Update(NamedTuple):
    """An update of the server: its second, x after it, and (client, version, began, second) of its messages."""

    second: float
    x: np.ndarray
    messages: tuple[tuple[int, int, float, float], ...]


def trained(here: Setup, number: int, client: int, x: np.ndarray) -> np.ndarray:
    """The difference that a client sends: x minus the end of one epoch of SGD."""
    hyper, y = here.method.hyper.model_dump(), x
    for batch in batches(here, number, client, epochs=hyper["epochs"] or 1, batch_size=hyper["batch_size"]):
        y = y - hyper["lr"] * batch.gradient(y)
    return x - y


def seconds(here: Setup, client: int) -> float:
    """Download, one epoch, upload."""
    traits = here.population.traits(client)
    return BITS / traits.downlink_bps + TRAIN[client] / traits.examples_per_s + UP_BITS / traits.uplink_bps


def simulated(
    here: Setup,
    factor: Callable[[int], float],
    *,
    buffer: int | None = None,
    period: float | None = None,
    mixes: bool = False,
) -> list[Update]:
    """All updates: by every `buffer` messages, or every `period` seconds. `mixes`: x <- x + a (x_i - x), a = factor."""
    places, x = here.population.settings.num_selected, start(here)
    air, versions, updates = list[Event](), [x], list[Update]()
    second, number, opened, arrived = 0.0, 0, 0.0, list[Event]()
    for version in range(here.rounds):
        while True:
            missing = places - len(air)
            if missing and (period is None or second == opened):
                taken = {event.client for event in (*air, *arrived)}
                idle = np.array([client for client in range(len(TRAIN)) if client not in taken])
                draws = seeding.generator(here.seed, number, purpose="participants")
                chosen = draws.choice(idle, missing, replace=False) if missing < len(idle) else idle
                for client in sorted(chosen.tolist()):
                    ends = second + seconds(here, client)
                    air.append(Event(ends, client, version, second, trained(here, number, client, x)))
                    number += 1
            air.sort(key=lambda event: (event.second, event.client))
            if period is None and len(arrived) == buffer:
                break
            if period is not None and (not air or air[0].second > opened + period):
                second = opened + period
                break
            arrived.append(air.pop(0))
            second = arrived[-1].second
        arrived.sort(key=lambda event: event.client)
        weights = np.array([TRAIN[event.client] for event in arrived], float)
        moves = [
            factor(version - one.version) * (one.delta + (x - versions[one.version] if mixes else 0.0))
            for one in arrived
        ]
        if arrived:
            x = x - np.average(moves, axis=0, weights=weights)
        rows = tuple((one.client, one.version, one.began, one.second) for one in arrived)
        versions.append(x)
        updates.append(Update(second, x, rows))
        opened, arrived = second, []
    return updates

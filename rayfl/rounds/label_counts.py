"""What clients tell the server once, for methods that need it: how many train examples of each class they have.

A client tells it when the server first reaches it, before its download, and is billed then, whatever becomes of it in
that round: 32 bits a class, enough for any number of examples. One that drops out before the download has told nothing.
The counts are no part of what papers count as communication (`server_comm`), like the numbers of examples.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch

from rayfl.population.client import ClientStatus
from rayfl.rounds.run_state import CurrentRound
from rayfl.rounds.setup import Setup

COUNT_BITS = 32


def telling_s(current: CurrentRound, clients: Iterable[int]) -> dict[int, float]:
    """Simulated seconds that those of the clients need who have not told their counts yet."""
    setup = current.setup
    if not setup.method.capabilities.label_counts:
        return {}
    told = _told(current)
    return {client: _seconds(setup, client) for client in clients if not told[client]}


def bill(current: CurrentRound) -> None:
    """Bill the clients of this round's ledger that have told their counts in it, and remember them."""
    setup, results = current.setup, current.ledger.results
    if not setup.method.capabilities.label_counts:
        return
    told = _told(current).clone()
    bits = COUNT_BITS * setup.dataset.num_classes
    for client, result in results.items():
        if not told[client] and result.status is not ClientStatus.DROPPED_BEFORE_DOWNLOAD:
            told[client] = True
            results[client] = replace(
                result,
                billed_bits=result.billed_bits + bits,
                # The bill has the seconds now, by which the client has begun later; not so in flights.
                begins_s=max(0.0, result.begins_s - _seconds(setup, client)),
            )
    current.run_state = replace(current.run_state, told={"clients": told})


def _told(current: CurrentRound) -> torch.Tensor:
    """Whether each client has told its counts, bool [num_clients]."""
    return current.run_state.told.get("clients", torch.zeros(current.setup.num_clients, dtype=torch.bool))


def _seconds(setup: Setup, client: int) -> float:
    """Simulated seconds in which a client sends its counts."""
    return COUNT_BITS * setup.dataset.num_classes / setup.population.traits(client).uplink_bps

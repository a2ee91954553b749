"""Clients by the fate that was drawn for them."""

from rayfl.population.sampling import Participation


def with_fate(drawn: Participation, *fates: str) -> tuple[int, ...]:
    """The selected clients for which one of these fates was drawn."""
    return tuple(client for client, fate in drawn.fates.items() if fate in fates)

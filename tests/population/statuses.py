"""Clients by the status that was drawn for them."""

from rayfl.population.sampling import Participation


def with_status(drawn: Participation, *statuses: str) -> tuple[int, ...]:
    """The selected clients for which one of these statuses was drawn."""
    return tuple(client for client, status in drawn.statuses.items() if status in statuses)

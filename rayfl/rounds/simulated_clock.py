"""The simulated clock: computes from bytes, work and speeds when a client is done and how long a round lasts."""

from collections.abc import Iterable

from rayfl.population.client import Traits
from rayfl.population.sampling import Population
from rayfl.rounds.example_cost import num_gradients
from rayfl.rounds.worker_jobs import ClientResult


def arrival_s(traits: Traits, result: ClientResult) -> float:
    """Seconds from the start of the round until the client is done or gone: download, then work, then upload."""
    if result.cut_s is not None:
        return result.cut_s
    return (
        result.begins_s
        + (result.downlink_bits - result.reply_bits) / traits.downlink_bps
        + num_gradients(result.work, result.costs) / traits.examples_per_s
        + result.billed_bits / traits.uplink_bps
    )


def reply_s(traits: Traits, result: ClientResult) -> float:
    """Seconds of the download after the server's update."""
    return result.reply_bits / traits.downlink_bps


def moment(seconds: float) -> float:
    """Seconds rounded to twelve digits, so that sums that differ only by rounding errors compare as equal."""
    return float(f"{seconds:.12g}")


def duration_s(population: Population, results: Iterable[ClientResult]) -> float:
    """Simulated seconds of a round: until every awaited client is back, gone or cut off, and then until the last
    one has its reply.

    A client is gone when it vanishes or its update is lost. Clients that train for themselves are not awaited: those
    that were not selected, and peers that miss the exchange.
    """
    awaited = [(population.traits(result.client), result) for result in results if result.fate.awaited]
    back = (arrival_s(traits, result) for traits, result in awaited)
    return max(back, default=0.0) + max((reply_s(traits, result) for traits, result in awaited), default=0.0)

"""The simulated clock: when a client is done, and how long a round lasts, from bytes, work and speeds."""

from collections.abc import Iterable

from rayfl.population.client import Traits
from rayfl.population.sampling import Population
from rayfl.rounds.worker_jobs import ClientResult


def arrival_s(traits: Traits, result: ClientResult) -> float:
    """Seconds from the round's beginning until the client is done, or gone: download, then work, then upload."""
    if result.cut_s is not None:
        return result.cut_s
    return (
        (result.downlink_bits - result.reply_bits) / traits.downlink_bps
        + result.num_examples / traits.examples_per_s
        + result.billed_bits / traits.uplink_bps
    )


def reply_s(traits: Traits, result: ClientResult) -> float:
    """Seconds of the download after the server's update."""
    return result.reply_bits / traits.downlink_bps


def moment(seconds: float) -> float:
    """Seconds to twelve digits, for comparisons: sums that differ in how they were rounded are the same moment."""
    return float(f"{seconds:.12g}")


def duration_s(population: Population, results: Iterable[ClientResult]) -> float:
    """Simulated seconds of a round: until the last awaited client is back, gone or cut off, and then until the last
    has its reply.

    A client is gone at the moment at which it vanishes or its update is lost. Nobody waits for those that train for
    themselves: who was not selected, and peers that are away from the exchange.
    """
    awaited = [(population.traits(result.client), result) for result in results if result.fate.awaited]
    back = (arrival_s(traits, result) for traits, result in awaited)
    return max(back, default=0.0) + max((reply_s(traits, result) for traits, result in awaited), default=0.0)

"""The simulated clock: computes from bytes, work and speeds when a client is done and how long a round lasts.

The cost of a training example is counted in gradients of the dense model.
"""

from collections.abc import Iterable, Mapping

from rayfl.methods.base import Context, State, Work
from rayfl.models.flops import forward_flops
from rayfl.population.client import Traits
from rayfl.population.sampling import Population
from rayfl.rounds.setup import Setup
from rayfl.rounds.worker_jobs import ClientResult

FORWARD = 1 / 3
"""The cost of an example that only runs forward: a gradient takes three forward passes (models/flops.py)."""


def example_costs(setup: Setup, ctx: Context, state: State) -> dict[str, float]:
    """The cost of an example in each stage of `ctx.work`, for a client that begins the round with `state`.

    It is the number of gradients (`Method.gradients_per_example`); with `clients.sparse_speedup` times the share of the
    model's operations that the stage's mask keeps.
    """
    costs: dict[str, float] = {}
    for stage in ctx.plan.stages:
        if stage.name not in ctx.work:
            continue
        costs[stage.name] = setup.method.gradients_per_example(stage, ctx) or FORWARD
        mask = setup.method.trains_under(state, stage) if setup.population.settings.sparse_speedup else None
        if mask is not None:
            costs[stage.name] *= forward_flops(setup.method.task.weight_uses, mask) / setup.forward_flops
    return costs


def num_gradients(work: Mapping[str, Work], costs: Mapping[str, float]) -> float:
    """The cost of all examples of all stages; an example costs 1 in a stage without a known cost."""
    return sum(done.num_examples * costs.get(name, 1.0) for name, done in work.items())


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

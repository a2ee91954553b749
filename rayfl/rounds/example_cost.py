"""The cost of a training example on the simulated clock, in gradients of the dense model."""

from collections.abc import Mapping

from rayfl.methods.base import Context, State, Work
from rayfl.models.flops import forward_flops
from rayfl.rounds.setup import Setup

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

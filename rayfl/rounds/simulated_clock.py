"""The simulated clock: computes from bytes, work and speeds when a client is done, and how long a round lasts.

The cost of a training example is counted in gradients of the dense model. Clients that miss the deadline, or are not
among the first `take_first`, are cut off; a client is billed what it used until then.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from rayfl.data.batches import steps_within
from rayfl.methods.base import Context, Plan, State, Work
from rayfl.models.flops import forward_flops
from rayfl.population.client import ClientStatus, Traits
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
    for stage in (stage for stage in ctx.plan.stages if stage.name in ctx.work):
        costs[stage.name] = setup.method.gradients_per_example(stage, ctx) or FORWARD
        mask = setup.method.trains_under(state, stage, ctx) if setup.population.settings.sparse_speedup else None
        if mask is not None:
            costs[stage.name] *= forward_flops(setup.method.task.weight_uses, mask, setup.initial) / setup.forward_flops
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
    awaited = [(population.traits(result.client), result) for result in results if result.status.awaited]
    back = (arrival_s(traits, result) for traits, result in awaited)
    return max(back, default=0.0) + max((reply_s(traits, result) for traits, result in awaited), default=0.0)


def cut_off_if_late(setup: Setup, plan: Plan, result: ClientResult) -> ClientResult:
    """Return the result; if the round waits for the client and the client misses the deadline, cut the result off.

    The cut result has `ClientStatus.LATE` and a smaller bill. Called before training, because a client that is late
    need not train, and again after training, when the size of the upload is known.
    """
    deadline_s = setup.population.settings.deadline_s
    if deadline_s is None or not plan.up or not result.status.awaited:
        return result
    in_time = moment(arrival_s(setup.population.traits(result.client), result)) <= deadline_s
    return result if in_time else _cut_off(setup, result, deadline_s, ClientStatus.LATE)


def cut_off_surplus(setup: Setup, plan: Plan, results: Iterable[ClientResult]) -> dict[int, ClientResult]:
    """Return the results by client. If `take_first` is set, cut off every client that is not among the first to finish.

    Clients that finish at the same moment are taken in the order of their ids. A client with nothing to send finishes
    too. A client that vanishes or whose update is lost does not finish, and is cut off if it is still busy then.
    """
    by_client = {result.client: result for result in sorted(results, key=lambda result: result.client)}
    wanted = setup.population.settings.take_first
    if wanted is None or not plan.up:
        return by_client
    awaited = {client: result for client, result in by_client.items() if result.status.awaited}
    times = {client: arrival_s(setup.population.traits(client), result) for client, result in awaited.items()}
    back = sorted((moment(times[client]), client) for client, result in awaited.items() if result.status.keeps_state)
    if len(back) < wanted:
        return by_client
    close, last = back[wanted - 1]
    surplus = {client for _, client in back[wanted:]} | {c for c in awaited if moment(times[c]) > close}
    return by_client | {
        client: _cut_off(setup, by_client[client], times[last], ClientStatus.SURPLUS) for client in surplus
    }


def _cut_off(setup: Setup, result: ClientResult, close_s: float, status: ClientStatus) -> ClientResult:
    """The result of a client after `close_s` seconds, when the server stops waiting: whole bytes and whole steps."""
    traits = setup.population.traits(result.client)
    busy_s = close_s - result.begins_s - result.downlink_bits / traits.downlink_bps
    sending_s = busy_s - num_gradients(result.work, result.costs) / traits.examples_per_s
    return replace(
        result,
        status=status,
        billed_bits=min(result.billed_bits, 8 * _whole(sending_s * traits.uplink_bps / 8)),
        downlink_bits=min(result.downlink_bits, 8 * _whole(close_s * traits.downlink_bps / 8)),
        work=_work_within(setup, result, busy_s * traits.examples_per_s),
        metrics={},
        relayed=(),
        cut_s=close_s,
    )


def _whole(amount: float) -> int:
    """Round down, but count 2.9999999 as 3, because times are differences of rounded numbers."""
    return max(0, math.floor(round(amount, 3)))


def _work_within(setup: Setup, result: ClientResult, left: float) -> dict[str, Work]:
    """The part of the work that costs at most `left` gradients, stage by stage and in whole examples."""
    done = {}
    for stage in (stage for stage in result.stages if stage.name in result.work):
        planned = result.work[stage.name]
        size = stage.num_examples(setup.data(result.client).num_examples(stage.split))
        cost = result.costs.get(stage.name, 1.0)
        examples = min(planned.num_examples, _whole(left / cost)) if cost else planned.num_examples
        # A stage begins after the one before it has ended.
        left = left - examples * cost if examples == planned.num_examples else 0.0
        steps = steps_within(examples, size, batch_size=stage.batch_size, batches_per_step=stage.batches_per_step)
        done[stage.name] = Work(min(planned.num_steps, steps), examples)
    return done

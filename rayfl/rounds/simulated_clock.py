"""The simulated clock: when a client is done, from its bytes, its work and its speeds, and what it used by then."""

import math
from dataclasses import replace
from typing import Literal

from rayfl.data.batches import steps_within
from rayfl.methods.base import Plan, Work
from rayfl.population.client import Traits
from rayfl.rounds.calls import ClientResult
from rayfl.rounds.setup import Setup


def arrival_s(traits: Traits, report: ClientResult) -> float:
    """Seconds from the round's beginning until the client is done, or gone: download, then work, then upload."""
    if report.cut_s is not None:
        return report.cut_s
    num_examples = sum(work.num_examples for work in report.work.values())
    return (
        (report.downlink_bits - report.reply_bits) / traits.downlink_bps
        + num_examples / traits.examples_per_s
        + report.uplink_bits / traits.uplink_bps
    )


def moment(seconds: float) -> float:
    """Seconds to twelve digits, for comparisons: sums that differ in how they were rounded are the same moment."""
    return float(f"{seconds:.12g}")


def reply_s(traits: Traits, report: ClientResult) -> float:
    """Seconds of the download after the server's update."""
    return report.reply_bits / traits.downlink_bps


def cut_off(
    setup: Setup, plan: Plan, report: ClientResult, close_s: float, status: Literal["late", "surplus"]
) -> ClientResult:
    """What a client has used when the server hangs up after `close_s` seconds: whole bytes, and whole steps.

    Nothing of its round counts.
    """
    traits = setup.population.traits(report.client)
    num_examples = sum(work.num_examples for work in report.work.values())
    busy_s = close_s - report.downlink_bits / traits.downlink_bps
    sending_s = busy_s - num_examples / traits.examples_per_s
    return replace(
        report,
        sent=False,
        uplink_bits=min(report.uplink_bits, 8 * _whole(sending_s * traits.uplink_bps / 8)),
        downlink_bits=min(report.downlink_bits, 8 * _whole(close_s * traits.downlink_bps / 8)),
        work=_done(setup, plan, report, _whole(busy_s * traits.examples_per_s)),
        metrics={},
        relayed=(),
        status=status,
        undone=True,
        cut_s=close_s,
    )


def _whole(amount: float) -> int:
    """How many whole ones there are, where 2.9999999 is 3: times are differences of rounded numbers."""
    return max(0, math.floor(round(amount, 3)))


def _done(setup: Setup, plan: Plan, report: ClientResult, num_examples: int) -> dict[str, Work]:
    """The part of the work that a client gets through, so many examples, stage by stage."""
    done = {}
    for stage in (stage for stage in plan.stages if stage.name in report.work):
        planned, size = report.work[stage.name], setup.data(report.client).num_examples(stage.split)
        examples = min(planned.num_examples, num_examples)
        num_examples -= examples
        sizes = {"batch_size": stage.batch_size, "batches_per_step": stage.batches_per_step}
        done[stage.name] = Work(min(planned.num_steps, steps_within(examples, size, **sizes)), examples)
    return done

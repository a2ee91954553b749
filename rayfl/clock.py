"""The simulated clock: when a client is done, from its bytes, its work and its speeds, and what it used by then."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from rayfl.methods.base import Traits, Work
from rayfl.work import Report


def arrival_s(traits: Traits, report: Report) -> float:
    """Seconds from the round's beginning until the client is done: download, then work, then upload."""
    if report.cut_s is not None:
        return report.cut_s
    num_examples = sum(work.num_examples for work in report.work.values())
    return (
        (report.downlink_bits - report.reply_bits) / traits.downlink_bps
        + num_examples / traits.examples_per_s
        + report.uplink_bits / traits.uplink_bps
    )


def reply_s(traits: Traits, report: Report) -> float:
    """Seconds of the download after the server's update."""
    return report.reply_bits / traits.downlink_bps


def cut_off(traits: Traits, report: Report, close_s: float, status: Literal["late", "surplus"]) -> Report:
    """What a client has used when the server hangs up after `close_s` seconds: whole bytes, and whole steps.

    Nothing of its round counts.
    """
    down = _crossed(report.downlink_bits, close_s, traits.downlink_bps)
    left = close_s - report.downlink_bits / traits.downlink_bps
    num_examples = sum(work.num_examples for work in report.work.values())
    work = _done(report.work, left * traits.examples_per_s)
    left -= num_examples / traits.examples_per_s
    return replace(
        report,
        sent=False,
        uplink_bits=_crossed(report.uplink_bits, left, traits.uplink_bps),
        downlink_bits=down,
        work=work,
        metrics={},
        relayed=(),
        status=status,
        undone=True,
        cut_s=close_s,
    )


def _crossed(bits: int, seconds: float, bits_per_s: float) -> int:
    """Bits of the whole bytes that cross a wire in this time."""
    return min(bits, 8 * int(max(0.0, seconds) * bits_per_s / 8))


def _done(planned: Mapping[str, Work], num_examples: float) -> dict[str, Work]:
    """The part of the work that a client gets through, stage by stage."""
    left, done = max(0, int(num_examples)), {}
    for name, work in planned.items():
        examples = min(work.num_examples, left)
        left -= examples
        done[name] = Work(work.num_steps * examples // max(1, work.num_examples), examples)
    return done

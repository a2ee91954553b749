"""Traits: a client's id and fixed properties, which methods see."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Traits:
    """A client's fixed traits: size of its train split, share of the model it can keep, and its speeds.

    `work_share`: the share of a plan's training steps that it does.
    `retention_given`: whether the experiment sets `retention_ratio`; if not, a method's own default applies.
    """

    id: int
    num_examples: int
    retention_ratio: float = 1.0
    examples_per_s: float = 1000.0
    uplink_bps: float = 10e6
    downlink_bps: float = 50e6
    retention_given: bool = False
    work_share: float = 1.0

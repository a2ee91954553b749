"""How evenly a metric is distributed over clients. The worst tenth is rounded up to whole clients."""

import math
from collections.abc import Iterable, Mapping

import numpy as np

from rayfl.metrics.facts import Facts

RECORDED: Mapping[str, Mapping[str, object]] = {
    "deviation": {"low": 0.0, "high": None, "higher_is_better": False},
    "worst_tenth": {},
    "worst": {},
    "difference": {"low": 0.0, "high": None, "higher_is_better": False},
    "jain": {"unit": "", "low": 0.0, "high": 1.0, "higher_is_better": True},
}
"""The values of `fairness` that each evaluation records, as `own_worst/accuracy`, with the facts in which they differ
from the metric."""
OVER_CLIENTS = ("merged", "weighted", *RECORDED)
"""Endings of places whose values are not means over clients: `own_merged/accuracy` (rayfl/rounds/evaluation.py)."""


def fairness(values: np.ndarray, facts: Facts) -> dict[str, float]:
    """The spread of clients' values [n], which are NaN if undefined; {} if all are. Results that are NaN are left out.

    mean, deviation: over clients (the population's standard deviation). worst_tenth: the mean of the worst 10 %. worst,
    best: the worst and the best client; difference: between these two. jain: Jain's index, (sum a)^2 / (n sum a^2),
    from 1/n to 1 (1 if all are equal, also if all are 0), left out if a value is negative. left_out: the number of
    clients whose value is undefined.
    """
    defined = values[~np.isnan(values)]
    if not len(defined):
        return {}
    # The worst first.
    ordered = np.sort(facts.sign * defined) * facts.sign
    # Losses of clients that have diverged are too large for a square.
    with np.errstate(all="ignore"):
        squares = (defined**2).sum()
        jain = np.nan if (defined < 0).any() else defined.sum() ** 2 / (len(defined) * squares) if squares else 1.0
        spread = {
            "mean": defined.mean(),
            "deviation": defined.std(),
            "worst_tenth": ordered[: math.ceil(len(defined) / 10)].mean(),
            "worst": ordered[0],
            "best": ordered[-1],
            "difference": abs(ordered[-1] - ordered[0]),
            "jain": jain,
            "left_out": len(values) - len(defined),
        }
    return {name: float(value) for name, value in spread.items() if not np.isnan(value)}


def is_summary(name: str, endings: Iterable[str] = OVER_CLIENTS) -> bool:
    """Whether the value `name` is over clients, but not the mean of their values: own_merged/accuracy."""
    return name.partition("/")[0].endswith(tuple(f"_{word}" for word in endings))


def facts_over_clients(evaluation: str, facts: Facts) -> Facts:
    """A value's facts in an evaluation: those of Jain's index for "own_jain", those of the metric for "own"."""
    fields = next((fields for word, fields in RECORDED.items() if evaluation.endswith(f"_{word}")), None)
    return facts.model_copy(update=fields) if fields else facts

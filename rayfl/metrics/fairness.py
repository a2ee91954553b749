"""How evenly a metric's values lie over clients. A worst tenth is rounded up to whole clients."""

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
"""What each evaluation records of `fairness`, as `own_worst/accuracy`, and in what their facts differ from
those of the metric."""
OVER_CLIENTS = ("merged", "weighted", *RECORDED)
"""What places end in whose values are no means over clients: `own_merged/accuracy` (rayfl/rounds/evaluation.py)."""


def fairness(values: np.ndarray, found: Facts) -> dict[str, float]:
    """The spread of clients' values [n], NaN where they are undefined; {} without any. What is NaN is left out.

    mean, deviation: over clients (the population's deviation). worst_tenth: the mean of the worst 10 %. worst, best: of
    a client; difference: between the two. jain: Jain's index, (sum a)^2 / (n sum a^2), from 1/n to 1 (all equal, also
    where all are 0), left out where a value is negative. left_out: the number of clients whose value is undefined.
    """
    defined = values[~np.isnan(values)]
    if not len(defined):
        return {}
    # The worst first.
    ordered = np.sort(found.sign * defined) * found.sign
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
    """Whether the value `name` sums clients' values up in another way than by their mean: own_merged/accuracy."""
    return name.partition("/")[0].endswith(tuple(f"_{word}" for word in endings))


def facts_over_clients(place: str, found: Facts) -> Facts:
    """The facts of a value in a place: of "own_jain" those of Jain's index over clients, of "own" those `found`."""
    fields = next((fields for word, fields in RECORDED.items() if place.endswith(f"_{word}")), None)
    return found.model_copy(update=fields) if fields else found

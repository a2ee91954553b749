"""Options of a page that compares runs: an experiment's `[report]` table, or flags."""

from collections.abc import Mapping, Sequence

from pydantic import Field

from rayfl.errors import RayflError
from rayfl.metrics.facts import Facts
from rayfl.settings import Settings


class ReportOptions(Settings):
    """The `[report]` table: how runs are compared. It changes no run, only the page that compares them."""

    target: float | None = Field(
        default=None, description="value of the metric whose cost is compared; default: what half of the runs reach"
    )
    best_over: tuple[str, ...] = Field(
        default=(), description="tuned settings, such as method.lr: only the best of their values is shown"
    )
    last: int = Field(default=3, ge=1, description="number of last evaluations whose mean is the smoothed final value")
    metric: str | None = Field(
        default=None,
        description="metric to compare by, as own/accuracy; default: the first one, own/... if a method is personal",
    )


def require_target(target: float, ranking: Mapping[str, Facts]) -> None:
    """Raise RayflError for a target that is outside the range of all metrics that it may be a value of."""
    if ranking and not any(facts.holds(target) for facts in ranking.values()):
        name, facts = next(iter(ranking.items()))
        raise RayflError(f"={target:g} is outside the range of {name}, {facts.range_words}", ("report", "target"))


def agreed_options(
    experiments: Sequence[Mapping[str, object]], given: Mapping[str, object] | None = None
) -> ReportOptions:
    """`given`, else the values on which the `[report]` tables of all experiments agree, else defaults.

    Raise RayflError for a wrong value.
    """
    tables = [table if isinstance(table := one.get("report"), Mapping) else {} for one in experiments]
    known = [key for key in ReportOptions.model_fields if tables and all(key in table for table in tables)]
    agreed = {key: tables[0][key] for key in known if all(table[key] == tables[0][key] for table in tables)}
    return ReportOptions(**{**agreed, **(given or {})})

"""Options of a page that compares runs: an experiment's `[report]` table, or flags."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from pydantic import BeforeValidator, Field

from rayfl.errors import RayflError, did_you_mean
from rayfl.metrics.comparable import comparable, default_metric
from rayfl.metrics.facts import Facts
from rayfl.settings import Settings

Names = Annotated[
    tuple[str, ...], BeforeValidator(lambda given: tuple(given.split(",")) if isinstance(given, str) else given)
]
"""Names; as text with commas between them."""


Color = Annotated[str, Field(pattern="^#[0-9A-Fa-f]{6}$")]


class TableOptions(Settings):
    """A `[[report.tables]]` table: numbers by the items of one swept setting, or of two.

    An axis is a dotted key such as "method.lr", "case", or several keys: "case,method.lr".
    """

    rows: Names = Field(default=("label",), description="swept settings of the rows; label: a row for each label")
    columns: Names = Field(default=(), description="swept settings of the columns; none: a column for each value")
    values: Names = Field(
        default=(), description="numbers to show, as in report.values; default: the metric that ranks the runs"
    )
    baseline: str | None = Field(default=None, description="row or column with which the others are compared")


class ReportOptions(Settings):
    """The `[report]` table: how runs are compared. It changes no run, only the page that compares them."""

    target: float | tuple[float, ...] | None = Field(
        default=None, description="value of the metric, or list of values, whose cost in rounds and bytes is compared"
    )
    values: Names = Field(
        default=(), description="further numbers to show, such as comm/busiest_megabytes, own/accuracy:best, rounds@0.8"
    )
    best_over: tuple[str, ...] = Field(
        default=(), description="tuned settings, such as method.lr: only the best of their values is shown"
    )
    last: int = Field(default=3, ge=1, description="number of last evaluations whose mean is the smoothed final value")
    metric: str | None = Field(
        default=None,
        description="metric that ranks runs, such as own/accuracy; default: the first, own/... if a method is personal",
    )
    note: str | None = Field(
        default=None, description="sentence at the top of the page, such as how the runs' settings were chosen"
    )
    order: Names = Field(
        default=(), description="labels of runs, in the order of tables, legends and colours; default: the sweep's"
    )
    colors: Mapping[str, Color] | None = Field(
        default=None, description="colours of runs on all pages, by their labels, such as {fedavg = '#0072B2'}"
    )

    tables: tuple[TableOptions, ...] = Field(
        default=(),
        description="tables by swept settings, charts against numbers; default: those that fit the sweep",
    )
    list_refused: bool = Field(
        default=False,
        description="whether a sweep runs although some combinations cannot: tables then list why they are refused",
    )

    @property
    def targets(self) -> tuple[float, ...]:
        """All targets."""
        return self.target if isinstance(self.target, tuple) else () if self.target is None else (self.target,)


def require_targets(targets: Iterable[float], name: str, facts: Facts) -> None:
    """Raise RayflError for a target that is outside the range of the value `name`."""
    for target in targets:
        if not facts.holds(target):
            raise RayflError(f"={target:g} is outside the range of {name}, {facts.range_words}", ("report", "target"))


def check_report(options: ReportOptions, known: Mapping[str, Facts]) -> None:
    """Raise RayflError for a metric that no run of an experiment can record, or a target that it cannot reach.

    known: the facts of the experiment's values, without their places.
    """
    names = comparable(known)
    if options.metric not in (None, *names):
        raise RayflError(
            f"={options.metric!r} is not a metric of this experiment; {did_you_mean(str(options.metric), names)}",
            ("report", "metric"),
        )
    name = options.metric or default_metric(known, by_client=True)
    if name in names:
        require_targets(options.targets, name.partition("/")[2], names[name])


def agreed_options(
    experiments: Sequence[Mapping[str, object]], given: Mapping[str, object] | None = None
) -> ReportOptions:
    """`given`, else the values on which the `[report]` tables of all experiments agree, else defaults.

    Raise RayflError for a wrong value.
    """
    tables = [table if isinstance(table := experiment.get("report"), Mapping) else {} for experiment in experiments]
    known = [key for key in ReportOptions.model_fields if tables and all(key in table for table in tables)]
    agreed = {key: tables[0][key] for key in known if all(table[key] == tables[0][key] for table in tables)}
    return ReportOptions(**{**agreed, **(given or {})})

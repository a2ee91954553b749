"""Early stop: the `[stop]` table of an experiment, which ends a run before its last round.

It counts evaluations of one value, not rounds. What it remembers is in the run state, so a resumed run ends in the same
round. This module loads no torch.
"""

from collections.abc import Mapping
from math import inf, nan
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from rayfl.errors import RayflError, did_you_mean
from rayfl.metrics.comparable import comparable, default_metric
from rayfl.metrics.facts import Facts
from rayfl.settings import Settings, unused_with


class EarlyStop(Settings):
    """The `[stop]` table: when a run ends before its last round. Evaluations are counted, not rounds."""

    metric: str | None = Field(
        default=None,
        description="value that decides, such as own/accuracy; default: that of the first metric that ranks runs, "
        "own/... or with evaluation.own=false pooled/...",
    )
    patience: int | None = Field(
        default=None, ge=1, description="end after this number of evaluations in a row that are no improvement"
    )
    min_delta: float = Field(
        default=0.0,
        ge=0,
        description="an improvement is better than the best value before by more than this",
        json_schema_extra=unused_with(patience=[None]),
    )
    target: float | None = Field(
        default=None, description="end after the first evaluation whose value is this or better"
    )

    keep: Literal["last", "best"] = Field(
        default="last", description="which models are saved: those of the last round, or of the best evaluation"
    )

    @model_validator(mode="after")
    def _can_end(self) -> "EarlyStop":
        if self.patience is None and self.target is None:
            raise RayflError("neither patience nor target is given, so it would end no run; give one of them, or both")
        return self


class StopRule(NamedTuple):
    """The early stop of an experiment. sign: 1, or -1 if smaller values are better."""

    settings: EarlyStop
    metric: str
    sign: int

    def after(self, state: Mapping[str, np.ndarray], value: float | None) -> dict[str, np.ndarray]:
        """The state after an evaluation (None: the value is undefined there); it is {} before the first.

        best, last: values times `sign`; waited: evaluations since the best one.
        """
        best = float(state.get("best", -inf))
        last = nan if value is None else self.sign * value
        improved = last - best > self.settings.min_delta
        waited = 0 if improved else int(state.get("waited", 0)) + 1
        return {"best": np.array(last if improved else best), "last": np.array(last), "waited": np.array(waited)}

    def keeps(self, state: Mapping[str, np.ndarray], values: Mapping[str, float]) -> bool:
        """Whether the models of the round that led to a state are the best so far, and are kept. values: of the round,
        by name."""
        return self.settings.keep == "best" and self.metric in values and not state["waited"]

    def reason(self, state: Mapping[str, np.ndarray]) -> str:
        """Why the run ends after the evaluation that led to a state; "" if it goes on."""
        patience, target = self.settings.patience, self.settings.target
        if state and target is not None and state["last"] >= self.sign * target:
            return f"{self.metric} has reached stop.target={target:g}: it is {self.sign * state['last']:.4g}"
        if state and patience is not None and state["waited"] >= patience:
            by = f" by more than stop.min_delta={self.settings.min_delta:g}" if self.settings.min_delta else ""
            best = f"its best value is {self.sign * state['best']:.4g}"
            return f"{self.metric} has not improved{by} in stop.patience={patience} evaluations; {best}"
        return ""


def stop_rule(settings: EarlyStop, known: Mapping[str, Facts], by_client: bool) -> StopRule:
    """The rule of a `[stop]` table. Raise RayflError for a metric or a target that does not exist.

    known: the facts of the experiment's values, without their places; by_client: `evaluation.own`.
    """
    metric = settings.metric or default_metric(known, by_client)
    names = comparable(known)
    if metric not in names:
        raise RayflError(
            f"={metric!r} is not a metric of this experiment; {did_you_mean(metric, names)}", ("stop", "metric")
        )
    if settings.target is not None and not names[metric].holds(settings.target):
        raise RayflError(
            f"={settings.target:g} is outside the range of {metric}, {names[metric].range_words}", ("stop", "target")
        )
    return StopRule(settings, metric, names[metric].sign)

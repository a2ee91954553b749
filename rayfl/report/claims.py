"""A paper's claims about sweeps, as its claims.toml lists them, and the values of their two sides, seed by seed.

A claim is about one number of the runs (rayfl/report/numbers.py), or about the same number at two moments, and compares
the runs of two values of a swept key. rayfl/report/verdicts.py decides by the differences.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal, Self

import numpy as np
import pandas as pd
from pydantic import Field, model_validator

from rayfl.errors import RayflError, did_you_mean
from rayfl.experiment.sweep import described
from rayfl.report.groups import Group, group_runs, ranked_names
from rayfl.report.numbers import COSTS, number
from rayfl.run_directory.record import Run
from rayfl.settings import Settings, dotted
from rayfl.untyped import Json, SettingsTable, Value

Choices = Mapping[str, str]
"""The label, or else the value in words, of each swept key: {"case": "FedAvg", "seed": "1"}."""
ClaimSide = SettingsTable | float
_AFTER = "_after_training"
"""The end of the first word of a metric that is read after local training: own_after_training/accuracy."""
_BY_SETTINGS = (*COSTS, "comm/", "flops/")
"""What the numbers begin with that the settings of a run decide, whatever it learns."""


class Claim(Settings):
    """A `[[claim]]` of claims.toml: that `better` exceeds `than`, that `order` falls, or that `trend` rises."""

    id: str
    source: Literal["paper", "ours"] = Field(default="paper", description="whose claim it is; only a paper's count")
    says: str = Field(description="the paper's sentence or cell, quoted, with its place")
    places: tuple[str, ...] = Field(default=(), description="further sentences and cells about the same runs")
    setting: str = Field(default="", description="our setting, and why it is the nearest")
    sweep: str = Field(description="the sweep's file, without .toml")
    value: str | tuple[str, ...] = Field(
        description="a number of the runs, as own/accuracy or rounds@0.8; several are moments, which must agree"
    )
    than_value: str = Field(default="", description="the number of the side `than`; default: value")
    relative: bool = Field(default=False, description="divide each difference by the value of `than`")
    where: SettingsTable = Field(default={}, description="values of swept keys that both sides have")
    better: SettingsTable | None = Field(default=None, description="values of swept keys of the one side")
    than: ClaimSide | None = Field(default=None, description="values of swept keys of the other side, or a number")
    order: tuple[SettingsTable, ...] = Field(default=(), description="sides, of which each exceeds the next")
    trend: str | None = Field(default=None, description="a swept key: a side's value is the slope over it")
    among: tuple[Value, ...] = Field(default=(), description="the values of `trend` that count; default: all")
    sign: Literal[">", "<", "="] = Field(default=">", description="which side has the larger value")
    margin: float | None = Field(default=None, ge=0, description="the smallest effect; default: that of its unit")
    size: float | None = Field(default=None, description="the paper's figure of the difference, or of the slope")
    horizon: float | None = Field(default=None, description="where a run that lacks the number is censored")
    converged: str = Field(default="", description="a number that only a converged run has, as rounds@train/loss=0.1")

    @model_validator(mode="after")
    def _compares_something(self) -> Self:
        ways = [self.better is not None and self.than is not None, len(self.order) > 1]
        alone = self.trend is not None and self.than is None and not self.order
        uneven = self.than is None or (self.than_value and not isinstance(self.than, Mapping))
        censored = any("@" in name for name in self.values)
        by_settings = self.source == "paper" and any(
            name.startswith(_BY_SETTINGS) and "@" not in name for name in self.values
        )
        moments = self.than_value and any(
            name != self.than_value and name.replace(_AFTER, "") == self.than_value.replace(_AFTER, "")
            for name in self.values
        )
        wrong = {
            "needs better and than, or an order of at least two sides, or a trend": sum(ways) != 1 and not alone,
            "has among, which needs a trend and two values": self.among and (not self.trend or len(self.among) < 2),
            "has than_value or relative, which need better and than": (self.than_value or self.relative) and uneven,
            f"reads value and than_value={self.than_value!r} at another moment; read both sides at one moment": moments,
            "needs horizon, the round (or cost) at which a run without the number is censored": censored
            and self.horizon is None,
            "has horizon, which needs a number with @, no trend and the sign > or <": self.horizon is not None
            and (not censored or self.sign == "=" or self.trend),
            f"reads {self.value!r}, which follows from the settings and cannot fail; write it into a table of facts, "
            "or set source='ours'": by_settings and not self.trend,
            "needs margin, the smallest effect, for sign='='": self.sign == "=" and self.margin is None,
        }
        for words in filter(wrong.get, wrong):
            raise RayflError(f" {self.id!r} {words}")
        return self

    @property
    def values(self) -> tuple[str, ...]:
        """The numbers that are read of both sides, one for each moment."""
        return (self.value,) if isinstance(self.value, str) else self.value

    @property
    def pairs(self) -> list[tuple[ClaimSide, ...]]:
        """The sides that are compared with each other; of a trend one side may be alone."""
        sides = self.order or [side for side in (self.better, self.than) if side is not None] or [{}]
        return [*itertools.pairwise(sides)] or [(sides[0],)]

    def choices(self, side: SettingsTable) -> Choices:
        """The values that a side and `where` give to swept keys, in the words of the sweep."""
        return {key: _word(value) for key, value in dotted({**self.where, **side}).items()}

    def words(self, pair: Sequence[ClaimSide]) -> str:
        """The claim about a pair: "Elastic > FedAvg", "slope over method.lr of FedAvg, wrap=elastic > 0"."""
        names = [
            ", ".join(
                value if isinstance(value, str) else f"{key.rpartition('.')[2]}={_word(value)}" for key, value in fixed
            )
            for fixed in (dotted(side).items() if isinstance(side, Mapping) else [("", f"{side:g}")] for side in pair)
        ]
        compared = f" {self.sign} ".join([*names, "0"][:2])
        return f"slope over {self.trend}{' of ' * bool(names[0])}{compared}" if self.trend else compared


def _word(value: Value) -> str:
    return value if isinstance(value, str) else described(value)


def check(claim: Claim, sweeps: Mapping[str, Sequence[Choices]]) -> None:
    """Raise RayflError unless each side of a claim is, in each seed, one combination of its sweep (or one trend)."""
    here = f"claim {claim.id!r}"
    sweep = claim.sweep
    if sweep not in sweeps:
        raise RayflError(f"{here} has sweep={sweep!r}: {did_you_mean(sweep, sweeps)}")
    axes = {key: [*dict.fromkeys(choices[key] for choices in sweeps[sweep])] for key in sweeps[sweep][0]}
    if len(axes["seed"]) < 2:
        raise RayflError(f"{here}: sweep {sweep!r} needs at least two seeds; give sweep.seed=[1, 2]")
    among = [_word(item) for item in claim.among] or axes.get(claim.trend or "", [""])
    for side in (claim.choices(side) for pair in claim.pairs for side in pair if isinstance(side, Mapping)):
        for key, word in (*side.items(), *((claim.trend, word) for word in among if claim.trend)):
            if word not in axes.get(key, ()):
                known = did_you_mean(word, axes[key]) if key in axes else f"it sweeps {', '.join(axes)}"
                raise RayflError(f"{here}: {sweep} has no {key}={word!r}; {known}")
        for key in (key for key in axes if len(axes[key]) > 1 and key not in {*side, "seed", claim.trend}):
            raise RayflError(f"{here} leaves {key!r} open; name one in where: {', '.join(axes[key]):.300}")


def check_distinct(claims: Sequence[Claim], sweeps: Mapping[str, Sequence[tuple[Choices, str]]]) -> None:
    """Raise RayflError if a claim compares runs with themselves, or if two claims of the paper are about the same runs.

    sweeps: the choices of each run of a sweep, and what decides its numbers. Checked claims alone.
    """
    known: dict[object, str] = {}
    for claim, pair in [(owner, sides) for owner in claims for sides in owner.pairs]:
        among = {_word(item) for item in claim.among}
        sides = [
            frozenset(
                settings
                for choices, settings in sweeps[claim.sweep]
                if claim.choices(side).items() <= choices.items() and (not among or choices[claim.trend or ""] in among)
            )
            if isinstance(side, Mapping)
            else side
            for side in pair
        ]
        if len(sides) == 2 and sides[0] == sides[1] and not claim.than_value:
            raise RayflError(f"claim {claim.id!r} compares runs of the same settings with each other; it cannot fail")
        other = known.setdefault((frozenset(sides), claim.values, claim.than_value, bool(claim.trend)), claim.id)
        if other != claim.id and claim.source == "paper":
            raise RayflError(
                f"claims {other!r} and {claim.id!r} read the same pairs of runs; make one of them, with places=[...]"
            )


def read_pairs(claims: Sequence[Claim], runs: Mapping[str, Sequence[tuple[Choices, Run | None]]]) -> pd.DataFrame:
    """The values of both sides of checked claims by the runs of each sweep, None for a run that has not finished.

    A row for each claim, pair of sides (compared), number (value) and seed. first, second: the values as recorded,
    shares in [0, 1]; NaN if a run lacks the number, inf if it is censored at the claim's horizon. converged: whether
    all runs have the claim's number `converged`. first_runs, second_runs: the directories of the runs, SWEEP/RUN, with
    ";" between them.
    """
    by_sweep = {name: group_runs([run for _, run in planned if run is not None]) for name, planned in runs.items()}
    metrics = {name: next(iter(ranked_names(together)), None) for name, together in by_sweep.items()}
    rows = [
        row
        for claim in claims
        if by_sweep.get(claim.sweep)
        for pair in claim.pairs
        for value in claim.values
        for row in _read(claim, pair, value, runs[claim.sweep], by_sweep[claim.sweep], metrics[claim.sweep])
    ]
    sides = ["first", "second", "converged", "first_runs", "second_runs"]
    return pd.DataFrame(rows, columns=["claim", "compared", "value", "unit", "seed", *sides])


def _read(
    claim: Claim,
    pair: Sequence[ClaimSide],
    value: str,
    planned: Sequence[tuple[Choices, Run | None]],
    together: Sequence[Group],
    metric: str | None,
) -> list[dict[str, Json]]:
    sides = [claim.choices(side).items() for side in pair if isinstance(side, Mapping)]
    runs = [
        (choices, run) for choices, run in planned if run is not None and any(side <= choices.items() for side in sides)
    ]
    if not runs:
        return []
    names = {"first": value, "second": claim.than_value or value, "converged": claim.converged or value}
    try:
        numbers = {column: number(name, together, metric) for column, name in names.items()}
    except RayflError as error:
        raise RayflError(f"claim {claim.id!r}: {error}") from None
    table = pd.DataFrame(
        {
            **choices,
            **{column: shown.read(run) for column, shown in numbers.items()},
            "run": f"{claim.sweep}/{run.directory.name}",
        }
        for choices, run in runs
    )
    if claim.horizon is not None:
        table[["first", "second"]] = table[["first", "second"]].fillna(np.inf)
    among = [_word(item) for item in claim.among] or [choices.get(claim.trend or "", "") for choices, _ in planned]
    words = [*dict.fromkeys(among)]
    read = pd.DataFrame(index=pd.Index(dict.fromkeys(choices["seed"] for choices, _ in planned), name="seed"))
    for name, side in zip(("first", "second"), pair, strict=False):
        if isinstance(side, Mapping):
            chosen = table.loc[[claim.choices(side).items() <= row.items() for row in table.to_dict("records")]]
            chosen = chosen.loc[chosen[claim.trend].isin(words)] if claim.trend else chosen
            read[name] = _by_seed(claim, chosen, name, words)
            read[f"{name}_runs"] = chosen.groupby("seed")["run"].agg(";".join)
        else:
            read[name] = float(side)
            read[f"{name}_runs"] = ""
    read["converged"] = True if not claim.converged else ~table["converged"].isna().groupby(table["seed"]).any()
    row = {"claim": claim.id, "compared": claim.words(pair), "value": value, "unit": numbers["first"].facts.unit}
    return [{**row, **values} for values in read.reset_index().to_dict("records")]


def _by_seed(claim: Claim, chosen: pd.DataFrame, column: str, words: Sequence[str]) -> pd.Series:
    """The value of a side by seed: the number of one run, or the slope over the runs of a trend, whose values are
    `words`; NaN if one of them has not finished."""
    if claim.trend is None:
        return pd.Series(chosen.set_index("seed")[column])
    numbers = np.asarray(pd.to_numeric(pd.Series(words), errors="coerce"))
    # Values that are not numbers are placed at 0, 1, 2 and so on.
    positions = np.arange(len(words)) if np.isnan(numbers).any() else numbers
    centred = positions - positions.mean()
    values = chosen.pivot(index="seed", columns=claim.trend, values=column).reindex(columns=words)
    return pd.Series(values @ (centred / (centred @ centred)))

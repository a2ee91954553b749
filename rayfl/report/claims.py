"""A paper's claims about sweeps, as its claims.toml lists them, the rule of their verdicts, and the page of these.

A claim is about one number of the runs (rayfl/report/numbers.py) and compares, seed by seed, the runs of two values of
a swept key. The verdict follows from the 95 % interval of the mean difference (rayfl/report/statistics.py):
"reproduced" if the interval lies on the claim's side of 0, "refuted" if it lies on the other side, "undecided" if it
contains 0. With sign "=" the claim's side is [-margin, margin]. `size` is the paper's own figure of the difference;
whether the interval contains it is reported too, and does not change the verdict.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal, Self
from urllib.parse import quote

import numpy as np
import pandas as pd
from pydantic import Field, model_validator

from rayfl.errors import RayflError, did_you_mean
from rayfl.experiment.sweep import described
from rayfl.report import wording
from rayfl.report.groups import Group, group_runs, ranked_names
from rayfl.report.numbers import number
from rayfl.report.statistics import holm, paired
from rayfl.run_directory.record import Run
from rayfl.settings import Settings, dotted
from rayfl.untyped import Json, SettingsTable, Value

Choices = Mapping[str, str]
"""The label, or else the value in words, of each swept key: {"case": "FedAvg", "seed": "1"}."""
ClaimSide = SettingsTable | float

_RULE = (
    "The rule, fixed before the runs: a claim is reproduced if the 95 % interval of the mean paired difference over "
    "seeds (Student's t) lies on the claim's side of 0, refuted if it lies on the other side, and undecided if it "
    "contains 0 or if a run lacks the number. Inside: whether the interval contains the paper's figure of the "
    "difference. p: of the paired t-test, after Holm's correction over all rows. Detectable: the smallest difference "
    "that the test finds with power 0.8. Each number of ours links to its runs."
)
_HEADS = ("Claim", "Ours", "Difference", "n", "Verdict", "Paper's", "Inside", "p, Holm", "Detectable")


class Claim(Settings):
    """A `[[claim]]` of claims.toml: that `better` exceeds `than`, that `order` falls, or that `trend` rises."""

    id: str
    says: str = Field(description="the paper's sentence or cell, quoted, with its place")
    setting: str = Field(default="", description="our setting, and why it is the nearest")
    sweep: str = Field(description="the sweep's file, without .toml")
    value: str = Field(description="a number of the runs, as own/accuracy or rounds@0.8")
    than_value: str = Field(default="", description="the number of the side `than`; default: value")
    relative: bool = Field(default=False, description="divide each difference by the value of `than`")
    where: SettingsTable = Field(default={}, description="values of swept keys that both sides have")
    better: SettingsTable | None = Field(default=None, description="values of swept keys of the one side")
    than: ClaimSide | None = Field(default=None, description="values of swept keys of the other side, or a number")
    order: tuple[SettingsTable, ...] = Field(default=(), description="sides, of which each exceeds the next")
    trend: str | None = Field(default=None, description="a swept key: a side's value is the slope over it")
    among: tuple[Value, ...] = Field(default=(), description="the values of `trend` that count; default: all")
    sign: Literal[">", "<", "="] = Field(default=">", description="which side has the larger value")
    margin: float = Field(default=0.0, ge=0, description="for sign =: the largest difference that counts as none")
    size: float | None = Field(default=None, description="the paper's figure of the difference, or of the slope")
    missing: float | None = Field(default=None, description="the value of a run that lacks the number")

    @model_validator(mode="after")
    def _compares_something(self) -> Self:
        ways = [self.better is not None and self.than is not None, len(self.order) > 1]
        alone = self.trend is not None and self.than is None and not self.order
        uneven = self.than is None or (self.than_value and not isinstance(self.than, Mapping))
        wrong = {
            "needs better and than, or an order of at least two sides, or a trend": sum(ways) != 1 and not alone,
            "has a margin, which only sign='=' uses; remove it": self.margin and self.sign != "=",
            "has among, which needs a trend and two values": self.among and (not self.trend or len(self.among) < 2),
            "has than_value or relative, which need better and than": (self.than_value or self.relative) and uneven,
        }
        for words in filter(wrong.get, wrong):
            raise RayflError(f" {self.id!r} {words}")
        return self

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


def assess(claims: Sequence[Claim], runs: Mapping[str, Sequence[tuple[Choices, Run | None]]]) -> pd.DataFrame:
    """The verdicts on checked claims by the runs of each sweep, None for one that has not finished: a row for each pair
    of sides.

    Values are as recorded, shares in [0, 1]. relative: whether the differences are shares of the second value. first,
    second: means over seeds; first_sd, second_sd: their deviations; first_runs, second_runs: the directories of the
    runs, SWEEP/RUN, with ";" between them. The next columns are those of `statistics.Paired`. paper: the paper's
    figure; inside: whether the interval contains it; holm: p after Holm's correction over all rows.
    """
    by_sweep = {name: group_runs([run for _, run in planned if run is not None]) for name, planned in runs.items()}
    metrics = {
        name: next(iter(ranked_names(together)), None) if together else None for name, together in by_sweep.items()
    }
    rows = [
        _assess(claim, pair, runs.get(claim.sweep, ()), by_sweep.get(claim.sweep, []), metrics.get(claim.sweep))
        for claim in claims
        for pair in claim.pairs
    ]
    return pd.DataFrame(rows).assign(holm=lambda verdicts: holm([*verdicts["p"]]))


def _assess(
    claim: Claim,
    pair: Sequence[ClaimSide],
    planned: Sequence[tuple[Choices, Run | None]],
    together: Sequence[Group],
    metric: str | None,
) -> dict[str, Json]:
    value = f"{claim.value}{f' against {claim.than_value}' * bool(claim.than_value)}{', relative' * claim.relative}"
    row = {"claim": claim.id, "compared": claim.words(pair), "sweep": claim.sweep, "value": value}
    row |= {"relative": claim.relative, "first_runs": "", "second_runs": ""}
    sides = [claim.choices(side).items() for side in pair if isinstance(side, Mapping)]
    runs = [
        (choices, run) for choices, run in planned if run is not None and any(side <= choices.items() for side in sides)
    ]
    if not runs:
        return {**row, "unit": "", **paired([])._asdict(), "verdict": "not run", "paper": claim.size, "inside": None}
    try:
        first, second = (number(name, together, metric) for name in (claim.value, claim.than_value or claim.value))
    except RayflError as error:
        raise RayflError(f"claim {claim.id!r}: {error}") from None
    rows = [
        {**choices, "first": first.read(run), "second": second.read(run), "run": f"{claim.sweep}/{run.directory.name}"}
        for choices, run in runs
    ]
    table = pd.DataFrame(rows).fillna(
        {} if claim.missing is None else {"first": claim.missing, "second": claim.missing}
    )
    axis = [*dict.fromkeys(choices.get(claim.trend or "", "") for choices, _ in planned)]
    read = {name: _side(claim, side, table, name, axis) for name, side in zip(("first", "second"), pair, strict=False)}
    for name, (values, directories) in read.items():
        row |= {name: values.mean(), f"{name}_sd": values.std(), f"{name}_runs": ";".join(directories)}
    differences = read["first"][0] - (read["second"][0] if "second" in read else 0.0)
    if claim.relative:
        differences = differences / read["second"][0]
    seen = paired(differences.to_numpy())
    verdict = "undecided" if differences.isna().any() else _verdict(claim, seen.low, seen.high)
    inside = None if claim.size is None or np.isnan(seen.low) else seen.low <= claim.size <= seen.high
    return {
        **row,
        "unit": first.facts.unit,
        **seen._asdict(),
        "verdict": verdict,
        "paper": claim.size,
        "inside": inside,
    }


def _side(
    claim: Claim, side: ClaimSide, table: pd.DataFrame, column: str, axis: Sequence[str]
) -> "tuple[pd.Series, list[str]]":
    """The value of a side by seed, and its runs: the number of one run, or the slope over the runs of a trend, whose
    values in the sweep are `axis`; NaN if one of them has not finished."""
    if not isinstance(side, Mapping):
        return pd.Series(float(side), table["seed"].unique()), []
    chosen = table.loc[[claim.choices(side).items() <= row.items() for row in table.to_dict("records")]]
    if claim.trend is None:
        return chosen.set_index("seed")[column], [*chosen["run"]]
    words = [_word(item) for item in claim.among] or axis
    numbers = np.asarray(pd.to_numeric(pd.Series(words), errors="coerce"))
    # Values that are not numbers are placed at 0, 1, 2 and so on.
    positions = np.arange(len(words)) if np.isnan(numbers).any() else numbers
    centred = positions - positions.mean()
    values = chosen.pivot(index="seed", columns=claim.trend, values=column).reindex(columns=words)
    return values @ (centred / (centred @ centred)), [*chosen.loc[chosen[claim.trend].isin(words), "run"]]


def _verdict(claim: Claim, low: float, high: float) -> str:
    """The rule for an interval; NaN decides nothing."""
    margin = np.nextafter(claim.margin, np.inf)
    least, most = {">": (0, np.inf), "<": (-np.inf, 0), "=": (-margin, margin)}[claim.sign]
    return "reproduced" if least < low and high < most else "refuted" if high < least or most < low else "undecided"


def verdicts_markdown(
    title: str,
    claims: Sequence[Claim],
    verdicts: pd.DataFrame,
    origin: Mapping[str, str],
    runs: Sequence[Run],
    planned: int,
) -> str:
    """The page of the `verdicts` on a paper's claims, which lies beside the sweeps' directories and links to the runs.

    title: the paper; origin: the command and commit, as `run_directory.description.origin`; runs: those that finished
    of the `planned`.
    """
    hours = sum(run.rounds["wall_s"].to_numpy().sum() for run in runs) / 3600
    seeds = pd.Series([run.experiment.get("seed") for run in runs], dtype=object).sort_values().unique()
    rows = [_HEADS, ["---"] * len(_HEADS), *(_row(verdict) for verdict in verdicts.to_dict("records"))]
    parts = [
        f"# {title}",
        ", ".join(f"{number} {verdict}" for verdict, number in verdicts["verdict"].value_counts().items()) + ".",
        f"`{origin['command']}`, commit {origin.get('commit', 'unknown')}, {len(runs)} of {planned} runs, "
        f"seeds {', '.join(map(str, seeds))}, {hours:.2f} hours of rounds.",
        _RULE,
        "\n".join(f"| {' | '.join(row)} |" for row in rows),
        "\n".join(
            f"- **{claim.id}**: {claim.says}{f' *Ours:* {claim.setting}' * bool(claim.setting)}" for claim in claims
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _row(verdict: Mapping[str, Json]) -> list[str]:
    def words(pattern: str, names: Sequence[str], unit: str, sign: str = "+") -> str:
        scale, digits = (100, ".2f") if unit == "%" else (1, ".4g")
        numbers = [
            wording.NONE if pd.isna(verdict[name]) else f"{scale * verdict[name]:{sign}{digits}}" for name in names
        ]
        return pattern.format(*numbers) + f" {unit}".rstrip() * any(number != wording.NONE for number in numbers)

    sides = []
    unit = "%" if verdict["relative"] else verdict["unit"]
    for name in ("first", "second"):
        if verdict.get(f"{name}_runs"):
            paths = enumerate(verdict[f"{name}_runs"].split(";"), 1)
            links = " ".join(f"[{number}]({quote(path)}/)" for number, path in paths)
            mean = words(f"{{}} {wording.PLUS_MINUS} {{}}", (name, f"{name}_sd"), verdict["unit"], "")
            sides.append(f"{mean} ({links})")
    return [
        f"{verdict['claim']}: {verdict['compared']} ({verdict['value']})".replace("|", "\\|"),
        " / ".join(sides) or wording.NONE,
        words("{} [{}, {}]", ("mean", "low", "high"), unit),
        str(verdict["num_pairs"]),
        f"**{verdict['verdict']}**",
        words("{}", ["paper"], unit),
        {None: wording.NONE, True: "yes", False: "no"}[verdict["inside"]],
        wording.NONE if np.isnan(verdict["holm"]) else f"{verdict['holm']:.2g}",
        words("{}", ["detectable"], unit, ""),
    ]

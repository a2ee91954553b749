"""The rule of verdicts on claims, and the page of these.

The differences of a row are those of one pair of runs over the seeds, or of one pair at two moments. A row's plain
verdict follows from Student's 95 % interval: "equal" if two one-sided tests place the difference inside the smallest
effect that matters, else "reproduced" or "refuted" by the side of 0 on which it lies, else "undecided". With a
horizon (values that no run may have) Wilcoxon's signed-rank test on the values up to the horizon replaces the interval.
Moments with different plain verdicts make a row "depends on the moment". The paper's rows are then tested together:
"reproduced" and "refuted" need a p-value of at most 0.05 after Holm's correction over all of them, run or not.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote

import numpy as np
import pandas as pd

from rayfl.report import wording
from rayfl.report.claims import Claim
from rayfl.report.statistics import LEVEL, Paired, equivalence, holm, paired, signed_rank
from rayfl.run_directory.record import Run
from rayfl.untyped import Foreign, Json

SHORT = ("Claim", "Difference, 95 %", "n", "p, Holm", "Verdict", "Paper's", "Size")
"""The columns of a page's first table, and of the one that the terminal shows."""
_RULE = (
    "The rule, fixed before the runs. A row is one pair of runs, or one trend, over fixed seeds. **Equal**: two "
    "one-sided tests at 5 % place the difference within the smallest effect that matters. **Reproduced**, **refuted**: "
    "the difference is on the claim's side of 0, or on the other, with p at most 0.05 after Holm's correction over all "
    "of the paper's rows. A claim of equality is reproduced if the two one-sided tests pass Holm. **Depends on the "
    "moment**: the plain intervals at the two moments, after the exchange and after training, say different things. "
    "**Not converged**, **constant**: no verdict, because a method has not converged, or because the difference is the "
    "same in all seeds and so follows from the settings. **Undecided**: all else. Intervals are plain ones (Student's "
    "t, without Holm). Where runs may never reach a target, values count up to the horizon and Wilcoxon's signed-rank "
    "test decides. Size: ours against the paper's figure."
)


class ClaimRows(NamedTuple):
    """The rows of a paper, and how large an effect must be to matter.

    smallest: by unit ("%", "MB", "relative"), as recorded: 0.005 of "%" is half a point.
    """

    claims: Sequence[Claim]
    smallest: Mapping[str, float]

    @property
    def by_id(self) -> dict[str, Claim]:
        """The claims by their ids."""
        return {claim.id: claim for claim in self.claims}

    @property
    def digest(self) -> str:
        """Twelve digits that change with any of the paper's rows."""
        rows = [
            claim.model_dump(mode="json", exclude_defaults=True) for claim in self.claims if claim.source == "paper"
        ]
        return hashlib.sha256(json.dumps([rows, dict(self.smallest)], sort_keys=True).encode()).hexdigest()[:12]

    def margin(self, claim: Claim, unit: str) -> float:
        """The smallest effect that matters for a claim."""
        return self.smallest.get("relative" if claim.relative else unit, 0.0) if claim.margin is None else claim.margin


def estimates(rows: ClaimRows, pairs: pd.DataFrame) -> pd.DataFrame:
    """What the paired values of `claims.read_pairs` say about each pair of sides and each moment.

    first, second: means over seeds; first_sd, second_sd: their deviations. The next columns are those of
    `statistics.Paired`; for a claim with a horizon the mean alone, of values up to it, and p of the signed-rank test.
    complete: whether no seed lacks a value.
    """
    keys = ["claim", "compared", "value", "unit"]
    records = []
    # pandas does not say that the keys of several columns are tuples.
    groups: Foreign = pairs.groupby(keys, sort=False)
    for names, part in groups:
        claim = rows.by_id[names[0]]
        values = part[["first", "second"]].astype(float).clip(upper=claim.horizon)
        second = values["second"] if len(claim.pairs[0]) > 1 else 0.0
        differences = (values["first"] - second).to_numpy()
        if claim.relative:
            differences = differences / values["second"].to_numpy()
        seen = paired(differences)
        if claim.horizon is not None:
            seen = seen._replace(low=np.nan, high=np.nan, p=signed_rank(differences), detectable=np.nan)
        row = dict(zip(keys, names, strict=True)) | seen._asdict()
        row |= {"complete": not np.isnan(differences).any(), "converged": bool(part["converged"].all())}
        for name in ("first", "second"):
            row |= {name: values[name].mean(), f"{name}_sd": values[name].std()}
            row[f"{name}_runs"] = ";".join(part[f"{name}_runs"].dropna()).strip(";") if f"{name}_runs" in part else ""
        records.append(row)
    return pd.DataFrame(records)


def plain(claim: Claim, seen: Paired, margin: float) -> tuple[float, str]:
    """The p-value by which a moment enters Holm's correction, and its verdict without that correction."""
    inside, outside = equivalence(seen, margin) if not np.isnan(seen.low) else (np.nan, np.nan)
    if claim.sign == "=":
        verdict = "reproduced" if inside <= LEVEL else "refuted" if outside <= LEVEL else "undecided"
        return float(np.fmin(inside, outside)), verdict
    if inside <= LEVEL:
        return seen.p, "equal"
    agrees = (seen.mean > 0) == (claim.sign == ">")
    return seen.p, ("reproduced" if agrees else "refuted") if seen.p <= LEVEL else "undecided"


def decide(rows: ClaimRows, seen: pd.DataFrame) -> pd.DataFrame:
    """The verdicts by `estimates`: a row for each pair of sides of each claim.

    p: the larger of the moments' p-values; holm: after Holm's correction over the paper's rows, NaN for ours; moments:
    a record of `estimates` for each moment, with its plain verdict.
    """
    by_row: dict[tuple[str, str], list[dict[str, Json]]] = {}
    for moment in seen.to_dict("records"):
        by_row.setdefault((moment["claim"], moment["compared"]), []).append(moment)
    table = pd.DataFrame(
        {
            "claim": claim.id,
            "source": claim.source,
            "sweep": claim.sweep,
            "compared": claim.words(pair),
            "moments": moments,
            "p": max((moment["p"] for moment in moments), default=np.nan),
            "paper": np.nan if claim.size is None else claim.size,
            "verdict": _together(claim, moments),
        }
        for claim in rows.claims
        for pair in claim.pairs
        for moments in [[_decided(rows, claim, moment) for moment in by_row.get((claim.id, claim.words(pair)), ())]]
    )
    counts = table["source"] == "paper"
    table.loc[counts, "holm"] = holm([*table.loc[counts, "p"].fillna(1)])
    table.loc[table["p"].isna(), "holm"] = np.nan
    weak = counts & table["verdict"].isin(["reproduced", "refuted"]) & ~(table["holm"] <= LEVEL)
    table.loc[weak, "verdict"] = "undecided"
    return table


def _decided(rows: ClaimRows, claim: Claim, moment: Mapping[str, Json]) -> dict[str, Json]:
    """A moment with its plain verdict, and the p-value for Holm's correction."""
    seen = Paired(*(moment[name] for name in Paired._fields))
    p, verdict = plain(claim, seen, rows.margin(claim, moment["unit"]))
    return {**moment, "p": p, "plain": verdict}


def _together(claim: Claim, moments: Sequence[Mapping[str, Json]]) -> str:
    """The verdict of a row by its moments, before Holm's correction."""
    verdicts = {moment["plain"] for moment in moments}
    stronger = {
        "not run": len(moments) < len(claim.values),
        "not converged": not all(moment["converged"] for moment in moments),
        "undecided": not all(moment["complete"] for moment in moments),
        "constant": claim.sign != "=" and all(moment["low"] == moment["high"] != 0 for moment in moments),
        "depends on the moment": len(verdicts) > 1,
    }
    return next(filter(stronger.get, stronger), None) or verdicts.pop()


def size_of(paper: float, moment: Mapping[str, Json]) -> str:
    """Whether the interval contains the paper's figure, or whether our effect is smaller or larger."""
    if pd.isna(paper) or np.isnan(moment["low"]):
        return wording.NONE
    is_smaller = (paper - moment["mean"]) * (paper or 1) > 0
    return "inside" if moment["low"] <= paper <= moment["high"] else "smaller" if is_smaller else "larger"


def counted(verdicts: pd.DataFrame) -> str:
    """The number of the paper's rows by verdict: "12 rows: 5 reproduced, 7 undecided"."""
    paper = verdicts.loc[verdicts["source"] == "paper", "verdict"].value_counts()
    numbers = ", ".join(f"{count} {name}" for name, count in paper.items())
    return f"{wording.counted(int(paper.sum()), 'row')}: {numbers}"


def short_rows(rows: ClaimRows, verdicts: pd.DataFrame, source: str = "paper") -> list[list[str]]:
    """The cells of `SHORT` for each row of one source."""
    cells = []
    for verdict in verdicts.loc[verdicts["source"] == source].to_dict("records"):
        claim, moments = rows.by_id[verdict["claim"]], verdict["moments"]
        unit = "%" if claim.relative else moments[0]["unit"] if moments else ""
        sizes = [size_of(verdict["paper"], moment) for moment in moments]
        cells.append(
            [
                f"{verdict['claim']}: {verdict['compared']}",
                " / ".join(_words(unit, moment, ("mean", "low", "high")) for moment in moments) or wording.NONE,
                str(min((moment["num_pairs"] for moment in moments), default=0)),
                wording.NONE if pd.isna(verdict["holm"]) else f"{verdict['holm']:.2g}",
                verdict["verdict"],
                wording.NONE if pd.isna(verdict["paper"]) else _words(unit, verdict, ("paper",)),
                " / ".join(dict.fromkeys(sizes)) or wording.NONE,
            ]
        )
    return cells


def verdicts_markdown(
    title: str,
    rows: ClaimRows,
    verdicts: pd.DataFrame,
    about: Sequence[str],
    runs: Sequence[Run],
) -> str:
    """The page of `verdicts`, which lies beside the sweeps' directories: the table of the paper's rows first.

    about: lines on where the numbers come from; runs: those that finished, for the hours and seeds.
    """
    hours = sum(run.rounds["wall_s"].to_numpy().sum() for run in runs) / 3600
    seeds = pd.Series([run.experiment.get("seed") for run in runs], dtype=object).sort_values().unique()
    ours = short_rows(rows, verdicts, "ours")
    parts = [
        f"# {title}",
        f"{counted(verdicts)}.",
        markdown_table(SHORT, short_rows(rows, verdicts)),
        f"{' '.join(about)} Seeds {', '.join(map(str, seeds))}, {hours:.2f} hours of rounds.",
        _RULE,
        *(["## Questions of our own, not counted", markdown_table(SHORT, ours)] if ours else ()),
        "## The sides, and their runs",
        markdown_table(("Row", "Number", "Ours", "Smallest effect"), _sides(rows, verdicts)),
        "## The claims in words",
        "\n".join(
            f"- **{claim.id}**: {' '.join([claim.says, *claim.places])}"
            + f" *Ours:* {claim.setting}" * bool(claim.setting)
            for claim in rows.claims
        ),
    ]
    return "\n\n".join(parts) + "\n"


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [heads, ["---"] * len(heads), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _sides(rows: ClaimRows, verdicts: pd.DataFrame) -> list[list[str]]:
    cells = []
    for verdict in verdicts.to_dict("records"):
        claim = rows.by_id[verdict["claim"]]
        for moment in verdict["moments"]:
            sides = []
            for name in ("first", "second"):
                paths = enumerate(filter(None, moment[f"{name}_runs"].split(";")), 1)
                links = " ".join(f"[{number}]({quote(path)}/)" for number, path in paths)
                if links or name == "first":
                    sides.append(f"{_words(moment['unit'], moment, (name, f'{name}_sd'), '')} ({links})")
            number = f"{moment['value']}{f' against {claim.than_value}' * bool(claim.than_value)}"
            margin = {"margin": rows.margin(claim, moment["unit"])}
            unit = "%" if claim.relative else moment["unit"]
            cells.append(
                [
                    f"{claim.id}: {verdict['compared']}",
                    f"{number}{', relative' * claim.relative}",
                    " / ".join(sides),
                    _words(unit, margin, ("margin",), ""),
                ]
            )
    return cells


def _words(unit: str, numbers: Mapping[str, Json], names: Sequence[str], sign: str = "+") -> str:
    """Numbers with their unit: a mean, with its interval, or with its deviation."""
    scale, digits = (100, ".2f") if unit == "%" else (1, ".4g")
    shown = [wording.NONE if pd.isna(numbers[name]) else f"{scale * numbers[name]:{sign}{digits}}" for name in names]
    if len(names) == 3:
        shown = [shown[0] + f" [{shown[1]}, {shown[2]}]" * (shown[1] != wording.NONE)]
    return f" {wording.PLUS_MINUS} ".join(shown) + f" {unit}".rstrip()

"""Counts the verdicts on each page of results: `python -m docs.generate.verdicts` writes their tables and figures.

A page begins with a table of its verdicts by part of the paper and a figure of the same numbers; the rows follow at its
end. They are made from the page's file of values, docs/results/NAME.csv, by the rule of rayfl.report.verdicts and the
claims that come with rayfl. A file with a column `seed` has the paired values of `rayfl reproduce` (pairs.csv). One
without it has the intervals that the page printed under the old rule: of these, only rows whose sides are at one moment
can be decided.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import vl_convert

from docs.generate.markdown import table
from jobs.reproduce import PAPERS, read_claims
from rayfl.report.claims import Claim
from rayfl.report.statistics import LEVEL, Paired
from rayfl.report.verdicts import SHORT, ClaimRows, decide, estimates, markdown_table, short_rows

RESULTS = Path(__file__).resolve().parents[1] / "results"
VERDICTS = {
    "reproduced": "#0072b2",
    "equal": "#56b4e9",
    "depends on the moment": "#cc79a7",
    "undecided": "#bdbdbd",
    "refuted": "#d55e00",
    "not run": "#eeeeee",
}
"""The colour of each verdict in figures; rows without a verdict for another reason count as undecided."""
SUMMARY = ("<!-- verdicts -->\n", "<!-- end of verdicts -->\n")
ROWS = ("<!-- rows -->\n", "<!-- end of rows -->\n")

PARTS: Mapping[str, Mapping[str, str]] = {
    "dispfl": {
        "table1": "Table 1: accuracy of the methods",
        "section4": "Section 4.2: local training",
        "table2": "Table 2: topologies",
        "table5": "Table 5: rounds to a target",
        "table3": "Table 3: unequal memory",
        "table4": "Table 4: sparsity",
        "figure5": "Figure 5: masks and labels",
        "figure6": "Figure 6: dropouts",
    },
    "elastic": {
        "table2": "Table 2: hosts",
        "table1": "Table 1: tau",
        "section3": "Section 3: boosted entries",
        "figure2": "Figure 2: heterogeneity, participation, epochs",
        "figure3": "Figure 3: speed",
        "section4": "Section 4: schedule",
        "table3": "Table 3: models",
    },
    "fedpse": {
        "table2": "Table 2: lambda 1, 2 to 10 clients",
        "table1": "Table 1: lambda 0.5 and 0, ConvNet2",
        "figure2": "Figure 2: convergence",
        "figure3": "Figure 3: correlation distance",
        "table3": "Table 3: variance",
        "figure4": "Figure 4: element-wise average, ratios",
        "figure5": "Figure 5: element-wise average, lambda",
        "figure7": "Figure 7: participation",
        "figure8": "Figure 8: personal downlink",
    },
    "mcepl": {
        "table1": "Table I: equal shares",
        "table2": "Table II: unequal shares",
        "table3": "Table III: topologies",
        "figure5": "Figure 5: LotteryDSGD",
        "figure6": "Figure 6: convergence",
        "figure9": "Figure 9: masks",
        "section5": "Section V: number of labels",
        "dslth": "Section V-A: lottery tickets",
    },
    "survey": {
        "uplink": "Compression: megabytes",
        "diana": "DIANA",
        "marina": "MARINA",
        "adiana": "ADIANA",
        "personal": "Personal models",
        "mixture": "One problem, three methods",
    },
}
"""The parts of each page: what the names of its claims begin with, and the words for them."""


class Page(NamedTuple):
    """A paper's rows and their verdicts. digest: the hash of its claims; fresh: whether they are from paired values."""

    rows: ClaimRows
    verdicts: pd.DataFrame
    digest: str
    fresh: bool


def page(name: str) -> Page:
    """The verdicts on a paper by its file of values."""
    rows = read_claims(PAPERS / name).rows
    values = pd.read_csv(RESULTS / f"{name}.csv", keep_default_na=False, na_values={"first": "", "second": ""})
    if "seed" in values:
        return Page(rows, decide(rows, estimates(rows, values)), rows.digest, True)
    printed = rows._replace(claims=[_at_printed_moments(claim, values) for claim in rows.claims])
    return Page(printed, decide(printed, _printed(printed, values)), rows.digest, False)


def _at_printed_moments(claim: Claim, values: pd.DataFrame) -> Claim:
    """The claim about those of its moments that the page has printed, if there are any."""
    known = {*values[values["claim"] == claim.id]["value"]}
    return claim.model_copy(update={"value": tuple(value for value in claim.values if value in known) or claim.value})


def _printed(rows: ClaimRows, values: pd.DataFrame) -> pd.DataFrame:
    """The printed intervals as `estimates` gives them."""
    from scipy.special import stdtr, stdtrit

    by_id = {claim.id: claim for claim in rows.claims if claim.horizon is None}
    records = []
    for row in values.loc[values["claim"].isin(by_id)].to_dict("records"):
        claim = by_id[row["claim"]]
        if row["value"] not in claim.values:
            continue
        degrees = row["n"] - 1
        # Rounded ends: the interval is as wide as the wider side says.
        half = max(row["high"] - row["mean"], row["mean"] - row["low"])
        error = half / stdtrit(degrees, 1 - LEVEL / 2)
        p = 2 * stdtr(degrees, -abs(row["mean"]) / error) if half else float(row["mean"] == 0)
        seen = Paired(row["mean"], row["mean"] - half, row["mean"] + half, float(p), np.nan, row["n"])
        unit = "%" if "accuracy" in row["value"] and "@" not in row["value"] else ""
        records.append(
            {"claim": claim.id, "compared": claim.words(claim.pairs[0]), "value": row["value"], "unit": unit}
            | {**seen._asdict(), "complete": True, "converged": row["converged"]}
        )
    return pd.DataFrame(records)


def counted(name: str) -> dict[str, Counter[str]]:
    """The verdicts on a paper's rows by part, in the order of PARTS."""
    verdicts = page(name).verdicts
    paper = verdicts[verdicts["source"] == "paper"]
    counts = {part: Counter[str]() for part in PARTS[name]}
    for claim, verdict in zip(paper["claim"], paper["verdict"], strict=True):
        counts[claim.partition("-")[0]][verdict if verdict in VERDICTS else "undecided"] += 1
    return {part: verdict_counts for part, verdict_counts in counts.items() if verdict_counts}


def total(counts: Mapping[str, Counter[str]]) -> Counter[str]:
    """The verdicts of a whole page."""
    return sum(counts.values(), Counter[str]())


def blocks(name: str) -> dict[tuple[str, str], str]:
    """What a page has between two marks: the table of its verdicts with the link to their figure, and its rows."""
    counts = counted(name)
    cells = [[PARTS[name][part], *_cells(verdict_counts)] for part, verdict_counts in counts.items()]
    cells.append([f"**{cell}**" for cell in ["all", *_cells(total(counts))]])
    shown = page(name)
    ours = short_rows(shown.rows, shown.verdicts, "ours")
    apart = ["### Questions of our own and facts of the settings, not counted", markdown_table(SHORT, ours)]
    summary = [table(["part", "rows", *VERDICTS], cells).rstrip(), f"![Verdicts by part]({name}.svg)"]
    rows = [
        f"Claims written on {read_claims(PAPERS / name).written}, hash `{page(name).digest}`.",
        markdown_table(SHORT, short_rows(shown.rows, shown.verdicts)),
        *(apart if ours else ()),
    ]
    return {
        marks: f"{marks[0]}\n" + "\n\n".join(parts) + f"\n\n{marks[1]}"
        for marks, parts in ((SUMMARY, summary), (ROWS, rows))
    }


def _cells(verdict_counts: Counter[str]) -> list[str]:
    return [str(verdict_counts.total()), *(str(verdict_counts[verdict]) for verdict in VERDICTS)]


def figure(name: str) -> str:
    """The same numbers as bars, in SVG."""
    rows = [
        {"part": PARTS[name][part], "verdict": verdict, "claims": verdict_counts[verdict], "order": order}
        for part, verdict_counts in counted(name).items()
        for order, verdict in enumerate(VERDICTS)
    ]
    return vl_convert.vegalite_to_svg(
        {
            "data": {"values": rows},
            "width": 420,
            "height": {"step": 18},
            "background": "white",
            # Browsers have other fonts than those with which the width of the labels was computed.
            "padding": {"left": 60, "right": 20, "top": 5, "bottom": 5},
            "mark": "bar",
            "encoding": {
                "y": {"field": "part", "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": 260}},
                "x": {"field": "claims", "type": "quantitative", "title": "number of rows"},
                "order": {"field": "order", "type": "quantitative"},
                "color": {
                    "field": "verdict",
                    "type": "nominal",
                    "title": None,
                    "scale": {"domain": [*VERDICTS], "range": [*VERDICTS.values()]},
                    "legend": {"orient": "top"},
                },
            },
        }
    )


def main() -> None:
    """Write the tables and the figures of all pages."""
    for name in PARTS:
        file = RESULTS / f"{name}.md"
        text = file.read_text(encoding="utf-8")
        for (begin, end), block in blocks(name).items():
            before, _, rest = text.partition(begin)
            text = f"{before}{block}{rest.partition(end)[2]}"
        file.write_text(text, encoding="utf-8")
        (RESULTS / f"{name}.svg").write_text(figure(name), encoding="utf-8")


if __name__ == "__main__":
    main()

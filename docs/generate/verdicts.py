"""Counts the verdicts on each page of results: `python -m docs.generate.verdicts` writes their tables and figures.

A page begins with a table of its verdicts by part of the paper and a figure of the same numbers; the rows follow at its
end. They are made from the page's file of values, docs/results/NAME.csv, which is pairs.csv of `rayfl reproduce`, by
the rule of rayfl.report.verdicts and the claims that come with rayfl. Rows that the file lacks are "not run".
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import vl_convert

from docs.generate.markdown import table
from jobs.reproduce import PAPERS, read_claims
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
        "figure7": "Figure 7: accuracy at equal bytes",
        "figure9": "Figure 9: masks",
        "section5": "Section V: number of labels",
        "dslth": "Section V-A: lottery tickets",
    },
    "survey": {
        "uplink": "Compression: megabytes",
        "diana": "DIANA",
        "marina": "MARINA",
        "adiana": "ADIANA",
        "fedavg": "FedAvg and FedSGD",
        "personal": "Personal models",
        "mixture": "One problem, three methods",
        "rates": "Table of rates",
        "few": "Few data a client",
    },
}
"""The parts of each page: what the names of its claims begin with, and the words for them."""


class Page(NamedTuple):
    """A paper's rows, their verdicts, and the hash of its claims."""

    rows: ClaimRows
    verdicts: pd.DataFrame
    digest: str


def page(name: str) -> Page:
    """The verdicts on a paper by its file of values."""
    rows = read_claims(PAPERS / name).rows
    values = pd.read_csv(RESULTS / f"{name}.csv", keep_default_na=False, na_values={"first": "", "second": ""})
    return Page(rows, decide(rows, estimates(rows, values)), rows.digest)


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

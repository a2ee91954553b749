"""Counts the verdicts on each page of results: `python -m docs.generate.verdicts` writes their tables and figures.

A page begins with a table of its verdicts by part of the paper, and a figure of the same numbers. Both are made from
the verdicts further down on the page, so run the program again after a verdict has changed.
"""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import vl_convert

from docs.generate.markdown import table

RESULTS = Path(__file__).resolve().parents[1] / "results"
VERDICTS = {"reproduced": "#0072b2", "undecided": "#bdbdbd", "refuted": "#d55e00"}
"""The colour of each verdict in figures."""
BEGIN, END = "<!-- verdicts -->\n", "<!-- end of verdicts -->\n"

PARTS: Mapping[str, Mapping[str, str]] = {
    "dispfl": {
        "Table 1": "Table 1: accuracy of the methods",
        "Communication and computation": "Table 1: communication, operations",
        "Table 2: a ring, and all connected": "Table 2: topologies",
        "Tables 5 to 7: rounds to a target": "Tables 5 to 7: rounds to a target",
        "Table 3: peers with less memory": "Table 3: unequal memory",
        "Table 4: the share that is kept, and the search of masks": "Table 4: sparsity, search of masks",
        "Figure 5: masks and labels": "Figure 5: masks and labels",
        "Figure 6: peers that drop out": "Figure 6: dropouts",
    },
    "elastic": {
        "Hosts": "Table 2: hosts",
        "Is it the sensitivity, or the length of the step?": "Sensitivity or step length",
        "tau": "Table 1: tau",
        "Heterogeneity, local epochs, schedules, held-out examples": "Heterogeneity, schedules",
        "Models": "Models",
    },
    "fedpse": {
        "table2": "FedSTC and FedSCR, lambda 1",
        "table1": "Others, lambda 0.5 and 0, ConvNet2",
        "figure2": "Figure 2: convergence",
        "section5": "Section 5: bytes",
        "figure3": "Figure 3: correlation distance",
        "table3": "Table 3: variance",
        "figure4": "Figure 4: element-wise average",
        "figure5": "Figure 5: element-wise average, lambda",
        "figure7": "Figure 7: participation",
        "figure8": "Figure 8: personal downlink",
        "absent": "Absent clients",
        "groups": "Ratios by group",
        "ten": "Ten clients, a rate of their own",
    },
    "mcepl": {
        "table1": "Table I: equal shares",
        "table2": "Table II: unequal shares",
        "table3": "Table III: topologies",
        "figure5": "Figure 5: LotteryDSGD",
        "figure6": "Figure 6: convergence",
        "figure7": "Figure 7: bytes",
        "figure9": "Figure 9: masks",
        "section5": "Section V: number of labels",
        "dslth": "Section V-A: lottery tickets",
        "few": "Few examples a peer",
    },
    "survey": {
        "uplink": "Compression: megabytes",
        "diana": "DIANA",
        "marina": "MARINA",
        "adiana": "ADIANA",
        "rate": "Bounds of the theory",
        "personal": "Personal models",
        "mixture": "One problem, three methods",
        "worst": "The worst clients",
        "seconds": "Slow uplinks",
        "dropout": "Dropouts",
    },
}
"""The parts of each page: its headings, or what the names of its claims begin with, and the words for them."""


def counted(name: str, text: str) -> dict[str, Counter[str]]:
    """The verdicts of a page by part, in the order of PARTS."""
    counts = {part: Counter[str]() for part in PARTS[name]}
    heading = ""
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        claim = re.match(r"\| `([a-z0-9]+)[-`]", line)
        if claim and claim[1] in counts and heading == "All verdicts":
            counts[claim[1]].update(re.findall(rf"\| ({'|'.join(VERDICTS)}) \|", line))
        elif heading in counts:
            counts[heading].update(re.findall(rf"\*\*({'|'.join(VERDICTS)})\*\*", line))
    return {part: found for part, found in counts.items() if found}


def total(counts: Mapping[str, Counter[str]]) -> Counter[str]:
    """The verdicts of a whole page."""
    return sum(counts.values(), Counter[str]())


def block(name: str, text: str) -> str:
    """The table of a page's verdicts, and the link to their figure."""
    counts = counted(name, text)
    rows = [[PARTS[name][part], *(str(found[verdict]) for verdict in VERDICTS)] for part, found in counts.items()]
    sums = total(counts)
    rows.append(["**all**", *(f"**{sums[verdict]}**" for verdict in VERDICTS)])
    return f"{BEGIN}\n{table(['part', *VERDICTS], rows)}\n![Verdicts by part]({name}.svg)\n\n{END}"


def figure(name: str, text: str) -> str:
    """The same numbers as bars, in SVG."""
    rows = [
        {"part": PARTS[name][part], "verdict": verdict, "claims": found[verdict], "order": order}
        for part, found in counted(name, text).items()
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
                "x": {"field": "claims", "type": "quantitative", "title": "number of claims"},
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
        page = RESULTS / f"{name}.md"
        text = page.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        page.write_text(f"{before}{block(name, text)}{rest.partition(END)[2]}", encoding="utf-8")
        (RESULTS / f"{name}.svg").write_text(figure(name, text), encoding="utf-8")


if __name__ == "__main__":
    main()

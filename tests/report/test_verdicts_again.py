"""Every verdict on the pages of results again, from the files of paired values, with numpy and scipy alone.

`verdicts_again` shares no code with rayfl: it reads claims.toml and the page's CSV, and writes the rule out once more.
"""

import csv
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from docs.generate import verdicts
from jobs.reproduce import PAPERS

# scipy's annotations do not know the results' fields.
T_TEST: Any = stats.ttest_1samp
WILCOXON: Any = stats.wilcoxon


def moment_again(claim: dict, smallest: dict, rows: list[dict[str, str]]) -> tuple[float, str, bool]:
    """The p-value and the plain verdict of one moment, and whether a seed lacks a value."""
    first = np.array([float(row["first"] or "nan") for row in rows])
    second = np.array([float(row["second"] or ("nan" if "than" in claim else "0")) for row in rows])
    if "horizon" in claim:
        first, second = np.minimum(first, claim["horizon"]), np.minimum(second, claim["horizon"])
    differences = first - second
    if claim.get("relative"):
        differences = differences / second
    lacks = bool(np.isnan(differences).any())
    differences = differences[~np.isnan(differences)]
    if len(differences) < 2:
        return np.nan, "undecided", lacks
    if np.ptp(differences) == 0 and "horizon" not in claim:
        return 0.0 if differences[0] else 1.0, "constant" if differences[0] else "equal", lacks
    if "horizon" in claim:
        exact = stats.PermutationMethod()
        p = WILCOXON(differences, zero_method="zsplit", method=exact).pvalue if differences.any() else 1.0
        side = differences.mean()
        inside = outside = np.nan
    else:
        p = T_TEST(differences, 0).pvalue
        side = differences.mean()
        margin = claim.get("margin", smallest.get("relative" if claim.get("relative") else rows[0]["unit"], 0.0))
        above = T_TEST(differences, -margin, alternative="greater").pvalue
        below = T_TEST(differences, margin, alternative="less").pvalue
        inside = max(above, below)
        outside = min(1.0, 2 * min(1 - above, 1 - below))
    if claim.get("sign") == "=":
        word = "reproduced" if inside <= 0.05 else "refuted" if outside <= 0.05 else "undecided"
        return min(inside, outside), word, lacks
    if inside <= 0.05:
        return p, "equal", lacks
    if p > 0.05:
        return p, "undecided", lacks
    return p, "reproduced" if (side > 0) == (claim.get("sign", ">") == ">") else "refuted", lacks


def verdicts_again(claims_file: Path, values_file: Path) -> dict[str, str]:
    """The verdict on each of the paper's claims by its name."""
    paper = tomllib.loads(claims_file.read_text(encoding="utf-8"))
    by_row = defaultdict(list)
    with values_file.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            by_row[row["claim"], row["value"]].append(row)
    p_values, words = {}, {}
    for claim in (claim for claim in paper["claim"] if claim.get("source") != "ours"):
        values = [claim["value"]] if isinstance(claim["value"], str) else claim["value"]
        moments = [
            moment_again(claim, paper["smallest"], by_row[claim["id"], value])
            for value in values
            if (claim["id"], value) in by_row
        ]
        p_values[claim["id"]] = max((p for p, *_ in moments), default=np.nan)
        plain = {word for _, word, _ in moments}
        if len(moments) < len(values):
            words[claim["id"]] = "not run"
        elif any(row["converged"] == "False" for value in values for row in by_row[claim["id"], value]):
            words[claim["id"]] = "not converged"
        elif any(lacks for *_, lacks in moments):
            words[claim["id"]] = "undecided"
        else:
            words[claim["id"]] = plain.pop() if len(plain) == 1 else "depends on the moment"
    # Holm (1979): go through the p-values from the smallest on, and stop at the first that is too large.
    rejected = set()
    ranked = sorted(p_values, key=lambda name: np.nan_to_num(p_values[name], nan=1.0))
    for position, name in enumerate(ranked):
        if not p_values[name] <= 0.05 / (len(ranked) - position):
            break
        rejected.add(name)
    return {
        name: "undecided" if word in ("reproduced", "refuted") and name not in rejected else word
        for name, word in words.items()
    }


@pytest.mark.parametrize("name", verdicts.PARTS)
def test_numpy_and_scipy_come_to_the_same_verdicts(name, tmp_path):
    page = verdicts.page(name)
    values = verdicts.RESULTS / f"{name}.csv"
    claims = PAPERS / name / "claims.toml"
    paper = page.verdicts[page.verdicts["source"] == "paper"]
    expected = dict(zip(paper["claim"], paper["verdict"], strict=True))
    assert values.stat().st_size < 300_000
    assert verdicts_again(claims, values) == expected
    if {*expected.values()} != {"not run"}:
        # Values of the other sign have other verdicts: the file decides, not the claims.
        text = values.read_text(encoding="utf-8").splitlines()
        turned = [text[0].replace("first", "x").replace("second", "first").replace("x", "second"), *text[1:]]
        (tmp_path / "turned.csv").write_text("\n".join(turned), encoding="utf-8")
        assert verdicts_again(claims, tmp_path / "turned.csv") != expected

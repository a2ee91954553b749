"""The page of a paper's verdicts as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd

from rayfl.report import wording
from rayfl.report.claims import Claim
from rayfl.run_directory.record import Run

_RULE = (
    "The rule, fixed before the runs: a claim is reproduced if the 95 % interval of the mean paired difference over "
    "seeds (Student's t) lies on the claim's side of 0, refuted if it lies on the other side, and undecided if it "
    "contains 0 or if a run lacks the number. Inside: whether the interval contains the paper's figure of the "
    "difference. p: of the paired t-test, after Holm's correction over all rows. Detectable: the smallest difference "
    "that the test finds with power 0.8. Each number of ours links to its runs."
)
_HEADS = ("Claim", "Ours", "Difference", "n", "Verdict", "Paper's", "Inside", "p, Holm", "Detectable")


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
    rows = [_HEADS, ["---"] * len(_HEADS), *(_row(one) for one in verdicts.to_dict("records"))]
    parts = [
        f"# {title}",
        ", ".join(f"{number} {verdict}" for verdict, number in verdicts["verdict"].value_counts().items()) + ".",
        f"`{origin['command']}`, commit {origin.get('commit', 'unknown')}, {len(runs)} of {planned} runs, "
        f"seeds {', '.join(map(str, seeds))}, {hours:.2f} hours of rounds.",
        _RULE,
        "\n".join(f"| {' | '.join(row)} |" for row in rows),
        "\n".join(f"- **{one.id}**: {one.says}{f' *Ours:* {one.setting}' * bool(one.setting)}" for one in claims),
    ]
    return "\n\n".join(parts) + "\n"


# Any: a row of `claims.judge`.
def _row(one: Mapping[str, Any]) -> list[str]:
    scale, unit, digits = (100, " %", ".2f") if one["unit"] == "%" else (1, f" {one['unit']}".rstrip(), ".4g")

    def words(value: float | None, sign: str = "+") -> str:
        return wording.NONE if value is None or np.isnan(value) else f"{scale * value:{sign}{digits}}{unit}"

    sides = []
    for name in ("first", "second"):
        if one.get(f"{name}_runs"):
            places = enumerate(one[f"{name}_runs"].split(";"), 1)
            links = " ".join(f"[{number}]({quote(place)}/)" for number, place in places)
            sides.append(f"{words(one[name], '')} {wording.PLUS_MINUS} {words(one[f'{name}_sd'], '')} ({links})")
    inside = {None: wording.NONE, True: "yes", False: "no"}[one["inside"]]
    return [
        f"{one['claim']}: {one['compared']} ({one['value']})".replace("|", "\\|"),
        " / ".join(sides) or wording.NONE,
        f"{words(one['mean'])} [{words(one['low'])}, {words(one['high'])}]",
        str(one["num_pairs"]),
        f"**{one['verdict']}**",
        words(one["paper"]),
        inside,
        wording.NONE if np.isnan(one["holm"]) else f"{one['holm']:.2g}",
        words(one["detectable"], ""),
    ]

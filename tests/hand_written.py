"""Runs whose records are written by hand, so that what a page says of them can be worked out on paper."""

from collections.abc import Mapping
from pathlib import Path

from rayfl.report.groups import Group, group_runs
from rayfl.rounds.ledger import MetricRow, RoundRow
from rayfl.run_directory.description import Description
from rayfl.run_directory.record import Recorder, Run, read_run
from rayfl.run_directory.run_folder import create_run_directory

ACCURACY = "pooled/accuracy"


def run_of(
    directory: Path,
    accuracy: Mapping[int, float],
    *,
    rounds: int | None = None,
    seed: int = 1,
    megabytes: int = 1,
    name: str = ACCURACY,
    **settings: object,
) -> Run:
    """`rounds` rounds (to the last evaluation), each `megabytes` up, 3 MB down and 2 simulated seconds.

    `accuracy` maps evaluated rounds to values of the metric `name`.
    """
    Description({"name": "run", "seed": seed, **settings}).write(create_run_directory(directory), {})
    with Recorder(directory) as recorder:
        for round in range(max(accuracy, default=0) + 1 if rounds is None else rounds):
            metrics = [MetricRow(None, name, accuracy[round])] if round in accuracy else []
            recorder.round(RoundRow(round, 1, 1, 8_000_000 * megabytes, 24_000_000, 2.0, 1.0), [], metrics)
    return read_run(directory)


def heading(html: str, section: str) -> str:
    """The heading of a page's section, by the section's id; "" if the page lacks that section."""
    return html.partition(f'<h2 id="{section}">')[2].partition("</h2>")[0]


def group_of(*runs: Run) -> Group:
    """The one group that the runs make."""
    (found,) = group_runs(runs)
    return found

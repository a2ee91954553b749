"""The figures that metrics ask for: a confusion matrix, and accuracy against confidence."""

from collections.abc import Mapping, Sequence

import numpy as np

from rayfl.report import wording
from rayfl.report.charts import Figure, Line, Section, lines_chart
from rayfl.report.groups import Group
from rayfl.report.mask_figures import cells_chart
from rayfl.report.series import facts, metric_names, series
from rayfl.run_directory.record import Run

Parts = Mapping[tuple[str, ...], float]
"""The last values of a metric's parts by the words after its name; NaN where they are undefined."""


def drawn_section(groups: Sequence[Group]) -> Section:
    """The figures of the last evaluation of each group's first run."""
    figures = []
    for group in groups:
        for what, parts in _drawn(group.runs[0]).items():
            part = facts(group.runs[0], "/".join((what, *next(iter(parts)))))
            whole = part.model_copy(update={"title": part.title.rpartition(": ")[0]})
            title = wording.title(what, whole) + f": {group.label}" * (len(groups) > 1)
            figures += (_matrix if part.drawn == "matrix" else _calibration)(title, parts)
    return Section("Confusion and calibration", "At the last evaluation, of one run each.", figures)


def is_drawn(run: Run, name: str) -> bool:
    """Whether a figure shows this part of a metric."""
    return bool(facts(run, name).drawn)


def _drawn(run: Run) -> dict[str, dict[tuple[str, ...], float]]:
    """The parts of each metric that is drawn, by its name and place: pooled/confusion."""
    last = {name: series(run, name) for name in metric_names(run) if is_drawn(run, name)}
    newest, found = max((int(one.rounds[-1]) for one in last.values() if one is not None), default=0), {}
    for name, one in last.items():
        place, what, *part = name.split("/")
        value = one.final if one is not None and one.rounds[-1] == newest else np.nan
        found.setdefault(f"{place}/{what}", {})[tuple(part)] = value
    return found


def _matrix(title: str, parts: Parts) -> list[Figure]:
    """Rows are true classes, columns predicted ones; each row is in shares of its class."""
    size = 1 + max(int(true) for true, _ in parts)
    counts = np.zeros((size, size))
    for (true, said), count in parts.items():
        counts[int(true), int(said)] = count
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, totals, out=np.full_like(counts, np.nan), where=totals > 0)
    chart = cells_chart(shares, "Predicted class", "True class", 1.0, percent=True)
    caption = (
        f"The share of each class's examples (row) that the model predicts as each class (column); the darkest cell is "
        f"all of them. {int(np.trace(counts)):,} of {int(counts.sum()):,} examples lie on the diagonal."
    )
    return [Figure(title, caption, chart)]


def _calibration(title: str, parts: Parts) -> list[Figure]:
    """Accuracy over confidence, a point for each bin that has examples, beside the diagonal."""
    bins = sorted({int(place) for place, _ in parts})
    rows = [[parts[str(place), part] for part in ("examples", "confidence", "accuracy")] for place in bins]
    examples, sure, right = np.array(rows).T
    held = examples > 0
    if not held.any():
        return []
    axis, ends = "Confidence, %", np.array([0.0, 100.0])
    lines = [
        Line("The model", {axis: 100 * sure[held]}, right[held]),
        Line("Calibrated", {axis: ends}, ends / 100),
    ]
    chart = lines_chart(lines, "Accuracy, %", [line.label for line in lines], percent=True, marked=True)
    largest = int(np.argmax(examples))
    caption = (
        "Each point is a bin of predictions of similar confidence. Below the diagonal the model is overconfident. "
        f"{examples[largest] / examples.sum():.0%} of the predictions lie in the bin at {100 * sure[largest]:.0f} %."
    )
    return [Figure(title, caption, chart)]

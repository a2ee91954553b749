"""Figures besides the charts over rounds: of metrics that are drawn, a confusion matrix and accuracy against
confidence; of masks, their distances compared with the similarity of labels (Dis-PFL, Figure 5), and drawings of some
clients' masks (MCE-PL, Figures 8 and 9)."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np

from rayfl.metrics.masks import CORRELATION, HAMMING
from rayfl.report import wording
from rayfl.report.charts import Figure, Line, Section, Spec, data, lines_chart, strips_chart, told
from rayfl.report.groups import Group, last_over_seeds, smoothed
from rayfl.report.series import UNREADABLE, facts, metric_names, personal_models, series, shape_of, tensor_of
from rayfl.run_directory.record import Run
from rayfl.run_directory.saved_models import CONSTANTS

LastValues = Mapping[tuple[str, ...], float]
"""The last values of a metric's parts by the words after its name; NaN where they are undefined."""

_DRAWN_CLIENTS = 4
"""The number of clients whose masks are drawn, as in MCE-PL's figures."""
_FILTERS = 20
"""The number of a layer's outputs that are drawn, those in its middle."""
_INPUTS = 6
"""The number of inputs whose kernels are drawn, the first ones."""


def drawn_section(groups: Sequence[Group]) -> Section:
    """The figures of the last evaluation of each group's first run."""
    figures = []
    for group in groups:
        for what, parts in _drawn(group.runs[0]).items():
            part = facts(group.runs[0], "/".join((what, *next(iter(parts)))))
            metric_facts = part.model_copy(update={"title": part.title.rpartition(": ")[0]})
            title = wording.title(what, metric_facts) + f": {group.label}" * (len(groups) > 1)
            figures += (_matrix if part.drawn == "matrix" else _calibration)(title, parts)
    return Section("Confusion and calibration", "At the last evaluation, of one run each.", figures)


def is_drawn(run: Run, name: str) -> bool:
    """Whether a figure shows this part of a metric."""
    return bool(facts(run, name).drawn)


def _drawn(run: Run) -> dict[str, dict[tuple[str, ...], float]]:
    """The parts of each metric that is drawn, by its name and place: pooled/confusion."""
    last = {name: series(run, name) for name in metric_names(run) if is_drawn(run, name)}
    newest = max((int(values.rounds[-1]) for values in last.values() if values is not None), default=0)
    by_metric = {}
    for name, evaluations in last.items():
        model, what, *part = name.split("/")
        final = evaluations.final if evaluations and evaluations.rounds[-1] == newest else np.nan
        by_metric.setdefault(f"{model}/{what}", {})[tuple(part)] = final
    return by_metric


def _matrix(title: str, parts: LastValues) -> list[Figure]:
    """Rows are true classes, columns predicted ones; each row is in shares of its class."""
    names = [*dict.fromkeys(true for true, _ in parts)]
    counts = np.array([[parts[true, said] for said in names] for true in names])
    # The shares of a class without examples are NaN.
    with np.errstate(invalid="ignore"):
        shares = counts / counts.sum(axis=1, keepdims=True)
    caption = (
        f"The share of each class's examples (row) that the model predicts as each class (column); the darkest cell is "
        f"all of them. {int(np.trace(counts)):,} of {int(counts.sum()):,} examples lie on the diagonal."
    )
    chart = cells_chart(shares, "Predicted class", "True class", percent=True, names=names)
    return [Figure(title, caption, chart)]


def _calibration(title: str, parts: LastValues) -> list[Figure]:
    """Accuracy over confidence, a point for each bin that has examples, beside the diagonal."""
    bins = sorted({int(number) for number, _ in parts})
    rows = np.array([[parts[str(number), part] for part in ("examples", "confidence", "accuracy")] for number in bins])
    examples, sure, right = rows[rows[:, 0] > 0].T
    if not len(examples):
        return []
    largest = np.argmax(examples)
    caption = (
        "Each point is a bin of predictions of similar confidence. Below the diagonal the model is overconfident. "
        f"{examples[largest] / examples.sum():.0%} of the predictions lie in the bin at {100 * sure[largest]:.0f} %."
    )
    axis, ends = "Confidence, %", np.array([0.0, 100.0])
    lines = [Line("The model", {axis: 100 * sure}, right), Line("Calibrated", {axis: ends}, ends / 100)]
    chart = lines_chart(lines, "Accuracy, %", [line.label for line in lines], percent=True, marked=True)
    return [Figure(title, caption, chart)]


def mask_section(groups: Sequence[Group]) -> Section:
    """The distances of masks for several runs; for one run also the masks of some clients. No figure
    without masks."""
    scores = {group.label: smoothed(group, CORRELATION, 1) for group in groups}
    numbers = "; ".join(f"{label}: {score.mean:.2f}" for label, score in scores.items() if score.count)
    intro = (
        "A distance is the share of entries that one client keeps and the other does not."
        + f" Its correlation with the similarity of labels, over pairs of clients: {numbers}." * bool(numbers)
    )
    runs = [run for group in groups for run in group.runs]
    return Section("Masks", intro, [*_distances(groups), *(_masks(runs[0]) if len(runs) == 1 else ())])


def _distances(groups: Sequence[Group]) -> list[Figure]:
    """The distances of the masks of all pairs of clients, a row per group."""
    strips = {group.label: values for group in groups if len(values := last_over_seeds(group, HAMMING))}
    labels = [group.label for group in groups]
    chart = strips_chart(strips, "Distance of two clients' masks", labels, percent=True) if strips else {}
    return [Figure("Distances of masks", "Each dot is a pair of clients after the last round.", chart)] * bool(strips)


def _masks(run: Run) -> list[Figure]:
    """What the first clients keep of the first layer with a mask, read from the saved personal models."""
    # If there is no file or one is damaged, the page only lacks these figures. The first file has the first clients.
    with suppress(*UNREADABLE, IndexError), personal_models(run, first_file=True) as files:
        clients = sorted(map(int, {name.partition("/")[0] for name in files} - {CONSTANTS}))[:_DRAWN_CLIENTS]
        prefix = f"{clients[0]}/"
        shapes = {name[len(prefix) :]: shape_of(files, name) for name in files if name.startswith(prefix)}
        # Convolutions, then matrices, each in the order of their number of inputs.
        layers = sorted((-len(shape), shape[1], name) for name, shape in shapes.items() if len(shape) in (2, 4))
        for _, _, layer in layers:
            kept = {client: tensor_of(files, f"{client}/{layer}") != 0 for client in clients}
            if not all(mask.all() for mask in kept.values()):
                caption = "Dark entries are kept. Columns are the layer's middle outputs, rows its first inputs."
                return [
                    Figure(
                        f"Client {client}: {mask.mean():.1%} of {layer}",
                        caption,
                        cells_chart(_picture(mask), "Outputs", "Inputs"),
                    )
                    for client, mask in kept.items()
                ]
    return []


def _picture(mask: np.ndarray) -> np.ndarray:
    """A layer's mask [outputs, inputs, ...] as rows of inputs and columns of outputs; NaN lies between kernels."""
    first = max(0, (len(mask) - _FILTERS) // 2)
    few = mask[first : first + _FILTERS].astype(np.float64)
    if few.ndim == 2:
        return few.T[: 2 * _FILTERS]
    few = np.pad(few[:, :_INPUTS], [(0, 0), (0, 0), (0, 1), (0, 1)], constant_values=np.nan)
    outputs, inputs, height, width = few.shape
    return few.transpose(1, 2, 0, 3).reshape(inputs * height, outputs * width)[:-1, :-1]


def cells_chart(
    values: np.ndarray, x: str, y: str, percent: bool = False, names: Sequence[object] | None = None
) -> Spec:
    """Values [rows, columns] in [0, 1] as shades, the first row on top; NaN stays blank. names: of rows and columns;
    by default their numbers."""
    height, width = values.shape
    names = names or range(max(height, width))
    position = {"type": "ordinal", "sort": None, "scale": {"round": True, "paddingInner": 0}}
    axis = {"labelOverlap": True, "ticks": False, "domain": False, "grid": False, "labelAngle": 0}
    shade = {"type": "quantitative", "legend": None, "scale": {"domain": [0, 1], "scheme": "blues"}}
    return {
        "width": "container",
        "height": max(90, min(340, round(350 * height / width))),
        "layer": [
            {
                **data([{"row": row, "value": line} for row, line in zip(names, values, strict=False)], values.size),
                "transform": [
                    {"flatten": ["value"]},
                    {"window": [{"op": "row_number", "as": "number"}], "groupby": ["row"]},
                    {"calculate": f"{json.dumps([*names])}[datum.number - 1]", "as": "column"},
                    {"filter": "isValid(datum.value)"},
                ],
                "mark": "rect",
                "encoding": {
                    "x": {"field": "column", "title": x, "axis": axis, **position},
                    "y": {"field": "row", "title": y, "axis": axis, **position},
                    "color": {"field": "value", **shade},
                    "tooltip": [told("row", y), told("column", x), told("value", "Value", percent)],
                },
            }
        ],
    }

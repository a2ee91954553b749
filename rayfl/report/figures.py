"""The charts that a report shows, with their captions."""

import re
from collections.abc import Sequence

import numpy as np

from rayfl.report.charts import Dot, Figure, Line, Section, dots_chart, lines_chart, strips_chart
from rayfl.report.graph_figure import graph_section
from rayfl.report.groups import Group, curve, has_seeds, last_of_clients
from rayfl.report.mask_figures import mask_section
from rayfl.report.series import MEGABYTE_BITS, Spread, cost, is_accuracy, metric_names, spread
from rayfl.report.wording import metric, title
from rayfl.rounds.mask_comparison import CORRELATION, HAMMING, SIMILARITY

_MASKS = (CORRELATION, HAMMING, SIMILARITY)
_AT_RETENTION = re.compile(r"(.+/accuracy)_at_retention_([\d.e+-]+)")
_FEW = 4
"""A chart with more lines than this is as wide as the page."""
_QUANTILES = "half of the clients lie in the dark band, 8 of 10 in the light one."


def sections(groups: Sequence[Group], names: Sequence[str]) -> list[Section]:
    """All charts of a page, accuracies in the order of `names`; sections without data are left out."""
    note = _seeds_note(groups)
    others = [name for group in groups for name in metric_names(group.runs[0]) if not is_accuracy(name)]
    others = [name for name in dict.fromkeys(others) if name not in _MASKS and not _AT_RETENTION.fullmatch(name)]
    others.sort(key=lambda name: name != "train/loss")
    clients_note = f"Lines are means over clients; {_QUANTILES}" if len(groups) == 1 else ""
    everything = [
        *(_accuracy_of_one(groups[0], names, note) if len(groups) == 1 else _accuracies(groups, names, note)),
        Section(
            "Clients",
            "A mean can hide clients that do badly: these charts show each client.",
            [*_clients(groups, names), *_by_retention(groups, names)],
        ),
        mask_section(groups),
        Section(
            "Messages",
            "Sizes of the messages as encoded, summed over clients.",
            [*_communication(groups), *_participation(groups)],
        ),
        graph_section(groups),
        Section(
            "Training and other measurements",
            note or clients_note,
            [figure for name in others for figure in _measured(groups, name)],
        ),
    ]
    return [section for section in everything if section.figures]


def _seeds_note(groups: Sequence[Group]) -> str:
    """A sentence on lines and bands if a group has several seeds, else ""."""
    counts = sorted({len(group.runs) for group in groups})
    if counts[-1] == 1:
        return ""
    numbers = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return f"Lines are means over seeds (n = {numbers}); bands are one standard deviation up and down."


def _accuracy_of_one(group: Group, names: Sequence[str], note: str) -> list[Section]:
    """All accuracies of one group in one chart."""
    intro = " ".join([*(f"{title(name)}: {metric(name).meaning}" for name in names), note]).strip()
    lines = [line._replace(label=title(name)) for name in names for line in _lines([group], name)]
    return [Section("Accuracy", intro, _accuracy_figures(lines, [title(name) for name in names]))]


def _accuracies(groups: Sequence[Group], names: Sequence[str], note: str) -> list[Section]:
    """A chart of the first accuracy's final value over the bytes sent up, then a chart per accuracy."""
    labels = [group.label for group in groups]
    found = [
        Section(
            f"Accuracy: {title(name)}",
            f"{metric(name).meaning} {note}".strip(),
            _accuracy_figures(_lines(groups, name), labels),
        )
        for name in names
    ]
    return [_tradeoff(groups, names[0]), *found] if names else []


def _accuracy_figures(lines: Sequence[Line], labels: Sequence[str]) -> list[Figure]:
    return [Figure("", "", lines_chart(lines, "Accuracy, %", labels, percent=True), wide=True)] if lines else []


def _tradeoff(groups: Sequence[Group], name: str) -> Section:
    """One dot per group: its final accuracy over all bytes sent up. Empty if fewer than two groups sent anything."""
    found = [(group.label, one) for group in groups if (one := curve(group, name)) is not None]
    dots = [
        Dot(label, one.cost.total_uplink_megabytes[-1], one.mean[-1], one.deviation[-1])
        for label, one in found
        if one.cost.total_uplink_megabytes[-1] > 0 and not np.isnan(one.mean[-1])
    ]
    heading = f"Bytes up and final accuracy: {title(name)}"
    if len(dots) < 2:
        return Section(heading, "", [])
    intro = "All that the clients sent up in the whole run, and the accuracy at its end. Up and to the left is better."
    intro += " Dots are means over seeds, bars one standard deviation." * has_seeds(groups)
    silent = [label for label, one in found if one.cost.total_uplink_megabytes[-1] == 0]
    if silent:
        intro += f" Runs that sent nothing up have no dot: {', '.join(silent)}."
    labels = [group.label for group in groups]
    chart = dots_chart(dots, "Sent up, MB", "Final accuracy", labels, percent=True)
    return Section(heading, intro, [Figure("", "1 MB is a million bytes.", chart, wide=True)])


def _lines(groups: Sequence[Group], name: str) -> list[Line]:
    """A metric's mean over seeds as a line per group, with a band of one deviation if there are several seeds."""
    lines = []
    for group in groups:
        if (found := curve(group, name)) is not None:
            band = (found.mean - found.deviation, found.mean + found.deviation)
            bands = (band,) if found.deviation.any() else ()
            lines.append(Line(group.label, found.cost.axes, found.mean, bands))
    return lines


def _quantile_bands(found: Spread) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    return ((found.quantiles[0], found.quantiles[4]), (found.quantiles[1], found.quantiles[3]))


def _is_one_run(groups: Sequence[Group]) -> bool:
    return len(groups) == 1 and len(groups[0].runs) == 1


def _clients(groups: Sequence[Group], names: Sequence[str]) -> list[Figure]:
    """Accuracy of single clients: over the rounds for a single run, and at the end."""
    figures, labels = [], [title(name) for name in names]
    ends: dict[str, np.ndarray] = {}
    for name in names:
        strips = {group.label: values for group in groups if len(values := last_of_clients(group, name))}
        if not strips:
            continue
        if _is_one_run(groups) and (found := spread(groups[0].runs[0], name)) is not None:
            axes = cost(groups[0].runs[0]).at(found.rounds).axes
            line = Line(title(name), axes, found.quantiles[2], _quantile_bands(found))
            chart = lines_chart([line], "Accuracy, %", labels, percent=True)
            figures.append(Figure(title(name), f"The line is the median client; {_QUANTILES}", chart))
        if len(groups) == 1:
            ends[title(name)] = next(iter(strips.values()))
        else:
            figures.append(_ends_figure(f"At the end: {title(name)}", strips, [group.label for group in groups]))
    return [*figures, _ends_figure("At the end", ends, labels)] if ends else figures


def _ends_figure(heading: str, strips: dict[str, np.ndarray], labels: Sequence[str]) -> Figure:
    caption = "Each dot is a client at the last evaluation; the box holds the middle half, its bar is the median."
    chart = strips_chart(strips, "Accuracy of a client", labels, percent=True)
    return Figure(heading, caption, chart, wide=len(strips) > _FEW)


def _by_retention(groups: Sequence[Group], names: Sequence[str]) -> list[Figure]:
    """A chart per accuracy: the last mean over the clients of each retention ratio (Dis-PFL, Figure 4)."""
    figures = []
    for name in names:
        lines = []
        for group in groups:
            found = sorted(
                (float(match[2]), last.mean[-1])
                for other in metric_names(group.runs[0])
                if (match := _AT_RETENTION.fullmatch(other)) and match[1] == name and (last := curve(group, other))
            )
            if found:
                ratios, means = np.array(found).T
                lines.append(Line(group.label, {"Retention ratio": ratios}, means))
        if lines:
            chart = lines_chart(lines, "Accuracy, %", [group.label for group in groups], percent=True)
            figures.append(
                Figure(
                    f"By retention ratio: {title(name)}",
                    "The mean over the clients that keep the same share of the model, at the last evaluation.",
                    chart,
                )
            )
    return figures


def _communication(groups: Sequence[Group]) -> list[Figure]:
    """Megabytes per round; left out if nothing was ever sent."""
    up, down = (_round_lines(groups, column, MEGABYTE_BITS) for column in ("uplink_bits", "downlink_bits"))
    if not any(line.y.any() for line in [*up, *down]):
        return []
    unit = "MB per round"
    if len(groups) == 1:
        labels = ["Up (clients to server or peers)", "Down"]
        lines = [line._replace(label=label) for line, label in zip([*up, *down], labels, strict=True)]
        chart = lines_chart(lines, unit, labels, from_zero=True)
        return [Figure("Up and down", "All that the clients together sent and received in each round.", chart)]
    labels = [group.label for group in groups]
    return [
        Figure(heading, f"All that the clients together {verb} in each round.", chart)
        for heading, verb, lines in (("Up", "sent", up), ("Down", "received", down))
        for chart in [lines_chart(lines, unit, labels, from_zero=True)]
    ]


def _round_lines(groups: Sequence[Group], column: str, unit: float = 1.0) -> list[Line]:
    """Means over seeds of a column of the rounds table, over the rounds that all seeds of a group have."""
    lines = []
    for group in groups:
        count = min(len(run.rounds) for run in group.runs)
        values = np.mean([run.rounds[column].to_numpy()[:count] for run in group.runs], axis=0) / unit
        rounds = group.runs[0].rounds["round"].to_numpy()[:count]
        lines.append(Line(group.label, cost(group.runs[0]).at(rounds).axes, values))
    return lines


def _participation(groups: Sequence[Group]) -> list[Figure]:
    """The share of the chosen clients that delivered; none if all did."""
    chosen, delivered = _round_lines(groups, "selected"), _round_lines(groups, "delivered")
    pairs = list(zip(chosen, delivered, strict=True))
    if all(np.array_equal(one.y, some.y) for one, some in pairs):
        return []
    lines = [one._replace(y=np.divide(some.y, one.y, out=np.ones_like(one.y), where=one.y > 0)) for one, some in pairs]
    chart = lines_chart(lines, "Share that delivered, %", [group.label for group in groups], percent=True)
    return [Figure("Delivered", "The share of the clients chosen for a round whose update arrived.", chart)]


def _measured(groups: Sequence[Group], name: str) -> list[Figure]:
    """Any other metric over the rounds, with the spread over clients for one run and over seeds for several."""
    lines = _lines(groups, name)
    if not lines:
        return []
    if _is_one_run(groups) and (found := spread(groups[0].runs[0], name)) is not None:
        lines = [lines[0]._replace(bands=_quantile_bands(found))]
    chart = lines_chart(lines, metric(name).unit or title(name), [group.label for group in groups])
    return [Figure(title(name), metric(name).meaning, chart)]

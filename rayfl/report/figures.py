"""The charts that a report shows, with their captions."""

from collections.abc import Sequence

import numpy as np

from rayfl.report.charts import Dot, Line, Strip, dots_chart, lines_chart, strips_chart
from rayfl.report.graph_figure import graph_section
from rayfl.report.mask_figures import by_retention, is_drawn_here, mask_section
from rayfl.report.panels import Figure, Section
from rayfl.report.series import Curve, Group, Spread, cost, curve, is_accuracy, metric_names, spread
from rayfl.report.traffic import communication, participation
from rayfl.report.wording import meaning, title, words

_FEW = 4
"""The most lines for which a chart of half the page's width is enough."""
_CLIENT_BANDS = "Lines are means over clients; half of the clients lie in the dark band, 8 of 10 in the light one."


def sections(groups: Sequence[Group], names: Sequence[str]) -> list[Section]:
    """All charts of a page, accuracies in the order of `names`; those without data are left out."""
    note = _bands_note(groups)
    if len(groups) == 1:
        intro = " ".join([*(f"{title(name)}: {meaning(name)}" for name in names), note]).strip()
        curves = [(title(name), style, curve(groups[0], name)) for style, name in enumerate(names)]
        accuracy = [Section("Accuracy", intro, _accuracy(curves))]
    else:
        accuracy = [_tradeoff(groups, names[0])] if names else []
        accuracy += [_learning(groups, name, note) for name in names]
    others = [name for group in groups for name in metric_names(group.runs[0]) if not is_accuracy(name)]
    others = [name for name in others if not is_drawn_here(name)]
    others = sorted(dict.fromkeys(others), key=lambda name: name != "train/loss")
    measured = [figure for name in others for figure in _measured(groups, name)]
    clients_note = _CLIENT_BANDS if len(groups) == 1 else ""
    everything = [
        *accuracy,
        Section(
            "Clients",
            "A mean can hide those who are left behind: how differently the clients fare.",
            [*_clients(groups, names), *by_retention(groups, names)],
        ),
        mask_section(groups),
        Section(
            "Messages",
            "Sizes of the messages as really encoded, summed over clients.",
            [*communication(groups), *participation(groups)],
        ),
        graph_section(groups),
        Section("Training and other measurements", note or clients_note, measured),
    ]
    return [section for section in everything if section.figures]


def _learning(groups: Sequence[Group], name: str, note: str) -> Section:
    return Section(f"Accuracy: {title(name)}", f"{meaning(name)} {note}".strip(), _accuracy(_curves(groups, name)))


def _tradeoff(groups: Sequence[Group], name: str) -> Section:
    """One dot a group: its final accuracy over all that its clients sent up. Empty if fewer than two sent anything."""
    found = [(group, style, curve(group, name)) for style, group in enumerate(groups)]
    dots = [
        Dot(group.label, style, found.uplink_megabytes[-1], found.mean[-1], found.deviation[-1])
        for group, style, found in found
        if found is not None and found.uplink_megabytes[-1] > 0 and not np.isnan(found.mean[-1])
    ]
    heading = f"Bytes up and final accuracy: {title(name)}"
    if len(dots) < 2:
        return Section(heading, "", [])
    intro = "What all clients sent up in the whole run, and where that led. Up and to the left is better."
    if any(len(group.runs) > 1 for group in groups):
        intro += " Dots are means over seeds, bars one standard deviation."
    silent = [group.label for group, _, one in found if one is not None and one.uplink_megabytes[-1] == 0]
    if silent:
        intro += f" Without a dot, as nothing was sent up: {', '.join(silent)}."
    chart = dots_chart(dots, "Sent up, MB", "Final accuracy", percent=True)
    return Section(heading, intro, [Figure("", "1 MB is a million bytes.", chart, legend=True, wide=True)])


def _bands_note(groups: Sequence[Group]) -> str:
    """The sentence on lines and bands where seeds are taken together, else ""."""
    counts = sorted({len(group.runs) for group in groups})
    if counts[-1] == 1:
        return ""
    few = f"{counts[0]} to " if len(counts) > 1 else ""
    alone = "; none where n = 1" if counts[0] == 1 else ""
    return f"Lines are means over seeds (n = {few}{counts[-1]}), bands one standard deviation up and down{alone}."


def _curves(groups: Sequence[Group], name: str) -> list[tuple[str, int, Curve | None]]:
    return [(group.label, style, curve(group, name)) for style, group in enumerate(groups)]


def _accuracy(curves: Sequence[tuple[str, int, Curve | None]]) -> list[Figure]:
    """Accuracy against rounds, bytes or simulated time."""
    lines = _lines(curves)
    if not lines:
        return []
    chart = lines_chart(lines, "Accuracy, %", percent=True)
    return [Figure("", "", chart, legend=len(curves) > 1, wide=True)]


def _lines(curves: Sequence[tuple[str, int, Curve | None]]) -> list[Line]:
    found = [(label, style, one) for label, style, one in curves if one is not None]
    return [Line(label, style, one.over, one.mean, _deviation(one)) for label, style, one in found]


def _deviation(found: Curve) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    return ((found.mean - found.deviation, found.mean + found.deviation),) if found.deviation.any() else ()


def _quantile_bands(found: Spread) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    return ((found.quantiles[0], found.quantiles[4]), (found.quantiles[1], found.quantiles[3]))


def _alone(groups: Sequence[Group]) -> bool:
    return len(groups) == 1 and len(groups[0].runs) == 1


def _clients(groups: Sequence[Group], names: Sequence[str]) -> list[Figure]:
    """Accuracy of single clients: over the rounds where one run is shown, and at the end."""
    figures, last = [], []
    for style, name in enumerate(names):
        found = {index: _last_values(group, name) for index, group in enumerate(groups)}
        strips = [Strip(groups[index].label, index, values) for index, values in found.items() if values is not None]
        if not strips:
            continue
        run = groups[0].runs[0]
        if _alone(groups) and (over_rounds := spread(run, name)) is not None:
            over = cost(run).over(over_rounds.rounds)
            line = Line(title(name), style, over, over_rounds.quantiles[2], _quantile_bands(over_rounds))
            caption = (
                "The line is the median client; half of all clients lie in the dark band, 8 of 10 in the light one."
            )
            figures.append(Figure(title(name), caption, lines_chart([line], "Accuracy, %", percent=True)))
        if len(groups) == 1:
            last.append(Strip(title(name), style, strips[0].values))
        else:
            figures.append(_last_figure(f"At the end: {title(name)}", strips))
    return figures + ([_last_figure("At the end", last)] if last else [])


def _last_figure(heading: str, strips: Sequence[Strip]) -> Figure:
    caption = "Each dot is a client at the last evaluation; the box holds the middle half, the bar is the median."
    return Figure(heading, caption, strips_chart(strips, "Accuracy of a client", percent=True), wide=len(strips) > _FEW)


def _last_values(group: Group, name: str) -> np.ndarray | None:
    found = [spread(run, name) for run in group.runs]
    present = [one.last for one in found if one is not None]
    return np.concatenate(present) if present else None


def _measured(groups: Sequence[Group], name: str) -> list[Figure]:
    """Any other metric over the rounds: one run with the spread over its clients, several with that over seeds."""
    lines = _lines(_curves(groups, name))
    if not lines:
        return []
    if _alone(groups) and (over_clients := spread(groups[0].runs[0], name)) is not None:
        lines = [Line(lines[0].label, 0, lines[0].over, lines[0].y, _quantile_bands(over_clients))]
    chart = lines_chart(lines, words(name).unit or title(name))
    return [Figure(title(name), meaning(name), chart, legend=len(groups) > 1)]

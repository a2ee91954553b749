"""The plots that a report shows, with their captions."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rayfl.report.graph_figure import graph_section
from rayfl.report.mask_figures import by_retention, is_drawn_here, mask_section
from rayfl.report.panels import Figure, Section
from rayfl.report.plots.lines import COLORS, ROUND, Line, Strip, key, line_plot, strip_plot, with_own_ids
from rayfl.report.plots.scatter import Dot, dot_plot
from rayfl.report.series import Curve, Group, Spread, curve, is_accuracy, metric_names, spread
from rayfl.report.traffic import communication, participation
from rayfl.report.wording import MEANINGS, title

_FEW = 4
"""The most lines for which a legend is enough."""
_CLIENT_BANDS = "Lines are means over clients; half of the clients lie in the dark band, 8 of 10 in the light one."
_COSTS = (
    ("Against rounds", ROUND, "rounds", "How much is learned per round of communication; rounds count from 0."),
    (
        "Against bytes up",
        "MB sent up so far",
        "uplink_megabytes",
        "The same over the bytes that clients sent: a method that sends less moves left. 1 MB is a million bytes.",
    ),
    (
        "Against bytes",
        "MB sent so far, up and down",
        "megabytes",
        "The same over all bytes sent: a method that sends less moves left. 1 MB is a million bytes.",
    ),
    (
        "Against time",
        "Simulated seconds so far",
        "simulated_s",
        "The same over the simulated clock, which models each client's speed and bandwidth.",
    ),
)
"""The axes against which accuracy is drawn: heading, label of the axis, field of `Curve`, caption."""


def sections(groups: Sequence[Group], names: Sequence[str]) -> list[Section]:
    """All plots of a page, accuracies in the order of `names`; those without data are left out."""
    note = _bands_note(groups)
    if len(groups) == 1:
        intro = " ".join([*(MEANINGS[name] for name in names if name in MEANINGS), note]).strip()
        curves = [(title(name), style, curve(groups[0], name)) for style, name in enumerate(names)]
        accuracy = [Section("Accuracy", intro, _against_costs(curves, [_COSTS[0], *_COSTS[2:]]))]
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
    return [_with_own_ids(section, f"s{number}") for number, section in enumerate(everything) if section.figures]


def _learning(groups: Sequence[Group], name: str, note: str) -> Section:
    intro = f"{MEANINGS.get(name, '')} {note}".strip()
    return Section(f"Accuracy: {title(name)}", intro, _against_costs(_curves(groups, name), _COSTS))


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
    svg = dot_plot(dots, "MB sent up", "Final accuracy", percent=True)
    return Section(heading, intro, [Figure("", "1 MB is a million bytes.", svg, wide=True)])


def _with_own_ids(section: Section, mark: str) -> Section:
    figures = [
        replace(figure, svg=with_own_ids(figure.svg, f"{mark}f{number}"))
        for number, figure in enumerate(section.figures)
    ]
    return replace(section, figures=figures)


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


def _against_costs(
    curves: Sequence[tuple[str, int, Curve | None]], costs: Sequence[tuple[str, str, str, str]]
) -> list[Figure]:
    """Accuracy against each of `costs` (rows of _COSTS); bytes and seconds only for those that spent any."""
    present = [(label, style, found) for label, style, found in curves if found is not None]
    if not present:
        return []
    keys = [key(label, style) for label, style, _ in present] if len(curves) > 1 else []
    figures = []
    for heading, x_label, field, caption in costs:
        lines = [
            Line(label, style, getattr(found, field), found.mean, _deviation(found)) for label, style, found in present
        ]
        spent = [line for line in lines if field == "rounds" or line.x[-1] > 0]
        if not spent:
            continue
        if free := [line.label for line in lines if not any(line is other for other in spent)]:
            caption += f" Not drawn, as they spend none: {', '.join(free)}."
        # Against rounds most lines end at the same round, so that each can have its name beside its end.
        wide = field == "rounds" and len(present) > _FEW
        svg = line_plot(spent, x_label, "Accuracy", percent=True, named=wide)
        figures.append(Figure(heading, caption, svg, keys, wide))
    return figures


def _deviation(found: Curve) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    return ((found.mean - found.deviation, found.mean + found.deviation),) if found.deviation.any() else ()


def _quantile_bands(found: Spread) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    return ((found.quantiles[0], found.quantiles[4]), (found.quantiles[1], found.quantiles[3]))


def _clients(groups: Sequence[Group], names: Sequence[str]) -> list[Figure]:
    """Accuracy of single clients: over the rounds where one run is shown, and at the end."""
    figures, last = [], []
    for style, name in enumerate(names):
        found = {index: _last_values(group, name) for index, group in enumerate(groups)}
        strips = [Strip(groups[index].label, index, values) for index, values in found.items() if values is not None]
        if not strips:
            continue
        over_rounds = spread(groups[0].runs[0], name)
        if len(groups) == 1 and len(groups[0].runs) == 1 and over_rounds is not None:
            line = Line(title(name), style, over_rounds.rounds, over_rounds.quantiles[2], _quantile_bands(over_rounds))
            caption = (
                "The line is the median client; half of all clients lie in the dark band, 8 of 10 in the light one."
            )
            figures.append(Figure(title(name), caption, line_plot([line], ROUND, "Accuracy", percent=True)))
        if len(groups) == 1:
            last.append(Strip(title(name), style, strips[0].values))
        else:
            figures.append(_last_figure(f"At the end: {title(name)}", strips))
    return figures + ([_last_figure("At the end", last)] if last else [])


def _last_figure(heading: str, strips: Sequence[Strip]) -> Figure:
    caption = "Each dot is a client at the last evaluation; the box holds the middle half, the bar is the median."
    keys = [key(strip.label, strip.style) for strip in strips]
    svg = strip_plot(strips, "Accuracy of a client", percent=True)
    return Figure(heading, caption, svg, keys, wide=len(strips) > len(COLORS))


def _last_values(group: Group, name: str) -> np.ndarray | None:
    found = [spread(run, name) for run in group.runs]
    present = [one.last for one in found if one is not None]
    return np.concatenate(present) if present else None


def _measured(groups: Sequence[Group], name: str) -> list[Figure]:
    """Any other metric over the rounds: one run with the spread over its clients, several with that over seeds."""
    present = [(label, style, found) for label, style, found in _curves(groups, name) if found is not None]
    lines = [Line(label, style, found.rounds, found.mean, _deviation(found)) for label, style, found in present]
    if not lines:
        return []
    over_clients = spread(groups[0].runs[0], name)
    if len(groups) == 1 and len(groups[0].runs) == 1 and over_clients is not None:
        lines = [Line(lines[0].label, 0, lines[0].x, lines[0].y, _quantile_bands(over_clients))]
    keys = [key(line.label, line.style) for line in lines] if len(groups) > 1 else []
    caption = MEANINGS.get(name, f"Recorded as {name}.")
    return [Figure(title(name), caption, line_plot(lines, ROUND, title(name).partition(":")[0]), keys)]

"""Which plots a report shows, and the sentence that says what one is looking at."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from markupsafe import Markup

from rayfl.dots import Dot, dot_plot
from rayfl.plots import ROUND, Key, Line, Strip, key, line_plot, stacked_plot, strip_plot, with_own_ids
from rayfl.series import MEGABYTE_BITS, Curve, Group, Spread, curve, is_accuracy, metric_names, spread
from rayfl.wording import MEANINGS, title

_PREFERRED = ("pooled/accuracy", "own_after_training/accuracy", "own/accuracy")
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
"""What accuracy is drawn against: heading, label of the axis, field of `Curve`, caption."""
_DELIVERED = "delivered"
# Blue for what arrived, warm colours for what did not.
_FATES = (0, 1, 4, 3, 6, 5, 2)


@dataclass(frozen=True)
class Figure:
    """A plot with its title, legend (empty for a single line) and caption."""

    title: str
    caption: str
    svg: Markup
    legend: Sequence[Key] = ()
    wide: bool = False


@dataclass(frozen=True)
class Section:
    """Plots under one heading."""

    title: str
    intro: str
    figures: Sequence[Figure]

    @property
    def legend(self) -> Sequence[Key]:
        """The legend that all figures share, to be shown once; empty if they differ."""
        first = self.figures[0].legend
        return first if all(figure.legend == first for figure in self.figures) else ()


def accuracy_names(groups: Sequence[Group]) -> list[str]:
    """All accuracies, first what the most groups have, then pooled before own: the first is what runs are ranked by."""
    counts: dict[str, int] = {}
    for group in groups:
        for name in metric_names(group.runs[0]):
            if is_accuracy(name) and curve(group, name) is not None:
                counts[name] = counts.get(name, 0) + 1
    rank = {name: place for place, name in enumerate(_PREFERRED)}
    return sorted(counts, key=lambda name: (-counts[name], rank.get(name, len(rank)), name))


def sections(groups: Sequence[Group]) -> list[Section]:
    """All plots of a page, for one run or for a comparison; those without data are left out."""
    names, note = accuracy_names(groups), _bands_note(groups)
    if len(groups) == 1:
        intro = " ".join([*(MEANINGS[name] for name in names if name in MEANINGS), note]).strip()
        curves = [(title(name), style, curve(groups[0], name)) for style, name in enumerate(names)]
        accuracy = [Section("Accuracy", intro, _against_costs(curves, [_COSTS[0], *_COSTS[2:]]))]
    else:
        accuracy = [_tradeoff(groups, names[0])] if names else []
        accuracy += [_learning(groups, name, note) for name in names]
    others = [name for group in groups for name in metric_names(group.runs[0]) if not is_accuracy(name)]
    others = sorted(dict.fromkeys(others), key=lambda name: name != "train/loss")
    measured = [figure for name in others for figure in _measured(groups, name)]
    clients_note = _CLIENT_BANDS if len(groups) == 1 else ""
    everything = [
        *accuracy,
        Section(
            "Clients",
            "A mean can hide those who are left behind: how differently the clients fare.",
            _clients(groups, names),
        ),
        Section(
            "Messages",
            "Sizes of the messages as really encoded, summed over clients.",
            [*_communication(groups), *_participation(groups)],
        ),
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
    """What lines and bands are where seeds were taken together."""
    if all(len(group.runs) == 1 for group in groups):
        return ""
    return "Lines are means over seeds, bands one standard deviation."


def _curves(groups: Sequence[Group], name: str) -> list[tuple[str, int, Curve | None]]:
    return [(group.label, style, curve(group, name)) for style, group in enumerate(groups)]


def _against_costs(
    curves: Sequence[tuple[str, int, Curve | None]], costs: Sequence[tuple[str, str, str, str]]
) -> list[Figure]:
    """Accuracy against each of `costs` (rows of _COSTS); bytes and seconds only where any were counted."""
    present = [(label, style, found) for label, style, found in curves if found is not None]
    if not present:
        return []
    keys = [key(label, style) for label, style, _ in present] if len(curves) > 1 else []
    figures = []
    for heading, x_label, field, caption in costs:
        lines = [
            Line(label, style, getattr(found, field), found.mean, _deviation(found)) for label, style, found in present
        ]
        if field == "rounds" or any(line.x[-1] > 0 for line in lines):
            figures.append(Figure(heading, caption, line_plot(lines, x_label, "Accuracy", percent=True), keys))
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
    return Figure(heading, caption, strip_plot(strips, "Accuracy of a client", percent=True), keys)


def _last_values(group: Group, name: str) -> np.ndarray | None:
    found = [spread(run, name) for run in group.runs]
    present = [one.last for one in found if one is not None]
    return np.concatenate(present) if present else None


def _communication(groups: Sequence[Group]) -> list[Figure]:
    """Megabytes a round; left out where nothing was ever sent."""
    up = [_round_line(group, style, "uplink_bits", MEGABYTE_BITS) for style, group in enumerate(groups)]
    down = [_round_line(group, style, "downlink_bits", MEGABYTE_BITS) for style, group in enumerate(groups)]
    if not any(line.y.any() for line in up + down):
        return []
    y_label = "Megabytes a round"
    if len(groups) == 1:
        lines = [Line("Up (clients to server or peers)", 0, up[0].x, up[0].y), Line("Down", 1, down[0].x, down[0].y)]
        caption = "What all clients together sent and received in each round."
        keys = [key(line.label, line.style) for line in lines]
        return [Figure("Up and down", caption, line_plot(lines, ROUND, y_label, from_zero=True), keys)]
    keys = [key(line.label, line.style) for line in up]
    return [
        Figure(
            "Up", "What all clients together sent in each round.", line_plot(up, ROUND, y_label, from_zero=True), keys
        ),
        Figure(
            "Down",
            "What all clients together received in each round.",
            line_plot(down, ROUND, y_label, from_zero=True),
            keys,
        ),
    ]


def _round_line(group: Group, style: int, column: str, unit: float) -> Line:
    """The mean over seeds of a column of the rounds table, over as many rounds as all of them have."""
    count = min(len(run.rounds) for run in group.runs)
    values = np.mean([run.rounds[column].to_numpy()[:count] for run in group.runs], axis=0) / unit
    return Line(group.label, style, group.runs[0].rounds["round"].to_numpy()[:count], values)


def _participation(groups: Sequence[Group]) -> list[Figure]:
    """What became of the chosen clients; nothing where all delivered."""
    chosen = [_round_line(group, style, "selected", 1) for style, group in enumerate(groups)]
    delivered = [_round_line(group, style, "delivered", 1) for style, group in enumerate(groups)]
    if all(np.array_equal(one.y, other.y) for one, other in zip(chosen, delivered, strict=True)):
        return []
    if len(groups) == 1 and len(groups[0].runs) == 1:
        return [_fates(groups[0])]
    lines = [
        Line(one.label, one.style, one.x, np.divide(some.y, one.y, out=np.ones_like(one.y), where=one.y > 0))
        for one, some in zip(chosen, delivered, strict=True)
    ]
    keys = [key(line.label, line.style) for line in lines] if len(lines) > 1 else []
    svg = line_plot(lines, ROUND, "Share that delivered", percent=True)
    return [Figure("Delivered", "Of the clients chosen for a round, the share whose update arrived.", svg, keys)]


def _fates(group: Group) -> Figure:
    """Clients of each round by status, those that delivered at the bottom."""
    run = group.runs[0]
    rounds, status = run.clients["round"].to_numpy(), np.array(run.clients["status"].to_pylist())
    names = sorted(set(status), key=lambda name: (name != _DELIVERED, name))
    x = run.rounds["round"].to_numpy()
    places = np.searchsorted(x, rounds)
    parts = [
        (style, np.bincount(places[status == name], minlength=len(x))[: len(x)])
        for style, name in zip(_FATES, names, strict=False)
    ]
    keys = [key(name.replace("_", " "), style) for style, name in zip(_FATES, names, strict=False)]
    caption = "What became of the clients that were chosen for each round."
    return Figure("Delivered and dropped", caption, stacked_plot(x, parts, ROUND, "Clients"), keys)


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

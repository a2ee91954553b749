"""The charts that a report shows, with their captions."""

import re
from collections.abc import Sequence

import numpy as np

from rayfl.metrics.facts import Facts
from rayfl.report.charts import Dot, Figure, Line, Section, dots_chart, lines_chart, strips_chart
from rayfl.report.graph_figure import graph_section
from rayfl.report.groups import Group, curve, facts_of, has_seeds, last_of_clients
from rayfl.report.mask_figures import mask_section
from rayfl.report.metric_figures import drawn_section, is_drawn
from rayfl.report.series import MEGABYTE_BITS, Spread, cost, metric_names, spread
from rayfl.report.wording import metric, title
from rayfl.rounds.mask_comparison import CORRELATION, HAMMING, SIMILARITY

_MASKS = (CORRELATION, HAMMING, SIMILARITY)
_AT_RETENTION = re.compile(r"(.+)_at_retention_([\d.e+-]+)")
_FEW = 4
"""A chart with more lines than this is as wide as the page."""
_QUANTILES = "half of the clients lie in the dark band, 8 of 10 in the light one."


def sections(groups: Sequence[Group], names: Sequence[str]) -> list[Section]:
    """All charts of a page, the metrics that rank runs in the order of `names`; sections without data are left out."""
    note = _seeds_note(groups)
    runs = [group.runs[0] for group in groups]
    others = [name for run in runs for name in metric_names(run) if name not in names and not is_drawn(run, name)]
    others = [name for name in dict.fromkeys(others) if name not in _MASKS and not _AT_RETENTION.fullmatch(name)]
    others.sort(key=lambda name: name != "train/loss")
    clients_note = f"Lines are means over clients; {_QUANTILES}" if len(groups) == 1 else ""
    everything = [
        *(_metrics_of_one(groups, names, note) if len(groups) == 1 else _metrics(groups, names, note)),
        drawn_section(groups),
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


def _metrics_of_one(groups: Sequence[Group], names: Sequence[str], note: str) -> list[Section]:
    """A chart of each metric of one group, with a line for each place where it is evaluated."""
    by_metric: dict[str, list[str]] = {}
    for name in names:
        by_metric.setdefault(name.partition("/")[2] or name, []).append(name)
    found = []
    for own in by_metric.values():
        facts, titles = facts_of(groups, own[0]), {name: title(name, facts_of(groups, name)) for name in own}
        means = [f"{titles[name]}: {metric(name, facts).meaning}" for name in own]
        lines = [line._replace(label=titles[name]) for name in own for line in _lines(groups, name)]
        figures = _metric_figures(lines, [*titles.values()], facts)
        found.append(Section(facts.title, " ".join([*means, note]).strip(), figures))
    return found


def _metrics(groups: Sequence[Group], names: Sequence[str], note: str) -> list[Section]:
    """A chart of the first metric's final value over the bytes sent up, then a chart per metric."""
    labels = [group.label for group in groups]
    found = []
    for name in names:
        facts = facts_of(groups, name)
        intro = f"{metric(name, facts).meaning} {note}".strip()
        found.append(Section(title(name, facts), intro, _metric_figures(_lines(groups, name), labels, facts)))
    return [_tradeoff(groups, names[0]), *found] if names else []


def _metric_figures(lines: Sequence[Line], labels: Sequence[str], facts: Facts) -> list[Figure]:
    chart = lines_chart(lines, _axis(facts), labels, percent=facts.is_percent) if lines else None
    return [Figure("", "", chart, wide=True)] if chart else []


def _axis(facts: Facts) -> str:
    """The title of an axis: "Accuracy, %"."""
    return f"{facts.title}, {facts.unit}" if facts.unit else facts.title


def _tradeoff(groups: Sequence[Group], name: str) -> Section:
    """One dot per group: its final value over all bytes sent up. Empty if fewer than two groups sent anything."""
    found = [(group.label, one) for group in groups if (one := curve(group, name)) is not None]
    dots = [
        Dot(label, one.cost.total_uplink_megabytes[-1], one.mean[-1], one.deviation[-1])
        for label, one in found
        if one.cost.total_uplink_megabytes[-1] > 0 and not np.isnan(one.mean[-1])
    ]
    facts = facts_of(groups, name)
    heading = f"Bytes up and the end: {title(name, facts)}"
    if len(dots) < 2:
        return Section(heading, "", [])
    better = "Up" if facts.sign > 0 else "Down"
    intro = (
        f"All that the clients sent up in the whole run, and the value at its end. {better} and to the left is better."
    )
    intro += " Dots are means over seeds, bars one standard deviation." * has_seeds(groups)
    silent = [label for label, one in found if one.cost.total_uplink_megabytes[-1] == 0]
    if silent:
        intro += f" Runs that sent nothing up have no dot: {', '.join(silent)}."
    labels = [group.label for group in groups]
    chart = dots_chart(dots, "Sent up, MB", _axis(facts), labels, percent=facts.is_percent)
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
    """Metrics of single clients: over the rounds for a single run, and at the end."""
    figures, titles = [], {name: title(name, facts_of(groups, name)) for name in names}
    labels = [*titles.values()]
    ends: dict[Facts, dict[str, np.ndarray]] = {}
    for name in names:
        facts, own = facts_of(groups, name), titles[name]
        strips = {group.label: values for group in groups if len(values := last_of_clients(group, name))}
        if not strips:
            continue
        if _is_one_run(groups) and (found := spread(groups[0].runs[0], name)) is not None:
            axes = cost(groups[0].runs[0]).at(found.rounds).axes
            line = Line(own, axes, found.quantiles[2], _quantile_bands(found))
            chart = lines_chart([line], _axis(facts), labels, percent=facts.is_percent)
            figures.append(Figure(own, f"The line is the median client; {_QUANTILES}", chart))
        if len(groups) == 1:
            ends.setdefault(facts, {})[own] = next(iter(strips.values()))
        else:
            every = [group.label for group in groups]
            figures.append(_ends_figure(f"At the end: {own}", strips, every, facts))
    many = len(ends) > 1
    for facts, strips in ends.items():
        figures.append(_ends_figure("At the end" + f": {facts.title}" * many, strips, labels, facts))
    return figures


def _ends_figure(heading: str, strips: dict[str, np.ndarray], labels: Sequence[str], facts: Facts) -> Figure:
    caption = "Each dot is a client at the last evaluation; the box holds the middle half, its bar is the median."
    chart = strips_chart(strips, f"{facts.title} of a client", labels, percent=facts.is_percent)
    return Figure(heading, caption, chart, wide=len(strips) > _FEW)


def _by_retention(groups: Sequence[Group], names: Sequence[str]) -> list[Figure]:
    """A chart per metric: the last mean over the clients of each retention ratio (Dis-PFL, Figure 4)."""
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
            facts = facts_of(groups, name)
            chart = lines_chart(lines, _axis(facts), [group.label for group in groups], percent=facts.is_percent)
            figures.append(
                Figure(
                    f"By retention ratio: {title(name, facts)}",
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
    facts = facts_of(groups, name)
    own = metric(name, facts if facts.title != name else None)
    unit, labels = own.unit or own.title, [group.label for group in groups]
    return [Figure(own.title, own.meaning, lines_chart(lines, unit, labels, percent=facts.is_percent))]

"""The charts that a report shows, with their captions."""

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rayfl.metrics.facts import Facts
from rayfl.metrics.fairness import RECORDED, is_summary
from rayfl.metrics.masks import CORRELATION, HAMMING, SIMILARITY
from rayfl.report.charts import Figure, Line, Section, dots_chart, lines_chart, ranks_chart, strips_chart
from rayfl.report.drawn_figures import drawn_section, is_drawn, mask_section
from rayfl.report.graph_figures import graph_section
from rayfl.report.groups import Group, curve, facts_of, has_seeds, last_over_seeds
from rayfl.report.pivot import FEWEST_NUMBERS, Pivot, Ranks, as_number, item_title, short
from rayfl.report.series import MEGABYTE_BITS, cost, metric_names, spread
from rayfl.report.wording import axis_title, metric, title

_MASKS = (CORRELATION, HAMMING, SIMILARITY)
_AT_RETENTION = re.compile(r"(.+)_at_retention_([\d.e+-]+)")
_OF_CLASS = re.compile(r"([^/]+/[^/]+)/(\d+)")
"""A metric's value of one class: own/recall/3."""
_FEW = 4
"""A chart with more lines than this is as wide as the page."""
_DOTS = "Each dot is a client at the last evaluation; the box holds the middle half, its bar is the median."
_QUANTILES = "half of the clients lie in the dark band, 8 of 10 in the light one."


def sections(groups: Sequence[Group], names: Sequence[str], tables: Sequence[Pivot] = ()) -> list[Section]:
    """All charts of a page, the metrics that rank runs in the order of `names`, the first one before all else; sections
    without data are left out.

    tables: those of the page, of which numbers are drawn against settings.
    """
    note = _seeds_note(groups)
    every = ((group.runs[0], name) for group in groups for name in metric_names(group.runs[0]))
    others = [
        name
        for name in dict.fromkeys(name for run, name in every if name not in names and not is_drawn(run, name))
        if not (name in _MASKS or _AT_RETENTION.fullmatch(name) or is_summary(name, RECORDED))
    ]
    others.sort(key=lambda name: name != "train/loss")
    clients_note = f"Lines are means over clients; {_QUANTILES}" if len(groups) == 1 else ""
    of_metrics = _metrics_of_one(groups, names, note) if len(groups) == 1 else _metrics(groups, names, note)
    everything = [
        *of_metrics[:1],
        Section(
            "Against swept settings",
            f"The numbers of the tables above. {note}".strip(),
            [figure for table in tables for figure in _against(table)],
        ),
        *(Section(f"Average ranks: {ranks.title}", "", _ranks(ranks)) for table in tables for ranks in table.ranks),
        *([_tradeoff(groups, names[0])] if len(groups) > 1 and names else []),
        *of_metrics[1:],
        drawn_section(groups),
        Section(
            "Clients",
            "A mean can hide clients that do badly: these charts show each client.",
            [*_clients(groups, names), *_by_retention(groups, names)],
        ),
        graph_section(groups, names),
        mask_section(groups),
        Section(
            "Messages",
            "Sizes of the messages as encoded, summed over clients.",
            _communication(groups),
        ),
        Section(
            "Training and other measurements",
            note or clients_note,
            [
                *(figure for name in others if not _OF_CLASS.fullmatch(name) for figure in _measured(groups, name)),
                *(
                    figure
                    for what, parts in _parts(others, _OF_CLASS).items()
                    for figure in _by_class(groups, what, parts)
                ),
            ],
        ),
    ]
    return [section for section in everything if section.figures]


def _parts(names: Iterable[str], pattern: re.Pattern[str]) -> dict[str, dict[float, str]]:
    """The names that match the pattern, by the metric of which they are parts, and by the number of the part."""
    parts: dict[str, dict[float, str]] = {}
    for match in filter(None, map(pattern.fullmatch, names)):
        parts.setdefault(match[1], {})[float(match[2])] = match[0]
    return parts


def _seeds_note(groups: Sequence[Group]) -> str:
    """A sentence on lines and bands if a group has several seeds, else ""."""
    counts = sorted({len(group.runs) for group in groups})
    numbers = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    note = f"Lines are means over seeds (n = {numbers}); bands are one standard deviation up and down."
    return note * has_seeds(groups)


def _labels(groups: Sequence[Group]) -> list[str]:
    return [group.label for group in groups]


def _metrics_of_one(groups: Sequence[Group], names: Sequence[str], note: str) -> list[Section]:
    """A chart of each metric of one group, with a line for each place where it is evaluated."""
    charts = []
    for what in dict.fromkeys(name.partition("/")[2] or name for name in names):
        places = [name for name in names if (name.partition("/")[2] or name) == what]
        titles = {name: title(name, facts_of(groups, name)) for name in places}
        facts = facts_of(groups, places[0])
        # The meaning once, and the models and data of each line.
        means = [
            f"{words.removeprefix(f'{facts.title}: ')}: "
            + metric(name, facts).meaning.removeprefix(f"{facts.meaning} of ")
            for name, words in titles.items()
        ]
        intro = " ".join([*[f"{facts.meaning}."] * bool(facts.meaning), *means, note]).strip()
        lines = [line._replace(label=words) for name, words in titles.items() for line in _lines(groups, name)]
        charts.append(Section(facts.title, intro, _figure("", "", lines, facts, [*titles.values()], wide=True)))
    return charts


def _metrics(groups: Sequence[Group], names: Sequence[str], note: str) -> list[Section]:
    """A chart per metric."""
    return [
        Section(
            title(name, facts),
            f"{metric(name, facts).meaning} {note}".strip(),
            _figure("", "", _lines(groups, name), facts, _labels(groups), wide=True),
        )
        for name in names
        for facts in [facts_of(groups, name)]
    ]


def _figure(
    heading: str,
    caption: str,
    lines: Sequence[Line],
    facts: Facts,
    labels: Sequence[str],
    wide: bool = False,
    marked: bool = False,
) -> list[Figure]:
    """A chart of a metric's lines; none without lines."""
    if not lines:
        return []
    chart = lines_chart(lines, axis_title(facts), labels, percent=facts.is_percent, marked=marked)
    return [Figure(heading, caption, chart, wide)]


def _constant(heading: str, caption: str, lines: Sequence[Line], facts: Facts) -> list[Figure]:
    """A figure without a chart, whose caption has the numbers, if no line changes over several points."""
    if not lines or any(len(line.y) < 2 or np.ptp(line.y) or np.isnan(line.y).any() for line in lines):
        return []
    number = facts if facts.is_percent else facts.model_copy(update={"unit": ""})
    unit = f" ({facts.unit})" * (facts.unit != number.unit)
    values = {line.label: number.words(float(line.y[0])) + unit for line in lines}
    different = {*values.values()}
    numbers = different.pop() if len(different) == 1 else "; ".join(map(" ".join, values.items()))
    return [Figure(heading, f"{numbers}, the same at all times. {caption}", {})]


def _tradeoff(groups: Sequence[Group], name: str) -> Section:
    """One dot per group: its final value over all bytes sent up. Empty if fewer than two groups sent anything."""
    curves = [(group.label, measured) for group in groups if (measured := curve(group, name)) is not None]
    dots = {
        label: (end.cost.total_uplink_megabytes[-1], end.mean[-1], end.deviation[-1])
        for label, end in curves
        if end.cost.total_uplink_megabytes[-1] > 0 and not np.isnan(end.mean[-1])
    }
    facts = facts_of(groups, name)
    heading = f"Bytes sent up and final value: {title(name, facts)}"
    if len(dots) < 2:
        return Section(heading, "", [])
    silent = ", ".join(label for label, end in curves if end.cost.total_uplink_megabytes[-1] == 0)
    intro = (
        "The bytes that all clients sent up in the whole run, and the value at its end. "
        f"{'Up' if facts.sign > 0 else 'Down'} and to the left is better."
        + " Dots are means over seeds, bars one standard deviation." * has_seeds(groups)
        + f" Runs that sent nothing up have no dot: {silent}." * bool(silent)
    )
    chart = dots_chart(dots, "Sent up, MB", axis_title(facts), _labels(groups), percent=facts.is_percent)
    return Section(heading, intro, [Figure("", "1 MB is a million bytes.", chart, wide=True)])


def _lines(groups: Sequence[Group], name: str) -> list[Line]:
    """A metric's mean over seeds as a line per group, with a band of one deviation if there are several seeds."""
    return [
        Line(group.label, seeds.cost.axes, seeds.mean, _band(seeds.mean, seeds.deviation))
        for group in groups
        if (seeds := curve(group, name)) is not None
    ]


def _band(mean: np.ndarray, deviation: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """One deviation up and down; no band of zeros."""
    return [(mean - deviation, mean + deviation)] * bool(deviation.any())


def _quantile_bands(quantiles: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    return ((quantiles[0], quantiles[4]), (quantiles[1], quantiles[3]))


def _is_one_run(groups: Sequence[Group]) -> bool:
    return len(groups) == 1 and len(groups[0].runs) == 1


def _clients(groups: Sequence[Group], names: Sequence[str]) -> list[Figure]:
    """Metrics of single clients: over the rounds for a single run, and at the end."""
    titles = {name: title(name, facts_of(groups, name)) for name in names}
    figures = []
    labels = [*titles.values()]
    ends = dict[tuple[str, Facts], dict[str, np.ndarray]]()
    for name, name_title in titles.items():
        facts = facts_of(groups, name)
        run = groups[0].runs[0]
        if _is_one_run(groups) and (clients := spread(run, name)) is not None:
            axes = cost(run).at(clients.rounds).axes
            line = Line(name_title, axes, clients.quantiles[2], _quantile_bands(clients.quantiles))
            figures += _figure(name_title, f"The line is the median client; {_QUANTILES}", [line], facts, labels)
        for group in groups:
            if len(values := last_over_seeds(group, name)):
                # Of one group a figure for each metric, else for each metric and place.
                heading, label = (facts.title, name_title) if len(groups) == 1 else (name_title, group.label)
                ends.setdefault((heading, facts), {})[label] = values
    every = labels if len(groups) == 1 else _labels(groups)
    for (heading, facts), strips in ends.items():
        chart = strips_chart(strips, f"{facts.title} of a client", every, percent=facts.is_percent)
        heading = "At the end" + f": {heading}" * (len(ends) > 1 or len(groups) > 1)
        figures.append(Figure(heading, _DOTS, chart, wide=len(strips) > _FEW))
    return figures


def _by_retention(groups: Sequence[Group], names: Sequence[str]) -> list[Figure]:
    """A chart per metric: the last mean over the clients of each retention ratio (Dis-PFL, Figure 4)."""
    parts = _parts((name for group in groups for name in metric_names(group.runs[0])), _AT_RETENTION)
    caption = "The mean over the clients that keep the same share of the model, at the last evaluation."
    return [
        figure
        for name in names
        for facts in [facts_of(groups, name)]
        for lines in [_across(groups, "Retention ratio", parts.get(name, {}))]
        for figure in _figure(
            f"By retention ratio: {title(name, facts)}", caption, lines, facts, _labels(groups), marked=True
        )
    ]


def _by_class(groups: Sequence[Group], what: str, parts: Mapping[float, str]) -> list[Figure]:
    """A chart of a metric's last value of each class."""
    facts = facts_of(groups, next(iter(parts.values())))
    facts = facts.model_copy(update={"title": facts.title.rpartition(": ")[0]})
    words, lines = metric(what, facts), _across(groups, "Class", parts)
    heading, caption = f"{words.title}, by class", f"At the last evaluation. {words.meaning}"
    return _figure(heading, caption, lines, facts, _labels(groups), marked=True)


def _across(groups: Sequence[Group], axis: str, parts: Mapping[float, str]) -> list[Line]:
    """The last values over what they are values of, a line per group; of one run with the spread over clients."""
    lines = []
    names = [parts[position] for position in sorted(parts)]
    for group in groups:
        means = np.array([np.nan if (measured := curve(group, name)) is None else measured.mean[-1] for name in names])
        last = [
            measured.quantiles[:, -1]
            for name in names
            if _is_one_run(groups) and (measured := spread(group.runs[0], name))
        ]
        bands = _quantile_bands(np.stack(last, axis=1)) if last and len(last) == len(names) else ()
        if not np.isnan(means).all():
            lines.append(Line(group.label, {axis: np.array(sorted(parts))}, means, bands))
    return lines


def _against(table: Pivot) -> list[Figure]:
    """A chart of each number of a table against its columns, or else its rows, if they have three numbers or more."""
    for axis, other in (("column", "row"), ("row", "column")):
        cells = table.frame.assign(x=[*map(as_number, table.frame[axis])])
        cells = cells.query("x == x and count > 0").sort_values(by="x", kind="stable")
        positions = sorted({*cells["x"]})
        if len(positions) < FEWEST_NUMBERS:
            continue
        along, across = (getattr(table.options, f"{name}s") for name in (axis, other))
        figures = []
        log_x = positions[0] > 0 and positions[-1] >= 10 * positions[0]
        for number, facts in table.facts.items():
            lines = [
                Line(label, {short(along): x}, mean, _band(mean, sd))
                for item, points in cells[cells["number"] == number].groupby(other, sort=False)
                for label in [item_title(across, str(item)) or facts.title]
                for x, mean, sd in [np.array([points[name] for name in ("x", "mean", "deviation")])]
            ]
            labels = [line.label for line in lines]
            chart = lines_chart(lines, axis_title(facts), labels, percent=facts.is_percent, marked=True, log_x=log_x)
            figures.append(Figure(f"{facts.title} against {short(along)}", "", chart, wide=True))
        return figures
    return []


def _ranks(ranks: Ranks) -> list[Figure]:
    """A chart of average ranks; none without a critical difference."""
    caption = (
        "Each dot is a method's average rank, its bar Nemenyi's critical difference, half on either side: methods "
        "whose bars do not overlap differ, if Friedman's test rejects that all are alike."
    )
    means = dict(zip(ranks.methods, ranks.compared.ranks.tolist(), strict=True))
    critical = ranks.compared.critical
    return [Figure("", caption, ranks_chart(means, critical), wide=True)] if critical > 0 else []


def _communication(groups: Sequence[Group]) -> list[Figure]:
    """Megabytes per round; left out if nothing was ever sent."""
    up, down = (_round_lines(groups, column, MEGABYTE_BITS) for column in ("uplink_bits", "downlink_bits"))
    if not any(line.y.any() for line in [*up, *down]):
        return []
    figures, labels = [("Up", "sent", up), ("Down", "received", down)], _labels(groups)
    if len(groups) == 1:
        labels = ["Up (clients to server or peers)", "Down"]
        lines = [line._replace(label=label) for line, label in zip([*up, *down], labels, strict=True)]
        figures = [("Up and down", "sent and received", lines)]
    return [
        figure
        for heading, verb, lines in figures
        for caption in [f"The megabytes that all clients together {verb} in each round."]
        for figure in _constant(heading, caption, lines, Facts(title=heading, unit="MB per round"))
        or [Figure(heading, caption, lines_chart(lines, "MB per round", labels, from_zero=True))]
    ]


def _round_lines(groups: Sequence[Group], column: str, unit: float) -> list[Line]:
    """Means over seeds of a column of the rounds table, over the rounds that all seeds of a group have."""
    return [
        Line(group.label, cost(group.runs[0]).at(rounds).axes, values / unit)
        for group in groups
        for count in [min(len(run.rounds) for run in group.runs)]
        for rounds in [group.runs[0].rounds["round"].to_numpy()[:count]]
        for values in [np.mean([run.rounds[column].to_numpy()[:count] for run in group.runs], axis=0)]
    ]


def _measured(groups: Sequence[Group], name: str) -> list[Figure]:
    """Any other metric over the rounds, with the spread over clients for one run and over seeds for several."""
    lines = _lines(groups, name)
    facts = facts_of(groups, name)
    if lines and _is_one_run(groups) and (clients := spread(groups[0].runs[0], name)) is not None:
        lines = [lines[0]._replace(bands=_quantile_bands(clients.quantiles))]
    words = metric(name, facts if facts.title != name else None)
    axis = Facts(title=words.unit or words.title, unit="%" if facts.is_percent else "")
    return _constant(words.title, words.meaning, lines, facts.model_copy(update={"unit": words.unit})) or _figure(
        words.title, words.meaning, lines, axis, _labels(groups)
    )

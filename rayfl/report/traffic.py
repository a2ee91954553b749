"""Charts of a round's traffic: megabytes up and down, and the fates of the chosen clients."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rayfl.report.charts import Chart, Line, lines_chart
from rayfl.report.client_status import fate_chart
from rayfl.report.panels import Figure
from rayfl.report.series import MEGABYTE_BITS, Group, cost


def communication(groups: Sequence[Group]) -> list[Figure]:
    """Megabytes a round; left out where nothing was ever sent."""
    up = [_round_line(group, style, "uplink_bits", MEGABYTE_BITS) for style, group in enumerate(groups)]
    down = [_round_line(group, style, "downlink_bits", MEGABYTE_BITS) for style, group in enumerate(groups)]
    if not any(line.y.any() for line in up + down):
        return []
    unit = "MB a round"
    if len(groups) == 1:
        (sent,), (received,) = up, down
        lines = [replace(sent, label="Up (clients to server or peers)"), replace(received, label="Down", style=1)]
        caption = "What all clients together sent and received in each round."
        return [Figure("Up and down", caption, lines_chart(lines, unit, from_zero=True), legend=True)]
    return [
        Figure(heading, f"What all clients together {verb} in each round.", _moving(lines, unit), legend=True)
        for heading, verb, lines in (("Up", "sent", up), ("Down", "received", down))
    ]


def _moving(lines: Sequence[Line], unit: str) -> Chart:
    """One direction of several runs; logarithmic as those need it that move anything."""
    drawn = lines_chart([line for line in lines if line.y.any()] or lines, unit, from_zero=True)
    return replace(drawn, lines=lines, styles={line.label: line.style for line in lines})


def _round_line(group: Group, style: int, column: str, unit: float) -> Line:
    """The mean over seeds of a column of the rounds table, over as many rounds as all of them have."""
    count = min(len(run.rounds) for run in group.runs)
    values = np.mean([run.rounds[column].to_numpy()[:count] for run in group.runs], axis=0) / unit
    rounds = group.runs[0].rounds["round"].to_numpy()[:count]
    return Line(group.label, style, cost(group.runs[0]).over(rounds), values)


def participation(groups: Sequence[Group]) -> list[Figure]:
    """Charts of the chosen clients' fates; none where all delivered."""
    chosen = [_round_line(group, style, "selected", 1) for style, group in enumerate(groups)]
    delivered = [_round_line(group, style, "delivered", 1) for style, group in enumerate(groups)]
    if all(np.array_equal(one.y, other.y) for one, other in zip(chosen, delivered, strict=True)):
        return []
    if len(groups) == 1 and len(groups[0].runs) == 1:
        return [fate_chart(groups[0])]
    lines = [
        Line(one.label, one.style, one.over, np.divide(some.y, one.y, out=np.ones_like(one.y), where=one.y > 0))
        for one, some in zip(chosen, delivered, strict=True)
    ]
    caption = "Of the clients chosen for a round, the share whose update arrived."
    chart = lines_chart(lines, "Share that delivered, %", percent=True)
    return [Figure("Delivered", caption, chart, legend=len(lines) > 1)]

"""Plots of a round's traffic: megabytes up and down, and the fates of the chosen clients."""

from collections.abc import Sequence

import numpy as np

from rayfl.report.client_status import fate_plot
from rayfl.report.panels import Figure
from rayfl.report.plots.lines import ROUND, Key, Line, key, line_plot
from rayfl.report.series import MEGABYTE_BITS, Group


def communication(groups: Sequence[Group]) -> list[Figure]:
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
    directions = (("Up", "sent", up), ("Down", "received", down))
    return [_one_way(heading, verb, lines, y_label, keys) for heading, verb, lines in directions]


def _one_way(heading: str, verb: str, lines: Sequence[Line], y_label: str, keys: Sequence[Key]) -> Figure:
    """One direction of several runs, without those that move nothing: no logarithmic axis has a place for them."""
    moving = [line for line in lines if line.y.any()] or lines
    still = [line.label for line in lines if not line.y.any()] if len(moving) < len(lines) else []
    caption = f"What all clients together {verb} in each round."
    if still:
        caption += f" Not drawn, as they {verb} nothing: {', '.join(still)}."
    return Figure(heading, caption, line_plot(moving, ROUND, y_label, from_zero=True), keys)


def _round_line(group: Group, style: int, column: str, unit: float) -> Line:
    """The mean over seeds of a column of the rounds table, over as many rounds as all of them have."""
    count = min(len(run.rounds) for run in group.runs)
    values = np.mean([run.rounds[column].to_numpy()[:count] for run in group.runs], axis=0) / unit
    return Line(group.label, style, group.runs[0].rounds["round"].to_numpy()[:count], values)


def participation(groups: Sequence[Group]) -> list[Figure]:
    """Plots of the chosen clients' fates; none where all delivered."""
    chosen = [_round_line(group, style, "selected", 1) for style, group in enumerate(groups)]
    delivered = [_round_line(group, style, "delivered", 1) for style, group in enumerate(groups)]
    if all(np.array_equal(one.y, other.y) for one, other in zip(chosen, delivered, strict=True)):
        return []
    if len(groups) == 1 and len(groups[0].runs) == 1:
        return [fate_plot(groups[0])]
    lines = [
        Line(one.label, one.style, one.x, np.divide(some.y, one.y, out=np.ones_like(one.y), where=one.y > 0))
        for one, some in zip(chosen, delivered, strict=True)
    ]
    keys = [key(line.label, line.style) for line in lines] if len(lines) > 1 else []
    svg = line_plot(lines, ROUND, "Share that delivered", percent=True)
    return [Figure("Delivered", "Of the clients chosen for a round, the share whose update arrived.", svg, keys)]

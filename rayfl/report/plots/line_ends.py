"""Names of lines beside their ends, moved apart where they would lie on each other."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

NAME_POINTS = 14.0
"""The height that a name takes."""


@dataclass(frozen=True)
class End:
    """The label at the end of the line `x`, `y` [num_points]."""

    label: str
    color: str
    x: np.ndarray
    y: np.ndarray


def name_ends(figure: Figure, axes: Axes, lines: Sequence[End]) -> None:
    """Write each label right of the plot, level with its line's end, or as near as the others let it be."""
    lines = [line for line in lines if not np.isnan(line.y).all()]
    if not lines:
        return
    # A pixel is a point, as in the svg.
    figure.set_dpi(72)
    figure.draw_without_rendering()
    frame = axes.get_window_extent()
    last = [np.flatnonzero(~np.isnan(line.y))[-1] for line in lines]
    points = [(float(line.x[index]), float(line.y[index])) for line, index in zip(lines, last, strict=True)]
    places = apart(axes.transData.transform(points)[:, 1], NAME_POINTS, frame.y0, frame.y1)
    for line, point, place in zip(lines, points, places, strict=True):
        leader = {
            "arrowstyle": "-",
            "color": line.color,
            "linewidth": 0.7,
            "shrinkA": 0,
            "shrinkB": 2,
            "relpos": (0, 0.5),
        }
        axes.annotate(
            line.label,
            point,
            (1.03, float(place - frame.y0) / frame.height),
            textcoords="axes fraction",
            va="center",
            fontsize=10,
            color="#333a45",
            annotation_clip=False,
            arrowprops=leader,
        )


def apart(wanted: np.ndarray, gap: float, low: float, high: float) -> np.ndarray:
    """Places [num_places] in the order of `wanted`, `gap` apart, as near to it as can be, centred where crowded.

    They stay in [low, high] where all fit in it, else they lie around its middle.
    """
    order = np.argsort(wanted, kind="stable")
    # Without the gaps the places need only be in order: then it is a fit that never falls, block by block.
    blocks: list[tuple[float, int]] = []
    for value in wanted[order] - gap * np.arange(len(wanted)):
        mean, count = float(value), 1
        while blocks and blocks[-1][0] > mean:
            before, many = blocks.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        blocks.append((mean, count))
    fitted = np.repeat([mean for mean, _ in blocks], [count for _, count in blocks])
    room = high - low - gap * (len(wanted) - 1)
    fitted = np.clip(fitted, low, low + room) if room >= 0 else np.full(len(wanted), low + room / 2)
    places = np.empty(len(wanted))
    places[order] = fitted + gap * np.arange(len(wanted))
    return places

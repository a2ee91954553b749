"""A plot of few dots, each with its label beside it: no legend to go back and forth to."""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes

from rayfl.plots import COLORS, PLAIN, STYLE, canvas, color, finish

_WIDTH_INCHES, _HEIGHT_INCHES = 10.0, 4.6
_LETTER, _LINE, _GAP = 6.2, 13.0, 7.0
"""Points: the usual width of a letter, the height of a line, the way from a dot to its label."""
_MARKERS = ("o", "s", "^", "D")


@dataclass(frozen=True)
class Dot:
    """One dot with a bar of one `deviation` up and down; `style` as in a line."""

    label: str
    style: int
    x: float
    y: float
    deviation: float = 0.0


def dot_plot(dots: Sequence[Dot], x_label: str, y_label: str, *, percent: bool = False) -> Markup:
    """Labelled dots at positive x, which is logarithmic where the largest is 10 times the smallest or more."""
    figure, axes = canvas(_HEIGHT_INCHES, _WIDTH_INCHES)
    # A pixel is a point, as in the svg.
    figure.set_dpi(72)
    for dot in dots:
        marker = _MARKERS[dot.style // len(COLORS) % len(_MARKERS)]
        if dot.deviation > 0:
            axes.errorbar(dot.x, dot.y, dot.deviation, color=color(dot.style), capsize=3, linewidth=1.2)
        axes.plot([dot.x], [dot.y], marker, color=color(dot.style), markersize=7)
    if max(dot.x for dot in dots) >= 10 * min(dot.x for dot in dots):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(PLAIN)
        x_label += " (logarithmic)"
    axes.margins(x=0.12, y=0.12)
    with matplotlib.rc_context(STYLE):
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        figure.draw_without_rendering()
        _label(axes, dots)
    return finish(figure, axes, x_label, y_label, percent)


def _label(axes: Axes, dots: Sequence[Dot]) -> None:
    """Put each label at the first place around its dot that is inside the plot and free."""
    places = axes.transData.transform([(dot.x, dot.y) for dot in dots])
    taken = [np.array([x - 5, y - 5, x + 5, y + 5]) for x, y in places]
    for dot, (x, _) in zip(dots, places, strict=True):
        low, high = (axes.transData.transform((dot.x, dot.y + sign * dot.deviation))[1] for sign in (-1, 1))
        taken.append(np.array([x - 4, low, x + 4, high]))
    frame = axes.get_window_extent()
    for dot, (x, y) in sorted(zip(dots, places, strict=True), key=lambda pair: pair[1][1]):
        width = _LETTER * len(dot.label)
        boxes = [(offset, _box(x, y, offset, width)) for offset in _offsets(width)]
        free = [
            (offset, box)
            for offset, box in boxes
            if box[0] >= frame.x0 and box[2] <= frame.x1 and box[1] >= frame.y0 and box[3] <= frame.y1
            if not any(_overlap(box, other) for other in taken)
        ]
        offset, box = (free or boxes)[0]
        taken.append(box)
        far = abs(offset[1]) > _LINE
        line = {"arrowstyle": "-", "color": color(dot.style), "linewidth": 0.7, "shrinkA": 0, "shrinkB": 4}
        axes.annotate(
            dot.label,
            (dot.x, dot.y),
            (offset[0], offset[1]),
            textcoords="offset points",
            va="center",
            fontsize=10,
            color="#333a45",
            arrowprops=line if far else None,
        )


def _offsets(width: float) -> list[tuple[float, float]]:
    """Where a label's left end may lie, in points from its dot: right, left, then higher and lower, and further."""
    sides = (_GAP, -_GAP - width)
    near = [(side, 0.0) for side in sides]
    around = [
        (side, sign * step * _LINE) for step in (1, 2, 3, 4, 5) for side in (*sides, -width / 2) for sign in (1, -1)
    ]
    return near + around


def _box(x: float, y: float, offset: tuple[float, float], width: float) -> np.ndarray:
    """The label's left, lower, right and upper end in pixels."""
    left, middle = x + offset[0], y + offset[1]
    return np.array([left, middle - _LINE / 2, left + width, middle + _LINE / 2])


def _overlap(one: np.ndarray, other: np.ndarray) -> bool:
    return bool((one[:2] < other[2:]).all() and (other[:2] < one[2:]).all())

"""A plot of few dots, each with its label beside it: no legend to go back and forth to."""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes

from rayfl.report.plots.label_placement import NEAR, label_places, reach
from rayfl.report.plots.lines import COLORS, STYLE, canvas, color, finish, logarithmic

_WIDTH_INCHES, _HEIGHT_INCHES = 10.0, 4.6
_LETTER, _LINE = 5.8, 13.0
"""Points: the usual width of a letter, the height of a line."""
_MARKERS = ("o", "s", "^", "D")


@dataclass(frozen=True)
class Dot:
    """One dot with a bar of one `deviation` up and down; `style` as in a line."""

    label: str
    style: int
    x: float
    y: float
    deviation: float = 0.0


def dot_plot(
    dots: Sequence[Dot],
    x_label: str,
    y_label: str,
    *,
    percent: bool = False,
    log_y: bool = False,
    height: float = _HEIGHT_INCHES,
) -> Markup:
    """Labelled dots at positive x, which is logarithmic where the largest is 10 times the smallest or more.

    `log_y`: y, positive too, is logarithmic; `height` in inches: more room for labels.
    """
    figure, axes = canvas(height, _WIDTH_INCHES)
    # A pixel is a point, as in the svg.
    figure.set_dpi(72)
    for dot in dots:
        marker = _MARKERS[dot.style // len(COLORS) % len(_MARKERS)]
        if dot.deviation > 0:
            axes.errorbar(dot.x, dot.y, dot.deviation, color=color(dot.style), capsize=3, linewidth=1.2)
        axes.plot([dot.x], [dot.y], marker, color=color(dot.style), markersize=7)
    if max(dot.x for dot in dots) >= 10 * min(dot.x for dot in dots):
        x_label = logarithmic(axes, "x", x_label)
    if log_y:
        y_label = logarithmic(axes, "y", y_label)
    axes.margins(x=0.12, y=0.12)
    with matplotlib.rc_context(STYLE):
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        figure.draw_without_rendering()
        _label(axes, dots)
    return finish(figure, axes, x_label, y_label, percent)


def _label(axes: Axes, dots: Sequence[Dot]) -> None:
    """Put each label where it is near its dot, inside the plot, and on nothing else."""
    places = axes.transData.transform([(dot.x, dot.y) for dot in dots])
    bars = [
        [axes.transData.transform((dot.x, dot.y + sign * dot.deviation))[1] for sign in (-1, 1)]
        for dot in dots
        if dot.deviation > 0
    ]
    barred = [x for dot, (x, _) in zip(dots, places, strict=True) if dot.deviation > 0]
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in places]
    taken += [(x - 4, low, x + 4, high) for x, (low, high) in zip(barred, bars, strict=True)]
    sizes = np.array([(_LETTER * len(dot.label), _LINE) for dot in dots])
    corners = label_places(places, sizes, np.array(taken), np.array(axes.get_window_extent().extents))
    far = reach(places, np.concatenate([corners, corners + sizes], axis=1)) > NEAR
    for dot, place, corner, size, joined in zip(dots, places, corners, sizes, far, strict=True):
        line = {
            "arrowstyle": "-",
            "color": color(dot.style),
            "linewidth": 0.7,
            "shrinkA": 0,
            "shrinkB": 4,
            "relpos": tuple(np.clip((place - corner) / size, 0, 1)),
        }
        axes.annotate(
            dot.label,
            (dot.x, dot.y),
            (float(corner[0] - place[0]), float(corner[1] + size[1] / 2 - place[1])),
            textcoords="offset points",
            va="center",
            fontsize=10,
            color="#333a45",
            arrowprops=line if joined else None,
        )

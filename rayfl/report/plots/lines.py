"""Plots as small inline SVG: matplotlib draws, text stays text, and nothing in them refers to a network.

Legends are left to the page, where they wrap on a phone and never cover data.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from rayfl.report.plots.line_ends import NAME_POINTS, End, name_ends

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
"""Okabe and Ito's colours, which the colour-blind can tell apart (their yellow is too pale on white); then dashes."""
_DASHES = ("-", "--", ":", "-.")
_BORDERS = ("solid", "dashed", "dotted", "double")
"""The border that a legend draws for each of the dashes: CSS has no line of dashes and dots."""
ROUND = "Round"
"""The label of an x axis that counts rounds: whole numbers, never logarithmic."""
_MOST_POINTS = 400
_PERCENT = FuncFormatter(lambda share, _: f"{100 * share:.6g} %")
_PLAIN = FuncFormatter(lambda value, _: f"{value:g}")
_NUMBER = re.compile(r"-?\d+\.\d{2,}")
_FAR_APART = 10
"""From this factor on an axis is logarithmic."""
_SIZE_INCHES = (5.2, 3.1)
# Any: matplotlib keeps the type of these keys to itself.
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "rayfl",
    # A run's name is shown as it is, dollar signs included.
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],
    "font.size": 11,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a8f98",
    "axes.labelcolor": "#333a45",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e8ec",
    "grid.linewidth": 0.8,
    "xtick.color": "#8a8f98",
    "ytick.color": "#8a8f98",
    "xtick.labelcolor": "#333a45",
    "ytick.labelcolor": "#333a45",
    "lines.linewidth": 1.8,
}


@dataclass(frozen=True)
class Line:
    """One line [num_points], with bands (low, high) around it; `style` numbers its colour and dash on all of a page."""

    label: str
    style: int
    x: np.ndarray
    y: np.ndarray
    bands: tuple[tuple[np.ndarray, np.ndarray], ...] = ()


@dataclass(frozen=True)
class Strip:
    """One row of values [num_values]; `style` as in a line."""

    label: str
    style: int
    values: np.ndarray


@dataclass(frozen=True)
class Key:
    """An entry of a legend: what the page shows beside a plot."""

    color: str
    dash: str
    label: str


def key(label: str, style: int) -> Key:
    """The legend's entry of the line or strip with this style."""
    return Key(color(style), _BORDERS[style // len(COLORS) % len(_DASHES)], label)


def color(style: int) -> str:
    """The colour of a style."""
    return COLORS[style % len(COLORS)]


def line_plot(
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    *,
    percent: bool = False,
    from_zero: bool = False,
    named: bool = False,
) -> Markup:
    """Lines over x. A line of few points shows them; a long one is thinned to about 400 points.

    `named`: a large plot with each line's label beside its end, and room for as many as there are.
    Where the lines' ends lie a factor of 10 or more apart, x (unless rounds) is logarithmic, else the shortest could
    not be read; and so is y that would begin at zero (`from_zero`), where the lines' tops do.
    """
    figure, axes = canvas(max(4.6, (3 + len(lines)) * NAME_POINTS / 72), 10.0) if named else canvas()
    _draw(axes, lines)
    ends = [float(line.x[-1]) for line in lines]
    if x_label != ROUND and min(ends) > 0 and max(ends) >= _FAR_APART * min(ends):
        x_label = logarithmic(axes, "x", x_label)
    else:
        axes.set_xlim(left=min(0.0, *(float(line.x[0]) for line in lines)))
    if from_zero:
        tops = [float(line.y.max()) for line in lines]
        if min(tops) > 0 and max(tops) >= _FAR_APART * min(tops):
            y_label = logarithmic(axes, "y", y_label)
        else:
            axes.set_ylim(0, 1.08 * max(tops) or 1)
    if named:
        with matplotlib.rc_context(STYLE):
            # It takes its height from the plot before names are placed.
            axes.set_xlabel(x_label)
        name_ends(figure, axes, [End(line.label, color(line.style), line.x, line.y) for line in lines])
    return finish(figure, axes, x_label, y_label, percent)


def _draw(axes: Axes, lines: Sequence[Line]) -> None:
    """Bands and lines."""
    # Many bands on top of each other hide the lines.
    alpha = 0.16 if len(lines) <= 7 else 0.08
    for line in lines:
        kept = _thin(len(line.x))
        x, y, tone = line.x[kept], line.y[kept], color(line.style)
        for low, high in line.bands:
            axes.fill_between(x, low[kept], high[kept], color=tone, alpha=alpha, linewidth=0)
        dash = _DASHES[line.style // len(COLORS) % len(_DASHES)]
        axes.plot(x, y, color=tone, linestyle=dash, marker="o" if len(x) <= 15 else None, markersize=4)


def stacked_plot(x: np.ndarray, parts: Sequence[tuple[int, np.ndarray]], x_label: str, y_label: str) -> Markup:
    """Parts (style, counts) of a whole over integer x, stacked from below as steps of width 1."""
    figure, axes = canvas()
    edges = np.append(x - 0.5, x[-1] + 0.5)
    base = np.zeros(len(x))
    for style, heights in parts:
        axes.stairs(base + heights, edges, baseline=base, fill=True, color=color(style), alpha=0.85)
        base = base + heights
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    return finish(figure, axes, x_label, y_label, percent=False)


def strip_plot(strips: Sequence[Strip], x_label: str, percent: bool = False) -> Markup:
    """A dot a value (up to 300 a row), a box around the middle half, a bar at the median.

    Dots are moved up and down by a fixed pattern, only so that they do not hide each other. Where there are more rows
    than colours, they are narrower and each has its label beside it.
    """
    many = len(strips) > len(COLORS)
    figure, axes = canvas(0.8 + 0.34 * len(strips), 10.0) if many else canvas(max(1.6, 0.8 + 0.55 * len(strips)))
    for row, strip in enumerate(strips):
        values, tone = np.sort(strip.values[~np.isnan(strip.values)]), color(strip.style)
        if not len(values):
            continue
        if len(values) <= 300:
            shift = (np.arange(len(values)) * 0.618034 % 1 - 0.5) * 0.5
            axes.scatter(values, row + shift, s=14, color=tone, alpha=0.55, linewidths=0)
        low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
        axes.barh(row, high - low, left=low, height=0.62, color=tone, alpha=0.16)
        axes.plot([middle, middle], [row - 0.31, row + 0.31], color=tone, linewidth=2.2)
    axes.set_yticks(range(len(strips)) if many else [], [strip.label for strip in strips] if many else [])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(len(strips) - 0.5, -0.5)
    return finish(figure, axes, x_label, "", percent, horizontal=True)


def canvas(height: float = _SIZE_INCHES[1], width: float = _SIZE_INCHES[0]) -> tuple[Figure, Axes]:
    """An empty plot of this size in inches."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        return figure, figure.add_subplot()


def logarithmic(axes: Axes, which: Literal["x", "y"], label: str) -> str:
    """Make an axis logarithmic; returns its label, which says so."""
    axes.set(**{f"{which}scale": "log"})
    getattr(axes, f"{which}axis").set_major_formatter(_PLAIN)
    return f"{label} (logarithmic)"


def finish(figure: Figure, axes: Axes, x_label: str, y_label: str, percent: bool, horizontal: bool = False) -> Markup:
    """Label a plot and give its svg; `horizontal`: the values are along x."""
    with matplotlib.rc_context(STYLE):
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        if axes.get_xscale() == "linear":
            axes.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10], integer=x_label == ROUND))
        if percent:
            (axes.xaxis if horizontal else axes.yaxis).set_major_formatter(_PERCENT)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return _inline(out.getvalue(), y_label or x_label, x_label)


def _inline(svg: str, what: str, over: str) -> Markup:
    """The <svg> element alone, as wide as its place, with short numbers and no ids but those that are referred to."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*|<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (d|x|y|transform)="[^"]*"', lambda match: _NUMBER.sub(_rounded, match[0]), svg)
    used = set(re.findall(r"#([a-z]\w+)", svg))
    svg = re.sub(r' id="([\w.-]+)"', lambda match: match[0] if match[1] in used else "", svg)
    view = re.search(r'viewBox="[^"]*"', svg)
    assert view is not None, "matplotlib wrote an svg without a viewBox"
    head = f'<svg {view[0]} role="img" aria-label="{escape(what)} over {escape(over)}">'
    return Markup(re.sub(r"<svg[^>]*>", lambda _: head, svg, count=1))


def with_own_ids(svg: Markup, mark: str) -> Markup:
    """The same plot with `mark` before its ids, since all plots of a page share one space of ids."""
    return Markup(re.sub(r'( id="|url\(#|xlink:href="#)', lambda match: match[1] + mark, svg))


def _rounded(match: re.Match[str]) -> str:
    return f"{float(match[0]):.1f}".removesuffix(".0")


def _thin(count: int) -> np.ndarray:
    """Indices of at most about 400 of `count` points, evenly, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, _MOST_POINTS)).astype(int))

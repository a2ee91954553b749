"""Charts as Vega-Lite specifications, each complete with its numbers, its legend and its inputs; and the colours of
charts, text and tables on a page.

Rows of data hold lists (a row per line), which Vega-Lite flattens: that takes a third of the bytes of a row per point.
"""

import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rayfl.untyped import Json

LIGHT = {
    "paper": "#ffffff",
    "ink": "#1c2430",
    "soft": "#5a6472",
    "line": "#e2e5ea",
    "wash": "#f6f7f9",
    "alert": "#fff4e0",
    "shade": "#00000033",
    # Okabe and Ito's colours, which colour-blind readers can tell apart (their yellow is too pale on white).
    "c0": "#0072B2",
    "c1": "#D55E00",
    "c2": "#009E73",
    "c3": "#CC79A7",
    "c4": "#E69F00",
    "c5": "#56B4E9",
    "c6": "#333333",
}
DARK = {
    "paper": "#14181f",
    "ink": "#e6e9ee",
    "soft": "#a3acb9",
    "line": "#2c333e",
    "wash": "#1d232c",
    "alert": "#3a2f1a",
    "shade": "#00000099",
    "c0": "#4AA8E0",
    "c1": "#FF8A4C",
    "c2": "#2CC59B",
    "c3": "#E39CC4",
    "c4": "#F2B73F",
    "c5": "#A3DCFA",
    "c6": "#D9DDE3",
}
"""The page's colours by the names of its CSS variables; c0 to c6 are those of series."""
NUM_COLORS = 7

Spec = dict[str, Json]

_DASHES = ([1, 0], [6, 6], [2, 4], [10, 4, 2, 4])
_SHAPES = ("circle", "square", "triangle-up", "diamond")
_ROW_LETTERS = 24
"""The most letters of a line of a label beside a row."""
MOST_POINTS = 400
"""The most points of a line."""
_MOST_DOTS = 300
"""The most dots in a row of a strip chart."""
_FEW_POINTS = 12
"""Lines with fewer points than this show each point as a dot."""
_MOST_SVG_MARKS = 3000
"""Charts with more points are drawn on a canvas, because a browser is slow with as many SVG elements."""


class Line(NamedTuple):
    """One line of `y` [num_points] with bands (low, high) around it.

    over: what the line can be drawn against, [num_points] by the title of the x axis.
    """

    label: str
    over: Mapping[str, np.ndarray]
    y: np.ndarray
    bands: Sequence[tuple[np.ndarray, np.ndarray]] = ()


class Figure(NamedTuple):
    """A chart with its title and caption; `wide`: as wide as the page."""

    title: str
    caption: str
    chart: Spec
    wide: bool = False


class Section(NamedTuple):
    """Figures under one heading."""

    title: str
    intro: str
    figures: Sequence[Figure]


def lines_chart(
    lines: Sequence[Line],
    y: str,
    labels: Sequence[str],
    *,
    percent: bool = False,
    from_zero: bool = False,
    marked: bool = False,
    log_x: bool = False,
) -> Spec:
    """Lines, whose x axis, scales and smoothing the reader chooses by inputs below the chart.

    labels: all series of the page, which give each its colour. from_zero: the y axis begins at zero, and is logarithmic
    at first if the largest values of the lines differ by a factor of 10 or more. marked: each point is a dot, as it is
    in charts of short lines. log_x: the x axis is logarithmic at first.
    """
    # Vega-Lite writes titles into expressions and does not escape them.
    y = re.sub(r'["\\]', "'", y)
    against = [name for name in lines[0].over if any(line.over[name].any() for line in lines)] or [*lines[0].over][:1]
    sides = ("low", "high", "low2", "high2")[: 2 * max(len(line.bands) for line in lines)]
    tops = [top for line in lines if (top := float(np.nanmax(line.y, initial=0.0)))]
    log = from_zero and len(tops) > 1 and max(tops) >= 10 * min(tops)
    shown = [line.label for line in lines]
    # A band that reaches down to zero is cut a factor of 100 below its line on a logarithmic axis.
    power = "log_y ? log(max({0}, datum.value / 100)) / LN10 : {0}"
    return {
        **data([_row(line, against, sides) for line in lines], sum(len(line.y) for line in lines)),
        "width": "container",
        "height": 270,
        "title": {"text": {"expr": "against"}},
        "params": _inputs(against, {"log_x": log_x, "log_y": log, "smooth": False}),
        "transform": [
            {"flatten": [*against, "value", *sides]},
            {"window": [{"op": "mean", "field": "value", "as": "mean"}], "frame": [-2, 2], "groupby": ["series"]},
            {"calculate": "log_x ? log(datum[against]) / LN10 : datum[against]", "as": "x"},
            {"calculate": power.format("(smooth ? datum.mean : datum.value)"), "as": "y"},
            *({"calculate": power.format(f"datum.{side}"), "as": f"{side}_y"} for side in sides),
            {"filter": {"and": [{"param": "shown"}, "isFinite(datum.x)", "isFinite(datum.y)"]}},
        ],
        "encoding": {
            "x": {
                "field": "x",
                "type": "quantitative",
                "title": None,
                "scale": {"zero": False, "nice": False, "padding": 6},
                "axis": {"labelExpr": _X_LABEL},
            },
            "color": _series(labels, shown, symbolType="stroke"),
        },
        "layer": [
            *(_band(low, high) for low, high in zip(sides[::2], sides[1::2], strict=True)),
            {
                "params": _SELECTIONS,
                "mark": {"type": "line", "strokeWidth": 2, "clip": True},
                "encoding": {
                    "y": {
                        "field": "y",
                        "type": "quantitative",
                        "title": y,
                        "scale": {"zero": {"expr": "!log_y"} if from_zero else False, "nice": False, "padding": 8},
                        "axis": {"labelExpr": _Y_LABEL.format(".3~%" if percent else ".3~g")},
                    },
                    "strokeDash": _series(labels, shown, _DASHES, symbolType="stroke"),
                },
            },
            _points(y, against, percent, few=marked or max(len(line.y) for line in lines) < _FEW_POINTS),
        ],
    }


_X_LABEL = (
    "log_x ? format(pow(10, datum.value), '.3~g') : "
    "against != 'Round' && against != 'Class' ? datum.label : datum.value % 1 ? '' : format(datum.value, 'd')"
)
_Y_LABEL = "format(log_y ? pow(10, datum.value) : datum.value, '{}')"
_SELECTIONS = [
    {"name": "shown", "select": {"type": "point", "fields": ["series"]}, "bind": "legend"},
    {"name": "zoom", "select": {"type": "interval", "zoom": "wheel![event.shiftKey]"}, "bind": "scales"},
]
"""A click on the legend shows one line alone; dragging and the wheel with shift move and zoom."""


def _row(line: Line, against: Sequence[str], sides: Sequence[str]) -> dict[str, object]:
    """A line as a row of lists; a band that it lacks has empty lists, which Vega-Lite's flatten needs."""
    bands = dict(zip(sides, (side for band in line.bands for side in band), strict=False))
    lists = {name: line.over[name] for name in against} | {"value": line.y} | dict.fromkeys(sides, np.empty(0)) | bands
    return {"series": line.label, **{name: thinned(values, MOST_POINTS) for name, values in lists.items()}}


def _inputs(against: Sequence[str], boxes: Mapping[str, bool]) -> list[Spec]:
    choice = {"bind": {"input": "select", "options": list(against), "name": "Against "}} if len(against) > 1 else {}
    return [
        {"name": "against", "value": against[0], **choice},
        *(
            {"name": name, "value": value, "bind": {"input": "checkbox", "name": f"{name.replace('_', ' ')} "}}
            for name, value in boxes.items()
        ),
    ]


def _band(low: str, high: str) -> Spec:
    return {
        "mark": {"type": "area", "opacity": 0.15, "clip": True},
        "encoding": {"y": {"field": f"{low}_y", "type": "quantitative"}, "y2": {"field": f"{high}_y"}},
    }


def _points(y: str, against: Sequence[str], percent: bool, few: bool) -> Spec:
    """The points of lines, which show their numbers to the pointer; they are invisible unless they are `few`."""
    return {
        "params": [{"name": "hover", "select": {"type": "point", "on": "pointerover", "clear": "pointerout"}}],
        "mark": {"type": "circle", "size": 60, "clip": True},
        "encoding": {
            "y": {"field": "y", "type": "quantitative"},
            "opacity": {"condition": {"param": "hover", "empty": False, "value": 1}, "value": float(few)},
            "tooltip": [told("series", "Run"), *(told(name, name) for name in against), told("value", y, percent)],
        },
    }


def _series(labels: Sequence[str], shown: Sequence[str], kinds: Sequence[object] = (), **legend: object) -> Spec:
    """The colour of each label, or its dash or shape (`kinds`): no two of 28 labels have both alike."""
    looks = {"range": [kinds[index % len(kinds)] for index in range(len(labels))]} if kinds else {}
    return {
        "field": "series",
        "type": "nominal",
        "scale": {"domain": list(labels), **looks},
        "legend": {"title": None, "values": list(shown), "labelExpr": _in_lines(shown, 34), **legend}
        if len(shown) > 1
        else None,
    }


def _in_lines(labels: Sequence[str], width: int) -> str:
    """Vega's expression for a label in lines of at most `width` letters, so that the narrowest page cuts none."""
    return f"{json.dumps({label: textwrap.wrap(label, width) for label in labels})}[datum.label]"


def told(field: str, title: str, percent: bool = False) -> Spec:
    """A line of a tooltip."""
    number = {"type": "quantitative", "format": ".2%" if percent else ",.4~g"}
    return {"field": field, "title": title, **({"type": "nominal"} if field == "series" else number)}


def strips_chart(strips: Mapping[str, np.ndarray], x: str, labels: Sequence[str], percent: bool = False) -> Spec:
    """A box plot per label, and a dot per value or per evenly spaced quantile: at most 300, fewer with many labels.

    Dots are moved up and down by a fixed pattern, only so that they do not hide each other.
    """
    most = max(20, min(_MOST_DOTS, 12_000 // len(strips)))
    rows = [
        {"series": label, "value": thinned(np.sort(values[~np.isnan(values)]), most)}
        for label, values in strips.items()
    ]
    return {
        **data(rows, most * len(rows)),
        "width": "container",
        "height": _height(strips),
        "transform": [
            {"flatten": ["value"]},
            {"window": [{"op": "row_number", "as": "number"}]},
            {"calculate": "datum.number * 0.618034 % 1 - 0.5", "as": "shift"},
        ],
        "encoding": {
            "x": _axis("value", x, percent),
            "y": _rows(strips),
            "color": _series(labels, []),
        },
        "layer": [
            {"mark": {"type": "boxplot", "extent": "min-max", "size": 20, "opacity": 0.35}},
            {
                "mark": {"type": "circle", "size": 22, "opacity": 0.55},
                "encoding": {
                    "yOffset": {"field": "shift", "type": "quantitative", "scale": {"domain": [-0.9, 0.9]}},
                    "tooltip": [told("series", "Run"), told("value", x, percent)],
                },
            },
        ],
    }


def _rows(labels: Iterable[str]) -> Spec:
    """The y axis with a row per label."""
    axis = {"labelExpr": _in_lines([*labels], _ROW_LETTERS)}
    return {"field": "series", "type": "nominal", "title": None, "sort": None, "axis": axis}


def _height(labels: Iterable[str]) -> int:
    """The height of a chart with a row per label."""
    return sum(max(34, 16 * len(textwrap.wrap(label, _ROW_LETTERS)) + 6) for label in labels)


def ranks_chart(ranks: Mapping[str, float], critical: float) -> Spec:
    """A dot per method at its average rank, the best on top, with a bar of the width `critical` around it."""
    title = "Average rank (1: the best)"
    rows = [
        {"series": name, "rank": ranks[name], "low": ranks[name] - critical / 2, "high": ranks[name] + critical / 2}
        for name in sorted(ranks, key=ranks.__getitem__)
    ]
    return {
        **data(rows, len(rows)),
        "width": "container",
        "height": _height(ranks),
        "encoding": {
            "y": _rows(ranks),
            "tooltip": [told("series", "Run"), told("rank", "Average rank")],
        },
        "layer": [
            {
                "mark": {"type": "rule", "strokeWidth": 3, "opacity": 0.5},
                "encoding": {"x": _axis("low", title), "x2": {"field": "high"}},
            },
            {
                "mark": {"type": "circle", "size": 90, "opacity": 1},
                "encoding": {"x": _axis("rank", title)},
            },
        ],
    }


def dots_chart(
    dots: Mapping[str, tuple[float, float, float]], x: str, y: str, labels: Sequence[str], *, percent: bool = False
) -> Spec:
    """A dot per label at positive x, with a bar up and down; the x axis is logarithmic if the largest x is 10 times the
    smallest or more. dots: x, y and the length of the bar's halves."""
    places = [place for place, _, _ in dots.values()]
    rows = [
        {"series": label, "x": place, "value": value, "low": value - bar, "high": value + bar}
        for label, (place, value, bar) in dots.items()
    ]
    return {
        **data(rows, len(rows)),
        "width": "container",
        "height": 300,
        "encoding": {
            "x": _axis("x", x, log=max(places) >= 10 * min(places)),
            "color": _series(labels, [*dots]),
            "tooltip": [told("series", "Run"), told("x", x), told("value", y, percent)],
        },
        "layer": [
            {
                "mark": {"type": "rule", "strokeWidth": 1.4},
                "encoding": {"y": _axis("low", y, percent), "y2": {"field": "high"}},
            },
            {
                "mark": {"type": "point", "size": 90, "filled": True, "opacity": 1},
                "encoding": {"y": _axis("value", y, percent), "shape": _series(labels, [*dots], _SHAPES)},
            },
        ],
    }


def _axis(field: str, title: str, percent: bool = False, log: bool = False) -> Spec:
    return {
        "field": field,
        "type": "quantitative",
        "title": f"{title} (logarithmic)" if log else title,
        "scale": {"nice": False, "padding": 20, **({"type": "log"} if log else {"zero": False})},
        "axis": {"format": ".3~%"} if percent else {},
    }


def data(rows: Sequence[Mapping[str, object]], num_marks: int) -> Spec:
    """The data of a chart, and the renderer for a chart with `num_marks` marks."""
    renderer = "canvas" if num_marks > _MOST_SVG_MARKS else "svg"
    return {"data": {"values": _json(rows)}, "usermeta": {"embedOptions": {"renderer": renderer}}}


def _json(value: object) -> object:
    """A value for JSON: numbers with six digits, null for those that are not finite."""
    if isinstance(value, dict):
        return {name: _json(item) for name, item in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [*map(_json, np.asarray(value).tolist() if isinstance(value, np.ndarray) else value)]
    return (float(f"{value:.6g}") if np.isfinite(value) else None) if isinstance(value, float) else value


def thinned(values: np.ndarray, most: int) -> np.ndarray:
    """At most `most` of the values, evenly spaced, the first and the last among them."""
    return values[np.unique(np.linspace(0, len(values) - 1, min(len(values), most)).astype(int))]


def config(colors: Mapping[str, str]) -> dict[str, Json]:
    """Vega's configuration for a page of these colours."""
    words = {"labelColor": colors["soft"], "titleColor": colors["ink"], "titleFontWeight": "normal"}
    lines = {"gridColor": colors["line"], "domainColor": colors["soft"], "tickColor": colors["soft"]}
    return {
        "font": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', 'DejaVu Sans', sans-serif",
        "background": colors["paper"],
        "axis": {**words, **lines, "labelFontSize": 12, "titleFontSize": 12, "titlePadding": 8},
        "axisX": {"labelOverlap": True, "tickCount": 7},
        "legend": {**words, "labelFontSize": 12, "orient": "top", "symbolOpacity": 1, "symbolStrokeWidth": 3},
        "title": {"color": colors["ink"], "fontSize": 12, "fontWeight": "normal", "orient": "bottom", "offset": 4},
        "range": {"category": [colors[f"c{number}"] for number in range(NUM_COLORS)]},
        "mark": {"color": colors["c0"]},
        "rule": {"color": colors["soft"]},
        "view": {"stroke": None},
        "text": {"color": colors["ink"], "fontSize": 12},
        "boxplot": {"median": {"color": colors["ink"]}, "rule": {"color": colors["soft"]}},
    }

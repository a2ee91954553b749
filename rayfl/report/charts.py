"""Charts as Vega-Altair specifications.

Lines have one specification for all of a page, because readers choose their x axis, smoothing and scale there. Altair
is imported where a chart is made: to load it takes half a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import altair as alt

LIGHT = {
    "paper": "#ffffff",
    "ink": "#1c2430",
    "soft": "#5a6472",
    "line": "#e2e5ea",
    "wash": "#f6f7f9",
    "alert": "#fff4e0",
    "shade": "#00000033",
    # Okabe and Ito's colours, which the colour-blind can tell apart (their yellow is too pale on white).
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
BORDERS = ("solid", "dashed", "dotted", "double")
"""The border with which a legend shows each of the script's four dashes: CSS has no line of dashes and dots."""
AXES = {
    "round": "Round",
    "up": "Sent up so far, MB",
    "both": "Sent up and down so far, MB",
    "time": "Simulated time so far, s",
}
"""What curves can be drawn against. 1 MB is a million bytes."""
LABELS = {
    "type": "label",
    "size": {"signal": "[width, height]"},
    "offset": [7, 7, 6, 6],
    "anchor": ["right", "left", "top", "bottom"],
}
"""Vega places labels of dots where they hide nothing; those without a place are left out."""
MOST_POINTS = 400
_MOST_COMPARED = 30
"""Lines of a chart among which coinciding ones are looked for."""
_MOST_DOTS = 300
"""Of a row of dots."""
MOST_LINKS = 3000
"""Of a graph."""


@dataclass(frozen=True)
class Key:
    """An entry of a legend: what the page shows beside a chart."""

    color: str
    dash: str
    label: str


def key(label: str, style: int) -> Key:
    """The legend's entry of what has this style: the colour is one of the page's CSS variables."""
    return Key(f"var(--c{style % NUM_COLORS})", BORDERS[style // NUM_COLORS % len(BORDERS)], label)


@dataclass(frozen=True)
class Line:
    """One line of `y` [num_points] with bands (low, high) around it; `style` numbers its colour and dash on a page.

    over: [num_points] by the key in `AXES` of what it can be drawn against, or by the axis' own title.
    """

    label: str
    style: int
    over: Mapping[str, np.ndarray]
    y: np.ndarray
    bands: tuple[tuple[np.ndarray, np.ndarray], ...] = ()


@dataclass(frozen=True)
class Strip:
    """One row of values [num_values]; `style` as in a line."""

    label: str
    style: int
    values: np.ndarray


@dataclass(frozen=True)
class Dot:
    """One dot with a bar of one `deviation` up and down; `style` as in a line."""

    label: str
    style: int
    x: float
    y: float
    deviation: float = 0.0


# Any: a specification is JSON.
Spec = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """A specification with its numbers, or `lines` for the specification that all lines share.

    rows: columns of equal length. A column "series" names what a legend's entry hides; `styles` has its style.
    from_zero: the y axis begins at zero; log: it is logarithmic at first, and so `log_x`.
    """

    spec: Spec = field(default_factory=dict)
    rows: Mapping[str, Sequence[object]] = field(default_factory=dict)
    styles: Mapping[str, int] = field(default_factory=dict)
    lines: Sequence[Line] = ()
    y: str = ""
    percent: bool = False
    from_zero: bool = False
    log: bool = False

    @cached_property
    def coinciding(self) -> Sequence[int]:
        """For each line, how many lines it lies upon, one upon the other: 0 for one that lies upon none."""
        depths: list[int] = []
        for place, line in enumerate(self.lines):
            earlier = zip(depths, self.lines, strict=False) if place < _MOST_COMPARED else ()
            depths.append(max((1 + depth for depth, other in earlier if _same(other, line)), default=0))
        return depths


def _same(one: Line, other: Line) -> bool:
    """Whether a reader sees one line: nine tenths of the points are as good as equal."""
    over, over_other = (next(iter(line.over.values())) for line in (one, other))
    if one.over.keys() != other.over.keys() or not np.array_equal(over, over_other):
        return False
    both = np.abs([*one.y, *other.y, 0.0])
    near = 0.004 * both[np.isfinite(both)].max()
    return bool(np.isclose(one.y, other.y, rtol=0, atol=near, equal_nan=True).mean() >= 0.9)


def lines_chart(lines: Sequence[Line], y: str, *, percent: bool = False, from_zero: bool = False) -> Chart:
    """Lines. `from_zero`: an axis that begins there is logarithmic where the lines' tops lie a factor of 10 apart."""
    tops = [float(np.nanmax(line.y, initial=0.0)) for line in lines]
    return Chart(
        styles={line.label: line.style for line in lines},
        lines=lines,
        y=y,
        percent=percent,
        from_zero=from_zero,
        log=from_zero and min(tops) > 0 and max(tops) >= 10 * min(tops),
    )


def lines_spec() -> Spec:
    """The specification of lines: their bands, what smoothing hides, the lines, and a dot where the pointer is."""
    import altair as alt

    hover = alt.selection_point(name="hover", nearest=True, on="pointermove", clear="pointerout", empty=False)
    zoom = alt.selection_interval(name="zoom", bind="scales", zoom="wheel![event.shiftKey]")
    base = alt.Chart(alt.NamedData("rows")).encode(alt.X("x:Q"), color=alt.Color("series:N"))
    dash = alt.StrokeDash("series:N")
    seen = alt.when(hover).then(alt.value(1)).when("datum.alone").then(alt.value(1)).otherwise(alt.value(0))
    wide, middle = (
        base.mark_area(opacity=0.13, clip=True).encode(alt.Y(f"{low}:Q"), alt.Y2(high))
        for low, high in (("low", "high"), ("low2", "high2"))
    )
    told = [alt.Tooltip("series:N", title="Run"), alt.Tooltip("x:Q", format=",.6~g"), alt.Tooltip("said:N")]
    layers = (
        wide,
        middle,
        base.mark_line(opacity=0.3, strokeWidth=1, clip=True).encode(alt.Y("raw:Q")),
        base.mark_line(strokeWidth=2, clip=True).encode(alt.Y("y:Q"), strokeDash=dash).add_params(zoom),
        base.mark_circle(size=46, clip=True).encode(alt.Y("y:Q"), opacity=seen, tooltip=told).add_params(hover),
    )
    return _spec(alt.layer(*layers).properties(width="container", height=270))


def strips_chart(strips: Sequence[Strip], x: str, percent: bool = False) -> Chart:
    """A dot a value and a box plot a row; of more than 300 values those at 300 evenly spaced quantiles.

    Dots are moved up and down by a fixed pattern, only so that they do not hide each other.
    """
    import altair as alt

    most = max(20, min(_MOST_DOTS, 12_000 // len(strips)))
    rows: dict[str, list[object]] = {"series": [], "x": [], "shift": []}
    for strip in strips:
        values = thinned(np.sort(strip.values[~np.isnan(strip.values)]), most)
        rows["series"] += [strip.label] * len(values)
        rows["x"] += values.tolist()
        rows["shift"] += (np.arange(len(values)) * 0.618034 % 1 - 0.5).round(3).tolist()
    named = alt.Y("series:N", title=None, sort=None, axis=alt.Axis(ticks=False, domain=False))
    over = alt.X("x:Q", title=f"{x}, %" if percent else x, axis=_axis(percent), scale=_scale(rows["x"], percent))
    base = alt.Chart(alt.NamedData("rows")).encode(over, named, color=alt.Color("series:N"))
    told = [alt.Tooltip("series:N", title="Run"), alt.Tooltip("x:Q", title=x, format=_FORMAT[percent])]
    shift = alt.YOffset("shift:Q", scale=alt.Scale(domain=[-0.9, 0.9]))
    dots = base.mark_circle(size=22, opacity=0.55, clip=True).encode(shift, tooltip=told)
    boxes = base.mark_boxplot(extent="min-max", size=20, opacity=0.35, ticks=False)
    chart = alt.layer(boxes, dots).properties(width="container", height=34 * len(strips))
    return Chart(_spec(chart), rows, {strip.label: strip.style for strip in strips})


def dots_chart(dots: Sequence[Dot], x: str, y: str, *, percent: bool = False, log_y: bool = False) -> Chart:
    """Labelled dots at positive x, which is logarithmic where the largest is 10 times the smallest or more."""
    import altair as alt

    tops, lows = ([dot.y + sign * dot.deviation for dot in dots] for sign in (1, -1))
    rows = {
        "series": [dot.label for dot in dots],
        "x": [dot.x for dot in dots],
        "y": [dot.y for dot in dots],
        **({"low": lows, "high": tops} if any(dot.deviation for dot in dots) else {}),
    }
    least, most = min(rows["x"]), max(rows["x"])
    log_x = most >= 10 * least
    across = alt.Scale(type="log", nice=False, padding=60) if log_x else alt.Scale(zero=False, padding=60)
    if most <= 1.05 * least:
        # Around one number an axis of its own has no room for ticks that would say which.
        across = alt.Scale(zero=False, nice=False, domain=[0.8 * least, 1.2 * most])
    upwards = alt.Scale(type="log", padding=20) if log_y else _scale([*tops, *lows], percent)
    over = alt.X("x:Q", title=_logarithmic(x, log_x), scale=across)
    value = alt.Y("y:Q", title=_logarithmic(f"{y}, %" if percent else y, log_y), axis=_axis(percent), scale=upwards)
    base = alt.Chart(alt.NamedData("rows")).encode(over, value, color=alt.Color("series:N"))
    told = [
        alt.Tooltip("series:N", title="Run"),
        alt.Tooltip("x:Q", title=x, format=",.4~g"),
        alt.Tooltip("y:Q", title=y, format=_FORMAT[percent]),
    ]
    layers = [base.mark_circle(size=90, opacity=1).encode(tooltip=told)]
    if "low" in rows:
        layers.append(base.mark_rule(strokeWidth=1.4).encode(alt.Y("low:Q", scale=upwards), alt.Y2("high")))
    layers.append(base.mark_text().encode(text="series:N").properties(name="labels"))
    chart = alt.layer(*layers).properties(width="container", height=340)
    return Chart(_spec(chart), rows, {dot.label: dot.style for dot in dots})


def dots_svg(chart: Chart, width: int, height: int) -> str:
    """A chart of dots as an SVG file."""
    import vl_convert

    names, cells = list(chart.rows), zip(*chart.rows.values(), strict=True)
    colors = [LIGHT[f"c{style % NUM_COLORS}"] for style in chart.styles.values()]
    spec = {**chart.spec, "width": width, "height": height, "background": LIGHT["paper"], "autosize": "pad"}
    spec["datasets"] = {"rows": [dict(zip(names, row, strict=True)) for row in cells]}
    for layer in spec["layer"]:
        scale = {"domain": list(chart.styles), "range": colors}
        layer["encoding"]["color"] = {"field": "series", "type": "nominal", "scale": scale, "legend": None}
    vega = vl_convert.vegalite_to_vega(spec)
    for mark in vega["marks"]:
        if mark["type"] == "text":
            mark["transform"] = [LABELS]
    return vl_convert.vega_to_svg(vega)


def stacked_chart(rounds: np.ndarray, parts: Sequence[tuple[str, int, np.ndarray]], y: str) -> Chart:
    """Counts [num_rounds] upon each other, the first at the bottom: (label, style, counts); at most 400 rounds."""
    import altair as alt

    places = thinned(np.arange(len(rounds)), MOST_POINTS)
    whole = alt.Axis(format="d", tickMinStep=1, labelExpr="datum.value % 1 ? '' : datum.label")
    edges = np.append(rounds[places] - 0.5, rounds[-1] + 0.5)
    rows = {
        "series": [label for label, _, _ in parts for _ in places],
        "order": [number for number in range(len(parts)) for _ in places],
        "left": np.tile(edges[:-1], len(parts)).tolist(),
        "right": np.tile(edges[1:], len(parts)).tolist(),
        "y": np.concatenate([counts[places] for _, _, counts in parts]).tolist(),
    }
    chart = (
        alt.Chart(alt.NamedData("rows"))
        .mark_bar(opacity=0.85)
        .encode(
            alt.X("left:Q", bin="binned", title="Round", axis=whole),
            alt.X2("right"),
            alt.Y("y:Q", title=y, stack="zero", axis=whole),
            color=alt.Color("series:N"),
            order="order:Q",
            tooltip=[alt.Tooltip("series:N", title="Fate"), alt.Tooltip("y:Q", title=y)],
        )
        .properties(width="container", height=270)
    )
    return Chart(_spec(chart), rows, {label: style for label, style, _ in parts})


def cells_chart(values: np.ndarray, x: str, y: str, most: float, told: str) -> Chart:
    """Values [rows, columns] in [0, most] as shades, the first row on top; NaN is left blank."""
    import altair as alt

    height, width = values.shape
    place = alt.Axis(
        labelOverlap=True, ticks=False, domain=False, grid=False, labelAngle=0, values=_ticks(max(values.shape))
    )
    whole = alt.Scale(round=True, paddingInner=0)
    chart = (
        alt.Chart(alt.NamedData("rows"))
        .mark_rect()
        .transform_window(number="row_number()")
        .transform_calculate(row=f"floor((datum.number - 1) / {width})", column=f"(datum.number - 1) % {width}")
        .transform_filter("isValid(datum.value)")
        .encode(
            alt.X("column:O", title=x, axis=place, scale=whole),
            alt.Y("row:O", title=y, axis=place, scale=whole),
            color=alt.Color("value:Q", legend=None, scale=alt.Scale(domain=[0, most or 1], scheme="blues")),
            tooltip=[
                alt.Tooltip(f"{name}:Q", title=title) for name, title in (("row", y), ("column", x), ("value", told))
            ],
        )
        .properties(width="container", height=max(90, min(340, round(350 * height / width))))
    )
    return Chart(_spec(chart), {"value": values.ravel().tolist()})


def _ticks(count: int) -> list[int]:
    return list(range(0, count, next(step for step in (1, 2, 5, 10, 20, 50, 100) if count <= 12 * step or step == 100)))


def graph_chart(places: np.ndarray, links: np.ndarray) -> Chart:
    """Nodes at `places` [n, 2] and lines between those that `links` [num_links, 2] name; at most 3,000 lines."""
    import altair as alt

    links = thinned(links, MOST_LINKS)
    (x, y), (x2, y2) = places[links[:, 0]].T, places[links[:, 1]].T
    columns = ("x", "y", "x2", "y2")
    ends = [dict(zip(columns, row, strict=True)) for row in np.stack([x, y, x2, y2], 1).round(3).tolist()]
    nodes = [{"x": float(x), "y": float(y), "peer": peer} for peer, (x, y) in enumerate(places.round(3))]
    axis = {"axis": None, "scale": alt.Scale(zero=False, nice=False, padding=18)}
    across, upwards = alt.X("x:Q", **axis), alt.Y("y:Q", **axis)
    opacity = float(np.clip(60 / max(len(ends), 1), 0.06, 0.7))
    blue = alt.value("var(--c0)")
    peers = alt.Chart(alt.Data(values=nodes)).encode(across, upwards)
    dots = peers.mark_circle(size=max(12, 260 - 4 * len(nodes)), opacity=1)
    rules = alt.Chart(alt.Data(values=ends)).mark_rule(opacity=opacity)
    layers = [
        rules.encode(across, upwards, alt.X2("x2"), alt.Y2("y2"), color=blue),
        dots.encode(color=blue, tooltip=[alt.Tooltip("peer:Q", title="Peer")]),
    ]
    if len(nodes) <= 30:
        layers.append(peers.mark_text(fontSize=9, color="white").encode(text="peer:Q"))
    return Chart(_spec(alt.layer(*layers).properties(width=330, height=330)))


_FORMAT = {True: ".1%", False: ",.4~g"}


def _axis(percent: bool) -> alt.Axis:
    import altair as alt

    return alt.Axis(format=".3~%") if percent else alt.Axis()


def _scale(values: Sequence[Any], percent: bool) -> alt.Scale:
    """Of shares within [0, 1], and with a span of 0.01 at least."""
    import altair as alt

    known = np.array(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    if not percent or not len(known):
        return alt.Scale(zero=False)
    low, high = known.min(), known.max()
    margin = max(0.06 * (high - low), (0.01 - (high - low)) / 2)
    low, high = max(0.0, low - margin), min(1.0, high + margin)
    low = min(low, 0.99)
    return alt.Scale(domain=[low, max(high, low + 0.01)], nice=False)


def _logarithmic(title: str, log: bool) -> str:
    return f"{title} (logarithmic)" if log else title


def _spec(chart: alt.Chart | alt.LayerChart | alt.FacetChart) -> Spec:
    """Without the schema's address and Altair's own theme: the page has one, light or dark."""
    found = {name: value for name, value in chart.to_dict(validate=False).items() if name not in ("$schema", "config")}
    return {**found, "autosize": {"type": "fit-x", "contains": "padding"}}


def thinned(values: np.ndarray, most: int) -> np.ndarray:
    """At most `most` of the values, evenly spaced, the first and the last among them."""
    return values[np.unique(np.linspace(0, len(values) - 1, min(len(values), most)).astype(int))]

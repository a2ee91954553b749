"""Charts as the numbers that a page's script draws: rounded, thinned, and each x axis once."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rayfl.report.charts import AXES, BORDERS, LABELS, LIGHT, NUM_COLORS, Chart, Line, lines_spec, thinned


# Any: the page's JSON.
def packed(charts: Mapping[str, Chart], most_points: int) -> dict[str, Any]:
    """The charts, by the element that shows each, as JSON for the page's script; lines of at most `most_points`.

    x values are kept once, because all metrics of a run share them.
    """
    shared: dict[str, int] = {}
    xs: list[dict[str, list[object]]] = []

    def number_of(over: Mapping[str, np.ndarray]) -> int:
        found = {name: numbers(thinned(values, most_points), 6) for name, values in over.items()}
        place = shared.setdefault(repr(found), len(xs))
        if place == len(xs):
            xs.append(found)
        return place

    def line_of(line: Line, depth: int) -> dict[str, Any]:
        bands = [side for band in line.bands for side in band]
        sides = dict(zip(("low", "high", "low2", "high2"), bands, strict=False))
        return {
            "name": line.label,
            "dash": max(depth, line.style // NUM_COLORS) % len(BORDERS),
            "x": number_of(line.over),
            **{name: numbers(thinned(values, most_points), 5) for name, values in {"y": line.y, **sides}.items()},
        }

    found = [
        {
            "id": name,
            "styles": {label: style % NUM_COLORS for label, style in chart.styles.items()},
            **({"spec": chart.spec} if chart.spec else {}),
            **({"rows": {column: numbers(values, 5) for column, values in chart.rows.items()}} if chart.rows else {}),
            **(
                {
                    "lines": [line_of(*one) for one in zip(chart.lines, chart.coinciding, strict=True)],
                    "y": chart.y,
                    "percent": chart.percent,
                    "zero": chart.from_zero,
                    "log": chart.log,
                }
                if chart.lines
                else {}
            ),
        }
        for name, chart in charts.items()
    ]
    shared_spec = lines_spec() if any(chart.lines for chart in charts.values()) else {}
    return {"axes": AXES, "light": LIGHT, "labels": LABELS, "lines": shared_spec, "xs": xs, "charts": found}


def numbers(values: Sequence[Any] | np.ndarray, digits: int) -> list[object]:
    """Values for JSON: numbers with that many digits, null for those that are none; words as they are."""
    return [_number(value, digits) for value in (values.tolist() if isinstance(values, np.ndarray) else values)]


def _number(value: object, digits: int) -> object:
    if not isinstance(value, float):
        return value
    if not np.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.{digits}g}")

"""The colours of a page, light and dark: of its text, of its tables and, as Vega's configuration, of its charts."""

from collections.abc import Mapping

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

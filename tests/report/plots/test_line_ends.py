"""Where names beside lines' ends lie: apart, near their line, in its order, inside the plot."""

import re

import numpy as np
import pytest

from rayfl.report.plots.line_ends import apart
from rayfl.report.plots.lines import COLORS, Line, Strip, line_plot, strip_plot


@pytest.mark.parametrize(
    ("wanted", "places"),
    [
        ([10, 30, 60], [10, 30, 60]),
        # Two that meet share what is missing, in their order.
        ([50, 52], [46, 56]),
        ([52, 50], [56, 46]),
        # Three at one height lie around it.
        ([50, 50, 50], [40, 50, 60]),
        # A block that grows into its neighbour takes it in: 40, 44, 48, 60 less 0, 10, 20, 30 average 33.
        ([40, 44, 48, 60], [33, 43, 53, 63]),
        # Pushed in from both edges.
        ([-20, 0, 99, 120], [0, 10, 90, 100]),
    ],
)
def test_places_are_a_gap_apart_and_as_near_as_can_be(wanted, places):
    assert apart(np.array(wanted, dtype=float), 10, 0, 100).tolist() == pytest.approx(places)


def test_more_than_fit_lie_around_the_middle():
    assert apart(np.full(5, 3.0), 10, 0, 20).tolist() == [-10, 0, 10, 20, 30]


def test_names_do_not_overlap_and_stand_in_the_order_of_their_lines():
    # Fifteen lines that end within 1.4 points of accuracy; one that is no number has no name.
    x = np.arange(5.0)
    lines = [Line(f"run {n}", n, x, np.linspace(0, 0.9 + 0.001 * n, 5)) for n in range(15)]
    lines.append(Line("nothing", 15, x, np.full(5, np.nan)))
    svg = str(line_plot(lines, "Round", "Accuracy", named=True))
    assert "run 3" not in str(line_plot(lines, "Round", "Accuracy"))
    found = {label: float(y) for y, label in re.findall(r'<text [^>]*? y="([\d.-]+)"[^>]*>(run \d+)<', svg)}
    assert len(found) == 15 and ">nothing<" not in svg
    # svg counts downwards; letters of 10 points are 12 high. A last layout may take a little of what was left between.
    heights = [found[f"run {n}"] for n in range(15)]
    assert (np.diff(heights) <= -12).all()
    view = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert view is not None
    assert min(heights) > 0 and max(heights) < float(view[2])


def test_rows_of_more_strips_than_colours_are_named():
    strips = [Strip(f"run {n}", n, np.array([0.1, 0.2])) for n in range(len(COLORS) + 1)]
    assert "run 3" in str(strip_plot(strips, "Accuracy")) and "run 3" not in str(strip_plot(strips[:-1], "Accuracy"))

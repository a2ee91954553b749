"""Plots, read back from their svg: proportions, thinning, logarithmic axes, stacked parts."""

import re

import numpy as np
import pytest

from rayfl.report.plots.lines import COLORS, Line, line_plot, stacked_plot


def points(svg: str, color: str) -> np.ndarray:
    """The corners [num_points, 2] of the first line drawn in `color`, in the plot's own units."""
    path = next(
        path for path in re.findall(r"<path [^>]*>", svg) if f"stroke: {color.lower()}" in path and "fill: none" in path
    )
    found = re.search(r' d="([^"]*)"', path)
    assert found is not None
    return np.array(re.findall(r"(-?[\d.]+) (-?[\d.]+)", found[1]), dtype=float)


def test_lines_keep_their_proportions_and_stay_inside_the_plot():
    x, y = np.array([0.0, 10.0, 40.0]), np.array([0.0, 0.5, 0.25])
    svg = str(line_plot([Line("a", 0, x, y)], "Round", "Accuracy"))
    view = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert view is not None
    drawn = points(svg, COLORS[0])
    assert (drawn >= 0).all()
    assert (drawn <= [float(view[1]), float(view[2])]).all()
    # Affine in x and (downwards) in y, up to the rounding to a tenth of a unit.
    across, down = drawn[:, 0] - drawn[0, 0], drawn[0, 1] - drawn[:, 1]
    assert across[1] / across[2] == pytest.approx(10 / 40, abs=0.002)
    assert down[2] / down[1] == pytest.approx(0.25 / 0.5, abs=0.002)
    # The plot is used: the line spans at least two thirds of its width.
    assert across[2] > float(view[1]) * 2 / 3


def test_a_line_of_many_points_is_thinned_and_keeps_its_ends():
    x = np.arange(5001.0)
    # 400 points, and the two that matplotlib may add to close a stretch that it has simplified.
    svg = str(line_plot([Line("a", 0, x, np.where(x % 2, 1.0, 0.0))], "Round", "Value"))
    assert len(points(svg, COLORS[0])) <= 402
    assert ">5000</text>" in svg


@pytest.mark.parametrize(("longest", "logarithmic"), [(9.0, False), (10.0, True)])
def test_bytes_of_very_different_runs_are_drawn_on_a_logarithmic_axis(longest, logarithmic):
    lines = [Line(str(end), style, np.array([0.5, end]), np.zeros(2)) for style, end in enumerate((1.0, longest))]
    assert ("(logarithmic)" in line_plot(lines, "MB", "Accuracy")) == logarithmic
    assert "(logarithmic)" not in line_plot(lines, "Round", "Accuracy")


def test_stacked_parts_add_up():
    svg = str(stacked_plot(np.array([0, 1]), [(0, np.array([1, 3])), (1, np.array([3, 1]))], "Round", "Clients"))
    heights = []
    for color in COLORS[:2]:
        path = next(path for path in re.findall(r"<path [^>]*>", svg) if f"fill: {color.lower()}" in path)
        found = re.search(r' d="([^"]*)"', path)
        assert found is not None
        heights.append(np.array(re.findall(r"(-?[\d.]+) (-?[\d.]+)", found[1]), dtype=float)[:, 1])
    # The lower part's highest edge (3 of 4) lies above the upper part's lowest edge (1 of 4), and both end at 4.
    unit = (max(heights[0]) - min(heights[0])) / 3
    assert max(heights[1]) == pytest.approx(max(heights[0]) - unit, abs=0.2)
    assert min(heights[1]) == pytest.approx(max(heights[0]) - 4 * unit, abs=0.2)

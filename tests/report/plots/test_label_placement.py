"""Where labels of dots lie: beside their dot where there is room, else apart from all others and inside the plot."""

import numpy as np
import pytest

from rayfl.report.plots.label_placement import _cross, _holds, label_places, reach

FRAME = np.array([0.0, 0.0, 600.0, 400.0])


def around(dots: np.ndarray) -> np.ndarray:
    return np.concatenate([dots - 5, dots + 5], axis=1)


def placed(dots: np.ndarray, widths: list[float]) -> np.ndarray:
    """The labels' boxes [num_dots, 4]."""
    sizes = np.array([(width, 13.0) for width in widths])
    corners = label_places(dots, sizes, around(dots), FRAME)
    return np.concatenate([corners, corners + sizes], axis=1)


def test_a_lone_label_lies_right_of_its_dot_and_at_the_right_edge_left_of_it():
    dots = np.array([[100.0, 200.0], [590.0, 200.0]])
    assert placed(dots, [50, 60]).tolist() == [[107, 193.5, 157, 206.5], [523, 193.5, 583, 206.5]]


def test_labels_of_a_heap_lie_on_no_label_and_no_dot_and_inside():
    dots = np.random.default_rng(0).uniform([250, 150], [350, 250], (20, 2))
    boxes = placed(dots, [60.0] * 20)
    assert (boxes >= [0, 0, 0, 0]).all() and (boxes[:, 2] <= 600).all() and (boxes[:, 3] <= 400).all()
    for one, box in enumerate(boxes):
        for kind, others in (("label", np.delete(boxes, one, axis=0)), ("dot", around(dots))):
            meet = (box[:2] < others[:, 2:]) & (others[:, :2] < box[2:])
            assert not meet.all(axis=1).any(), (one, kind)


def test_two_dots_on_one_place_have_their_labels_beside_it():
    boxes = placed(np.array([[300.0, 200.0], [300.0, 200.0]]), [50, 50])
    assert (reach(np.array([300.0, 200.0]), boxes) <= 7).all()
    assert sorted(boxes[:, 0]) == [243, 307]


def test_the_same_dots_have_the_same_places():
    dots = np.random.default_rng(1).uniform([200, 100], [400, 300], (15, 2))
    assert (placed(dots, [70.0] * 15) == placed(dots, [70.0] * 15)).all()


@pytest.mark.parametrize(
    ("line", "held"),
    [
        ([[0, 5], [20, 5]], True),
        ([[0, 5], [9, 5]], False),
        ([[15, 0], [15, 20]], True),
        ([[0, 0], [30, 15]], True),
        # Passes the corner (20, 0) at (20, -1).
        ([[10, -11], [30, 9]], False),
        # Begins and ends inside.
        ([[12, 2], [14, 8]], True),
    ],
)
def test_a_line_meets_a_box_or_not(line, held):
    assert _holds(np.array([[10.0, 0.0, 20.0, 10.0]]), np.array([line], dtype=float)).tolist() == [[held]]


def test_lines_cross_or_not():
    lines = np.array([[[0.0, 0.0], [10.0, 10.0]]])
    others = np.array([[[0.0, 10.0], [10.0, 0.0]], [[6.0, 4.0], [20.0, 0.0]], [[0.0, 0.0], [5.0, 9.0]]])
    assert _cross(lines, others).tolist() == [[True, False, False]]

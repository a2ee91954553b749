"""Places for the labels of dots: beside the dot, or near it and joined to it by a thin line."""

from collections.abc import Sequence

import numpy as np

NEAR = 8.0
"""A label that lies further from its dot is joined to it by a line."""
_GAP = 7.0
_RINGS = 9
_LEVEL = 1e-6
_PASSES, _TRIES = 8, 12
_CROWD = 60.0
"""Dots nearer than this are neighbours."""
_ON_LABEL, _ON_DOT, _LINE_ON_LABEL, _LINES_CROSS, _LINE_ON_DOT = 1000.0, 1000.0, 1000.0, 100.0, 500.0
"""Costs of overlaps and crossings, in units of length."""


def label_places(dots: np.ndarray, sizes: np.ndarray, taken: np.ndarray, frame: np.ndarray) -> np.ndarray:
    """Left lower corners [num_dots, 2] of labels with `sizes` [num_dots, 2] of `dots` at [num_dots, 2].

    `taken` [num_taken, 4] are boxes (left, lower, right, upper), the first num_dots of them the dots themselves, and
    `frame` [4] is one that labels stay in. Every label in turn takes the place that costs least, several times.
    """
    options = [_options(dot, size, frame) for dot, size in zip(dots, sizes, strict=True)]
    lines = [_lines(dot, boxes) for dot, boxes in zip(dots, options, strict=True)]
    alone = [_alone(index, options[index], lines[index], taken) for index in range(len(dots))]
    # Labels with the most neighbours choose first, then random orders are tried: the cheapest result is taken.
    crowd = np.count_nonzero(np.linalg.norm(dots[:, None] - dots, axis=2) < _CROWD, axis=1)
    orders = [np.argsort(-crowd, kind="stable"), *np.random.default_rng(0).permuted(_indices(len(dots)), axis=1)]
    tries = [_place_in_turn([int(index) for index in order], alone, options, lines) for order in orders]
    best = min(tries, key=lambda tried: tried[0])[1]
    return np.array([options[index][best[index], :2] for index in range(len(dots))]).reshape(-1, 2)


def _indices(count: int) -> np.ndarray:
    return np.tile(np.arange(count), (_TRIES, 1))


def _place_in_turn(
    order: Sequence[int], alone: Sequence[np.ndarray], options: Sequence[np.ndarray], lines: Sequence[np.ndarray]
) -> tuple[float, dict[int, int]]:
    """Let labels choose in this order until none moves; their cost, and the option of each."""
    chosen: dict[int, int] = {}
    costs: dict[int, float] = {}
    for _ in range(_PASSES):
        before = dict(chosen)
        for index in order:
            others = [other for other in chosen if other != index]
            cost = alone[index] + _between(index, others, chosen, options, lines)
            chosen[index] = int(np.argmin(cost))
            costs[index] = float(cost[chosen[index]])
        if chosen == before:
            break
    return sum(costs.values()), chosen


def reach(dots: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Distances [num_boxes] from a dot (or a dot for each box) to boxes [num_boxes, 4]."""
    return np.hypot(*(dots - _nearest(dots, boxes)).T)


def _nearest(dots: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """The point of each box that is nearest to the dot."""
    return np.clip(dots, boxes[:, :2], boxes[:, 2:])


def _options(dot: np.ndarray, size: np.ndarray, frame: np.ndarray) -> np.ndarray:
    """Boxes [num_options, 4] inside the frame: right and left, above and below, and rings further out."""
    width, height = size
    lefts = (_GAP, -_GAP - width)
    corners = [(left, -height / 2) for left in lefts]
    for ring in range(1, _RINGS + 1):
        for lift in np.arange(-ring, ring + 1) * height:
            sides = [(ring - 1) * 2 * height + _GAP, -(ring - 1) * 2 * height - _GAP - width]
            corners += [(left, lift - height / 2) for left in sides]
        for shift in (-0.5, -0.25, -0.75, 0.0, -1.0):
            corners += [(shift * width, sign * (ring * height + 1) - height / 2) for sign in (1, -1)]
    low = dot + np.array(corners)
    boxes = np.concatenate([low, low + size], axis=1)
    inside = (boxes[:, :2] >= frame[:2]).all(axis=1) & (boxes[:, 2:] <= frame[2:]).all(axis=1)
    return boxes[inside] if inside.any() else boxes


def _lines(dot: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Both ends [num_options, 2, 2] of the line from the dot to each box; that of a near one stays in the dot."""
    ends = np.where((reach(dot, boxes) > NEAR)[:, None], _nearest(dot, boxes), dot)
    return np.stack([np.broadcast_to(dot, ends.shape), ends], axis=1)


def _alone(index: int, boxes: np.ndarray, lines: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """Costs [num_options] of a label's options before others are placed: distance, and dots in the way."""
    dot = lines[0, 0]
    others = np.delete(taken, index, axis=0)
    # The order of the options decides between equally near ones.
    cost = 2 * reach(dot, boxes) + 0.01 * np.arange(len(boxes))
    cost += _ON_DOT * np.count_nonzero(_overlap(boxes, taken), axis=1)
    # A dot on top of this one is in the way of every line.
    apart = others[~_holds(others, np.stack([dot, dot])[None])[0]]
    return cost + _LINE_ON_DOT * np.count_nonzero(_holds(apart, lines), axis=1)


def _between(
    index: int,
    others: Sequence[int],
    chosen: dict[int, int],
    options: Sequence[np.ndarray],
    lines: Sequence[np.ndarray],
) -> np.ndarray:
    """Costs [num_options] of a label's options due to the labels that are placed."""
    own, own_lines = options[index], lines[index]
    if not others:
        return np.zeros(len(own))
    boxes = np.array([options[other][chosen[other]] for other in others])
    others_lines = np.array([lines[other][chosen[other]] for other in others])
    cost = _ON_LABEL * np.count_nonzero(_overlap(own, boxes), axis=1)
    cost = cost + _LINE_ON_LABEL * np.count_nonzero(_holds(boxes, own_lines), axis=1)
    cost += _LINE_ON_LABEL * np.count_nonzero(_holds(own, others_lines), axis=0)
    return cost + _LINES_CROSS * np.count_nonzero(_cross(own_lines, others_lines), axis=1)


def _overlap(boxes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Boolean [num_boxes, num_others]."""
    one, other = boxes[:, None, :], others[None, :, :]
    return np.all((one[..., :2] < other[..., 2:]) & (other[..., :2] < one[..., 2:]), axis=-1)


def _holds(boxes: np.ndarray, lines: np.ndarray) -> np.ndarray:
    """Boolean [num_lines, num_boxes]: whether a part of the line lies inside the box."""
    begin, way = lines[:, None, 0], lines[:, None, 1] - lines[:, None, 0]
    # Shares of the way where the line meets the box's sides; a way that is level would divide by zero.
    way = np.where(np.abs(way) < _LEVEL, _LEVEL, way)
    low, high = (boxes[None, :, :2] - begin) / way, (boxes[None, :, 2:] - begin) / way
    enters, leaves = np.minimum(low, high).max(axis=-1), np.maximum(low, high).min(axis=-1)
    return np.maximum(enters, 0) < np.minimum(leaves, 1)


def _cross(lines: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Boolean [num_lines, num_others]: whether they cross."""
    a, b = lines[:, None, 0], lines[:, None, 1]
    c, d = others[None, :, 0], others[None, :, 1]
    apart = _side(a, b, c) * _side(a, b, d) < 0
    return apart & (_side(c, d, a) * _side(c, d, b) < 0)


def _side(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Positive where c lies left of the way from a to b."""
    return (b[..., 0] - a[..., 0]) * (c[..., 1] - a[..., 1]) - (b[..., 1] - a[..., 1]) * (c[..., 0] - a[..., 0])

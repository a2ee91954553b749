"""FedRolex against the equations in float64."""

import math
from typing import Any

import numpy as np
import pytest
from torch import nn

from rayfl.methods.capacity.fedrolex import FedRolex
from rayfl.rounds.check_setup import check_setup
from tests.bound_tasks import classification
from tests.methods.capacity.reference import FIRST, RATIOS, SECOND, Kept, assert_agrees, reference, setup


@pytest.mark.parametrize(
    "hyper",
    [
        {"lr": 0.3, "batch_size": 4, "epochs": 2},
        {"lr": 0.1, "batch_size": 3, "momentum": 0.5, "weight_decay": 0.01, "weighting": "samples", "advance": 3},
    ],
)
def test_fedrolex_is_that_of_the_paper(hyper: dict[str, Any]):
    made = setup("fedrolex", hyper)

    def kept(round: int, client: int) -> Kept:
        ratio, begin = RATIOS[client % 3], hyper.get("advance", 1) * round
        first, second = ((begin + np.arange(math.ceil(ratio * n))) % n for n in (FIRST, SECOND))
        return first, second

    assert_agrees(made, reference(made, kept))


def square(width: int, height: int) -> FedRolex:
    """Two hidden layers of these widths."""
    layers = nn.Linear(2, width), nn.ReLU(), nn.Linear(width, height), nn.ReLU(), nn.Linear(height, 2)
    return FedRolex(classification(lambda: nn.Sequential(*layers), (2,)))


@pytest.mark.parametrize(("round", "window"), [(0, [0, 1, 2, 3]), (1, [1, 2, 3, 4]), (6, [6, 7, 0, 1])])
def test_windows_move_forwards_and_wrap(round: int, window: list[int]):
    assert [units.tolist() for units in square(8, 8).window(0.5, round, 0)] == [window, window]


@pytest.mark.parametrize(
    ("width", "height", "ratio", "trained"),
    [(8, 8, 0.25, 24), (8, 8, 0.5, 56), (8, 8, 0.625, 64), (16, 8, 0.25, 80), (8, 7, 0.25, 56)],
)
def test_entries_in_no_window_are_counted(width: int, height: int, ratio: float, trained: int):
    never = square(width, height).never_trained(ratio, width * height, 0)
    assert never == ({"2.weight": width * height - trained} if trained < width * height else {})


def test_entries_that_nobody_will_train_are_named_before_the_run(caplog: pytest.LogCaptureFixture):
    made = setup("fedrolex", {"lr": 0.3}, ratios=[0.25])
    check_setup(made)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "3.weight" in message and "retention_ratio" in message
    caplog.clear()
    check_setup(setup("fedrolex", {"lr": 0.3}, ratios=[0.25, 1.0]))
    assert not caplog.records

"""Which axis of an array of images has the channels."""

import numpy as np
import pytest

from rayfl.data.datasets import Dataset
from rayfl.data.sources.arrays import Arrays
from tests.refusals import refused

LABELS = np.arange(20) % 2


def images(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (20, *shape), dtype=np.uint8)


def load(inputs: np.ndarray) -> Dataset:
    return Arrays(inputs, LABELS, inputs, LABELS).load()


@pytest.mark.parametrize(
    "shape", [(28, 28, 4), (32, 32, 13), (8, 8, 2), (64, 64, 63), (64, 48, 4), (5, 7, 1), (6, 6, 3), (64, 48, 13)]
)
def test_channels_in_the_last_axis_are_seen(shape: tuple[int, int, int]):
    found = load(given := images(shape))
    assert found.input_shape == (shape[2], *shape[:2]) and len(found.mean) == shape[2]
    np.testing.assert_array_equal(found.train.inputs, given.transpose(0, 3, 1, 2))


@pytest.mark.parametrize(
    "shape",
    [(1, 8, 8), (3, 8, 9), (4, 28, 28), (13, 32, 32), (13, 8, 8), (8, 8, 8), (2, 10, 12), (4, 20, 6)],
)
def test_channels_in_the_first_axis_stay(shape: tuple[int, int, int]):
    found = load(given := images(shape))
    assert found.input_shape == shape
    np.testing.assert_array_equal(found.train.inputs, given)


@pytest.mark.parametrize("shape", [(8, 8, 13), (16, 20, 12), (4, 28, 4), (10, 7, 5)])
def test_axes_that_could_be_either_are_refused(shape: tuple[int, int, int]):
    with refused(names=[f"{list(shape)}", "channels", "data.kind='vector'"]):
        load(images(shape))
    assert Arrays(images(shape), LABELS, kind="vector").load().input_shape == shape

"""A data set with a shift: the digits that come with rayfl, turned by a quarter. Another network knows them upright."""

from dataclasses import replace

import numpy as np

from rayfl.data.datasets import Dataset, Examples, Source
from rayfl.data.sources.idx import Digits


class Turned(Source):
    """Handwritten digits, 8x8, turned to the left."""

    def load(self) -> Dataset:
        """The examples of `digits`, in their order."""
        upright = Digits().load()
        return replace(upright, name="turned", train=turned(upright.train), test=turned(upright.test))


def turned(examples: Examples) -> Examples:
    """The same labels, with images [n, channels, height, width] turned by 90 degrees."""
    return replace(examples, inputs=np.rot90(examples.inputs, axes=(2, 3)).copy())

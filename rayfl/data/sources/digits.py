"""Digits: 1,797 scans of handwritten digits, 8x8 grey values from 0 to 16, shipped inside the package.

Source and licence: `optdigits/README.md` beside this file (Alpaydin and Kaynak 1998, UCI, CC BY 4.0).
"""

from pathlib import Path

import numpy as np

from rayfl.data.datasets import Dataset, Samples, Source
from rayfl.data.sources.idx import read_idx
from rayfl.determinism.seeding import generator

FOLDER = Path(__file__).parents[1] / "optdigits"
TEST_IMAGES_PER_CLASS = 36


class Digits(Source):
    """1,437 train and 360 test images [1, 8, 8] of 10 classes, always the same: 36 test images a class."""

    name = "digits"

    def load(self) -> Dataset:
        """The dataset; reading it takes a millisecond."""
        images = read_idx(FOLDER / "images-idx3-ubyte.gz")[:, None]
        labels = read_idx(FOLDER / "labels-idx1-ubyte.gz").astype(np.int64)
        order = generator(0, purpose="digits").permutation(len(labels))
        by_class = [order[labels[order] == label] for label in range(10)]
        test = np.sort(np.concatenate([indices[:TEST_IMAGES_PER_CLASS] for indices in by_class]))
        train = np.sort(np.concatenate([indices[TEST_IMAGES_PER_CLASS:] for indices in by_class]))
        grey = images[train] / 16.0
        return Dataset(
            name=self.name,
            train=Samples(images[train], labels[train]),
            test=Samples(images[test], labels[test]),
            num_classes=10,
            kind="image",
            mean=(float(grey.mean()),),
            std=(float(grey.std()),),
            white=16,
        )

"""EMNIST: handwritten digits and letters of NIST's Special Database 19 as 28x28 grey images.

Cohen, Afshar, Tapson, van Schaik: EMNIST, an extension of MNIST to handwritten letters (IJCNN 2017).
"""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from rayfl.data.datasets import Dataset, Samples, Source
from rayfl.data.sources.fetch import CACHE, Cache, Root, download
from rayfl.data.sources.idx import find_idx
from rayfl.data.sources.mnist import read_samples
from rayfl.data.sources.moments import moments
from rayfl.errors import RayflError
from rayfl.limits.regular_files import expanded

NUM_CLASSES = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}
FIRST_LABEL = {"letters": 1}
ADVICE = (
    "fetch https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip, unpack it and set data.root to the folder that holds "
    "emnist-*-idx3-ubyte.gz"
)


class EMNIST(Source):
    """EMNIST in one of its splits: handwritten digits and letters (Cohen and others, 2017).

    split: byclass (814,255 images, 62 classes), bymerge, balanced (131,600 images, 47 classes), letters (26),
    digits (10) or mnist, as in torchvision, whose class downloads the files to `cache` if no `root` is given.

    Images are transposed, as in the files and in torchvision. The labels of `letters` count from 0 here, not from 1.
    Mean and deviation are those of the train images. The source `femnist` also has the writer of each image.
    """

    name: ClassVar[str] = "emnist"
    split: Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"] = Field(
        default="balanced", description="which of EMNIST's splits"
    )
    root: Root = None
    cache: Cache = CACHE

    def load(self) -> Dataset:
        """Load the dataset. If files are missing and cannot be downloaded, RayflError says what to do."""
        if self.root is None:
            download(self.name, "EMNIST", self.cache, ADVICE, split=self.split)
        folder = self.root or self.cache / "EMNIST" / "raw"
        train, test = (self._samples(expanded(folder), split) for split in ("train", "test"))
        mean, std = moments(train.inputs)
        return Dataset(self.name, train, test, NUM_CLASSES[self.split], "image", mean, std)

    def _samples(self, folder: Path, split: str) -> Samples:
        images, labels = (f"emnist-{self.split}-{split}-{part}-ubyte" for part in ("images-idx3", "labels-idx1"))
        if not (find_idx(folder, images) and find_idx(folder, labels)):
            raise RayflError(f"emnist: {folder} lacks {images} or {labels} (or their .gz): {ADVICE}")
        samples = read_samples(folder, images, labels)
        return replace(samples, labels=samples.labels - FIRST_LABEL.get(self.split, 0))

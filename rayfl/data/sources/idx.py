"""Grey images in IDX files: MNIST and Fashion-MNIST, and the digits inside the package.

An IDX file has a magic number, big-endian sizes, then bytes; it may be gzipped. Source: the file format section of Yann
LeCun's MNIST page (http://yann.lecun.com/exdb/mnist/).
"""

import gzip
import math
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from rayfl.data.datasets import Dataset, Examples, Field, RayflError, Source
from rayfl.data.sources.fetch import Downloaded
from rayfl.determinism.seeding import generator
from rayfl.limits import memory
from rayfl.limits.regular_files import reading, require_regular

FOLDER = Path(__file__).parents[1] / "optdigits"
TEST_IMAGES_PER_CLASS = 36
FASHION_MNIST_OF_DEBIAN = Path("/usr/share/datasets/fashion-mnist")
MOST_DIMENSIONS = 8
_OF_BYTES = b"\0\0\x08"
"""The first bytes of a file whose values are unsigned bytes."""


class Digits(Source):
    """1,437 train and 360 test images [1, 8, 8] of 10 classes, always the same: 36 test images a class.

    Scans of handwritten digits with grey values from 0 to 16. Source and licence: `optdigits/README.md` in rayfl/data
    (Alpaydin and Kaynak 1998, UCI, CC BY 4.0).
    """

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
            train=Examples(images[train], labels[train]),
            test=Examples(images[test], labels[test]),
            num_classes=10,
            kind="image",
            mean=(float(grey.mean()),),
            std=(float(grey.std()),),
            white=16,
        )


class _FourFiles(Downloaded):
    """60,000 train and 10,000 test images of 10 classes in four IDX files."""

    padding: int = Field(default=0, ge=0, le=98, description="black pixels around an image; 2 makes it 32x32")

    mean: ClassVar[float]
    std: ClassVar[float]
    advice: ClassVar[str] = "put its four idx files into a folder and set data.root"

    def files(self) -> list[Path]:
        """The four files, downloaded if they are missing."""
        folder = self.fetch(self.advice, self.kind, "raw")
        parts = ("images-idx3-ubyte", "labels-idx1-ubyte")
        return [find_idx(folder, f"{prefix}-{part}", self.advice) for prefix in ("train", "t10k") for part in parts]

    def load(self) -> Dataset:
        """Load the dataset. If files are missing and cannot be downloaded, RayflError says what to do."""
        frame = ((0, 0), (0, 0), (self.padding, self.padding), (self.padding, self.padding))
        files = self.files()
        bare = read_examples(*files[:2]), read_examples(*files[2:])
        train, test = (replace(examples, inputs=np.pad(examples.inputs, frame)) for examples in bare)
        return Dataset(self.name, train, test, 10, "image", (self.mean,), (self.std,))


class MNIST(_FourFiles):
    """Handwritten digits (LeCun, Cortes, Burges 1998)."""

    name = "mnist"
    mean = 0.1307
    std = 0.3081
    kind = "MNIST"


class FashionMNIST(_FourFiles):
    """Pictures of clothes (Xiao, Rasul, Vollgraf 2017); read from Debian's dataset-fashion-mnist if installed."""

    name = "fashion-mnist"
    mean = 0.2860
    std = 0.3530
    kind = "FashionMNIST"
    advice = f"run `apt-get install dataset-fashion-mnist`, or {_FourFiles.advice}"

    def fetch(self, advice: str, *inside: str, **options: object) -> Path:
        """The folder of the files: that of Debian's package if no root is given and the package is installed."""
        installed = self.root is None and FASHION_MNIST_OF_DEBIAN.is_dir()
        return FASHION_MNIST_OF_DEBIAN if installed else super().fetch(advice, *inside, **options)


def read_examples(images_path: Path, labels_path: Path) -> Examples:
    """Images uint8 [n, 1, height, width] and their labels from two IDX files. Raise RayflError if one is wrong."""
    return Examples(read_idx(images_path)[:, None], read_idx(labels_path).astype(np.int64), place=str(labels_path))


def read_idx(path: Path) -> np.ndarray:
    """The uint8 array in `path`, read-only; a name that ends in .gz is unpacked. Raise RayflError if there is none.

    At most as many bytes are unpacked as the header announces.
    """
    with reading(path, "fetch it again or give another root", EOFError, zlib.error):
        require_regular(path)
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            magic = file.read(4)
            dimensions = magic[3] if magic[:3] == _OF_BYTES and len(magic) == 4 else 0
            header = file.read(4 * dimensions)
            if not 0 < dimensions <= MOST_DIMENSIONS or len(header) < 4 * dimensions:
                raise RayflError(
                    f"{path} is not an IDX file of bytes: it begins with {magic.hex(' ')!r}; fetch it again"
                )
            shape = struct.unpack(f">{dimensions}I", header)
            memory.require(math.prod(shape), str(path), "fetch it again")
            content = file.read(math.prod(shape) + 1)
    if len(content) != math.prod(shape):
        num_bytes = "more" if len(content) > math.prod(shape) else len(content)
        raise RayflError(
            f"{path} has {num_bytes} bytes of values where its header says {math.prod(shape)}: fetch it again"
        )
    return np.frombuffer(content, np.uint8).reshape(shape)


def find_idx(folder: Path, stem: str, advice: str) -> Path:
    """`folder/stem` or `folder/stem.gz`, whichever exists. If neither does, RayflError ends with `advice`."""
    for path in (folder / stem, folder / f"{stem}.gz"):
        if path.is_file():
            return path
    raise RayflError(f"{folder} has no {stem} or {stem}.gz: {advice}")

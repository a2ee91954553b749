"""The datasets of TensorFlow Federated: examples by owner (a writer, a client, a speaking role), in HDF5 files.

A file has a group `examples` with one group per client and one array per feature; h5py opens it, which is an optional
dependency: `pip install 'rayfl[tff]'`.

Decoding half a million small images takes minutes. So the decoded arrays are kept on disk as .npy files, which later
runs map into memory: only the first run of a sweep decodes them.
"""

import hashlib
import json
import math
import os
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from string import ascii_letters, digits
from typing import Any, ClassVar, NamedTuple

import numpy as np

from rayfl.data.datasets import Dataset, Examples, Field, RayflError
from rayfl.data.loading import first_row, whole_labels
from rayfl.data.sources.cifar import CIFAR100
from rayfl.data.sources.fetch import Fetched
from rayfl.data.sources.moments import moments
from rayfl.limits import memory
from rayfl.limits.regular_files import expanded, reading, require_regular

FORMAT = 2
"""A change of the decoding raises this number, so that arrays of older versions are not used."""
TrainAndTest = tuple[Examples, Examples]
"""Train and test examples."""
EMNIST_SIDE, EMNIST_CLASSES = 28, 62

LENGTH = 80
CHARACTERS = "".join(sorted(ascii_letters + digits + "\n\r !\"#$%&'()*,-./:;?@[]_"))
PAD = 0
UNKNOWN, BEGIN, END = (len(CHARACTERS) + offset for offset in (1, 2, 3))
NUM_TOKENS = len(CHARACTERS) + 4

_TOKEN_OF_CODE = np.full(129, UNKNOWN, np.int64)
_TOKEN_OF_CODE[np.frombuffer(CHARACTERS.encode("ascii"), np.uint8)] = np.arange(1, len(CHARACTERS) + 1)


class OwnerExamples(NamedTuple):
    """The examples of one owner in one split. inputs: [n, ...]; labels: int64 [n]."""

    owner: str
    inputs: np.ndarray
    labels: np.ndarray


class OwnerFiles(Fetched):
    """A dataset in the files STEM_train.h5 and STEM_test.h5 of TensorFlow Federated."""

    stem: ClassVar[str]

    def files(self) -> list[Path]:
        """The files of the train and the test split."""
        return [self.folder / f"{self.stem}_{split}.h5" for split in ("train", "test")]

    @abstractmethod
    def read(self, path: Path) -> Iterable[OwnerExamples]:
        """The examples of each owner in one file. Raise RayflError if they are wrong."""

    def splits(self) -> TrainAndTest:
        """Both splits. Raise RayflError if the files are not in the folder, or wrong."""
        files = self.files()
        if not all(path.exists() for path in files):
            raise self.missing(f"{self.folder} has no {files[0].name} and {files[1].name}")
        splits = cached_arrays(self.cache, self.name, files, lambda: joined(self.name, *map(self.read, files)))
        train, test = (replace(examples, place=str(self.folder)) for examples in splits)
        return train, test


def joined(dataset: str, train: Iterable[OwnerExamples], test: Iterable[OwnerExamples]) -> TrainAndTest:
    """Both splits; the group of an example is its owner's place among the sorted names of all owners of either split.

    Raise RayflError if a split has no owners.
    """
    splits = list(train), list(test)
    if not all(splits):
        raise RayflError(f"{dataset}: one of its files has no clients; fetch it again")
    owners = sorted({part.owner for parts in splits for part in parts})
    numbers = {owner: number for number, owner in enumerate(owners)}
    return _samples(splits[0], numbers), _samples(splits[1], numbers)


def _samples(parts: list[OwnerExamples], numbers: dict[str, int]) -> Examples:
    owners = [numbers[part.owner] for part in parts]
    return Examples(
        inputs=np.concatenate([part.inputs for part in parts]),
        labels=np.concatenate([part.labels for part in parts]),
        groups=np.repeat(np.array(owners, np.int64), [len(part.labels) for part in parts]),
    )


def cached_arrays(cache: Path, name: str, files: Sequence[Path], read: Callable[[], TrainAndTest]) -> TrainAndTest:
    """Return what `read` makes of `files`; the arrays are saved below `cache`/arrays and mapped from there.

    Saved arrays are used again if the order, paths, sizes, inodes and times of the files are the same. If `cache`
    cannot be written or is full, the examples stay in memory.
    """
    stamps = [(str(path.absolute()), path.stat()) for path in files]
    fingerprint = [(path, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for path, s in stamps]
    digest = hashlib.sha256(json.dumps([FORMAT, name, fingerprint]).encode()).hexdigest()[:16]
    folder = expanded(cache) / "arrays" / f"{name}-{digest}"
    if not folder.is_dir():
        splits = read()
        with suppress(OSError):
            _save(folder, splits)
        # Another run may have written the folder first.
        if not folder.is_dir():
            return splits
    return _load(folder, "train"), _load(folder, "test")


def _save(folder: Path, splits: TrainAndTest) -> None:
    """Write all arrays, then rename the folder, so that no process reads a partial one. Raise OSError if that fails."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, suffix=".partial") as home:
        partial = Path(home, folder.name)
        partial.mkdir()
        for split, examples in zip(("train", "test"), splits, strict=True):
            for part, values in (("inputs", examples.inputs), ("labels", examples.labels), ("groups", examples.groups)):
                if values is not None:
                    with open(partial / f"{split}-{part}.npy", "wb") as file:
                        np.save(file, values, allow_pickle=False)
                        file.flush()
                        os.fsync(file.fileno())
        partial.rename(folder)


def _load(folder: Path, split: str) -> Examples:
    paths = (folder / f"{split}-{part}.npy" for part in ("inputs", "labels", "groups"))
    # Plain arrays, since pickle cannot share the buffer of a memmap.
    inputs, labels, *groups = (np.asarray(np.load(path, mmap_mode="r")) for path in paths if path.exists())
    return Examples(inputs, labels, groups[0] if groups else None)


def read_tff(path: Path, *features: str) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Each client's name and its arrays of the given features, in the order of the names.

    Raise RayflError if h5py is not installed or the file is not one of TensorFlow Federated, and for what would make
    other files part of it: links, external storage and virtual datasets.
    """
    try:
        # Any: a package that need not be installed.
        h5py: Any = import_module("h5py")
    except ImportError:
        raise RayflError(f"{path} needs the package h5py: run `pip install 'rayfl[tff]'`") from None
    layout = ", ".join(f"examples/CLIENT/{feature}" for feature in features)
    with reading(path, f"fetch an HDF5 file with {layout}", KeyError, AttributeError, TypeError, RuntimeError):
        require_regular(path)
        with h5py.File(path, "r") as file:
            examples = _member(h5py, file, "examples", h5py.Group)
            for name in sorted(examples):
                group = _member(h5py, examples, name, h5py.Group)
                arrays = [_member(h5py, group, feature, h5py.Dataset) for feature in features]
                # An HDF5 dataset of one repeated value takes no space in its file, however large it is in memory.
                memory.require(sum(array.nbytes for array in arrays), f"client {name!r}", "fetch the file again")
                yield name, [np.asarray(array[()]) for array in arrays]


# Any: objects of h5py.
def _member(h5py: Any, group: Any, name: str, kind: Any) -> Any:
    """The group or dataset `name` in a group, if the file itself holds it. Raise ValueError if not."""
    what = f"its {group.name.rstrip('/')}/{name} is"
    # To follow a link to another file would open that file.
    if not isinstance(group.get(name, getlink=True), h5py.HardLink | None):
        raise ValueError(f"{what} a link, and links may lead to other files")
    member = group[name]
    if not isinstance(member, kind):
        raise ValueError(f"{what} a {type(member).__name__.lower()}, and must be a {kind.__name__.lower()}")
    if kind is h5py.Dataset and (member.is_virtual or member.external):
        raise ValueError(f"{what} kept in other files")
    return member


class FedCIFAR100(OwnerFiles):
    """CIFAR-100 by client: colour images [3, 32, 32] of 100 classes; partition `natural` has 500 clients of 100 images
    (Reddi et al., Adaptive Federated Optimization, ICLR 2021: a Pachinko allocation over the coarse labels).

    `root` holds TFF's fed_cifar100_train.h5 and fed_cifar100_test.h5, which need h5py. The test images belong to 100
    other clients, so no client has test data of its own: models are evaluated on all of them together.
    augment: train batches are cropped (padding 4) and flipped at random, from the client's generator.
    """

    augment: bool = Field(default=True, description="crop and flip train batches at random")

    name = "fed-cifar100"
    stem = "fed_cifar100"
    advice = "fetch https://storage.googleapis.com/tff-datasets-public/fed_cifar100.tar.bz2 and unpack it"

    def load(self) -> Dataset:
        """Load the dataset. If files are missing, RayflError says which to fetch and where to put them."""
        train, test = self.splits()
        return Dataset(self.name, train, test, CIFAR100.num_classes, "image", CIFAR100.mean, CIFAR100.std, self.augment)

    def read(self, path: Path) -> Iterator[OwnerExamples]:
        """Each client's images, uint8 [n, 3, 32, 32], and fine labels. Raise RayflError for other types or shapes."""
        for name, (images, labels) in read_tff(path, "image", "label"):
            classes = whole_labels(f"{path}: client {name!r}", "", labels, CIFAR100.num_classes)
            if images.dtype != np.uint8 or images.shape != (len(classes), 32, 32, 3):
                raise RayflError(
                    f"{path}: the images of client {name!r} are {images.dtype} of shape {list(images.shape)}, and not "
                    f"uint8 of shape [{len(classes)}, 32, 32, 3]: fetch it again"
                )
            # Clients of both files are numbered from 0, and are not the same.
            owner = f"test {name}" if path.stem.endswith("_test") else name
            yield OwnerExamples(owner, np.ascontiguousarray(images.transpose(0, 3, 1, 2)), classes)


class FederatedEMNIST(OwnerFiles):
    """Handwritten digits and letters by writer: images [1, 28, 28] of 62 classes; partition `natural` (TFF).

    Caldas et al., LEAF (2018); about 3,400 writers, 0.7 million images, 0.6 GB as bytes. `root` holds TFF's
    fed_emnist_train.h5 and fed_emnist_test.h5, which need h5py. Each writer's train and test images are those of the
    files. Grey values are rounded to 1/255; paper is white, 255, as in the files. Labels:
    digits 0 to 9, capitals 10 to 35, small letters 36 to 61.
    """

    name = "femnist"
    stem = "fed_emnist"
    advice = "fetch https://storage.googleapis.com/tff-datasets-public/fed_emnist.tar.bz2 and unpack it"

    def load(self) -> Dataset:
        """Load the dataset. If files are missing, RayflError says which to fetch and where to put them."""
        train, test = self.splits()
        mean, std = moments(train.inputs)
        return Dataset(self.name, train, test, EMNIST_CLASSES, "image", mean, std)

    def read(self, path: Path) -> Iterator[OwnerExamples]:
        """Each writer's images, from pixels [n, 28, 28] or [n, 784] from 0 to 1. Raise RayflError if they are not."""
        for writer, (pixels, labels) in read_tff(path, "pixels", "label"):
            origin = f"{path}: writer {writer!r}"
            shape = (len(labels), 1, EMNIST_SIDE, EMNIST_SIDE)
            classes = whole_labels(origin, "", labels, EMNIST_CLASSES)
            if pixels.size != math.prod(shape):
                raise RayflError(f"{origin} has images of shape {pixels.shape}, not [n, 28, 28]")
            if (row := first_row(pixels, lambda part: ~((part >= 0) & (part <= 1)))) is not None:
                raise RayflError(f"{origin} has grey values outside [0, 1] in row {row}, counted from 0; make it again")
            yield OwnerExamples(writer, np.rint(pixels * 255).astype(np.uint8).reshape(shape), classes)


class Shakespeare(OwnerFiles):
    """The next character after 80, by speaking role: tokens [80] of 90 kinds; partition `natural` (TFF).

    McMahan et al., AISTATS 2017, section 3; Caldas et al., LEAF (2018); Reddi et al., Adaptive Federated Optimization
    (ICLR 2021), whose 86 characters and 4 special tokens make the 90 tokens here.

    Token 0 is padding, 1 to 86 are the characters in ASCII's order, 87 any other, 88 and 89 the begin and the end of a
    snippet. `root` has TFF's shakespeare_train.h5 and shakespeare_test.h5, which need h5py. Every character of a
    snippet, and its end, is the label of one example, whose input is the 80 tokens before it, with padding before the
    snippet's begin. Each role's train and test examples are those of the files.

    An example takes 640 bytes; the examples are mapped from `cache` after the first load.
    """

    name = "shakespeare"
    stem = "shakespeare"
    advice = "fetch https://storage.googleapis.com/tff-datasets-public/shakespeare.tar.bz2 and unpack it"

    def load(self) -> Dataset:
        """Load the dataset. If files are missing, RayflError says which to fetch and where to put them."""
        train, test = self.splits()
        return Dataset(self.name, train, test, NUM_TOKENS, "text", vocabulary=NUM_TOKENS)

    def read(self, path: Path) -> Iterator[OwnerExamples]:
        for name, (snippets,) in read_tff(path, "snippets"):
            for snippet in snippets:
                text = snippet.decode("utf-8", errors="replace") if isinstance(snippet, bytes) else str(snippet)
                yield OwnerExamples(name, *windows(text))


def tokens(text: str) -> np.ndarray:
    """The tokens of a text, int64 [len(text)]; characters that are not among the 86 become `UNKNOWN`."""
    codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.dtype("<u4"))
    return _TOKEN_OF_CODE[np.minimum(codes, 128)]


def windows(snippet: str) -> tuple[np.ndarray, np.ndarray]:
    """Every next token of a snippet with the 80 before it: int64 [n, 80] and [n], n = len(snippet) + 1."""
    line = np.concatenate([np.full(LENGTH - 1, PAD), [BEGIN], tokens(snippet), [END]]).astype(np.int64)
    return np.lib.stride_tricks.sliding_window_view(line[:-1], LENGTH), line[LENGTH:]

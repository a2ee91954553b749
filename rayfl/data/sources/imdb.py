"""IMDB: film reviews and whether they praise the film.

Maas et al.: Learning Word Vectors for Sentiment Analysis (ACL 2011).

Reviews become token numbers by the same rules on every machine: reviews are split into words, the words of the train
split are numbered by frequency, and reviews are cut or padded to one length.
"""

from pathlib import Path

import numpy as np

from rayfl.data.datasets import Dataset, Examples
from rayfl.data.sources.fetch import Fetched
from rayfl.data.sources.words import Length, Vocabulary, encoded, numbered, words
from rayfl.limits import memory
from rayfl.limits.regular_files import read_text, reading

SENTIMENTS = ("neg", "pos")


class IMDB(Fetched):
    """25,000 train and 25,000 test film reviews, bad (0) or good (1), as tokens [length] (Maas and others, 2011).

    Tokens are runs of letters, digits and apostrophes, in lower case.
    vocabulary: the number of token numbers: 0 is padding, 1 any other word, and 2 onwards the most frequent words of
    the train split, equally frequent ones in alphabetical order. A model must embed this number of tokens.
    length: tokens of a review; longer reviews lose their end, shorter ones are padded with 0 at the end.
    """

    name = "imdb"
    vocabulary: Vocabulary = 10_000
    length: Length = 256
    advice = (
        "fetch https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz and unpack it; the folders train and "
        "test of aclImdb"
    )

    def files(self) -> list[Path]:
        """The folders of the labelled reviews."""
        return [self.folder / split / sentiment for split in ("train", "test") for sentiment in SENTIMENTS]

    def load(self) -> Dataset:
        """Load the dataset. If files are missing, RayflError says which to fetch and where to put them."""
        folder = self.folder
        (train, train_labels), (test, test_labels) = (self._reviews(folder / split) for split in ("train", "test"))
        numbers = numbered(train, self.vocabulary)
        return Dataset(
            name=self.name,
            train=Examples(encoded(train, numbers, self.length), train_labels, place=str(folder / "train")),
            test=Examples(encoded(test, numbers, self.length), test_labels, place=str(folder / "test")),
            num_classes=2,
            kind="text",
            vocabulary=self.vocabulary,
        )

    def _reviews(self, folder: Path) -> tuple[list[list[str]], np.ndarray]:
        """The words of all reviews, the bad ones first, in the order of their files' names, and the labels."""
        files: list[tuple[Path, int]] = []
        for label, sentiment in enumerate(SENTIMENTS):
            paths = sorted((folder / sentiment).glob("*.txt"))
            if not paths:
                raise self.missing(f"{folder / sentiment} has no *.txt")
            files += [(path, label) for path in paths]
        memory.require(8 * self.length * len(files), f"data.length={self.length} for {len(files)} reviews", "lower it")
        return [words(_text(path)) for path, _ in files], np.array([label for _, label in files], np.int64)


def _text(path: Path) -> str:
    with reading(path, "unpack aclImdb_v1.tar.gz again"):
        return read_text(path)

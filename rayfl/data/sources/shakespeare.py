"""Shakespeare: the lines of each speaking role of his plays; models learn to predict the next character.

McMahan et al., AISTATS 2017, section 3; Caldas et al., LEAF (2018); Reddi et al., Adaptive Federated Optimization (ICLR
2021), whose 86 characters and 4 special tokens make the 90 tokens here.
"""

from collections.abc import Iterator
from pathlib import Path
from string import ascii_letters, digits
from typing import ClassVar

import numpy as np

from rayfl.data.datasets import Dataset
from rayfl.data.sources.by_owner import OwnerSamples, read_leaf, read_splits, read_tff, split_files
from rayfl.data.sources.fetch import Fetched
from rayfl.errors import RayflError

LENGTH = 80
CHARACTERS = "".join(sorted(ascii_letters + digits + "\n\r !\"#$%&'()*,-./:;?@[]_"))
PAD = 0
UNKNOWN, BEGIN, END = (len(CHARACTERS) + offset for offset in (1, 2, 3))
NUM_TOKENS = len(CHARACTERS) + 4

_TOKEN_OF_CODE = np.full(129, UNKNOWN, np.int64)
_TOKEN_OF_CODE[np.frombuffer(CHARACTERS.encode("ascii"), np.uint8)] = np.arange(1, len(CHARACTERS) + 1)


class Shakespeare(Fetched):
    """The next character after 80, by speaking role: tokens [80] of 90 kinds; partition `natural` (LEAF, TFF).

    Token 0 is padding, 1 to 86 are the characters in ASCII's order, 87 any other, 88 and 89 the begin and the end of a
    snippet. `root` holds LEAF's train/*.json and test/*.json, whose samples are taken as they are, or TFF's
    shakespeare_train.h5 and shakespeare_test.h5 (which need h5py). There every character of a snippet and its end is a
    label once; its input is the 80 tokens before it, filled with padding before the snippet's begin.
    Each role's train and test samples are those of the files.

    A sample takes 640 bytes, so the 4.2 million of LEAF's full preprocessing take 2.7 GB, mapped from `cache` after the
    first load.
    """

    name: ClassVar[str] = "shakespeare"
    advice: ClassVar[str] = (
        "run LEAF's data/shakespeare/preprocess.sh -s niid -t sample (https://github.com/TalwalkarLab/leaf) and take "
        "its folders train and test, or fetch https://storage.googleapis.com/tff-datasets-public/shakespeare.tar.bz2 "
        "and unpack it"
    )

    def files(self) -> list[Path]:
        """The files of both splits."""
        return [path for paths in split_files(self, "shakespeare", leaf=True) for path in paths]

    def load(self) -> Dataset:
        """Load the dataset. If files are missing, RayflError says which to fetch and where to put them."""
        train, test = read_splits(self, "shakespeare", _tff, _leaf)
        return Dataset(self.name, train, test, NUM_TOKENS, "text", vocabulary=NUM_TOKENS)


def tokens(text: str) -> np.ndarray:
    """The tokens of a text, int64 [len(text)]; characters that are not among the 86 become `UNKNOWN`."""
    codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.dtype("<u4"))
    return _TOKEN_OF_CODE[np.minimum(codes, 128)]


def windows(snippet: str) -> tuple[np.ndarray, np.ndarray]:
    """Every next token of a snippet with the 80 before it: int64 [n, 80] and [n], n = len(snippet) + 1."""
    line = np.concatenate([np.full(LENGTH - 1, PAD), [BEGIN], tokens(snippet), [END]]).astype(np.int64)
    return np.lib.stride_tricks.sliding_window_view(line[:-1], LENGTH), line[LENGTH:]


def _leaf(path: Path) -> Iterator[OwnerSamples]:
    for name, x, y in read_leaf(path):
        sizes = ((x, LENGTH), (y, 1))
        if any(not isinstance(text, str) or len(text) != size for texts, size in sizes for text in texts):
            raise RayflError(f"{path}: role {name!r} has samples that are not {LENGTH} characters and the next")
        yield OwnerSamples(name, tokens("".join(x)).reshape(-1, LENGTH), tokens("".join(y)))


def _tff(path: Path) -> Iterator[OwnerSamples]:
    for name, (snippets,) in read_tff(path, "snippets"):
        for snippet in snippets:
            text = snippet.decode("utf-8", errors="replace") if isinstance(snippet, bytes) else str(snippet)
            yield OwnerSamples(name, *windows(text))

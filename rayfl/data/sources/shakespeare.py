"""Shakespeare: the lines of each speaking role of his plays; models learn to predict the next character.

McMahan et al., AISTATS 2017, section 3; Caldas et al., LEAF (2018); Reddi et al., Adaptive Federated Optimization (ICLR
2021), whose 86 characters and 4 special tokens make the 90 tokens here.
"""

from collections.abc import Iterator
from pathlib import Path
from string import ascii_letters, digits

import numpy as np

from rayfl.data.datasets import Dataset
from rayfl.data.sources.by_owner import OwnerFiles, OwnerSamples, read_tff

LENGTH = 80
CHARACTERS = "".join(sorted(ascii_letters + digits + "\n\r !\"#$%&'()*,-./:;?@[]_"))
PAD = 0
UNKNOWN, BEGIN, END = (len(CHARACTERS) + offset for offset in (1, 2, 3))
NUM_TOKENS = len(CHARACTERS) + 4

_TOKEN_OF_CODE = np.full(129, UNKNOWN, np.int64)
_TOKEN_OF_CODE[np.frombuffer(CHARACTERS.encode("ascii"), np.uint8)] = np.arange(1, len(CHARACTERS) + 1)


class Shakespeare(OwnerFiles):
    """The next character after 80, by speaking role: tokens [80] of 90 kinds; partition `natural` (TFF).

    Token 0 is padding, 1 to 86 are the characters in ASCII's order, 87 any other, 88 and 89 the begin and the end of a
    snippet. `root` holds TFF's shakespeare_train.h5 and shakespeare_test.h5, which need h5py. Every character of a
    snippet and its end is a label once. Its input is the 80 tokens before it, with padding before the snippet's
    begin. Each role's train and test samples are those of the files.

    A sample takes 640 bytes; the samples are mapped from `cache` after the first load.
    """

    name = "shakespeare"
    stem = "shakespeare"
    advice = "fetch https://storage.googleapis.com/tff-datasets-public/shakespeare.tar.bz2 and unpack it"

    def load(self) -> Dataset:
        """Load the dataset. If files are missing, RayflError says which to fetch and where to put them."""
        train, test = self.splits()
        return Dataset(self.name, train, test, NUM_TOKENS, "text", vocabulary=NUM_TOKENS)

    def read(self, path: Path) -> Iterator[OwnerSamples]:
        for name, (snippets,) in read_tff(path, "snippets"):
            for snippet in snippets:
                text = snippet.decode("utf-8", errors="replace") if isinstance(snippet, bytes) else str(snippet)
                yield OwnerSamples(name, *windows(text))


def tokens(text: str) -> np.ndarray:
    """The tokens of a text, int64 [len(text)]; characters that are not among the 86 become `UNKNOWN`."""
    codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.dtype("<u4"))
    return _TOKEN_OF_CODE[np.minimum(codes, 128)]


def windows(snippet: str) -> tuple[np.ndarray, np.ndarray]:
    """Every next token of a snippet with the 80 before it: int64 [n, 80] and [n], n = len(snippet) + 1."""
    line = np.concatenate([np.full(LENGTH - 1, PAD), [BEGIN], tokens(snippet), [END]]).astype(np.int64)
    return np.lib.stride_tricks.sliding_window_view(line[:-1], LENGTH), line[LENGTH:]

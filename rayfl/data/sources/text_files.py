"""A user's own texts as sequences of bytes, for models that predict the next one."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from rayfl.data.datasets import Dataset, Field, RayflError, Samples, Source
from rayfl.data.sources.conversion import PAD, dataset
from rayfl.limits import memory
from rayfl.limits.regular_files import expanded, read_bytes, reading

NUM_TOKENS = 257
"""Token 0 is padding, and token b + 1 the byte b."""


class TextFiles(Source):
    """A file of text, or a folder of .txt files with an owner each, as sequences of bytes for the task next-token.

    Token 0 is padding, b + 1 the byte b. A file is cut into sequences [length], which predict the token after each of
    theirs: after the last one, the first of the next sequence. So each byte of a file but the first is a target once.
    """

    name = "text"
    path: str = Field(min_length=1, examples=["my_texts"], description="a file, or a folder of .txt files")
    length: int = Field(default=64, ge=1, description="tokens of a sequence")
    test_share: float = Field(
        default=0.2, gt=0, lt=1, description="share of the sequences that is held out for the test"
    )

    def files(self) -> list[Path]:
        """The file, or the folder's .txt files in the order of their names."""
        path = expanded(self.path)
        return sorted(path.glob("*.txt")) if path.is_dir() else [path]

    def load(self) -> Dataset:
        """Load the dataset. Raise RayflError if there is no text, or too little of it."""
        texts = [sequences(self._read(file), self.length) for file in self.files()]
        if not texts:
            raise RayflError(f"{self.path} has no .txt files; give data.path a file, or a folder of them")
        inputs, labels = (np.concatenate(parts) for parts in zip(*texts, strict=True))
        owners = np.repeat(np.arange(len(texts)), [len(one) for one, _ in texts]) if len(texts) > 1 else None
        found = dataset(self.name, self.path, Samples(inputs, labels, owners), None, self.test_share, kind="text")
        return replace(found, num_classes=NUM_TOKENS, vocabulary=NUM_TOKENS)

    def _read(self, file: Path) -> bytes:
        with reading(file, "give data.path a file, or a folder of .txt files"):
            found = read_bytes(file)
        memory.require(32 * len(found), str(file), "give less data")
        if len(found) < 2:
            raise RayflError(f"{file} has {len(found)} bytes of text; give at least 2")
        return found


def sequences(text: bytes, length: int) -> tuple[np.ndarray, np.ndarray]:
    """A text's sequences and the token that follows each of their tokens, int64 [n, length] each; -1 after its end."""
    tokens = np.frombuffer(text, np.uint8).astype(np.int64) + 1
    padding = -(len(tokens) - 1) % length
    inputs, labels = (
        np.pad(part, (0, padding), constant_values=fill).reshape(-1, length)
        for part, fill in ((tokens[:-1], PAD), (tokens[1:], -1))
    )
    return inputs, labels

"""A user's own texts as sequences of bytes, for models that predict the next one."""

import gzip
import io
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from rayfl.data.datasets import Dataset, Examples, Field, RayflError, Source
from rayfl.data.sources.conversion import PAD, dataset
from rayfl.data.sources.splits import FileSplit, split_files
from rayfl.limits import memory
from rayfl.limits.regular_files import expanded, read_bytes, reading

NUM_TOKENS = 257
"""Token 0 is padding, and token b + 1 the byte b."""
_BYTES_A_TOKEN = 32
_PIECE = 1 << 20
_GZIP = b"\x1f\x8b"
_PACKED = {b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"7z\xbc\xaf": "7z"}
"""The first bytes of packed files that are not text."""


class TextFiles(Source):
    """A file of text, or a folder of .txt files with an owner each, as sequences of bytes for the task next-token.

    Token 0 is padding, b + 1 the byte b. A file is cut into sequences [length], which predict the token after each of
    theirs: after the last one, the first of the next sequence. So each byte of a file but the first is a target once.
    Files called train.txt and test.txt (or valid.txt, ...) are splits, and so are those of owners, ann_train.txt and
    ann_test.txt. Files that gzip has packed are unpacked.
    """

    name = "text"
    path: str = Field(min_length=1, examples=["my_texts"], description="a file, or a folder of .txt files")
    length: int = Field(default=64, ge=1, description="tokens of a sequence")
    test_share: float = Field(
        default=0.2, gt=0, lt=1, description="share of the sequences that is held out if there is no test split"
    )

    def files(self) -> list[Path]:
        """The file, or the folder's .txt files, and .txt.gz where they are packed, in the order of their names."""
        path = expanded(self.path)
        packed = [file for file in path.glob("*.txt.gz") if not file.with_suffix("").exists()]
        files = [file for file in (*path.glob("*.txt"), *packed) if not file.name.startswith(".")]
        return sorted(files) if path.is_dir() else [path]

    def load(self) -> Dataset:
        """Load the dataset. Raise RayflError if there is no text, or too little of it."""
        files = self.files()
        if not files:
            raise RayflError(f"{self.path} has no .txt files; give data.path a file, or a folder of them")
        splits = split_files(files) or {file.name: {"train": file} for file in files}
        train = self._samples(splits, "train")
        test = self._samples(splits, "test") if any("test" in paths for paths in splits.values()) else None
        names = [owner.removesuffix(".gz").removesuffix(".txt") for owner in splits]
        texts = dataset(self.name, self.path, train, test, self.test_share, kind="text", owner_names=names)
        return replace(texts, num_classes=NUM_TOKENS, vocabulary=NUM_TOKENS)

    def _samples(self, splits: Mapping[str, Mapping[FileSplit, Path]], split: FileSplit) -> Examples:
        """The sequences of all owners in one split; they have owners if there are several."""
        texts = {
            owner: sequences(self._read(paths[split]), self.length) for owner, paths in splits.items() if split in paths
        }
        inputs, labels = (np.concatenate(parts) for parts in zip(*texts.values(), strict=True))
        numbers = [owner for owner, name in enumerate(splits) if name in texts]
        owners = np.repeat(numbers, [len(rows) for rows, _ in texts.values()]) if len(splits) > 1 else None
        return Examples(inputs, labels, owners)

    def _read(self, file: Path) -> bytes:
        with reading(file, "give data.path a file, or a folder of .txt files", EOFError, zlib.error):
            content = read_bytes(file)
            for magic, what in _PACKED.items():
                if content.startswith(magic):
                    raise RayflError(f"{file} is packed ({what}); unpack it, or pack it with gzip")
            if content.startswith(_GZIP):
                content = _unpacked(file, content)
        memory.require(_BYTES_A_TOKEN * len(content), str(file), "give less data")
        if len(content) < 2:
            raise RayflError(f"{file} has {len(content)} bytes of text; give at least 2")
        return content


def _unpacked(file: Path, packed: bytes) -> bytes:
    """The content of a gzip file, piece by piece, so that a small one cannot fill the memory."""
    parts = list[bytes]()
    size = 0
    with gzip.open(io.BytesIO(packed)) as stream:
        while part := stream.read(_PIECE):
            parts.append(part)
            size += len(part)
            memory.require(_BYTES_A_TOKEN * size, f"{file}, unpacked,", "give less data")
    return b"".join(parts)


def sequences(text: bytes, length: int) -> tuple[np.ndarray, np.ndarray]:
    """A text's sequences and the token that follows each of their tokens, int64 [n, length] each; -1 after its end."""
    tokens = np.frombuffer(text, np.uint8).astype(np.int64) + 1
    padding = -(len(tokens) - 1) % length
    inputs, labels = (
        np.pad(part, (0, padding), constant_values=fill).reshape(-1, length)
        for part, fill in ((tokens[:-1], PAD), (tokens[1:], -1))
    )
    return inputs, labels

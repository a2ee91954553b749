"""LEAF's JSON files: examples by user, as its scripts and those of FedProx write them (Caldas et al., 2018)."""

from collections.abc import Mapping, Sequence
from math import isqrt
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from rayfl.data.datasets import Dataset, Examples, Field, Source
from rayfl.data.sources import tff
from rayfl.data.sources.client_files import owner_numbers
from rayfl.data.sources.conversion import InputKind, dataset, held_out
from rayfl.data.sources.csv_files import unpacked
from rayfl.data.sources.images import Channels, ImageSide, decoded
from rayfl.data.sources.table_files import ending, folder_splits, whole_json
from rayfl.data.sources.words import Length, Vocabulary, text_dataset
from rayfl.errors import RayflError
from rayfl.limits.regular_files import expanded, read_bytes, reading
from rayfl.settings import shown

_ADVICE = "give files of LEAF, tables with users and user_data, which has x and y of each user"


class LeafRows(NamedTuple):
    """The examples of one split, as JSON has them. users: the user of each."""

    # Any: what JSON holds.
    inputs: list[Any]
    labels: list[Any]
    users: list[str]


class Leaf(Source):
    """LEAF's data: PATH/train/*.json and PATH/test/*.json, or one file to train and test on; one owner a user.

    kind: "vector": x are numbers or lists of them (synthetic). "image": x are grey values from 0 to 1 of square images
    (FEMNIST), or names of files in `image_folder` (CelebA). "characters": x are texts and y the next character
    (Shakespeare), as the 90 tokens of the dataset `shakespeare`. "words": x are texts, or lists of which the entry
    `entry` is the text (Sent140: 4), as tokens of words like those of `imdb`.
    """

    name = "leaf"
    path: str = Field(min_length=1, examples=["leaf/data/femnist/data"], description="the folder of train and test")
    kind: Literal["auto", "vector", "image", "characters", "words"] = Field(
        default="auto", description="what x are; auto: found by the first x and y"
    )
    entry: int | None = Field(default=None, ge=0, description="the entry of x that is the text, counted from 0")
    image_folder: str | None = Field(default=None, description="the folder of the images that x names")
    side: ImageSide = None
    channels: Channels = 3
    vocabulary: Vocabulary = 10_000
    length: Length = 256
    test_share: float = Field(default=0.2, gt=0, lt=1, description="share that is held out if there is no test split")

    def load(self) -> Dataset:
        """Load the dataset. Raise RayflError if a file is none of LEAF's, or if its x have several types or shapes."""
        splits = self._splits()
        owners = owner_numbers({user for rows in splits for user in rows.users})
        kind = self._kind(splits[0])
        if kind == "characters":
            train, *test = (_characters(self.path, rows, owners) for rows in splits)
            train, test_rows = (train, test[0]) if test else held_out(self.path, train, self.test_share)
            return Dataset(self.name, train, test_rows, tff.NUM_TOKENS, "text", vocabulary=tff.NUM_TOKENS)
        train, *test = (self._examples(rows, kind, owners) for rows in splits)
        test_rows = test[0] if test else None
        if kind == "words":
            lengths = self.vocabulary, self.length
            return text_dataset(
                self.name, self.path, train, test_rows, self.test_share, *lengths, owner_names=[*owners]
            )
        as_kind: InputKind = "image" if kind == "image" else "vector"
        return dataset(self.name, self.path, train, test_rows, self.test_share, as_kind, owner_names=[*owners])

    def unused(self) -> Mapping[str, str]:
        without = {} if self.image_folder else dict.fromkeys(("side", "channels"), "without data.image_folder")
        is_text = self.kind in ("auto", "words")
        of_words = () if is_text and not self.image_folder else ("vocabulary", "length", "entry")
        return {**without, **dict.fromkeys(of_words, "as x are no words")}

    def _splits(self) -> list[LeafRows]:
        """Train, and test if there is one."""
        home = expanded(self.path)
        if not home.is_dir():
            return [_joined_users([home])]
        splits = folder_splits(home, lambda file: ending(file) == ".json")
        if not splits:
            raise RayflError(f"{self.path} has no .json files; {_ADVICE}")
        return [_joined_users([file for _, file in files]) for files in splits.values()]

    def _kind(self, rows: LeafRows) -> str:
        """What x are: the setting, or by the first of them."""
        if self.kind != "auto":
            return self.kind
        first, label = rows.inputs[0], rows.labels[0]
        if self.image_folder is not None:
            return "image"
        if self.entry is not None:
            return "words"
        if isinstance(first, str):
            return "characters" if isinstance(label, str) and len(label) == 1 else "words"
        return "vector"

    def _examples(self, rows: LeafRows, kind: str, owners: dict[str, int]) -> Examples:
        groups = np.array([owners[user] for user in rows.users])
        labels = _array(self.path, "y", rows.labels)
        if kind == "words":
            texts = np.empty((len(rows.inputs), 1), object)
            texts[:, 0] = [self._text(row) for row in rows.inputs]
            return Examples(texts, labels, groups)
        if self.image_folder is not None:
            paths = [Path(expanded(self.image_folder), str(name)) for name in rows.inputs]
            return Examples(decoded(paths, self.side, self.channels), labels, groups)
        inputs = _array(self.path, "x", rows.inputs)
        inputs = inputs[:, None] if inputs.ndim == 1 else inputs
        if inputs.dtype.kind not in "biuf":
            raise RayflError(f"{self.path} has x such as {shown(rows.inputs[0])}; set data.kind to what they are")
        return Examples(self._pixels(inputs) if kind == "image" else inputs.astype(np.float32), labels, groups)

    # Any: what JSON holds.
    def _text(self, value: Any) -> str:
        if self.entry is not None and isinstance(value, list) and self.entry < len(value):
            value = value[self.entry]
        if not isinstance(value, str):
            raise RayflError(
                f"{self.path} has {shown(value)} where x must be a text; set data.entry to that of the text"
            )
        return value

    def _pixels(self, inputs: np.ndarray) -> np.ndarray:
        """Grey values from 0 to 1, [n, pixels], as uint8 [n, 1, side, side]."""
        side = isqrt(inputs[0].size)
        if side**2 != inputs[0].size or not ((inputs >= 0) & (inputs <= 1)).all():
            raise RayflError(
                f"{self.path} has x of {inputs[0].size} numbers from {inputs.min():g} to {inputs.max():g}; images are "
                "squares of grey values from 0 to 1: set data.kind='vector'"
            )
        return np.rint(inputs * 255).astype(np.uint8).reshape(-1, 1, side, side)


def _joined_users(files: Sequence[Path]) -> LeafRows:
    """The examples of all files. Raise RayflError if one is none of LEAF's."""
    rows = LeafRows([], [], [])
    for file in files:
        with reading(file, _ADVICE):
            content = unpacked(file)
            document = whole_json(file, read_bytes(file) if content is None else content)
            if not isinstance(document, dict) or not isinstance(users := document.get("user_data"), dict):
                raise ValueError("it has no user_data")
            for user, data in users.items():
                if not isinstance(data, dict) or not all(isinstance(data.get(name), list) for name in "xy"):
                    raise ValueError(f"the user {shown(user)} has no lists x and y")
                if len(data["x"]) != len(data["y"]):
                    raise ValueError(f"the user {shown(user)} has {len(data['x'])} x and {len(data['y'])} y")
                rows.inputs.extend(data["x"])
                rows.labels.extend(data["y"])
                rows.users.extend([user] * len(data["y"]))
    if not rows.users:
        raise RayflError(f"{files[0]} has no examples; {_ADVICE}")
    return rows


def _characters(place: str, rows: LeafRows, owners: dict[str, int]) -> Examples:
    """Texts and the character that follows each, as tokens int64 [n, length] and [n]."""
    lengths = {len(text) if isinstance(text, str) else -1 for text in rows.inputs}
    if (
        len(lengths) != 1
        or -1 in lengths
        or not all(isinstance(label, str) and len(label) == 1 for label in rows.labels)
    ):
        raise RayflError(f"{place} must have texts of one length as x, and one character as each y; set data.kind")
    tokens = tff.tokens("".join(rows.inputs)).reshape(len(rows.inputs), -1)
    return Examples(tokens, tff.tokens("".join(rows.labels)), np.array([owners[user] for user in rows.users]), place)


# Any: what JSON holds.
def _array(place: str, name: str, values: list[Any]) -> np.ndarray:
    try:
        array = np.array(values)
    except ValueError:
        array = np.empty(0, object)
    if array.dtype == object:
        raise RayflError(f"{place} has {name} of several lengths or types; give all one shape")
    return array

"""Dataset: plain arrays that all clients share. Source: loads one.

Images stay uint8 until `Dataset.prepare` makes a batch of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field

from rayfl.choices.kinds import Choice
from rayfl.data.sources.several_inputs import InputLayout
from rayfl.errors import RayflError
from rayfl.limits.regular_files import expanded
from rayfl.settings import shown

PADDING = 4
"""Pixels of black on each side before the random crop of CIFAR-like augmentation."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples and their targets, in the order of the source.

    inputs: images uint8 [n, channels, height, width]; vectors float32 [n, dim]; tokens int64 or uint16 [n, length]. A
    source may give a tuple or a dictionary of arrays [n, ...], of which rows are made (`Dataset.layout`).
    labels: the targets: classes int64 [n]; numbers float32 [n, outputs] (regression); 0 or 1 int64 [n, labels] (several
    labels each); the next token of each token int64 [n, length], negative where there is none; or from a source a tuple
    or a dictionary of arrays, of which rows are made (`Dataset.targets`).
    groups: int64 [n], the natural client of each example (writer, speaker), if the source knows it.
    place: the file or folder of the examples, for error messages.
    """

    inputs: np.ndarray
    labels: np.ndarray
    groups: np.ndarray | None = None
    place: str = ""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Train and test examples, and how batches are made of them.

    num_classes: the number of classes; where targets are not classes, of the numbers, labels or tokens to predict.
    mean, std: one value per channel of images, on the [0, 1] scale. Of vectors one per input, by which the examples
    have been scaled already, and models scale raw inputs; empty if they were not scaled, and for other kinds.
    augment: crop with padding 4 and flip at random, drawn again for each batch (as for CIFAR).
    white: the grey value that counts as 1 (16 for `digits`, whose pixels are counts from 0 to 16).
    vocabulary: the number of different tokens, which are all below it; None if the source does not give it.
    columns: names of a table's columns by their use: "inputs", or why they are not inputs; {} for other data.
    classes: the user's names of classes, labels or numbers to predict, in their order; () if they have only numbers.
    input_names: the name of each input of a table or data frame, such as "age" or "ward=A"; () for other data.
    owners: the user's name, or number, of each group of examples, by the group's number; () without them.
    layout: where the inputs are in a row [dim], if examples have several; `kind` is then "vector". targets: where the
    targets are in a row of `labels`, float32 [n, numbers], if they have several of these.
    """

    name: str
    train: Examples
    test: Examples
    num_classes: int
    kind: str
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augment: bool = False
    white: int = 255
    vocabulary: int | None = None
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    classes: Sequence[str] = ()
    input_names: Sequence[str] = ()
    owners: Sequence[str] = ()
    layout: InputLayout | None = None
    targets: InputLayout | None = None

    def class_name(self, label: int) -> str:
        """The name of a class, or its number if it has no other."""
        return self.classes[label] if label < len(self.classes) else str(label)

    def in_words(self, most: int) -> list[str]:
        """A line on the shape of an input, and one for each use of a table's columns, with the names of at most `most`
        columns."""
        kind = "an image [channels, height, width]" if self.kind == "image" else f"a {self.kind} of shape"
        shape = f"an input is {kind} {list(self.input_shape)}"
        return [
            shape if self.layout is None else f"an example has the inputs {self.layout}",
            *(
                ("inputs: " if use == "inputs" else f"no inputs ({use}): ")
                + ", ".join(map(shown, names[:most]))
                + f" and {len(names) - most:,} more" * (len(names) > most)
                for use, names in self.columns.items()
            ),
        ]

    @property
    def has_classes(self) -> bool:
        """Whether each example has one class as its target."""
        return self.train.labels.ndim == 1

    @property
    def num_tokens(self) -> int:
        """Number of different tokens: the source's, or the largest token + 1."""
        if self.vocabulary is not None:
            return self.vocabulary
        occurring = [examples.inputs for examples in (self.train, self.test) if examples.inputs.size]
        return max((int(tokens.max()) + 1 for tokens in occurring), default=0)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example: (channels, height, width), (dim,) or (length,)."""
        return self.train.inputs.shape[1:]

    def prepare(self, inputs: np.ndarray) -> torch.Tensor:
        """The batch that a model sees, not augmented, as a tensor that owns its memory: float32, or int64 for tokens.

        `inputs` are rows of `train.inputs` or `test.inputs`.
        """
        return self.normalise(torch.tensor(inputs))

    def normalise(
        self, inputs: torch.Tensor, constants: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Raw inputs on any device as a new tensor: (inputs / white - mean) / std for images, only cast for others.

        constants: `channel_constants` of the inputs' device; without them they are copied to the device in each call.
        """
        if self.kind != "image":
            return inputs.to(torch.int64 if self.kind == "text" else torch.float32, copy=True)
        scale, shift = self._scale_and_shift
        pixels = inputs.to(torch.float32, copy=True)
        if len(scale) == 1:
            return pixels.mul_(scale[0]).add_(shift[0])
        scales, shifts = constants or self.channel_constants(pixels.device)
        return pixels.mul_(scales).add_(shifts)

    def channel_constants(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and shift per channel, float32 [channels, 1, 1] each: x * scale + shift."""
        scale, shift = (torch.tensor(numbers).view(-1, 1, 1).to(device) for numbers in self._scale_and_shift)
        return scale, shift

    @property
    def _scale_and_shift(self) -> tuple[list[float], list[float]]:
        scale = [1.0 / (self.white * std) for std in self.std]
        return scale, [-mean / std for mean, std in zip(self.mean, self.std, strict=True)]


class Source(Choice, ABC):
    """Base of the datasets that `[data]` names: its fields are the options, `load` reads the arrays."""

    label = "dataset"
    package = "rayfl.data.sources"

    digest: Mapping[str, str] | None = Field(
        default=None, description="digests of the files' content by name; default: those that the files have"
    )

    flipped_clients: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of the clients that train on wrong labels: class c becomes num_classes - 1 - c",
    )

    # Any: a table of an experiment.
    def to_table(self) -> dict[str, Any]:
        """The table that makes it again."""
        return {name: value for name, value in super().to_table().items() if name != "digest" or value is not None}

    def files(self) -> Sequence[Path]:
        """The files and folders that `load` reads, whose content belongs to a run's identity.

        By default those that settings called path, test_path, root and image_folder name.
        """
        named = [getattr(self, name, None) for name in ("path", "test_path", "root", "image_folder")]
        return [expanded(path) for path in named if isinstance(path, str | Path)]

    @abstractmethod
    def load(self) -> Dataset:
        """Load the dataset. Raise RayflError if its files are missing or cannot be fetched."""


def draw_crops(batch: int, generator: np.random.Generator) -> np.ndarray:
    """Random crops of a batch: int64 [3, batch]; top and left in the padded image, and 1 if it is mirrored."""
    top, left = generator.integers(0, 2 * PADDING + 1, size=(2, batch))
    return np.stack([top, left, (generator.random(batch) < 0.5).astype(np.int64)])


def cropped(images: torch.Tensor, crops: torch.Tensor) -> torch.Tensor:
    """Pad each image with 4 black pixels, crop it, and mirror it if its draw is 1.

    images: uint8 [batch, channels, height, width]; crops: `draw_crops` [3, batch], on the same device; returns a new
    tensor of the images' shape.
    """
    batch, channels, height, width = images.shape
    top, left, mirrored = crops.unsqueeze(-1)
    framed = torch.nn.functional.pad(images, (PADDING,) * 4)
    across = torch.arange(width, device=images.device)
    columns = left + torch.where(mirrored > 0, width - 1 - across, across)
    rows = top + torch.arange(height, device=images.device)
    positions = (rows[:, :, None] * framed.shape[-1] + columns[:, None, :]).view(batch, 1, height * width)
    flat = framed.view(batch, channels, -1).gather(2, positions.expand(batch, channels, height * width))
    return flat.view(batch, channels, height, width)


def __getattr__(name: str) -> object:
    if name == "Samples":
        raise RayflError("rayfl.data.datasets.Samples is called Examples now; rename it")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

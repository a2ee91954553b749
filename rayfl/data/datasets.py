"""A `Dataset` is plain arrays that all clients share; a `Source` loads one.

Nothing is converted when a dataset is loaded: images stay uint8 until `Dataset.prepare` makes a batch of them.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from rayfl.choices import Choice

PADDING = 4
"""Pixels of black on each side before the random crop of CIFAR-like augmentation."""


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples and their labels, in the order of the source.

    inputs: images uint8 [n, channels, height, width]; vectors float32 [n, dim]; tokens int64 or uint16 [n, length].
    labels: int64 [n], or float32 [n] for regression.
    groups: int64 [n], the natural client of each sample (writer, speaker), where the source knows one.
    place: the file or folder that they come from, for sentences.
    """

    inputs: np.ndarray
    labels: np.ndarray
    groups: np.ndarray | None = None
    place: str = ""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Train and test samples, and how they become a batch.

    mean, std: one value a channel of images, on the [0, 1] scale; empty for other kinds.
    augment: crop with padding 4 and flip, drawn for each batch anew (as for CIFAR).
    white: the grey value that counts as 1 (16 for `digits`, whose pixels are counts from 0 to 16).
    vocabulary: the number of kinds of tokens, which are all below it; None where the source does not give it.
    """

    name: str
    train: Samples
    test: Samples
    num_classes: int
    kind: str
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augment: bool = False
    white: int = 255
    vocabulary: int | None = None

    @property
    def num_tokens(self) -> int:
        """Kinds of tokens that a model must embed: as the source gives them, or as occur. ValueError below 0."""
        if self.vocabulary is not None:
            return self.vocabulary
        occurring = [samples.inputs for samples in (self.train, self.test) if samples.inputs.size]
        if any(int(tokens.min()) < 0 for tokens in occurring):
            raise ValueError(f"dataset {self.name!r} has tokens below 0; number them from 0, which is padding")
        return max((int(tokens.max()) + 1 for tokens in occurring), default=0)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample: (channels, height, width), (dim,) or (length,)."""
        return self.train.inputs.shape[1:]

    def prepare(self, inputs: np.ndarray, generator: np.random.Generator | None = None) -> Tensor:
        """The batch that a model sees, as a tensor that owns its memory: float32, or int64 for tokens.

        `inputs` are rows of `train.inputs` or `test.inputs`. They are augmented only if a `generator` is given and
        the dataset asks for it.
        """
        if self.augment and generator is not None:
            inputs = crop_and_flip(inputs, generator)
        return self.normalise(torch.tensor(inputs))

    def normalise(self, inputs: Tensor) -> Tensor:
        """Raw inputs on any device as a new tensor: (inputs / white - mean) / std for images, only typed for others."""
        if self.kind != "image":
            return inputs.to(torch.int64 if self.kind == "text" else torch.float32, copy=True)
        scale = [1.0 / (self.white * std) for std in self.std]
        shift = [-mean / std for mean, std in zip(self.mean, self.std, strict=True)]
        pixels = inputs.to(torch.float32, copy=True)
        if len(scale) == 1:
            return pixels.mul_(scale[0]).add_(shift[0])
        per_channel = (len(scale), 1, 1)
        pixels.mul_(torch.tensor(scale, device=pixels.device).view(per_channel))
        return pixels.add_(torch.tensor(shift, device=pixels.device).view(per_channel))


class Source(Choice, ABC):
    """Base of the datasets that `[data]` names: its fields are the options, `load` reads the arrays."""

    label: ClassVar[str] = "dataset"
    package: ClassVar[str] = "rayfl.data.sources"

    @abstractmethod
    def load(self) -> Dataset:
        """The dataset. SettingsError with one sentence where its files are missing or cannot be fetched."""


def crop_and_flip(images: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Frame each image with 4 black pixels, cut its size out at random, and mirror it with probability 1/2.

    images: uint8 [batch, channels, height, width]; returns a new array of the same shape.
    """
    batch, _, height, width = images.shape
    framed = np.pad(images, ((0, 0), (0, 0), (PADDING, PADDING), (PADDING, PADDING)))
    windows = np.lib.stride_tricks.sliding_window_view(framed, (height, width), axis=(2, 3))
    top, left = generator.integers(0, 2 * PADDING + 1, size=(2, batch))
    cropped = windows[np.arange(batch), :, top, left]
    mirrored = generator.random(batch) < 0.5
    cropped[mirrored] = cropped[mirrored][..., ::-1]
    return cropped

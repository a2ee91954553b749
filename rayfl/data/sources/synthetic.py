"""Synthetic(alpha, beta) of FedProx: a softmax model and a feature distribution for each client.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks (MLSys 2020), section 5.1
and appendix C.1. Deviations: the test share of a client is `test_ratio` of its examples, rounded, but at least one; and
with a `shape` the features are rounded to pixels before they are labelled, which makes data of any image's shape.
"""

import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np

from rayfl.data.datasets import Dataset, Examples, Field, Source
from rayfl.data.loading import MOST_CLASSES
from rayfl.determinism.seeding import generator
from rayfl.limits import memory
from rayfl.settings import unused_with

Side = Annotated[int, Field(ge=1)]
GREY, CONTRAST = 128, 32
"""The pixel value of a feature of 0, and the number of grey values per unit."""


class Synthetic(Source):
    """Vectors or images in natural groups, each with its own labelling model and its own features.

    Group k labels x by argmax(W_k x + b_k) with W_k, b_k ~ N(u_k, 1), u_k ~ N(0, alpha); its features are
    x ~ N(v_k, diag(j^-1.2)) with v_k ~ N(B_k, 1), B_k ~ N(0, beta). alpha and beta are variances. u_k is one number, as
    in the paper, and moves all logits of an example alike, so the labels depend on beta but not on alpha.

    samples_per_group: None is the paper's 50 + LogNormal(4, 2), which is very uneven.
    shape: [channels, height, width] for uint8 images instead of float32 vectors of length `dim`.
    augment: crop and flip image batches as for CIFAR.
    """

    name = "synthetic"
    alpha: float = Field(default=1.0, ge=0.0, le=1e12, description="variance of the means of the groups' models")
    beta: float = Field(default=1.0, ge=0.0, le=1e12, description="variance of the means of the groups' inputs")
    num_groups: int = Field(default=30, ge=1, description="natural clients")
    samples_per_group: int | None = Field(
        default=None, ge=2, description="samples of each group; default: 50 + LogNormal(4, 2), very uneven"
    )
    dim: int = Field(default=60, ge=1, description="numbers of an input")
    num_classes: int = Field(default=10, ge=2, le=MOST_CLASSES, description="classes")
    test_ratio: float = Field(default=0.1, gt=0.0, lt=1.0, description="share of each group that is for testing")
    shape: tuple[Side, Side, Side] | None = Field(
        default=None, description="channels, height, width, for images in place of vectors"
    )
    augment: bool = Field(
        default=False,
        description="crop and flip batches of images at random",
        json_schema_extra=unused_with(shape=[None]),
    )
    seed: int = Field(default=0, ge=0, description="seed of the data; the experiment's seed decides the rest")

    def load(self) -> Dataset:
        """Draw the dataset from `seed`; its groups are 0 to num_groups - 1."""
        self._require_memory()
        train, test = zip(*(self._group(group) for group in range(self.num_groups)), strict=True)
        channels = 0 if self.shape is None else self.shape[0]
        return Dataset(
            name=self.name,
            train=_joined(train),
            test=_joined(test),
            num_classes=self.num_classes,
            kind="vector" if self.shape is None else "image",
            mean=(GREY / 255,) * channels,
            std=(CONTRAST / 255,) * channels,
            augment=self.augment,
        )

    @property
    def _dim(self) -> int:
        """Numbers of one example."""
        return self.dim if self.shape is None else math.prod(self.shape)

    def _require_memory(self) -> None:
        """Raise RayflError if memory cannot hold the examples of all groups, at least 50 each, or the model of one
        group."""
        examples = self.num_groups * (50 if self.samples_per_group is None else self.samples_per_group)
        sizes = f"num_groups={self.num_groups}, samples_per_group={self.samples_per_group or 'drawn'}"
        sample = f"dim={self.dim}" if self.shape is None else f"shape={list(self.shape)}"
        sizes += f", {sample}, num_classes={self.num_classes}"
        bytes_a_sample = 4 * self._dim + 4 * self.num_classes // self.num_groups + 16
        memory.require(examples * bytes_a_sample, f"data with {sizes}", "lower them")
        memory.require(12 * self._dim * self.num_classes, f"data with {sizes}", "lower them")

    def _group(self, group: int) -> tuple[Examples, Examples]:
        """The train and the test examples of one group."""
        draw = generator(self.seed, client=group, purpose="synthetic")
        dim = self._dim
        size = self.samples_per_group
        if size is None:
            size = 50 + int(draw.lognormal(4.0, 2.0))
        model_mean = draw.normal(0.0, np.sqrt(self.alpha))
        data_mean = draw.normal(0.0, np.sqrt(self.beta))
        weights = draw.normal(model_mean, 1.0, (dim, self.num_classes)).astype(np.float32)
        bias = draw.normal(model_mean, 1.0, self.num_classes).astype(np.float32)
        centre = draw.normal(data_mean, 1.0, dim).astype(np.float32)
        spread = (np.arange(1, dim + 1) ** -0.6).astype(np.float32)
        inputs = centre + spread * draw.standard_normal((size, dim), dtype=np.float32)
        features = inputs
        if self.shape is not None:
            inputs = np.clip(np.rint(GREY + CONTRAST * inputs), 0, 255).astype(np.uint8)
            features = (inputs.astype(np.float32) - GREY) / CONTRAST
            inputs = inputs.reshape(size, *self.shape)
        labels = np.argmax(features @ weights + bias, axis=1).astype(np.int64)
        num_test = min(size - 1, max(1, round(self.test_ratio * size)))
        return Examples(inputs[num_test:], labels[num_test:]), Examples(inputs[:num_test], labels[:num_test])


def _joined(of_groups: Sequence[Examples]) -> Examples:
    return Examples(
        inputs=np.concatenate([examples.inputs for examples in of_groups]),
        labels=np.concatenate([examples.labels for examples in of_groups]),
        groups=np.repeat(np.arange(len(of_groups)), [len(examples) for examples in of_groups]),
    )

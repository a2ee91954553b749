"""Models by name. A model is a frozen `Architecture` whose `build` makes the module for a dataset's shape."""

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Annotated, ClassVar

from pydantic import Field
from torch import nn

from rayfl.settings import Settings

Width = Annotated[int, Field(ge=1)]
"""Number of units or channels of a layer."""


class Architecture(Settings):
    """A model with its options. Its parameters are counted in tests against ALGORITHMS' table of models."""

    name: ClassVar[str]

    @abstractmethod
    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """The network: inputs [batch, *input_shape], logits [batch, num_classes]; ValueError if they do not fit."""

    def builder(self, input_shape: tuple[int, ...], num_classes: int) -> Callable[[], nn.Module]:
        """`build` with its arguments bound, which pickles."""
        return partial(self.build, tuple(input_shape), num_classes)


class Logistic(Architecture):
    """Multinomial logistic regression on the flattened input: 7,850 parameters for 28x28 and 10 classes."""

    name: ClassVar[str] = "logistic"

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))


class MLP(Architecture):
    """Fully connected ReLU network on the flattened input."""

    name: ClassVar[str] = "mlp"
    hidden: tuple[Width, ...] = Field(default=(200,), description="widths of the hidden layers")

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        widths = [math.prod(input_shape), *self.hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for width, following in pairwise(widths):
            layers += [nn.Linear(width, following), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))


class ConvNet2(Architecture):
    """Two 5x5 convolutions with 2x2 max pooling, then fully connected layers.

    The defaults are the example network of Beutel et al. (Flower, 2020), which FedPSE uses: conv 6, pool, conv 16,
    pool, fc 120, fc 84; 44,426 parameters at 28x28x1 and 10 classes.
    """

    name: ClassVar[str] = "convnet2"
    channels: tuple[Width, Width] = Field(default=(6, 16), description="output channels of the two convolutions")
    hidden: tuple[Width, ...] = Field(default=(120, 84), description="widths of the fully connected layers")

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        if len(input_shape) != 3 or min(input_shape[1:]) < 16:
            raise ValueError(
                f"convnet2 needs images [channels, height, width] of at least 16x16, and the data's inputs are "
                f"{list(input_shape)}; choose model mlp or logistic"
            )
        first, second = self.channels
        height, width = (((side - 4) // 2 - 4) // 2 for side in input_shape[1:])
        layers: list[nn.Module] = [
            *(nn.Conv2d(input_shape[0], first, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        ]
        widths = [second * height * width, *self.hidden]
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))

"""Fully connected models on the flattened input."""

import math
from itertools import pairwise

from torch import nn

from rayfl.models.base import Architecture, Field, Width


class Logistic(Architecture):
    """Multinomial logistic regression on the flattened input: 7,850 parameters for 28x28 and 10 classes."""

    name = "logistic"

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))


class MLP(Architecture):
    """Fully connected ReLU network on the flattened input."""

    name = "mlp"
    hidden: tuple[Width, ...] = Field(default=(200,), description="widths of the hidden layers")

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        widths = [math.prod(input_shape), *self.hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for width, following in pairwise(widths):
            layers += [nn.Linear(width, following), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))

"""Small networks of the random experiments, with what rayfl's own small ones lack: running statistics and dropout."""

import math

from torch import Tensor, nn


class Normed(nn.Module):
    """A linear layer, BatchNorm and a linear layer."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), 8, bias=False))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs [batch, *input_shape] to logits [batch, num_classes]."""
        return self.head(self.norm(self.body(inputs)).relu())


class Dropping(nn.Module):
    """Two linear layers with dropout between them."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), 10), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(10, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs [batch, *input_shape] to logits [batch, num_classes]."""
        return self.head(self.body(inputs))

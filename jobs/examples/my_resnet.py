"""Your own model with BatchNorm: a small residual network."""

from torch import Tensor, nn


class Block(nn.Module):
    """Two 3x3 convolutions, each after a BatchNorm and ReLU, plus a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False)),
            *(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False)),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Images [batch, width, height, side] -> the same shape."""
        return images + self.layers(images)


class SmallResNet(nn.Module):
    """A stem, `depth` blocks of `width` channels, the mean over the pixels, and a head."""

    def __init__(self, input_shape: tuple[int, int, int], num_classes: int, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(input_shape[0], width, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images [batch, channels, height, width] -> logits [batch, num_classes]."""
        return self.head(self.norm(self.blocks(self.stem(images))).relu().mean((2, 3)))

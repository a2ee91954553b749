"""The ResNet-18 of Dis-PFL as tests need it: shapes of its tensors and the order of its layers (GroupNorm, 10 classes).

3x3 stem without pooling, stages of 64, 128, 256 and 512 channels, two blocks each, 1x1 projections where shapes change.
"""

from torch import Tensor, nn


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(32, after), nn.GroupNorm(32, after)])
        self.shortcut = nn.Sequential()
        if stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.GroupNorm(32, after))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norms[1](self.second(self.norms[0](self.first(x)).relu()))
        return (inner + self.shortcut(x)).relu()


class PaperResNet18(nn.Module):
    """11,173,962 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.GroupNorm(32, 64), nn.ReLU())
        plan = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)]
        self.blocks = nn.Sequential(*(Block(*sizes) for sizes in [*plan, (256, 512, 2), (512, 512, 1)]))
        self.head = nn.Linear(512, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))

"""Residual networks with GroupNorm or BatchNorm, of torchvision's blocks.

He et al., Deep Residual Learning for Image Recognition, CVPR 2016; Wu and He, Group Normalization, ECCV 2018.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from rayfl.data.torchvision import torchvision
from rayfl.models.base import Architecture
from rayfl.models.convolutional import start_convolution


class ResNet18(Architecture):
    """ResNet-18 for small images: torchvision's with a 3x3 stem of stride 1, no pooling behind it, and GroupNorm.

    11,173,962 parameters at 3 channels and 10 classes, 11,220,132 at 100, 11,271,432 at 200: Dis-PFL's.
    """

    name = "resnet18"
    groups: Literal[1, 2, 4, 8, 16, 32, 64] = Field(default=32, description="groups of every GroupNorm")

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        self.need_images(input_shape, least=8)
        return _resnet18(input_shape[0], num_classes, partial(nn.GroupNorm, self.groups))


class ResNet18BatchNorm(Architecture):
    """`resnet18` with BatchNorm; `parts.buffers` says how clients share its running statistics.

    The same number of parameters, and 9,600 running means and variances.
    """

    name = "resnet18-batchnorm"

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        self.need_images(input_shape, least=8)
        return _resnet18(input_shape[0], num_classes, nn.BatchNorm2d)


def _resnet18(channels: int, num_classes: int, norm: Callable[[int], nn.Module]) -> nn.Module:
    """ResNet-18 with a stem for small images."""
    resnet = torchvision().models.resnet
    network = resnet.ResNet(resnet.BasicBlock, [2, 2, 2, 2], num_classes=num_classes, norm_layer=norm)
    network.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    start_convolution(network.conv1)
    network.maxpool = nn.Identity()
    return network


class ResNet20(Architecture):
    """ResNet-20 for small images: three stages of three blocks, shortcuts without parameters (option A), GroupNorm.

    269,722 parameters at 3 channels and 10 classes. Elastic Aggregation trains it and does not name its norm.
    """

    name = "resnet20"
    memory_format = "channels_last"
    groups: Literal[1, 2, 4, 8, 16] = Field(default=8, description="groups of every GroupNorm")

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        self.need_images(input_shape, least=8)
        block = torchvision().models.resnet.BasicBlock
        norm = partial(nn.GroupNorm, self.groups)
        layers: list[nn.Module] = [nn.Conv2d(input_shape[0], 16, 3, padding=1, bias=False), norm(16), nn.ReLU()]
        before = 16
        for after in (16, 32, 64):
            for _ in range(3):
                shortcut = None if before == after else Subsampled(after - before)
                layers.append(block(before, after, 1 if before == after else 2, shortcut, norm_layer=norm))
                before = after
        network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, num_classes))
        return network.apply(start_convolution)


class Subsampled(nn.Module):
    """Option A: every second pixel in both directions, and `more` channels of zeros after the existing ones."""

    def __init__(self, more: int) -> None:
        super().__init__()
        self.more = more

    def forward(self, images: Tensor) -> Tensor:
        """[batch, channels, height, width] to [batch, channels + more, ceil(height / 2), ceil(width / 2)]."""
        return nn.functional.pad(images[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.more))

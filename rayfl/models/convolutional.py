"""Convolutional models: plain ones, and residual networks of torchvision's blocks.

He et al., Deep Residual Learning for Image Recognition, CVPR 2016; Wu and He, Group Normalization, ECCV 2018.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Literal

from torch import Tensor, nn

from rayfl.data.torchvision import torchvision
from rayfl.models.base import Architecture, Field, Rate, Width

VGG11_STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))
"""Channels of the convolutions before each pooling (Simonyan and Zisserman, ICLR 2015, column A)."""


class ConvNet2(Architecture):
    """Two 5x5 convolutions with 2x2 max pooling, then fully connected layers.

    The defaults are the example network of Beutel et al. (Flower, 2020), which FedPSE uses: conv 6, pool, conv 16,
    pool, fc 120, fc 84; 44,426 parameters at 28x28x1 and 10 classes.
    """

    name = "convnet2"
    memory_format = "channels_last"
    channels: tuple[Width, Width] = Field(default=(6, 16), description="output channels of the two convolutions")
    hidden: tuple[Width, ...] = Field(default=(120, 84), description="widths of the fully connected layers")

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        self.need_images(input_shape, least=16)
        first, second = self.channels
        height, width = (((side - 4) // 2 - 4) // 2 for side in input_shape[1:])
        layers: list[nn.Module] = [
            *(nn.Conv2d(input_shape[0], first, 5), *pooled_relu()),
            *(nn.Conv2d(first, second, 5), *pooled_relu(), nn.Flatten()),
        ]
        widths = [second * height * width, *self.hidden]
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))


class EMNISTCNN(Architecture):
    """Two 3x3 convolutions, pooling and two linear layers with dropout: 1,206,590 parameters at 28x28x1, 62 classes.

    The network of Reddi et al., Adaptive Federated Optimization, ICLR 2021, for EMNIST.
    """

    name = "emnist-cnn"
    memory_format = "channels_last"
    dropout: tuple[Rate, Rate] = Field(default=(0.25, 0.5), description="dropout after the pooling, and before the end")

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        self.need_images(input_shape, least=6)
        height, width = ((side - 4) // 2 for side in input_shape[1:])
        early, late = self.dropout
        return nn.Sequential(
            *(nn.Conv2d(input_shape[0], 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), *pooled_relu()),
            *(nn.Dropout(early), nn.Flatten(), nn.Linear(64 * height * width, 128), nn.ReLU()),
            *(nn.Dropout(late), nn.Linear(128, num_classes)),
        )


class VGG11(Architecture):
    """VGG-11 with GroupNorm after its 3x3 convolutions: 9,231,114 parameters at 3 channels and 10 classes.

    Dis-PFL's (Dai et al., ICML 2022): one linear layer after the last pooling, on the mean over the remaining pixels.
    """

    name = "vgg11"
    groups: Literal[1, 2, 4, 8, 16, 32, 64] = Field(default=32, description="groups of every GroupNorm")

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        self.need_images(input_shape, least=32)
        layers: list[nn.Module] = []
        before = input_shape[0]
        for stage in VGG11_STAGES:
            for after in stage:
                layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(self.groups, after), nn.ReLU()]
                before = after
            layers[-1:] = pooled_relu()
        started = nn.Sequential(*layers).apply(start_convolution)
        return nn.Sequential(*started, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, num_classes))


class AlexNetMCEPL(Architecture):
    """The small AlexNet of MCE-PL (Tian et al.): three 5x5 convolutions without bias, two linear layers.

    Every layer ends in ELU, the last one included, as in the authors' code (`elu_logits`); each convolution's is
    followed by local response normalisation over 4 channels and 3x3 max pooling of stride 2. At 3x32x32 and 10 classes
    1,227,328 weights, which the paper masks, and 202 biases, which it does not.
    """

    name = "alexnet-mcepl"
    elu_logits: bool = Field(default=True, description="ELU on the logits too, as in the authors' code")

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        self.need_images(input_shape, least=21)
        layers: list[nn.Module] = []
        channels, sides = input_shape[0], input_shape[1:]
        for after, alpha, padding in ((64, 2e-5, 0), (128, 1e-4, 0), (256, 1e-4, 1)):
            layers += [nn.Conv2d(channels, after, 5, padding=1, bias=False), nn.ELU()]
            layers += [LocalResponseNorm(4, alpha, beta=0.75), nn.MaxPool2d(3, stride=2, padding=padding)]
            sides = tuple((side - 2 + 2 * padding - 3) // 2 + 1 for side in sides)
            channels = after
        layers += [nn.Flatten(), nn.Linear(channels * sides[0] * sides[1], 192), nn.ELU()]
        layers.append(nn.Linear(192, num_classes))
        return nn.Sequential(*layers, *([nn.ELU()] if self.elu_logits else []))


class LocalResponseNorm(nn.Module):
    """x / (1 + alpha m)^beta, where m is the mean of x^2 over `size` channels, size / 2 of them before x's own.

    What `nn.LocalResponseNorm` computes, as a sum of slices: on a GPU torch's way leads through avg_pool3d, whose
    backward pass has no deterministic algorithm. Source: Krizhevsky, Sutskever, Hinton, NeurIPS 2012, section 3.3.
    """

    def __init__(self, size: int, alpha: float, beta: float) -> None:
        super().__init__()
        self.size = size
        self.alpha = alpha
        self.beta = beta

    def forward(self, images: Tensor) -> Tensor:
        """[batch, channels, height, width], and the same shape comes out."""
        around = (0, 0, 0, 0, self.size // 2, (self.size - 1) // 2)
        squares = nn.functional.pad(images * images, around)
        channels = images.shape[-3]
        total = squares.narrow(-3, 0, channels)
        for first in range(1, self.size):
            total = total + squares.narrow(-3, first, channels)
        return images / (total / self.size * self.alpha + 1).pow(self.beta)


def pooled_relu() -> tuple[nn.Module, nn.Module]:
    """ReLU and 2x2 max pooling, the pooling first: a maximum commutes with ReLU, so values and gradients are the same,
    and ReLU has a quarter of the work."""
    return nn.MaxPool2d(2), nn.ReLU()


def start_convolution(layer: nn.Module) -> None:
    """Give a convolution torchvision's initial values before a ReLU; other layers keep theirs.

    Weights are normal, so that gradients keep their scale; biases are 0.
    """
    if isinstance(layer, nn.Conv2d):
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


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

    def set_width(self, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
        """Take the numbers of channels of a narrow network (`rayfl.models.widths.narrow`)."""
        self.more = outputs[1] - inputs[1]

    def forward(self, images: Tensor) -> Tensor:
        """[batch, channels, height, width] to [batch, channels + more, ceil(height / 2), ceil(width / 2)]."""
        return nn.functional.pad(images[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.more))

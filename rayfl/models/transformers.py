"""Transformers for images: Dosovitskiy et al., An Image is Worth 16x16 Words, ICLR 2021.

Their layers are plain linear layers, so that `[adapters]` can name each of them: `blocks.0.attention.query`, `.key`,
`.value` and `.output`, `blocks.0.hidden` and `blocks.0.output`.
"""

import math

import torch
from torch import Tensor, nn

from rayfl.errors import RayflError
from rayfl.models.base import Architecture, Field, Width


class ViTTiny(Architecture):
    """A vision transformer with a class token and learned positions, and layer norms before attention and MLP.

    Width, depth and heads are those of DeiT-Ti (Touvron et al., Training Data-Efficient Image Transformers, ICML 2021),
    and patches are small, for small images: 5,362,762 parameters at 3x32x32 and 10 classes. There is no dropout.
    """

    name = "vit-tiny"
    patch: Width = Field(default=4, description="side of a patch in pixels; it divides the sides of the images")
    width: Width = Field(default=192, description="numbers per patch")
    depth: Width = Field(default=12, le=100, description="blocks")
    heads: Width = Field(default=3, description="heads of the attention; they divide the width")
    mlp_ratio: float = Field(default=4.0, gt=0, description="units of a block's hidden layer, as a multiple of width")

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        self.need_images(input_shape, least=1)
        if any(side % self.patch for side in input_shape[1:]):
            raise RayflError(
                f"model.patch={self.patch} does not divide the sides of the images, {list(input_shape[1:])}; give a "
                f"divisor of {math.gcd(*input_shape[1:])}"
            )
        if self.width % self.heads:
            raise RayflError(f"model.heads={self.heads} does not divide model.width={self.width}; change one of them")
        return VisionTransformer(input_shape, num_classes, self)


class VisionTransformer(nn.Module):
    """Patches, blocks, and a linear layer on the class token."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, options: ViTTiny) -> None:
        super().__init__()
        channels, height, width = input_shape
        num_patches = (height // options.patch) * (width // options.patch)
        self.patches = nn.Conv2d(channels, options.width, options.patch, stride=options.patch)
        self.class_token = nn.Parameter(torch.zeros(options.width))
        self.positions = nn.Parameter(torch.zeros(num_patches + 1, options.width))
        hidden = max(1, round(options.mlp_ratio * options.width))
        self.blocks = nn.Sequential(*(EncoderBlock(options.width, options.heads, hidden) for _ in range(options.depth)))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, num_classes)
        nn.init.normal_(self.class_token, std=0.02)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        """Images [batch, channels, height, width] to logits [batch, num_classes]."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(patches), 1, -1), patches], dim=1) + self.positions
        return self.head(self.norm(self.blocks(tokens)[:, 0]))


class EncoderBlock(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.norm_mlp = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, hidden)
        self.output = nn.Linear(hidden, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, tokens, width], and the same shape comes out."""
        tokens = tokens + self.attention(self.norm_attention(tokens))
        return tokens + self.output(nn.functional.gelu(self.hidden(self.norm_mlp(tokens))))


class SelfAttention(nn.Module):
    """Softmax attention of every token to all tokens.

    Written out, since the fused kernels of a GPU have backward passes without a deterministic algorithm.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, tokens, width], and the same shape comes out."""
        batch, length, _ = tokens.shape
        # A narrow network's heads need not be as wide together as its tokens.
        queries, keys, values = (
            layer(tokens).view(batch, length, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = queries @ keys.transpose(2, 3) / math.sqrt(queries.shape[-1])
        return self.output((scores.softmax(dim=-1) @ values).transpose(1, 2).reshape(batch, length, -1))

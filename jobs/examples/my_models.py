"""Your own model: any torch module that returns one number per class."""

from torch import Tensor, nn


class PatchMixer(nn.Module):
    """Cuts images into patches of `patch` x `patch` pixels, mixes over patches and over features, and averages."""

    def __init__(
        self, input_shape: tuple[int, int, int], num_classes: int, patch: int = 2, width: int = 16, depth: int = 2
    ) -> None:
        super().__init__()
        channels, height, side = input_shape
        num_patches = (height // patch) * (side // patch)
        self.embed = nn.Conv2d(channels, width, patch, stride=patch)
        self.mixers = nn.ModuleList(nn.Linear(num_patches, num_patches) for _ in range(depth))
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(depth))
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Images [batch, channels, height, width] -> logits [batch, num_classes]."""
        patches = self.embed(images).flatten(2)
        for mix, layer in zip(self.mixers, self.layers, strict=True):
            patches = patches + mix(patches).relu()
            patches = patches + layer(patches.transpose(1, 2)).transpose(1, 2).relu()
        return self.head(patches.mean(2))

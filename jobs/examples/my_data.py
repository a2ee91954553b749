"""Your own data: a source declares its options and loads arrays. Each example may name the client that owns it."""

import numpy as np

from rayfl.data.datasets import Dataset, Examples, Field, Source


class Rings(Source):
    """Points in the plane on two noisy rings, which are the classes; every owner has its own half of them."""

    num_owners: int = Field(default=10, ge=1, description="natural clients")
    per_owner: int = Field(default=60, ge=5, description="samples of each, a fifth of them for the test")
    noise: float = Field(default=0.1, ge=0, description="standard deviation of the radius")
    seed: int = Field(default=0, ge=0, description="seed of the points; the experiment's seed does not change them")

    def load(self) -> Dataset:
        """Two rings of radius 1 and 2, inputs [n, 2]."""
        generator = np.random.default_rng(self.seed)
        count = self.num_owners * self.per_owner
        owners = np.repeat(np.arange(self.num_owners), self.per_owner)
        labels = generator.integers(0, 2, count)
        radius = 1.0 + labels + self.noise * generator.standard_normal(count)
        angle = np.pi * generator.random(count) + 2 * np.pi * owners / self.num_owners
        inputs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).astype(np.float32)
        test = np.arange(count) % 5 == 0
        train, held_out = (Examples(inputs[rows], labels[rows], owners[rows]) for rows in (~test, test))
        return Dataset("rings", train, held_out, num_classes=2, kind="vector")

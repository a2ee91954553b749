"""A value for each client: one for all, a list in turn, or a distribution."""

from typing import Annotated, Self

import numpy as np
from pydantic import Field, model_validator

from rayfl.determinism import seeding
from rayfl.errors import RayflError
from rayfl.settings import Settings

Speed = Annotated[float, Field(ge=1e-9, le=1e12)]
"""A speed that the simulated clock takes."""
Share = Annotated[float, Field(gt=0, le=1)]


class LogNormal(Settings):
    """Values exp(N(log(median), sigma^2))."""

    median: Speed = Field(description="the median value")
    sigma: float = Field(gt=0, le=10, description="standard deviation of the value's logarithm")

    def draw(self, count: int, generator: np.random.Generator) -> np.ndarray:
        return self.median * np.exp(self.sigma * generator.standard_normal(count))


class UniformValues(Settings):
    """Values uniform in [low, high)."""

    low: Speed = Field(description="the least value")
    high: Speed = Field(description="the values are below it")

    @model_validator(mode="after")
    def _is_range(self) -> Self:
        if self.low >= self.high:
            raise RayflError(f"={self.low} is not below high={self.high}; give a lower one", ("low",))
        return self

    def draw(self, count: int, generator: np.random.Generator) -> np.ndarray:
        return generator.uniform(self.low, self.high, count)


class UniformShare(UniformValues):
    """Shares uniform in [low, high)."""

    low: Share = Field(description="the least share")
    high: Share = Field(description="the shares are below it")


Speeds = Speed | Annotated[tuple[Speed, ...], Field(min_length=1)] | LogNormal | UniformValues
"""One speed for all, a list whose values are taken in turn, or a distribution."""
Shares = Share | Annotated[tuple[Share, ...], Field(min_length=1)] | UniformShare
"""The same for shares in (0, 1], which a log-normal draw need not be."""


def values(trait: Speeds | Shares, count: int, seed: int, name: str) -> np.ndarray:
    """A trait's value for each client, float64 [count]; draws depend on the seed and the trait's name alone."""
    if isinstance(trait, LogNormal | UniformValues):
        return trait.draw(count, seeding.generator(seed, purpose=name))
    listed = np.atleast_1d(np.asarray(trait, dtype=np.float64))
    return listed[np.arange(count) % len(listed)]

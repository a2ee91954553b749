"""A value for each client: one for all, a list in turn, or a distribution."""

from typing import Any

import numpy as np
from pydantic import Field

from rayfl.determinism import seeding
from rayfl.errors import RayflError
from rayfl.settings import Settings

SPEEDS = (1e-9, 1e12)
"""The least and the largest speed that the simulated clock takes."""


class LogNormal(Settings):
    """Values exp(N(log(median), sigma^2))."""

    median: float = Field(gt=0, description="the median value")
    sigma: float = Field(gt=0, le=10, description="standard deviation of the value's logarithm")

    def draw(self, count: int, generator: np.random.Generator) -> np.ndarray:
        return self.median * np.exp(self.sigma * generator.standard_normal(count))


class Uniform(Settings):
    """Values uniform in [low, high)."""

    low: float = Field(gt=0, description="the least value")
    high: float = Field(gt=0, description="the values are below it")

    def draw(self, count: int, generator: np.random.Generator) -> np.ndarray:
        return generator.uniform(self.low, self.high, count)


Trait = float | tuple[float, ...] | LogNormal | Uniform
"""One value for all, a list whose values are taken in turn, or a distribution."""


def values(trait: Trait, count: int, seed: int, name: str) -> np.ndarray:
    """A trait's value for each client, float64 [count]; draws depend on the seed and the trait's name alone."""
    if isinstance(trait, LogNormal | Uniform):
        return trait.draw(count, seeding.generator(seed, purpose=name))
    given = np.atleast_1d(np.asarray(trait, dtype=np.float64))
    return given[np.arange(count) % len(given)]


# Any: a trait's type is what this function looks at.
def check_trait(name: str, trait: Any, share: bool = False) -> None:
    """Raise RayflError for a share that is not in (0, 1], or a speed that is not in SPEEDS."""
    key = tuple(name.split("."))
    allowed, (least, most) = (
        ("(0, 1]", (np.nextafter(0, 1), 1.0)) if share else ("[{:g}, {:g}]".format(*SPEEDS), SPEEDS)
    )
    if isinstance(trait, Uniform) and not least <= trait.low < trait.high <= most:
        raise RayflError(f" has low={trait.low} and high={trait.high}; low must be below high, both in {allowed}", key)
    if isinstance(trait, LogNormal) and share:
        raise RayflError(f" must be in {allowed}, which a log-normal draw need not be; give low and high instead", key)
    if isinstance(trait, LogNormal) and not least <= trait.median <= most:
        raise RayflError(f" has median={trait.median}; it must be in {allowed}", key)
    if isinstance(trait, float | tuple):
        given = (trait,) if isinstance(trait, float) else trait
        if not given:
            raise RayflError("=[] has no values; give at least one", key)
        wrong = [value for value in given if not least <= value <= most]
        if wrong:
            raise RayflError(f"={wrong[0]} is not allowed; it must be in {allowed}", key)

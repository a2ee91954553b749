"""A value for each client: one for all, a list in turn, a distribution, or groups."""

from typing import Any, Literal

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


class Groups(Settings):
    """One value per group of clients. A group is every g-th client or neighbouring ids; sizes differ by at most 1."""

    groups: tuple[float, ...] = Field(min_length=1, description="one value a group")
    order: Literal["in-turn", "blocks"] = Field(
        default="in-turn", description="in-turn: every g-th client; blocks: neighbouring ids"
    )

    def draw(self, count: int, generator: np.random.Generator) -> np.ndarray:
        clients, number = np.arange(count), len(self.groups)
        members = clients % number if self.order == "in-turn" else clients * number // count
        return np.asarray(self.groups, dtype=np.float64)[members]


Trait = float | tuple[float, ...] | LogNormal | Uniform | Groups
"""One value for all, a list whose values are taken in turn, a distribution, or groups."""


def values(trait: Trait, count: int, seed: int, name: str) -> np.ndarray:
    """A trait's value for each client, float64 [count]; draws depend on the seed and the trait's name alone."""
    if isinstance(trait, LogNormal | Uniform | Groups):
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
    if isinstance(trait, float | tuple | Groups):
        given = (trait,) if isinstance(trait, float) else trait.groups if isinstance(trait, Groups) else trait
        if not given:
            raise RayflError("=[] has no values; give at least one", key)
        wrong = [value for value in given if not least <= value <= most]
        if wrong:
            raise RayflError(f"={wrong[0]} is not allowed; it must be in {allowed}", key)

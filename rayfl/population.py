"""Who exists and who shows up: the clients' traits, and for every round who is selected and who drops out.

All of it is drawn from the experiment's seed. A simulated dropout is science: it changes the result and is recorded.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from rayfl import seeding
from rayfl.methods.base import Traits
from rayfl.settings import Settings

Status = Literal["delivered", "silent", "dropped_before_download", "dropped_after_training"]

TRAITS = ("retention_ratio", "examples_per_s", "uplink_mbps", "downlink_mbps")


class LogNormal(Settings):
    """Values exp(N(log(median), sigma^2))."""

    median: float = Field(gt=0)
    sigma: float = Field(gt=0)

    def draw(self, count: int, generator: np.random.Generator) -> np.ndarray:
        return self.median * np.exp(self.sigma * generator.standard_normal(count))


class Uniform(Settings):
    """Values uniform in [low, high)."""

    low: float = Field(gt=0)
    high: float = Field(gt=0)

    def draw(self, count: int, generator: np.random.Generator) -> np.ndarray:
        return generator.uniform(self.low, self.high, count)


class Groups(Settings):
    """One value a group of clients: groups of every g-th client, or of neighbouring ids, as even as can be."""

    groups: tuple[float, ...] = Field(min_length=1)
    order: Literal["in-turn", "blocks"] = "in-turn"

    def draw(self, count: int, generator: np.random.Generator) -> np.ndarray:
        clients, number = np.arange(count), len(self.groups)
        members = clients % number if self.order == "in-turn" else clients * number // count
        return np.asarray(self.groups, dtype=np.float64)[members]


Trait = float | tuple[float, ...] | LogNormal | Uniform | Groups
"""One value for all, a list that is dealt out in turn, a distribution, or groups."""


class Clients(Settings):
    """The `[clients]` table of an experiment."""

    count: int = Field(ge=1, description="number of clients, N")
    per_round: int | None = Field(default=None, ge=1, description="clients selected each round, m")
    fraction: float | None = Field(default=None, gt=0, le=1, description="share of the clients selected each round")
    dropout_before_download: float = Field(default=0.0, ge=0, lt=1, description="chance to vanish before the download")
    dropout_after_training: float = Field(
        default=0.0, ge=0, lt=1, description="chance to vanish with the trained update"
    )
    retention_ratio: Trait | None = Field(
        default=None, description="share of the model that a client can keep, r_i; default: what the method says, or 1"
    )
    examples_per_s: Trait = Field(default=1000.0, description="training speed, examples a second")
    uplink_mbps: Trait = Field(default=10.0, description="megabits (1e6) a second from the client")
    downlink_mbps: Trait = Field(default=50.0, description="megabits (1e6) a second to the client")

    @model_validator(mode="after")
    def _participants_exist(self) -> "Clients":
        if self.per_round is not None and self.fraction is not None:
            raise ValueError(f"per_round={self.per_round} and fraction={self.fraction} are both given; give one")
        if self.per_round is not None and self.per_round > self.count:
            raise ValueError(
                f"per_round={self.per_round} is more than the {self.count} clients there are; "
                "lower per_round or raise count"
            )
        for name in TRAITS:
            _check_trait(name, getattr(self, name), at_most=1.0 if name == "retention_ratio" else np.inf)
        return self

    @property
    def num_selected(self) -> int:
        """Clients selected each round."""
        if self.per_round is not None:
            return self.per_round
        return max(1, math.floor((self.fraction or 1.0) * self.count + 0.5))


@dataclass(frozen=True)
class Participation:
    """The clients selected in a round, ascending, and what becomes of each."""

    selected: tuple[int, ...]
    status: Mapping[int, Status]

    def among(self, *statuses: Status) -> tuple[int, ...]:
        """The selected clients with one of these statuses."""
        return tuple(client for client in self.selected if self.status[client] in statuses)


@dataclass(frozen=True)
class Population:
    """All clients of an experiment."""

    settings: Clients
    seed: int
    num_examples: np.ndarray
    """Train examples of each client, int64 [num_clients]."""

    def __len__(self) -> int:
        return self.settings.count

    def traits(self, client: int) -> Traits:
        """What is fixed about a client."""
        drawn = self._drawn
        return Traits(
            id=client,
            num_examples=int(self.num_examples[client]),
            retention_ratio=float(drawn["retention_ratio"][client]),
            examples_per_s=float(drawn["examples_per_s"][client]),
            uplink_bps=float(drawn["uplink_mbps"][client]) * 1e6,
            downlink_bps=float(drawn["downlink_mbps"][client]) * 1e6,
            retention_given=self.settings.retention_ratio is not None,
        )

    def draw(self, round: int, everyone: bool = False) -> Participation:
        """Who is selected in a round (uniformly, without replacement, afresh each round) and who drops out."""
        count, wanted = self.settings.count, self.settings.num_selected
        if everyone or wanted == count:
            selected = np.arange(count)
        else:
            generator = seeding.generator(self.seed, round, purpose="participants")
            selected = np.sort(generator.choice(count, wanted, replace=False))
        chances = seeding.generator(self.seed, round, purpose="dropout").random((count, 2))[selected]
        before = chances[:, 0] < self.settings.dropout_before_download
        after = chances[:, 1] < self.settings.dropout_after_training
        names = np.where(before, "dropped_before_download", np.where(after, "dropped_after_training", "delivered"))
        clients = tuple(selected.tolist())
        return Participation(clients, dict(zip(clients, names.tolist(), strict=True)))

    @cached_property
    def _drawn(self) -> dict[str, np.ndarray]:
        return {name: self._values(name) for name in TRAITS}

    def _values(self, name: str) -> np.ndarray:
        trait, count = getattr(self.settings, name), self.settings.count
        if isinstance(trait, LogNormal | Uniform | Groups):
            return trait.draw(count, seeding.generator(self.seed, purpose=name))
        return np.resize(np.asarray(1.0 if trait is None else trait, dtype=np.float64), count)


# Any: a trait's type is what this function looks at.
def _check_trait(name: str, trait: Any, at_most: float) -> None:
    """ValueError for values outside (0, at_most]."""
    allowed = f"in (0, {at_most:g}]" if at_most < np.inf else "greater than 0"
    if isinstance(trait, Uniform) and not trait.low < trait.high <= at_most:
        raise ValueError(f"{name} has low={trait.low} and high={trait.high}; low must be below high, both {allowed}")
    if isinstance(trait, LogNormal) and at_most < np.inf:
        raise ValueError(f"{name} must be {allowed}, which a log-normal draw need not be; give low and high instead")
    if isinstance(trait, float | tuple | Groups):
        values = (trait,) if isinstance(trait, float) else trait.groups if isinstance(trait, Groups) else trait
        if not values:
            raise ValueError(f"{name}=[] has no values; give at least one")
        wrong = [value for value in values if not 0 < value <= at_most]
        if wrong:
            raise ValueError(f"{name}={wrong[0]} is not allowed; it must be {allowed}")

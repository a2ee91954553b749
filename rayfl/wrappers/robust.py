"""Robust means: replace the mean of clients' messages by a value that a few false messages cannot move far.

All messages of a round are kept, and read slice by slice on the workers: once by rules that treat every entry by
itself, twice by rules that use distances, which are computed from the inner products of all pairs of messages.
"""

import numpy as np
import torch

from rayfl.gather import CENTER, RobustMean
from rayfl.limits.memory import in_words
from rayfl.methods.base import (
    Capabilities,
    Context,
    Delivered,
    Field,
    Method,
    Metrics,
    RayflError,
    Received,
    ServerHalf,
    State,
    WeightedMean,
)
from rayfl.methods.shared.wrapper import Wrapping
from rayfl.rounds.setup import Setup
from rayfl.tree import num_bytes
from rayfl.wrappers.base import KEY, Wrapper, require_uniform_weights


class Robust(Wrapping):
    """A method whose means are computed by a robust rule."""

    capabilities = Capabilities(on_device=True, keeps_parts=True, sees_all=True)
    own_names = frozenset((CENTER,))

    def __init__(self, inner: Method, rule: "RobustWrapper") -> None:
        super().__init__(inner)
        self.gather = dict.fromkeys(inner.gather, rule)
        self.keeps_center = rule.keeps_center

    def server_update(
        self, server: State, received: Received, delivered: Delivered, ctx: Context
    ) -> tuple[State, Metrics]:
        state, metrics = super().server_update(server, received, delivered, ctx)
        made = (
            {name: gathered.result for name, gathered in received.items() if gathered.count}
            if self.keeps_center
            else {}
        )
        return {**state, CENTER: {**server.get(CENTER, {}), **made}} if made or CENTER in server else state, metrics


class RobustWrapper(Wrapper, RobustMean):
    """A rule that replaces a server's means; a subclass has `combine`, and `decide` if it `measures`."""

    store_share: float = Field(
        default=0.5, gt=0, le=1, description="share of the object store that a round's messages may take"
    )

    def around(self, method: Method) -> Method:
        rules = {type(rule) for rule in method.gather.values()}
        if not isinstance(method, ServerHalf) or rules != {WeightedMean} or method.capabilities.needs_everyone:
            raise RayflError(
                f": {self.name!r} replaces a server's means, but {type(method).__name__} has none, gathers other sums "
                "too, or needs the mean of all clients; take fedavg, for example",
                KEY,
            )
        return Robust(method, self)

    def check(self, setup: Setup, store_bytes: int) -> None:
        require_uniform_weights(self.name, setup.method)
        count, names = setup.population.settings.num_selected, list(setup.method.gather.values()).count(self)
        needed, allowed = count * names * num_bytes(setup.initial_arrays), int(self.store_share * store_bytes)
        if needed > allowed:
            raise RayflError(
                f": {self.name!r} keeps {count} messages, {in_words(needed)}, and may take {in_words(allowed)} of the "
                "object store; lower clients.per_round, or raise store_share or runtime.object_store_memory_mb",
                KEY,
            )


class CoordinateMedian(RobustWrapper):
    """The median of every entry; for an even number of messages, the mean of the middle two (Yin, Chen, Ramchandran,
    Bartlett, ICML 2018, Definition 1)."""

    name = "coordinate-median"

    def combine(self, rows: torch.Tensor, decision: np.ndarray | None) -> torch.Tensor:
        return rows.sort(dim=0).values[(len(rows) - 1) // 2 : len(rows) // 2 + 1].mean(dim=0)


class TrimmedMean(RobustWrapper):
    """The mean of every entry without its largest and smallest values (Yin et al., ICML 2018, Definition 2)."""

    name = "trimmed-mean"
    trim: float = Field(default=0.2, gt=0, lt=0.5, description="share of the messages that is left out at each end")

    def combine(self, rows: torch.Tensor, decision: np.ndarray | None) -> torch.Tensor:
        cut = int(self.trim * len(rows) + 1e-9)
        return rows.sort(dim=0).values[cut : len(rows) - cut].mean(dim=0)


class ByDistances(RobustWrapper):
    """A weighted sum of the messages, with weights computed from their distances."""

    measures = True

    def combine(self, rows: torch.Tensor, decision: np.ndarray | None) -> torch.Tensor:
        return (torch.from_numpy(np.asarray(decision)) @ rows.double()).float()


class Krum(ByDistances):
    """The message with the smallest sum of squared distances to its n - f - 2 nearest ones (Blanchard, El Mhamdi,
    Guerraoui, Stainer, NeurIPS 2017); with `keep` the mean of the best ones, multi-Krum.

    If fewer than 2 f + 3 messages arrive (dropouts, Poisson sampling), the rule is the same but withstands fewer
    attackers.
    """

    name = "krum"
    byzantine: int = Field(default=1, ge=1, description="attackers among a round's clients that it withstands, f")
    keep: int = Field(default=1, ge=1, description="messages that are averaged, m; multi-Krum: up to n - f")

    def check(self, setup: Setup, store_bytes: int) -> None:
        super().check(setup, store_bytes)
        count, least = setup.population.settings.num_selected, max(2 * self.byzantine + 3, self.keep + self.byzantine)
        if count < least:
            raise RayflError(
                f": {self.name!r} with byzantine={self.byzantine} and keep={self.keep} needs {least} clients per "
                f"round, and there are {count}; lower byzantine or keep",
                KEY,
            )

    def decide(self, statistics: np.ndarray) -> np.ndarray:
        count, square = len(statistics), np.diag(statistics)
        distances = square[:, None] + square - 2 * statistics + np.diag(np.full(count, np.inf))
        scores = np.sort(distances, axis=1)[:, : max(1, count - self.byzantine - 2)].sum(axis=1)
        chosen = np.argsort(scores, kind="stable")[: self.keep]
        return np.isin(np.arange(count), chosen) / len(chosen)


class GeometricMedian(ByDistances):
    """The point with the smallest sum of distances to the messages, by Weiszfeld's algorithm from their mean (RFA:
    Pillutla, Kakade, Harchaoui, IEEE TSP 2022, Algorithm 2)."""

    name = "geometric-median"
    steps: int = Field(default=32, ge=1, description="iterations; they do not read the messages again")
    smoothing: float = Field(default=1e-6, gt=0, description="smaller distances are replaced by this one, nu")

    def decide(self, statistics: np.ndarray) -> np.ndarray:
        weights = np.full(len(statistics), 1 / len(statistics))
        for _ in range(self.steps):
            inverse = 1 / np.maximum(distances_to(weights, statistics), self.smoothing)
            weights = inverse / inverse.sum()
        return weights


class CenteredClipping(ByDistances):
    """v <- v + mean of (message - v) min(1, radius / |message - v|), from the v of the round before, at first 0
    (Karimireddy, He, Jaggi, ICML 2021, Algorithm 2, without the clients' momentum)."""

    name = "centered-clipping"
    keeps_center = True
    radius: float = Field(default=1.0, gt=0, description="norm to which each message's distance to v is clipped, tau")
    steps: int = Field(default=1, ge=1, description="iterations per round")

    def decide(self, statistics: np.ndarray) -> np.ndarray:
        weights = np.zeros(len(statistics))
        weights[-1] = 1.0
        for _ in range(self.steps):
            far = np.maximum(distances_to(weights, statistics)[:-1], 1e-30)
            moves = np.minimum(1.0, self.radius / far) / len(far)
            weights = np.append(moves, 0.0) + weights * (1 - moves.sum())
        return weights


def distances_to(weights: np.ndarray, products: np.ndarray) -> np.ndarray:
    """The distance of each row to the sum of weights times rows, from the products of every two rows [n, n]."""
    square = np.diag(products) - 2 * products @ weights + weights @ products @ weights
    return np.sqrt(np.maximum(square, 0.0))

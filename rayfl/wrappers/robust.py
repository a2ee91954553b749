"""Robust means: replace the mean of clients' messages by a value that a few false messages cannot move far.

Among peers each one replaces the mean of its neighbours' messages and its own (rounds/mix.py). With a server,
all messages of a round are kept, and read slice by slice on the workers: once by rules that treat every entry by
itself, twice by rules that use distances, which are computed from the inner products of all pairs of messages.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

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
    PeerHalf,
    RayflError,
    Received,
    ServerHalf,
    State,
    WeightedMean,
)
from rayfl.methods.shared.wrapper import Wrapping, WrappingPeers
from rayfl.rounds.peer_exchange import graph_among
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


class RobustPeers(WrappingPeers):
    """A method whose peers mix by a robust rule, each with its own message as the reference."""

    capabilities = Capabilities(on_device=True, keeps_parts=True, sees_all=True, takes_stale=True)

    def __init__(self, inner: Method, rule: "RobustWrapper") -> None:
        super().__init__(inner)
        self.gather = dict.fromkeys(inner.gather, rule)
        if rule.symmetric_weights:
            self.capabilities = self.capabilities.but(needs_weights="symmetric")


class RobustWrapper(Wrapper, RobustMean):
    """A rule that replaces a server's means, or those of peers; a subclass has `combine`, and `decide` if it
    `measures`."""

    symmetric_weights: ClassVar[bool] = False
    """Whether the rule uses mixing weights among peers, which must be symmetric; others do without weights."""

    store_share: float = Field(
        default=0.5, gt=0, le=1, description="share of the object store that a round's messages may take"
    )

    def around(self, method: Method) -> Method:
        rules, can = {type(rule) for rule in method.gather.values()}, method.capabilities
        if isinstance(method, PeerHalf):
            plain = rules == {WeightedMean} and can.include_self and can.needs_weights == "row" and not can.weighs_links
            if not plain or can.num_exchanges > 1 or method.has_link_messages or can.in_pairs:
                raise RayflError(
                    f": {self.name!r} replaces the mean of a peer's and its neighbours' messages, but "
                    f"{method.title} does not mix by one such mean, or needs sums that a robust value does not keep; "
                    "take dpsgd, for example",
                    KEY,
                )
            return RobustPeers(method, self)
        if not isinstance(method, ServerHalf) or rules != {WeightedMean} or method.capabilities.needs_everyone:
            raise RayflError(
                f": {self.name!r} replaces a server's means, but {type(method).__name__} has none, gathers other sums "
                "too, or needs the mean of all clients; take fedavg, for example",
                KEY,
            )
        return Robust(method, self)

    def check_neighbourhood(self, count: int) -> None:
        """Raise RayflError if the rule does nothing, or not what it says, with `count` messages, a peer's own among
        them."""

    def check(self, setup: Setup, store_bytes: int) -> None:
        if setup.is_peer:
            assert setup.topology is not None, "refused before"
            if self.is_given("store_share"):
                raise RayflError(f": {self.name!r} keeps no messages among peers; remove store_share", KEY)
            for round_number in range(8 if setup.topology.varying else 1):
                graph = setup.topology.sparse(setup.num_clients, setup.seed, round_number)
                self.check_neighbourhood(int(graph.sum(axis=1).min()) + 1)
            return
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
    own: Literal["inside", "outside"] = Field(
        default="inside",
        description="among peers: whether the own message is trimmed with the others, or joins the rest afterwards",
    )

    def combine(self, rows: torch.Tensor, decision: np.ndarray | None) -> torch.Tensor:
        cut = int(self.trim * len(rows) + 1e-9)
        return rows.sort(dim=0).values[cut : len(rows) - cut].mean(dim=0)

    def combine_among(self, rows: torch.Tensor, decision: np.ndarray | None, own_row: int) -> torch.Tensor:
        if self.own == "inside":
            return self.combine(rows, decision)
        # BRIDGE: Fang, Yang, Bajwa, IEEE TSIPN 2022.
        others = torch.cat([rows[:own_row], rows[own_row + 1 :]]).sort(dim=0).values
        cut = int(self.trim * len(others) + 1e-9)
        return torch.cat([others[cut : len(others) - cut], rows[own_row : own_row + 1]]).mean(dim=0)

    def check(self, setup: Setup, store_bytes: int) -> None:
        super().check(setup, store_bytes)
        if self.own == "outside" and not setup.is_peer:
            raise RayflError(
                f": {self.name!r} has own='outside', and a server has no message of its own; remove it", KEY
            )

    def check_neighbourhood(self, count: int) -> None:
        count -= self.own == "outside"
        if int(self.trim * count + 1e-9) == 0:
            least = f"; raise it to {1 / count:.3g} or more, or" if count > 2 else ";"
            raise RayflError(
                f": {self.name!r} with trim={self.trim:g} leaves out none of the {count} messages that some peers have"
                f"{least} take a graph with more links",
                KEY,
            )


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
        if not setup.is_peer:
            self.require(setup.population.settings.num_selected, "clients per round")

    def check_neighbourhood(self, count: int) -> None:
        self.require(count, "messages per peer, its own among them")

    def require(self, count: int, what: str) -> None:
        """Raise RayflError if `count` messages are too few."""
        least = max(2 * self.byzantine + 3, self.keep + self.byzantine)
        if count < least:
            raise RayflError(
                f": {self.name!r} with byzantine={self.byzantine} and keep={self.keep} needs {least} {what}, and there "
                f"are {count}; lower byzantine or keep",
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
    (Karimireddy, He, Jaggi, ICML 2021, Algorithm 2, without the clients' momentum).

    Among peers v is the own message, the mean is weighted by the mixing weights, which are symmetric, and there is one
    iteration (ClippedGossip: He, Karimireddy, Jaggi, arXiv 2202.01545). With one radius for all the sum of the models
    is kept. `attacking` makes it each peer's own: its square is the weighted sum of the squared distances of the
    nearest messages over `attacking`, the weight that attackers may have, which the farthest ones lose.
    """

    name = "centered-clipping"
    keeps_center = True
    symmetric_weights = True
    radius: float = Field(default=1.0, gt=0, description="norm to which each message's distance to v is clipped, tau")
    steps: int = Field(default=1, ge=1, description="iterations per round; among peers 1")
    attacking: float | None = Field(
        default=None, gt=0, lt=1, description="among peers: weight of attackers, from which the radius follows"
    )

    def unused(self) -> Mapping[str, str]:
        other = {} if self.attacking is None else {"radius": f"beside attacking={self.attacking:g}"}
        return {**super().unused(), **other}

    def check(self, setup: Setup, store_bytes: int) -> None:
        super().check(setup, store_bytes)
        if setup.is_peer and self.steps > 1:
            raise RayflError(f": {self.name!r} has steps={self.steps}, and peers take one; remove it", KEY)
        if not setup.is_peer and self.attacking is not None:
            raise RayflError(f": {self.name!r} has attacking={self.attacking:g}, which peers alone use; remove it", KEY)
        if setup.is_peer and self.attacking is not None:
            exchange = setup.exchange(0, np.full(setup.num_clients, True))
            assert setup.topology is not None, "refused before"
            weights = setup.topology.mixing(graph_among(setup, exchange), exchange)
            least = float((weights.sum(axis=1) - weights.diagonal()).min())
            if self.attacking >= least:
                raise RayflError(
                    f": {self.name!r} with attacking={self.attacking:g} hears nobody, as the weight of all neighbours "
                    f"of some peer is {least:.3g}; lower it",
                    KEY,
                )

    def decide_among(self, statistics: np.ndarray, weights: np.ndarray, own_row: int) -> np.ndarray:
        square = np.diag(statistics)
        distances = np.sqrt(np.maximum(square + square[own_row] - 2 * statistics[own_row], 0.0))
        distances[own_row] = 0.0
        radius = self.radius if self.attacking is None else self.own_radius(distances, weights, own_row)
        moves = weights * np.minimum(1.0, radius / np.maximum(distances, 1e-30))
        moves[own_row] = 0.0
        moves[own_row] = 1.0 - moves.sum()
        return moves

    def own_radius(self, distances: np.ndarray, weights: np.ndarray, own_row: int) -> float:
        """A peer's radius from the distances of the messages to its own, and their weights, [n]."""
        assert self.attacking is not None
        order = [place for place in np.argsort(distances, kind="stable") if place != own_row]
        left, total = float(weights[order].sum()) - self.attacking, 0.0
        for place in order:
            taken = min(float(weights[place]), max(left, 0.0))
            total, left = total + taken * float(distances[place]) ** 2, left - taken
        return float(np.sqrt(total / self.attacking))

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

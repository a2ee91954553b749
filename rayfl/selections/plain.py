"""Selections that use no reports of clients: uniform, Poisson, by size, in turns."""

from collections.abc import Sequence

import numpy as np
import torch

from rayfl.selections.base import Answer, Seen, Selection, drawn
from rayfl.tree import State


class Uniform(Selection):
    """`clients.per_round` of the available clients, uniformly without replacement; all if there are fewer."""

    name = "uniform"

    def choose(
        self, state: State, seen: Seen, available: np.ndarray, num_wanted: int, generator: np.random.Generator
    ) -> Sequence[int]:
        chosen = generator.choice(available, num_wanted, replace=False) if num_wanted < len(available) else available
        return chosen.tolist()


class Poisson(Selection):
    """Every available client with probability `per_round / count`, independently: their number varies and may be 0.

    This sampling amplifies differential privacy (McMahan et al., ICLR 2018).
    """

    name = "poisson"

    def choose(
        self, state: State, seen: Seen, available: np.ndarray, num_wanted: int, generator: np.random.Generator
    ) -> Sequence[int]:
        # Every client has a draw, so that no client's draw depends on which others are available.
        hit = generator.random(len(seen.num_examples)) < num_wanted / len(seen.num_examples)
        return available[hit[available]].tolist()


class Weighted(Selection):
    """`clients.per_round` of the available clients, drawn one after another with probabilities proportional to n_i."""

    name = "weighted"

    def choose(
        self, state: State, seen: Seen, available: np.ndarray, num_wanted: int, generator: np.random.Generator
    ) -> Sequence[int]:
        return drawn(generator, available, num_wanted, seen.num_examples[available].astype(float)).tolist()


class RoundRobin(Selection):
    """The next `clients.per_round` available clients in the order of their numbers; after the last comes the first."""

    name = "round-robin"

    def init(self, num_clients: int) -> State:
        return {"next": torch.tensor(0), "count": torch.tensor(num_clients)}

    def choose(
        self, state: State, seen: Seen, available: np.ndarray, num_wanted: int, generator: np.random.Generator
    ) -> Sequence[int]:
        return np.roll(available, -np.searchsorted(available, int(state["next"])))[:num_wanted].tolist()

    def observe(self, state: State, round_number: int, answers: Sequence[Answer]) -> State:
        first, count = int(state["next"]), int(state["count"])
        steps = max(((answer.client - first) % count + 1 for answer in answers), default=0)
        return {**state, "next": torch.tensor((first + steps) % count)}

"""Selection: which clients a server selects in a round, based on what it may know about them."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from rayfl.choices.kinds import Choice
from rayfl.tree import State


@dataclass(frozen=True)
class Seen:
    """What the server may know before it selects the clients of a round.

    num_examples: train examples of each client, int64 [num_clients]; examples_per_s: speed of each client, float64
    [num_clients]; losses: the mean losses that polled clients reported, by client.
    """

    round: int
    num_examples: np.ndarray
    examples_per_s: np.ndarray
    losses: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What the server learned from a client that it selected.

    num_examples: its train examples. loss: the mean training loss that the client reported, None if it delivered
    nothing. seconds: simulated seconds from the start of the round until the client was done or gone.
    """

    client: int
    num_examples: int
    loss: float | None
    seconds: float


class Selection(Choice):
    """A rule that chooses the clients of a round. Its state is kept at the server, and in checkpoints."""

    label = "selection"
    package = "rayfl.selections"
    hears_losses: ClassVar[bool] = False
    """Whether clients that deliver report their mean training loss, for which each is billed 32 bits."""

    def init(self, num_clients: int) -> State:
        """The state before round 0: arrays as tensors, by name."""
        return {}

    def candidates(
        self, state: State, seen: Seen, available: np.ndarray, num_wanted: int, generator: np.random.Generator
    ) -> Sequence[int]:
        """The clients that are polled before `choose`: each gets the model and reports its loss. By default none."""
        return ()

    def polled_examples(self) -> int | Literal["all"]:
        """The number of its train examples on which a polled client computes its loss."""
        return "all"

    @abstractmethod
    def choose(
        self, state: State, seen: Seen, available: np.ndarray, num_wanted: int, generator: np.random.Generator
    ) -> Sequence[int]:
        """The clients to select, each once, in any order.

        seen: with the losses of those that were polled. available: the clients that can be selected, int64, ascending;
        it may be empty. num_wanted: `clients.per_round`. generator: keyed by (seed, round).
        """

    def observe(self, state: State, round_number: int, answers: Sequence[Answer]) -> State:
        """The state after a round, from the answers of the selected clients, by ascending client."""
        return state


def drawn(generator: np.random.Generator, clients: np.ndarray, count: int, chances: np.ndarray) -> np.ndarray:
    """`count` of the clients (all, if there are fewer), drawn one after another with probabilities proportional to
    `chances` (at least 0); those with chance 0 come last."""
    positive, rest = clients[chances > 0], clients[chances <= 0]
    if count >= len(positive):
        return np.concatenate([positive, generator.permutation(rest)[: max(0, count - len(positive))]])
    weights = chances[chances > 0]
    return generator.choice(positive, count, replace=False, p=weights / weights.sum())

"""Oort: prefers fast clients with a large training loss, and tries some new clients (Lai et al., OSDI 2021)."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from rayfl.selections.base import Answer, Seen, Selection, drawn
from rayfl.tree import State

CUT_OFF = 0.95
"""Clients whose utility is at least this share of the cut-off value are candidates (Algorithm 1)."""


class Oort(Selection):
    """A share of the clients is drawn by utility from the tried ones, the rest from the untried ones (Algorithm 1).

    The statistical utility of a client is U_i = n_i |mean training loss|: methods report the mean of the losses and not
    the root of their mean square. U_i is clipped at the 95th percentile and scaled to [0, 1]; then a bonus
    sqrt(.1 ln R / L_i) is added, where R is the current round and L_i the one in which the client was last selected.
    For a client that takes t_i > T seconds the sum is multiplied by (T / t_i)^penalty; T is a percentile of the
    observed seconds (the paper's pacer, which changes T, is not implemented). A client that did not deliver counts as
    tried and keeps its utility. Each report is 32 bits.
    """

    name = "oort"
    hears_losses = True
    exploration: float = Field(default=0.9, ge=0, le=1, description="share of untried clients in round 0, epsilon")
    exploration_decay: float = Field(default=0.98, gt=0, le=1, description="factor of that share each round")
    least_exploration: float = Field(default=0.2, ge=0, le=1, description="the smallest such share")
    explore_by: Literal["speed", "size"] = Field(
        default="speed", description="probabilities of untried clients: proportional to their speed (paper), or to n_i"
    )
    penalty: float = Field(default=2.0, ge=0, description="exponent of T / t_i for clients slower than T, alpha")
    percentile: float = Field(default=80.0, gt=0, le=100, description="percentile of the seconds observed that is T")

    def init(self, num_clients: int) -> State:
        return {
            "utility": torch.zeros(num_clients, dtype=torch.float64),
            "seconds": torch.zeros(num_clients, dtype=torch.float64),
            "last": torch.zeros(num_clients, dtype=torch.int64),
        }

    def choose(
        self, state: State, seen: Seen, available: np.ndarray, num_wanted: int, generator: np.random.Generator
    ) -> Sequence[int]:
        tried = state["last"].numpy()[available] > 0
        old, new = available[tried], available[~tried]
        share = max(self.least_exploration, self.exploration * self.exploration_decay**seen.round)
        share = min(share, self.exploration)
        num_old = min(len(old), max(math.floor((1 - share) * num_wanted), num_wanted - len(new)))
        chances = seen.examples_per_s if self.explore_by == "speed" else seen.num_examples.astype(float)
        explored = drawn(generator, new, min(len(new), num_wanted - num_old), chances[new])
        if not num_old:
            return explored.tolist()
        utility = self.utilities(state, old, seen.round + 1)
        least = CUT_OFF * np.sort(utility)[-num_old]
        near = utility >= least
        return [*drawn(generator, old[near], num_old, utility[near]).tolist(), *explored.tolist()]

    def utilities(self, state: State, clients: np.ndarray, round_from_1: int) -> np.ndarray:
        """The utilities of tried clients in a round, counted from 1, float64 [len(clients)]."""
        raw = state["utility"].numpy()[clients]
        seconds, last = state["seconds"].numpy(), state["last"].numpy()
        raw = np.minimum(raw, np.percentile(raw, 95))
        low = 0.999 * raw.min()
        scaled = (raw - low) / (raw.max() - low) if raw.max() > low else np.zeros(len(raw))
        scaled = scaled + np.sqrt(0.1 * np.log(round_from_1) / last[clients])
        preferred = np.percentile(seconds[last > 0], self.percentile)
        slow = seconds[clients] > preferred
        return scaled * np.where(slow, (preferred / np.maximum(seconds[clients], 1e-12)) ** self.penalty, 1.0)

    def observe(self, state: State, round_number: int, answers: Sequence[Answer]) -> State:
        utility, seconds, last = (state[name].clone() for name in ("utility", "seconds", "last"))
        for answer in answers:
            last[answer.client] = round_number + 1
            if answer.loss is not None:
                utility[answer.client] = abs(answer.loss) * answer.num_examples
                seconds[answer.client] = answer.seconds
        return {"utility": utility, "seconds": seconds, "last": last}

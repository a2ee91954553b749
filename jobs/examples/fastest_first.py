"""A selection of your own: the clients that were fastest last time; each client is selected once before that.

rayfl run jobs/experiments/demo.toml selection=jobs/examples/fastest_first.py:FastestFirst clients.per_round=5
"""

from collections.abc import Sequence

import numpy as np
import torch
from pydantic import Field

from rayfl.selections.base import Answer, Seen, Selection
from rayfl.tree import State


class FastestFirst(Selection):
    """Select the clients with the fewest seconds so far; a client that was never selected has 0 seconds."""

    memory: float = Field(default=0.5, ge=0, lt=1, description="weight of earlier rounds in a client's seconds")

    def init(self, num_clients: int) -> State:
        return {"seconds": torch.zeros(num_clients, dtype=torch.float64)}

    def choose(
        self, state: State, seen: Seen, available: np.ndarray, num_wanted: int, generator: np.random.Generator
    ) -> Sequence[int]:
        return sorted(available.tolist(), key=lambda client: float(state["seconds"][client]))[:num_wanted]

    def observe(self, state: State, round_number: int, answers: Sequence[Answer]) -> State:
        seconds = state["seconds"].clone()
        for answer in answers:
            seconds[answer.client] = self.memory * seconds[answer.client] + (1 - self.memory) * answer.seconds
        return {"seconds": seconds}

"""Power of choice: of some candidates, the clients with the largest loss (Cho, Wang, Joshi, AISTATS 2022)."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from rayfl.selections.base import Answer, Seen, Selection, drawn
from rayfl.tree import State


class PowerOfChoice(Selection):
    """Candidates are drawn with probabilities proportional to n_i; those with the largest losses are selected.

    pow-d: every candidate downloads the model and reports its loss on all of its train examples. cpow-d: on one batch
    of them. rpow-d: no client is polled; the loss of a client is the training loss that it reported last, or infinite
    before its first report. Each report is 32 bits. Of equal losses the lower client number comes first. The method's
    own mean should be uniform, because candidates are drawn with the weights already.
    """

    name = "power-of-choice"
    candidate_count: int | None = Field(
        default=None, ge=1, description="candidates of a round, d; default: twice clients.per_round"
    )
    variant: Literal["pow-d", "cpow-d", "rpow-d"] = Field(
        default="pow-d", description="loss on all examples, on one batch, or that of the client's last training"
    )
    batch_size: int = Field(
        default=50,
        ge=1,
        description="examples of cpow-d's batch",
        json_schema_extra={"unused_with": {"variant": ["pow-d", "rpow-d"]}},
    )

    @property
    def hears_losses(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether clients that deliver report their training loss: only with rpow-d."""
        return self.variant == "rpow-d"

    def init(self, num_clients: int) -> State:
        return {"loss": torch.full((num_clients,), torch.inf, dtype=torch.float64)} if self.hears_losses else {}

    def candidates(
        self, state: State, seen: Seen, available: np.ndarray, num_wanted: int, generator: np.random.Generator
    ) -> Sequence[int]:
        return () if self.hears_losses else self._drawn(seen, available, num_wanted, generator)

    def _drawn(
        self, seen: Seen, available: np.ndarray, num_wanted: int, generator: np.random.Generator
    ) -> Sequence[int]:
        num_candidates = max(num_wanted, self.candidate_count or 2 * num_wanted)
        return drawn(generator, available, num_candidates, seen.num_examples[available].astype(float)).tolist()

    def polled_examples(self) -> int | Literal["all"]:
        return "all" if self.variant == "pow-d" else self.batch_size

    def choose(
        self, state: State, seen: Seen, available: np.ndarray, num_wanted: int, generator: np.random.Generator
    ) -> Sequence[int]:
        losses = seen.losses
        if self.hears_losses:
            losses = {
                client: float(state["loss"][client]) for client in self._drawn(seen, available, num_wanted, generator)
            }
        return sorted(losses, key=lambda client: (-losses[client], client))[:num_wanted]

    def observe(self, state: State, round_number: int, answers: Sequence[Answer]) -> State:
        if not self.hears_losses:
            return state
        loss = state["loss"].clone()
        for answer in answers:
            if answer.loss is not None:
                loss[answer.client] = answer.loss
        return {"loss": loss}

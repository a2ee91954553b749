"""Clipping of whole messages."""

import math
from collections.abc import Mapping

import torch

from rayfl.methods.base import Context, Field, Gather, Metrics, Received, State, Sum, Tree, tree, unused_with
from rayfl.wrappers.base import MessageWrapper

WITHIN = "clip/within"
"""The message that says whether a client's message was within the norm: 1/2 if it was, otherwise -1/2."""


class Clip(MessageWrapper):
    """Scales a client's message down to a Euclidean norm of at most `norm`, over all of its trees together.

    With a `quantile` (Andrew, Thakkar, McMahan, Ramaswamy, NeurIPS 2021, Algorithm 1, without noise) `norm` is only the
    norm of round 0: clients download the norm C and report whether their message was within it, and the server sets
    C <- C exp(-rate (share within - quantile)).
    """

    name = "clip"
    norm: float = Field(default=1.0, gt=0, description="largest norm of a message; with a quantile: in round 0")
    quantile: float | None = Field(
        default=None, gt=0, lt=1, description="target share of the clients whose messages are within the norm"
    )
    rate: float = Field(
        default=0.2,
        gt=0,
        description="step of the logarithm of the norm",
        json_schema_extra=unused_with(quantile=[None]),
    )

    @property
    def takes_stale(self) -> bool:
        return self.quantile is None and not self.needs_server

    def gather(self) -> Mapping[str, Gather]:
        return {} if self.quantile is None else {WITHIN: Sum()}

    def init_server(self, params: Tree) -> State:
        return {} if self.quantile is None else {"norm": torch.tensor([self.norm])}

    def download(self, server: State) -> Tree:
        return dict(server)

    def client(
        self, trees: Mapping[str, Tree], state: State, received: Tree, ctx: Context
    ) -> tuple[Mapping[str, Tree], State, Metrics]:
        most = float(received.get("norm", self.norm))
        norm = math.hypot(*(tree.norm(update) for update in trees.values()))
        sent = (
            dict(trees) if norm <= most else {name: tree.scale(update, most / norm) for name, update in trees.items()}
        )
        if self.quantile is not None:
            sent[WITHIN] = {"within": torch.tensor([0.5 if norm <= most else -0.5])}
        return sent, state, {"clip/norm": norm, "clip/clipped": float(norm > most)}

    def aggregate(self, received: Received, server: State, ctx: Context) -> tuple[Received, State, Metrics]:
        if self.quantile is None:
            return received, server, {}
        norm, within = server["norm"], received[WITHIN]
        if within.count:
            share = 0.5 + float(within.sum["within"]) / within.count
            server = {"norm": norm * math.exp(-self.rate * (share - self.quantile))}
        return received, server, {"clip/bound": float(norm)}

"""Distributed SGD with a compressor that belongs to the method: x <- x - sum_i p_i C(gamma g_i).

The step size is inside the compressor. Where C(a v) = a C(v) for a > 0 that is gamma C(g_i); and with error feedback,
C(gamma g_i + e_i), what is remembered stays a part of x when gamma changes.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import ClassVar

from rayfl import tree
from rayfl.compress.base import Compressor
from rayfl.determinism.seeding import FirstDraws
from rayfl.gather import Aggregate, Gather, WeightedMean
from rayfl.methods.base import Carry, Context, Finished, Metrics
from rayfl.methods.shared.distributed_gradient import DistributedGradient, GradientStep
from rayfl.population.client import Traits
from rayfl.tree import State, Tree


class CompressedSGD(DistributedGradient):
    """Up: one compressed step a client and round, as "delta". Down: the dense model, 4 bytes an entry.

    Client state: the compressor's memory.
    """

    Hyper: ClassVar[type[GradientStep]] = GradientStep
    hyper: GradientStep
    own_compression: ClassVar[bool] = True
    gather: Mapping[str, Gather] = {"delta": WeightedMean()}

    @abstractmethod
    def make_compressor(self) -> Compressor:
        """C, as the hyper-parameters describe it."""

    @cached_property
    def compressor(self) -> Compressor:
        """C."""
        return self.make_compressor()

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> State:
        return self.compressor.init(params)

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        delta = tree.scale(carry["gradient"], self.hyper.rate(ctx.round))
        packet, memory = self.compressor.encode(delta, state, ctx.generator)
        return self.finished(memory, {"delta": packet}, carry, ctx)

    def server_update(
        self, server: State, received: Mapping[str, Aggregate], delivered: Sequence[int], ctx: Context
    ) -> tuple[State, Metrics]:
        delta = received["delta"].result
        return ({"params": tree.sub(server["params"], delta)} if delta else server), {}

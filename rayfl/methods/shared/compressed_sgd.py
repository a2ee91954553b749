"""Distributed SGD with a compressor that belongs to the method: x <- x - sum_i p_i C(gamma g_i).

The step size is inside the compressor. Where C(a v) = a C(v) for a > 0 that is gamma C(g_i); and with error feedback,
C(gamma g_i + e_i), the memory stays a part of x when gamma changes.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from rayfl import tree
from rayfl.compress.base import Compressor
from rayfl.methods.base import Aggregate, Context, Finished, FirstDraws, Gather, ModelState, Traits, Tree, WeightedMean
from rayfl.methods.shared.distributed_gradient import DistributedGradient, GradientCarry, GradientStep


class CompressedSGD(DistributedGradient):
    """Up: one compressed step a client and round, as "delta". Down: the dense model, 4 bytes an entry.

    Client state: the compressor's memory.
    """

    hyper: GradientStep
    own_compression: ClassVar[bool] = True
    gather: Mapping[str, Gather] = {"delta": WeightedMean()}

    @property
    @abstractmethod
    def compressor(self) -> Compressor:
        """C, made from the hyper-parameters."""

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> Tree:
        return self.compressor.init(params)

    # The state is the compressor's memory alone.
    def finish(self, state: Tree, carry: GradientCarry, ctx: Context) -> Finished:
        delta = tree.scale(carry["gradient"], self.hyper.rate(ctx.round))
        packet, memory = self.compressor.encode(delta, state, ctx.generator)
        return self.finished(memory, {"delta": packet}, carry, ctx)

    def update(self, server: ModelState, received: Mapping[str, Aggregate], ctx: Context) -> ModelState:
        return {"params": tree.sub(server["params"], received["delta"].result)}

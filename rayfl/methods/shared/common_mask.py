"""A server of one sparse model: its mask is the same for all clients, or of each client a part of it.

It sends a client the entries of the mask, with their positions if the client last got another mask. A client trains
these entries, so its gradients and weights are 0 elsewhere, and sends the entries of its mask after training, with
their positions if it has changed the mask. Tensors of fewer than two dimensions (biases, norms) are dense.
"""

from abc import abstractmethod
from typing import TypeVar, cast

import torch

from rayfl.methods.base import (
    Batch,
    Context,
    ElementwiseMean,
    KeptModel,
    Message,
    Packet,
    Reply,
    Stage,
    State,
    Traits,
    Tree,
)
from rayfl.methods.shared import masks
from rayfl.methods.shared.local_training import GradientMethod, LocalCarry
from rayfl.methods.shared.masked_server import WEIGHTS, weights_packet


class SparseCarry(LocalCarry, masks.Masked):
    """A client's carry."""

    known: Tree  # the mask that it received


SparseTraining = TypeVar("SparseTraining", bound=SparseCarry)
"""The carry of a method that adds to `SparseCarry`."""


class CommonMask(GradientMethod, KeptModel):
    """A client trains under the mask that it received; a subclass says how masks move (`finish`, `update`)."""

    gather = {WEIGHTS: ElementwiseMean("sent")}

    @abstractmethod
    def mask_for(self, server: masks.MaskedModel, ctx: Context) -> Tree:
        """The mask that the client of `ctx` trains under."""

    def init_server_memory(self, client: Traits, params: Tree) -> masks.Masked:
        return {"mask": {name: torch.zeros_like(tensor, dtype=torch.bool) for name, tensor in params.items()}}

    def personal_message(self, server: masks.MaskedModel, server_memory: masks.Masked, ctx: Context) -> Reply:
        mask = self.mask_for(server, ctx)
        return Reply({WEIGHTS: weights_packet(server["params"], mask, server_memory["mask"])}, {"mask": mask})

    def begin(self, state: State, received: Message, ctx: Context) -> SparseCarry:
        mask = received[WEIGHTS].support()
        return {**self.start(received[WEIGHTS].decode()), "mask": mask, "known": mask}

    def step(self, carry: SparseTraining, batch: Batch, *, stage: Stage) -> SparseTraining:
        loss, gradient = self.task.value_and_grad(carry["params"], batch)
        moved = self.descend(carry, loss, masks.masked(gradient, carry["mask"]), stage)
        # A momentum outlives a mask that moves between two steps.
        return cast(SparseTraining, {**moved, "params": masks.masked(moved["params"], carry["mask"])})


def sent_weights(params: Tree, mask: Tree, known: Tree) -> dict[str, Packet]:
    """A client's message."""
    return {WEIGHTS: weights_packet(params, mask, known)}


def prunable(params: Tree) -> Tree:
    """The tensors that masks are for."""
    return {name: tensor for name, tensor in params.items() if tensor.dim() > 1}

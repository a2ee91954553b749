"""The task of a client whose model has tensors of its own: parameters and buffers that it keeps."""

from collections.abc import Collection

import torch

from rayfl.methods.base import (
    Batch,
    Tree,
)
from rayfl.task import NetworkTask, Objective, gradients, leaves


class ClientTask(NetworkTask):
    """A task that adds the tensors `kept` to the parameters in every pass of the network. Made for one step.

    After a gradient, `moved` holds the buffers of `kept` as the training pass left them, and `gradient` the gradient of
    the parameters of `kept` in `trained`. num_gradients: the number of gradients taken.
    """

    def __init__(self, task: NetworkTask, kept: Tree, trained: Collection[str] = ()) -> None:
        super().__init__(task.network, task.task)
        self.uses_functorch = task.uses_functorch
        self.kept, self.trained = kept, trained
        self.moved: Tree = {}
        self.gradient: Tree = {}
        self.num_gradients = 0

    def outputs(self, params: Tree, batch: Batch) -> torch.Tensor:
        outputs, self.moved = self.network.advance({**params, **self.kept}, batch, by_hand=self.uses_functorch)
        return outputs

    def evaluated(self, params: Tree, batch: Batch) -> torch.Tensor:
        return super().evaluated({**params, **self.kept}, batch)

    def value_and_grad(
        self, params: Tree, batch: Batch, objective: Objective | None = None
    ) -> tuple[torch.Tensor, Tree]:
        objective, kept = objective or self.loss, self.kept
        self.num_gradients += 1

        def moving(trees: tuple[Tree, Tree], batch: Batch) -> tuple[torch.Tensor, Tree]:
            self.kept, self.moved = {**kept, **trees[1]}, {}
            try:
                return objective(trees[0], batch), self.moved
            finally:
                self.kept = kept

        personal = {name: kept[name] for name in self.trained}
        if self.uses_functorch:
            both, (value, self.moved) = torch.func.grad_and_value(moving, has_aux=True)((params, personal), batch)
            gradient, self.gradient = both
            return value, gradient
        shared, personal = leaves(params), leaves(personal)
        with torch.enable_grad():
            value, moved = moving((shared, personal), batch)
        self.moved = {name: tensor.detach() for name, tensor in moved.items()}
        derivatives = gradients(value, [*shared.values(), *personal.values()])
        self.gradient = dict(zip(personal, derivatives[len(shared) :], strict=True))
        return value.detach(), dict(zip(shared, derivatives[: len(shared)], strict=True))

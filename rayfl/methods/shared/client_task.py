"""A task bound to what one client keeps of a model: personal parameters, and buffers that training changes."""

from collections.abc import Collection

import torch

from rayfl.data.batches import Batch
from rayfl.task import NetworkTask, Objective, leaves, named
from rayfl.tree import Tree


class ClientTask(NetworkTask):
    """A task whose parameters are joined by `kept` in every pass of the network. Made for one step.

    A gradient leaves what it found beside that of the parameters: `moved`, the buffers of `kept` after the training
    pass, and `gradient`, that of the parameters of `kept` in `trained`. num_gradients: how many were taken.
    """

    def __init__(self, task: NetworkTask, kept: Tree, trained: Collection[str] = ()) -> None:
        super().__init__(task.network, task.task)
        self.uses_functorch = task.uses_functorch
        self.kept, self.trained = kept, trained
        self.moved: Tree = {}
        self.gradient: Tree = {}
        self.num_gradients = 0

    def outputs(self, params: Tree, batch: Batch) -> torch.Tensor:
        found, self.moved = self.network.advance({**params, **self.kept}, batch, by_hand=self.uses_functorch)
        return found

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

        own = {name: kept[name] for name in self.trained}
        if self.uses_functorch:
            both, (value, self.moved) = torch.func.grad_and_value(moving, has_aux=True)((params, own), batch)
            gradient, self.gradient = both
            return value, gradient
        shared, own = leaves(params), leaves(own)
        with torch.enable_grad():
            value, moved = moving((shared, own), batch)
        self.moved = {name: tensor.detach() for name, tensor in moved.items()}
        found = torch.autograd.grad(value, [*shared.values(), *own.values()], materialize_grads=True)
        self.gradient = named(own, found[len(shared) :])
        return value.detach(), named(shared, found[: len(shared)])

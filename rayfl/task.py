"""A task bound to a network, as pure functions of parameters and a batch: losses, gradients, Hessian products.

Methods never call autograd. `BoundTask` differentiates by plain autograd on its own leaves, which is fastest for one
client after another; `task.functional()` is the same task differentiated by torch.func, which also runs under vmap.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import numpy as np
import torch

from rayfl.data.batches import Batch
from rayfl.data.datasets import Dataset
from rayfl.errors import RayflError
from rayfl.metrics.base import Metric
from rayfl.metrics.loss import Loss
from rayfl.models.flops import Uses
from rayfl.network import Network
from rayfl.tasks.base import Task
from rayfl.tree import Tree
from rayfl.untyped import Outputs

Objective = Callable[[Tree, Batch], torch.Tensor]


class BoundTask(ABC):
    """A differentiable objective. Subclasses give the parameters, the loss and the losses of examples."""

    vmappable: bool = True
    """Whether the loss can run under torch.vmap."""
    stochastic: bool = False
    """Whether a pass draws random numbers from global generators (dropout), as far as is known before the run."""
    uses_functorch: bool = False
    constants: Mapping[str, np.ndarray] = MappingProxyType({})
    """Tensors that the loss uses beside the parameters: never trained, sent or counted; saved with the final models."""
    local: Mapping[str, np.ndarray] = MappingProxyType({})
    """Initial values of the tensors that clients keep: personal parameters, and buffers that training changes."""

    @abstractmethod
    def init(self, seed: int) -> Tree:
        """Initial parameters, the same for the same seed."""

    @abstractmethod
    def loss(self, params: Tree, batch: Batch) -> torch.Tensor:
        """Mean training loss over the batch's examples, a scalar. `batch.weights` (0 for padding) are respected."""

    @abstractmethod
    def losses(self, params: Tree, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Each example's loss as a sum, and its count (`Task.loss`), [batch] each, in evaluation mode; detached."""

    def score(self, params: Tree, batch: Batch) -> torch.Tensor:
        """How well each example is solved (`Task.score`), [batch] from 0 to 1, in evaluation mode; detached."""
        raise RayflError(f"{type(self).__name__} has no score")

    def outputs(self, params: Tree, batch: Batch) -> torch.Tensor:
        """The network's output [batch, ...] (logits), for objectives that need no labels."""
        raise RayflError(f"{type(self).__name__} has no network output")

    def num_outputs(self, dataset: Dataset) -> int:
        """The number of outputs that the network was built for (`Task.num_outputs`)."""
        return dataset.num_classes

    def evaluated(self, params: Tree, batch: Batch) -> torch.Tensor:
        """The network's output [batch, ...] in evaluation mode (no dropout), which can be differentiated too."""
        return self.outputs(params, batch)

    def evaluated_loss(self, params: Tree, batch: Batch) -> torch.Tensor:
        """The loss in evaluation mode (no dropout), which can be differentiated too."""
        return self.loss(params, batch)

    @property
    def weight_uses(self) -> Uses:
        """For each weight by name: the multiplications of an entry in an example's forward pass; none if unknown."""
        return Uses()

    @property
    def head(self) -> str:
        """The name of the last linear layer, whose output is the network's (`models.flops`); "" if there is none."""
        return self.weight_uses.head

    def loss_and_features(self, params: Tree, batch: Batch, training: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean loss, a scalar, and the representation of each example, float32 [batch, D]: the input of `head`.

        training: False for the evaluation mode. Both can be differentiated. See `Capabilities.needs_features`.
        """
        raise RayflError(f"{type(self).__name__} has no features")

    def grad(self, params: Tree, batch: Batch, objective: Objective | None = None) -> Tree:
        """Gradient of `objective` (default: the loss) at `params`."""
        return self.value_and_grad(params, batch, objective)[1]

    def value_and_grad(
        self, params: Tree, batch: Batch, objective: Objective | None = None
    ) -> tuple[torch.Tensor, Tree]:
        """The objective's value (detached scalar) and its gradient.

        An objective takes its means over examples by `batch.mean`: in stacks of clients batches have padding.
        """
        objective = objective or self.loss
        if self.uses_functorch:
            gradient, value = torch.func.grad_and_value(objective)(params, batch)
            return value, gradient
        own_leaves = leaves(params)
        with torch.enable_grad():
            value = objective(own_leaves, batch)
        return value.detach(), dict(zip(own_leaves, gradients(value, own_leaves.values()), strict=True))

    @property
    def gives_gradients_away(self) -> bool:
        """Whether nothing but the caller of `value_and_grad` holds the memory of the gradient that it returns."""
        return type(self).value_and_grad is BoundTask.value_and_grad and not self.uses_functorch

    def hvp(self, params: Tree, batch: Batch, vector: Tree) -> Tree:
        """Hessian of the loss at `params` times `vector`."""
        if self.uses_functorch:
            # Backward twice: forward mode supports fewer operators and warns of torch.jit at its first use.
            return torch.func.grad(lambda p: inner(torch.func.grad(self.loss)(p, batch), vector))(params)
        own_leaves = leaves(params)
        with torch.enable_grad():
            first = gradients(self.loss(own_leaves, batch), own_leaves.values(), create_graph=True)
            product = inner(dict(zip(own_leaves, first, strict=True)), vector)
        if not product.requires_grad:
            return {name: torch.zeros_like(tensor) for name, tensor in params.items()}
        return dict(zip(own_leaves, gradients(product, own_leaves.values()), strict=True))

    def functional(self) -> "BoundTask":
        """The same task on torch.func, for use under vmap."""
        copied = copy.copy(self)
        copied.uses_functorch = True
        return copied


class NetworkTask(BoundTask):
    """A task bound to a network: the losses and the scores of the network's outputs."""

    def __init__(self, network: Network, task: Task) -> None:
        self.network = network
        self.task = task

    @property
    def stochastic(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.network.stochastic

    @property
    def vmappable(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.network.vmappable

    @property
    def constants(self) -> Mapping[str, np.ndarray]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.network.constants

    @property
    def local(self) -> Mapping[str, np.ndarray]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.network.local

    @property
    def weight_uses(self) -> Uses:
        return self.network.weight_uses

    def init(self, seed: int) -> Tree:
        return self.network.init(seed)

    def num_outputs(self, dataset: Dataset) -> int:
        return self.task.num_outputs(dataset)

    def outputs(self, params: Tree, batch: Batch) -> torch.Tensor:
        return self.network(params, batch.inputs)

    def evaluated(self, params: Tree, batch: Batch) -> torch.Tensor:
        return self.network(params, batch.inputs, training=False)

    def loss(self, params: Tree, batch: Batch) -> torch.Tensor:
        return self.task.mean_loss(self.outputs(params, batch), batch.labels, batch.weights)

    def evaluated_loss(self, params: Tree, batch: Batch) -> torch.Tensor:
        return self.task.mean_loss(self.evaluated(params, batch), batch.labels, batch.weights)

    def loss_and_features(self, params: Tree, batch: Batch, training: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        seen = list[torch.Tensor]()
        head = self.network.module.get_submodule(self.head)
        with head.register_forward_pre_hook(lambda _, layer_inputs: seen.append(layer_inputs[0])):
            outputs = (self.outputs if training else self.evaluated)(params, batch)
        # Under autocast the layer's input may be bf16.
        return self.task.mean_loss(outputs, batch.labels, batch.weights), seen[-1].float()

    def predictions(self, outputs: Outputs, metrics: Iterable[Metric]) -> torch.Tensor:
        """What `metrics` but the loss evaluate; the outputs themselves if there is no such metric."""
        return outputs if all(isinstance(metric, Loss) for metric in metrics) else self.task.predictions(outputs)

    @torch.no_grad()
    def losses(self, params: Tree, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return self.task.loss(self.evaluated(params, batch), batch.labels)

    @torch.no_grad()
    def score(self, params: Tree, batch: Batch) -> torch.Tensor:
        return self.task.score(self.evaluated(params, batch), batch.labels)


def leaves(params: Tree) -> Tree:
    """The engine's own leaves: same memory, fresh graph."""
    return {name: tensor.detach().requires_grad_() for name, tensor in params.items()}


def inner(a: Tree, b: Tree) -> torch.Tensor:
    """The inner product over all entries, differentiable."""
    return torch.stack([(tensor * b[name]).sum() for name, tensor in a.items()]).sum()


def gradients(value: torch.Tensor, at: Iterable[torch.Tensor], create_graph: bool = False) -> list[torch.Tensor]:
    """The gradient of `value` at each of the leaves `at`, 0 where it does not depend on one.

    It is contiguous: a checkpoint keeps no strides, and sums over a tensor add in the order of its memory.
    """
    leaves = list(at)
    # materialize_grads of torch before 2.7 would give zeros that require a gradient.
    derivatives = torch.autograd.grad(value, leaves, create_graph=create_graph, allow_unused=True)
    return [
        torch.zeros_like(leaf, memory_format=torch.contiguous_format) if derivative is None else derivative.contiguous()
        for leaf, derivative in zip(leaves, derivatives, strict=True)
    ]

"""Task: the loss and the score of a network's outputs, chosen by `[task]`."""

from abc import ABC, abstractmethod

from torch import Tensor

from rayfl.choices.kinds import Choice
from rayfl.data.datasets import Dataset
from rayfl.errors import RayflError
from rayfl.metrics.base import Metric
from rayfl.metrics.loss import Loss
from rayfl.network import Network
from rayfl.untyped import Outputs


class Task(Choice, ABC):
    """What is learned. `outputs` are a network's, for a batch; `targets` are the batch's `Examples.labels`.

    If a network returns several outputs, a tuple or a dictionary of tensors, `output_shape` returns None, `loss` and
    `score` get what the network returns, and metrics other than the loss get its `predictions`.
    """

    label = "task"
    package = "rayfl.tasks"

    @abstractmethod
    def loss(self, outputs: Outputs, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each example as a sum, and the number of terms in that sum, float32 [batch] each.

        A mean is the sum of the sums divided by the sum of the counts: a mean over tokens, if an example counts its
        tokens. It runs under torch.vmap, so its shapes may depend only on those of its arguments.
        """

    @abstractmethod
    def score(self, outputs: Outputs, targets: Tensor) -> Tensor:
        """How well each example is solved, float32 [batch] from 0 to 1 (best); methods compare it with thresholds."""

    def mean_loss(self, outputs: Outputs, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """The mean of `loss`, a scalar. weights: float32 [batch], 0 for padding; all ones if None."""
        sums, counts = self.loss(outputs, targets)
        if weights is not None:
            sums, counts = sums * weights, counts * weights
        total = counts.sum()
        return sums.sum() / (total + (total == 0))

    def num_outputs(self, dataset: Dataset) -> int:
        """The number of outputs for each predicted target, which a model gets as `num_classes`."""
        return dataset.num_classes

    def output_shape(self, dataset: Dataset) -> tuple[int, ...] | None:
        """The shape of a network's output for one example; None if the task takes whatever the network returns."""
        return (self.num_outputs(dataset),)

    def predictions(self, outputs: Outputs) -> Tensor:
        """The tensor [batch, ...] among the outputs that metrics evaluate; of a single output that itself."""
        if not isinstance(outputs, Tensor):
            raise RayflError(
                f"task {self.name!r} does not say which of several outputs metrics evaluate: define predictions, or "
                "set evaluation.metrics=['loss']"
            )
        return outputs

    def default_metrics(self) -> tuple[Metric, ...]:
        """The metrics of a run that names none: the loss alone by default."""
        return (Loss(),)

    @abstractmethod
    def check(self, dataset: Dataset, network: Network) -> None:
        """Raise RayflError if the data's targets, or the network, do not fit the task."""

    def misfit(self, requirement: str, dataset: Dataset) -> RayflError:
        """The error for targets that do not fit the task; `requirement` describes those that would."""
        labels = dataset.train.labels
        return RayflError(
            f"task {self.name!r} needs labels that are {requirement}, and those of dataset {dataset.name!r} are "
            f"{labels.dtype} {list(labels.shape)}"
        )

"""A task on examples with several targets: it gets a tuple or a dictionary of tensors."""

from typing import Any

from torch import Tensor

from rayfl.data.datasets import Dataset
from rayfl.data.sources.several_inputs import InputLayout
from rayfl.errors import RayflError
from rayfl.metrics.base import Metric
from rayfl.network import Network
from rayfl.tasks.base import Task
from rayfl.untyped import Outputs


class WithSeveralTargets(Task):
    """The task `single` with the targets of an example taken from their row: `Dataset.targets` says where they are."""

    single: Task
    layout: InputLayout

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The task's name in sentences."""
        return self.single.name

    # Any: a table of an experiment.
    def to_table(self) -> dict[str, Any]:
        return self.single.to_table()

    def loss(self, outputs: Outputs, targets: Tensor) -> tuple[Tensor, Tensor]:
        return self.single.loss(outputs, self._several(targets))

    def mean_loss(self, outputs: Outputs, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        return self.single.mean_loss(outputs, self._several(targets), weights)

    def score(self, outputs: Outputs, targets: Tensor) -> Tensor:
        return self.single.score(outputs, self._several(targets))

    def num_outputs(self, dataset: Dataset) -> int:
        return self.single.num_outputs(dataset)

    def output_shape(self, dataset: Dataset) -> tuple[int, ...] | None:
        return self.single.output_shape(dataset)

    def predictions(self, outputs: Outputs) -> Tensor:
        raise RayflError(
            f"the examples have several targets ({self.layout}), and metrics other than the loss evaluate one; set "
            "evaluation.metrics=['loss']"
        )

    def default_metrics(self) -> tuple[Metric, ...]:
        return self.single.default_metrics()

    def check(self, dataset: Dataset, network: Network) -> None:
        if type(self.single).__module__.startswith(f"{Task.package}."):
            raise RayflError(
                f"task {self.name!r} takes one target, and an example of dataset {dataset.name!r} has several, "
                f"{self.layout}; give a task of your own, whose loss gets all"
            )
        self.single.check(dataset, network)

    # Any: a tuple or a dictionary of tensors.
    def _several(self, targets: Tensor) -> Any:
        return self.layout.unpack(targets)

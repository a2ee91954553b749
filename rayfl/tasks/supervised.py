"""Supervised tasks: the targets are classes, yes-or-no labels, following tokens, or numbers."""

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch.nn import functional

from rayfl.data.datasets import Dataset
from rayfl.data.loading import first_row
from rayfl.errors import RayflError
from rayfl.metrics.accuracy import Accuracy
from rayfl.metrics.base import Metric
from rayfl.metrics.loss import Loss, Perplexity
from rayfl.metrics.regression import R2, MeanAbsoluteError
from rayfl.network import Network
from rayfl.settings import unused_with
from rayfl.tasks.base import Task


class Classification(Task):
    """One class of several for each example, by cross-entropy.

    Targets are integers [batch], outputs are logits [batch, num_classes]. The score is 1 if the largest logit is that
    of the class, otherwise 0.
    """

    name = "classification"

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        losses = functional.cross_entropy(outputs, targets, reduction="none")
        return losses, torch.ones_like(losses)

    def mean_loss(
        self, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        # One operation instead of five, with the same bits; a subclass may have a loss of its own.
        if weights is None and type(self).loss is Classification.loss:
            return functional.cross_entropy(outputs, targets)
        return super().mean_loss(outputs, targets, weights)

    def score(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.argmax(dim=1) == targets).float()

    def default_metrics(self) -> tuple[Metric, ...]:
        return (Loss(), Accuracy())

    def check(self, dataset: Dataset, network: Network) -> None:
        labels = dataset.train.labels
        if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
            cure = "; these look one-hot: give labels.argmax(1), or task='multilabel'" if look_one_hot(labels) else ""
            raise self.misfit(f"one class number for each input, [n]{cure}", dataset)


def look_one_hot(labels: np.ndarray) -> bool:
    """Whether each of the first rows has one 1 and otherwise zeros."""
    labels = labels[:1000]
    return labels.ndim == 2 and bool(((labels == 0) | (labels == 1)).all() and (labels.sum(1) == 1).all())


class Multilabel(Task):
    """Several yes-or-no labels for each example, by the binary cross-entropy of each.

    Targets are 0 or 1 [batch, labels], outputs are logits of the same shape: above 0 means yes. An example's loss is
    the mean over its labels, its score the share of them that is right.
    """

    name = "multilabel"

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        targets = targets.to(outputs.dtype)
        losses = functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(dim=1)
        return losses, torch.ones_like(losses)

    def score(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((outputs > 0) == (targets > 0)).float().mean(dim=1)

    def default_metrics(self) -> tuple[Metric, ...]:
        return (Loss(), Accuracy())

    def num_outputs(self, dataset: Dataset) -> int:
        return dataset.train.labels.shape[-1]

    def check(self, dataset: Dataset, network: Network) -> None:
        splits = (dataset.train.labels, dataset.test.labels)
        if not all(labels.ndim == 2 and are_yes_or_no(labels) for labels in splits):
            raise self.misfit("0 or 1 for each label, [n, labels]", dataset)


def are_yes_or_no(labels: np.ndarray) -> bool:
    """Whether all labels are 0 or 1."""
    return first_row(labels, lambda part: (part != 0) & (part != 1)) is None


class NextToken(Task):
    """The token that follows each token of a sequence, by cross-entropy.

    Targets are tokens [batch, length], negative where nothing is to be predicted; outputs are logits
    [batch, length, tokens]. An example's loss is the sum over its targets, and its count is their number, so a mean is
    one over tokens. The score is the share of tokens whose largest logit is right.
    """

    name = "next-token"

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        counted = (targets >= 0).to(outputs.dtype)
        classes = targets.clamp(min=0).flatten(0, 1)
        losses = functional.cross_entropy(outputs.flatten(0, 1), classes, reduction="none").view_as(counted)
        return (losses * counted).sum(dim=1), counted.sum(dim=1)

    def score(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        right = (outputs.argmax(dim=-1) == targets).float().sum(dim=1)
        return right / (targets >= 0).sum(dim=1).clamp(min=1)

    def default_metrics(self) -> tuple[Metric, ...]:
        return (Loss(), Accuracy(), Perplexity())

    def output_shape(self, dataset: Dataset) -> tuple[int, ...]:
        return (*dataset.input_shape, self.num_outputs(dataset))

    def check(self, dataset: Dataset, network: Network) -> None:
        for examples in (dataset.train, dataset.test):
            labels = examples.labels
            if labels.shape != examples.inputs.shape or not np.issubdtype(labels.dtype, np.integer):
                raise self.misfit(
                    f"tokens of the shape of the inputs, [{', '.join(['n', *map(str, dataset.input_shape)])}]", dataset
                )
            row = first_row(labels, lambda part: part >= dataset.num_classes)
            if row is not None:
                raise self.misfit(f"tokens below {dataset.num_classes} (row {row} has a larger one)", dataset)


class Regression(Task):
    """Numbers for each example, by a squared, an absolute or a Huber error.

    Targets and outputs are numbers [batch, outputs]. An example's loss is the mean error of its outputs: (o - t)^2,
    |o - t|, or Huber's, which is (o - t)^2 / 2 up to |o - t| = delta and delta (|o - t| - delta / 2) beyond (Huber,
    Robust Estimation of a Location Parameter, 1964). The score is 1 / (1 + loss).
    """

    name = "regression"
    error: Literal["squared", "absolute", "huber"] = Field(default="squared", description="error of an output")
    delta: float = Field(
        default=1.0,
        gt=0,
        description="distance from which Huber's error grows linearly",
        json_schema_extra=unused_with(error=["squared", "absolute"]),
    )

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        targets = targets.to(outputs.dtype)
        if self.error == "huber":
            errors = functional.huber_loss(outputs, targets, reduction="none", delta=self.delta)
        else:
            errors = (outputs - targets).square() if self.error == "squared" else (outputs - targets).abs()
        losses = errors.flatten(1).mean(dim=1)
        return losses, torch.ones_like(losses)

    def score(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 1 / (1 + self.loss(outputs, targets)[0])

    def default_metrics(self) -> tuple[Metric, ...]:
        return (Loss(), MeanAbsoluteError(), R2())

    def num_outputs(self, dataset: Dataset) -> int:
        return dataset.train.labels.shape[-1]

    def check(self, dataset: Dataset, network: Network) -> None:
        if dataset.train.labels.ndim != 2:
            raise self.misfit("numbers [n, outputs], also for one output", dataset)


def task_for(dataset: Dataset) -> Task:
    """The default task for the shape and the type of the data's targets; classification for one class each.

    Raise RayflError for whole numbers [n, outputs] that are not 0 and 1: they may be classes, or numbers to predict.
    """
    labels = dataset.train.labels
    if dataset.targets is not None:
        raise RayflError(
            f"an example of dataset {dataset.name!r} has several targets, {dataset.targets}; give a task of your own, "
            "whose loss gets all"
        )
    if dataset.has_classes or look_one_hot(labels):
        return Classification()
    if dataset.kind == "text" and labels.shape == dataset.train.inputs.shape:
        return NextToken()
    if np.issubdtype(labels.dtype, np.integer):
        if are_yes_or_no(labels):
            return Multilabel()
        if labels.ndim == 2:
            cure = "labels[:, 0]" if labels.shape[1] == 1 else "one an example"
            raise RayflError(
                f"{dataset.train.place or dataset.name} has labels [n, {labels.shape[1]}] that are whole numbers and "
                f"not only 0 and 1: if they are classes, give {cure}, [n]; to predict numbers, set task='regression'"
            )
    return Regression()


def with_task(table: Mapping[str, object], dataset: Dataset) -> dict[str, object]:
    """The table of an experiment, in which a task that follows from the data is written."""
    return {**table, "task": table.get("task") or task_for(dataset).to_table()}

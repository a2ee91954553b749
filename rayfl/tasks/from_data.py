"""The task of an experiment that names none."""

import numpy as np

from rayfl.data.datasets import Dataset
from rayfl.tasks.base import Task
from rayfl.tasks.supervised import Classification, Multilabel, NextToken, Regression, are_yes_or_no, look_one_hot


def task_for(dataset: Dataset) -> Task:
    """The task by the shape and the type of the data's targets; classification for one class each."""
    labels = dataset.train.labels
    if dataset.has_classes or look_one_hot(labels):
        return Classification()
    if dataset.kind == "text" and labels.shape == dataset.train.inputs.shape:
        return NextToken()
    return Multilabel() if np.issubdtype(labels.dtype, np.integer) and are_yes_or_no(labels) else Regression()

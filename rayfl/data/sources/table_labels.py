"""The labels of a table: class numbers, or names, with sentences for numbers that are neither."""

from logging import WARNING

import numpy as np

from rayfl.data.sources.csv_files import GAPS
from rayfl.data.sources.table_columns import TableColumns, TableSource
from rayfl.errors import RayflError, log_once
from rayfl.settings import shown

_MANY_CLASSES, _FEW_ROWS = 20, 5
"""More classes than this, of fewer rows each than this, are noted: they may be numbers to predict."""


def labels_of(source: TableSource, columns: TableColumns, train: TableColumns, of_lists: str = "") -> np.ndarray:
    """The label of each row: class numbers of the `train` table, or names. Raise RayflError for other numbers.

    of_lists: what to do about lists, see `TableColumns.column`.
    """
    if columns is not train and source.labels in train.kinds and source.labels not in columns.kinds:
        raise RayflError(
            f"the test split of {columns.path} has no column {source.labels!r}, so that nothing can be tested on it; "
            "name the train split alone, of which data.test_share is held out"
        )
    labels = columns.column(source.labels, of_lists)
    if labels.dtype.kind == "f" and (np.isfinite(labels) & (labels == np.floor(labels))).all():
        labels = labels.astype(np.int64)
    if source.named_labels:
        return labels.astype(str).astype(object)
    if labels.dtype.kind not in "iuf":
        for word in sorted({*GAPS} & {*labels.tolist()}):
            log_once(
                WARNING,
                f"{columns.path} has the class {word!r} in column {source.labels!r}; if it says that there is no "
                "label, leave these rows out (of a table: data.missing='drop')",
            )
        return labels
    targets = ""
    if hasattr(source, "targets"):
        targets = f"; if they are numbers to predict, give data.targets=[{source.labels!r}]"
    if len(wrong := np.flatnonzero((labels < 0) | (labels != np.floor(labels)))):
        unknown = "; where -1 says that nobody knows the label, give other rows to test on" if -1 in labels else ""
        raise RayflError(
            f"{columns.path} has the {'train' if columns is train else 'test'} label {labels[wrong[0]]} in column "
            f"{source.labels!r} of row {wrong[0]} (counted from 0); "
            "labels are whole numbers from 0, or the names of classes: if these are names, set data.named_labels=true"
            f"{targets}{unknown}"
        )
    num_classes = len(np.unique(labels))
    if num_classes > _MANY_CLASSES and len(labels) < _FEW_ROWS * num_classes:
        log_once(
            WARNING,
            f"{columns.path} has {num_classes} classes in the {len(labels)} rows of column {source.labels!r}{targets}",
        )
    return _numbered_alike(source.labels, labels, columns, train)


def _numbered_alike(name: str, labels: np.ndarray, columns: TableColumns, train: TableColumns) -> np.ndarray:
    """Class numbers by the order of the class names that the `train` table has; the table's own order may differ."""
    names, of_train = columns.class_names(name), train.class_names(name)
    if names == of_train or not names or not of_train:
        return labels
    if strange := [label for label in np.unique(labels) if label >= len(names) or names[label] not in of_train]:
        row = int(np.flatnonzero(labels == strange[0])[0])
        what = shown(names[strange[0]]) if strange[0] < len(names) else strange[0]
        raise RayflError(
            f"{columns.path} has the class {what} (row {row}, counted from 0), and the classes of train are called "
            f"{shown([*of_train])}; give both splits the same class names"
        )
    log_once(WARNING, f"{columns.path} numbers its classes in another order than train; the names of classes decide")
    numbers = np.array([of_train.index(class_name) if class_name in of_train else -1 for class_name in names])
    return numbers[labels]

"""A Hugging Face dataset on disk, as `datasets.Dataset.save_to_disk` writes it."""

from typing import Any

import numpy as np
from pydantic import Field

from rayfl.data.datasets import Dataset, Samples, Source
from rayfl.data.sources.conversion import Kind, dataset, next_tokens
from rayfl.data.sources.fetch import import_optional
from rayfl.errors import RayflError, did_you_mean
from rayfl.limits.regular_files import expanded


class HuggingFace(Source):
    """A dataset on disk with a column of inputs (images, or lists of numbers) and one of labels. Needs `datasets`.

    Labels are classes, or lists of numbers to predict. With kind = "text" the column may be missing: the label of each
    token is then the next one.
    `train` and `test` name the splits to use. If the dataset has no splits, a share is held out.
    """

    name = "huggingface"
    path: str = Field(min_length=1, examples=["my_dataset"], description="the folder that save_to_disk wrote")
    inputs: str = Field(default="image", description="the column of inputs")
    labels: str = Field(default="label", description="the column of labels")
    owners: str | None = Field(default=None, description="the column with the owner of each sample")
    train: str = Field(default="train", description="the split to train on")
    test: str = Field(default="test", description="the split to test on; if it is missing, a share is held out")
    kind: Kind = Field(default="auto", description="image, vector or text; auto: by the type of the inputs")
    test_share: float = Field(default=0.2, gt=0, lt=1, description="share that is held out if there is no test split")

    def load(self) -> Dataset:
        """Load the dataset. Raise RayflError if the folder, a split or a column is missing."""
        datasets = import_optional("datasets", "huggingface", "data 'huggingface'")
        folder = expanded(self.path)
        try:
            found = datasets.load_from_disk(str(folder))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            raise RayflError(
                f"{self.path} is no dataset on disk ({reason}); give data.path a folder of save_to_disk"
            ) from None
        if not isinstance(found, dict):
            return dataset(self.name, self.path, self._rows(found), None, self.test_share, self.kind)
        if self.train not in found:
            raise RayflError(f"{self.path} has no split {self.train!r}: {did_you_mean(self.train, found)}")
        test = self._rows(found[self.test]) if self.test in found else None
        return dataset(self.name, self.path, self._rows(found[self.train]), test, self.test_share, self.kind)

    # Any: a dataset of Hugging Face, which is an optional package.
    def _rows(self, table: Any) -> Samples:
        columns = table.column_names
        follows = self.kind == "text" and self.labels not in columns and not self.is_given("labels")
        for name in (self.inputs, *([] if follows else [self.labels]), *([self.owners] if self.owners else [])):
            if name not in columns:
                raise RayflError(f"{self.path} has no column {name!r}: {did_you_mean(name, columns)}")
        samples = [np.asarray(value) for value in table[self.inputs]]
        if len({sample.shape for sample in samples}) > 1:
            shapes = sorted({str(list(sample.shape)) for sample in samples})
            raise RayflError(f"{self.path} has inputs of the shapes {' and '.join(shapes[:2])}; give all one shape")
        owners = None if self.owners is None else np.asarray(table[self.owners])
        inputs = np.stack(samples)
        labels = next_tokens(inputs) if follows else np.asarray(table[self.labels])
        return Samples(inputs, labels, owners)

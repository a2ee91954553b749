"""The inputs of a run's final models, which stand beside their weights: shape, preprocessing, classes, digest.

With them a model is built and used without the data.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, model_validator

from rayfl.determinism.process import Precision
from rayfl.errors import RayflError, reason
from rayfl.limits.json_files import read_json
from rayfl.run_directory.description import is_run, read_experiment
from rayfl.run_directory.disk import write_json
from rayfl.run_directory.part import Part
from rayfl.settings import Settings

# A list of runs loads no torch.
if TYPE_CHECKING:
    from rayfl.data.datasets import Dataset

PART = Part(
    (r"models/inputs\.json",),
    {
        "`models/inputs.json`": "what the models take and return: the shape of an input, how pixels are scaled, the "
        "number of classes, and the digest of the data"
    },
)
MOST_ENTRIES = 1 << 40
"""The most numbers of an input."""


class ModelInputs(Settings):
    """The content of models/inputs.json."""

    dataset: str
    kind: str = Field(description="image, vector or text, as `Dataset.kind`")
    input_shape: tuple[Annotated[int, Field(ge=1)], ...] = Field(description="shape of one input")
    num_classes: int = Field(ge=1)
    has_classes: bool = Field(default=True, description="whether an input has one class, as `Dataset.has_classes`")
    mean: tuple[float, ...] = Field(description="of each channel of images, on the [0, 1] scale")
    std: tuple[Annotated[float, Field(gt=0)], ...] = Field(description="the same")
    white: float = Field(gt=0, description="the grey value that counts as 1")
    vocabulary: int | None = Field(description="number of different tokens, if the data give it")
    precision: Precision = Field(description="runtime.precision")
    digest: Mapping[str, str] | str | None = Field(description="data.digest of experiment.json")

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if math.prod(self.input_shape) > MOST_ENTRIES:
            raise RayflError(f"={list(self.input_shape)} has more than {MOST_ENTRIES} entries", ("input_shape",))
        sizes = {len(self.mean), len(self.std)}
        if self.kind == "image" and sizes not in ({1}, set(self.input_shape[:1])):
            given = f"={list(self.mean)} and std={list(self.std)}"
            raise RayflError(f"{given} are not one value each for {self.input_shape[0]} channels", ("mean",))
        return self

    def without_samples(self) -> "Dataset":
        """The dataset that the models were trained on, without its samples."""
        import numpy as np

        from rayfl.data.datasets import Dataset, Samples

        none = Samples(np.empty((0, *self.input_shape), np.uint8), np.empty(0, np.int64))
        kept = self.model_dump(include={"num_classes", "kind", "mean", "std", "white", "vocabulary"})
        return Dataset(self.dataset, none, none, **kept)


def write_model_inputs(directory: Path, dataset: "Dataset", precision: Precision) -> Path:
    """Write what the final models of the run in `directory` take; returns the file. OSError if the disk refuses."""
    data = read_experiment(directory).get("data") if is_run(directory) else None
    # Somebody's own source may have numbers of numpy.
    inputs = {
        "dataset": str(dataset.name),
        "kind": str(dataset.kind),
        "input_shape": [int(side) for side in dataset.input_shape],
        "num_classes": int(dataset.num_classes),
        "has_classes": dataset.has_classes,
        "mean": [float(one) for one in dataset.mean],
        "std": [float(one) for one in dataset.std],
        "white": float(dataset.white),
        "vocabulary": None if dataset.vocabulary is None else int(dataset.vocabulary),
        "precision": precision,
        "digest": data.get("digest") if isinstance(data, Mapping) else None,
    }
    path = directory / "models" / "inputs.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, inputs)
    return path


def read_model_inputs(directory: Path) -> ModelInputs | None:
    """What `write_model_inputs` wrote; None if an older rayfl wrote the models. Raise RayflError if it is damaged."""
    path = directory / "models" / "inputs.json"
    if not path.exists():
        return None
    try:
        return ModelInputs(**read_json(path))
    except (OSError, ValueError) as error:
        raise RayflError(f"{path} cannot be read ({reason(error)}): restore it, or run the experiment again") from None

"""The final models of a run, as safetensors files, and their inputs: shape, preprocessing, classes, digest.

models/NAME.safetensors, or models/NAME-0000.safetensors, models/NAME-0001.safetensors, ... for a large tree.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from safetensors import SafetensorError, safe_open

from rayfl.determinism.process import ArithmeticPrecision
from rayfl.errors import RayflError
from rayfl.limits.regular_files import reading, require_regular
from rayfl.run_directory.description import is_run, read_as, read_experiment
from rayfl.run_directory.disk import RunFiles, portions, safetensors_errors, write_json, write_whole
from rayfl.settings import Settings

# A list of runs loads no torch.
if TYPE_CHECKING:
    from torch import Tensor

    from rayfl.data.datasets import Dataset

PART = RunFiles(
    (r"models/(global|personal)(-[0-9]{4,})?\.safetensors", r"models/inputs\.json"),
    {
        "`models/*.safetensors`": "the final global model, the final personal models; personal ones of more than "
        "128 MiB in several files, `personal-0000.safetensors` and so on",
        "`models/inputs.json`": "what the models take and return: the shape of an input, how pixels are scaled, the "
        "classes and their names, the names of a table's inputs, and the digest of the data",
    },
)
CONSTANTS = "constants"
"""In the keys of personal models, in place of a client's number: parameters and buffers that all clients share."""
MODEL_BYTES = 128 << 20
"""A file of final models is closed when it is larger."""


def save_model(directory: Path, name: str, parts: Iterable[Mapping[str, "Tensor"]]) -> list[Path]:
    """Write a tree of tensors under `name`; returns the paths of its files.

    Raise OSError if writing fails. The tree comes in parts that have different keys. If it is larger than
    `MODEL_BYTES` it goes to several files of whole parts, so that no more than one file's content is in memory.
    """
    import torch
    from safetensors.torch import save_file

    def save(path: Path, tensors: Mapping[str, "Tensor"]) -> None:
        # Clones, because safetensors refuses tensors that share memory.
        clones = {
            key: value.detach().cpu().clone(memory_format=torch.contiguous_format) for key, value in tensors.items()
        }
        with safetensors_errors():
            save_file(clones, path)

    folder = directory / "models"
    folder.mkdir(parents=True, exist_ok=True)
    single = folder / f"{name}.safetensors"
    earlier = model_files(directory, name)
    paths = list[Path]()
    for tensors in portions(parts, lambda part: sum(tensor.nbytes for tensor in part.values()), MODEL_BYTES):
        paths.append(folder / f"{name}-{len(paths):04d}.safetensors")
        write_whole(paths[-1], lambda partial, tensors=tensors: save(partial, tensors))
    if len(paths) == 1:
        paths = [paths[0].replace(single)]
    for path in {single, *earlier} - set(paths):
        path.unlink(missing_ok=True)
    return paths


def model_files(directory: Path, name: str) -> list[Path]:
    """The files that `save_model` wrote under `name`, in their order; [] if there are none."""
    single = directory / "models" / f"{name}.safetensors"
    shards = sorted(
        single.parent.glob(f"{name}-[0-9][0-9][0-9][0-9]*.safetensors"), key=lambda path: (len(path.name), path.name)
    )
    return [single] if single.is_file() else shards


def load_model(directory: Path, name: str, prefix: str = "") -> dict[str, "Tensor"]:
    """The tree that `save_model` wrote under `name`, or the part of it whose keys begin with `prefix`.

    Raise RayflError if there is none, or if a file is damaged.
    """
    paths = model_files(directory, name)
    if not paths:
        raise RayflError(
            f"{directory}/models/{name}.safetensors does not exist: the run has saved no model of that name"
        )
    tensors: dict[str, Tensor] = {}
    for path in paths:
        with reading(path, "restore it, or run the experiment again", SafetensorError):
            require_regular(path)
            with safe_open(path, "pt") as file:
                tensors |= {key: file.get_tensor(key) for key in file.keys() if key.startswith(prefix)}  # noqa: SIM118
    return tensors


class SavedLayout(Settings):
    """`InputLayout`, which loads torch."""

    names: tuple[str, ...]
    shapes: tuple[tuple[Annotated[int, Field(ge=0)], ...], ...]
    kinds: str = Field(pattern="[biuf]+")


class ModelInputs(Settings):
    """The content of models/inputs.json, with which a model is built and used without the data."""

    dataset: str
    kind: str = Field(description="image, vector or text, as `Dataset.kind`")
    input_shape: tuple[Annotated[int, Field(ge=1)], ...] = Field(description="shape of one input")
    num_classes: int = Field(ge=1)
    has_classes: bool = Field(default=True, description="whether an input has one class, as `Dataset.has_classes`")
    mean: tuple[float, ...] = Field(
        description="of each channel of images, on the [0, 1] scale, or of each input of a table"
    )
    std: tuple[Annotated[float, Field(gt=0)], ...] = Field(description="the same")
    white: float = Field(gt=0, description="the grey value that counts as 1")
    vocabulary: int | None = Field(description="number of different tokens, if the data give it")
    classes: tuple[str, ...] = Field(default=(), description="names of the classes, as `Dataset.classes`")
    columns: tuple[str, ...] = Field(default=(), description="names of a table's inputs, as `Dataset.input_names`")
    layout: SavedLayout | None = Field(default=None, description="of several inputs, as `Dataset.layout`")
    precision: ArithmeticPrecision = Field(description="runtime.precision")
    digest: Mapping[str, str] | str | None = Field(description="data.digest of experiment.json")
    round: int | None = Field(default=None, description="the round of the models, with stop.keep='best'")

    def without_samples(self) -> "Dataset":
        """The dataset that the models were trained on, without its examples."""
        import numpy as np

        from rayfl.data.datasets import Dataset, Examples
        from rayfl.data.sources.several_inputs import InputLayout

        layout = None if self.layout is None else InputLayout(**self.layout.model_dump())
        none = Examples(np.empty((0, *self.input_shape), np.uint8), np.empty(0, np.int64))
        kept = self.model_dump(include={"num_classes", "kind", "mean", "std", "white", "vocabulary", "classes"})
        return Dataset(self.dataset, none, none, input_names=self.columns, layout=layout, **kept)


def write_model_inputs(
    directory: Path, dataset: "Dataset", precision: ArithmeticPrecision, of_round: int | None = None
) -> Path:
    """Write what the saved models of the run in `directory` take; returns the file. OSError if the disk refuses.

    of_round: the round that they are from, if it need not be the last one.
    """
    data = read_experiment(directory).get("data") if is_run(directory) else None
    # Somebody's own source may have numbers of numpy.
    inputs = {
        "dataset": str(dataset.name),
        "kind": str(dataset.kind),
        "input_shape": [int(side) for side in dataset.input_shape],
        "num_classes": int(dataset.num_classes),
        "has_classes": dataset.has_classes,
        "mean": [float(value) for value in dataset.mean],
        "std": [float(value) for value in dataset.std],
        "white": float(dataset.white),
        "vocabulary": None if dataset.vocabulary is None else int(dataset.vocabulary),
        "classes": [str(name) for name in dataset.classes],
        "columns": [str(name) for name in dataset.input_names],
        "layout": None if dataset.layout is None else asdict(dataset.layout),
        "precision": precision,
        "digest": data.get("digest") if isinstance(data, Mapping) else None,
        **({} if of_round is None else {"round": of_round}),
    }
    path = directory / "models" / "inputs.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, inputs)
    return path


def read_model_inputs(directory: Path) -> ModelInputs:
    """What `write_model_inputs` wrote. Raise RayflError if it is missing or damaged."""
    return read_as(ModelInputs, directory / "models" / "inputs.json")

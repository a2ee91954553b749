"""The final models of a run, as safetensors files.

models/NAME.safetensors, or models/NAME-0000.safetensors, models/NAME-0001.safetensors, ... for a large tree.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from rayfl.errors import RayflError
from rayfl.limits.regular_files import require_regular
from rayfl.run_directory.disk import portions, safetensors_errors, write_whole
from rayfl.run_directory.part import Part

# A list of runs loads no torch.
if TYPE_CHECKING:
    from torch import Tensor

PART = Part(
    (r"models/(global|personal)(-[0-9]{4,})?\.safetensors",),
    {
        "`models/*.safetensors`": "the final global model, the final personal models; personal ones of more than "
        "128 MiB in several files, `personal-0000.safetensors` and so on"
    },
)
CONSTANTS = "constants"
"""Where a client's number stands in the keys of personal models: the parameters and buffers that all have in common."""
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
        own = {key: value.detach().cpu().clone(memory_format=torch.contiguous_format) for key, value in tensors.items()}
        with safetensors_errors():
            save_file(own, path)

    folder = directory / "models"
    folder.mkdir(parents=True, exist_ok=True)
    whole, earlier, paths = folder / f"{name}.safetensors", model_files(directory, name), list[Path]()
    for tensors in portions(parts, lambda part: sum(tensor.nbytes for tensor in part.values()), MODEL_BYTES):
        paths.append(folder / f"{name}-{len(paths):04d}.safetensors")
        write_whole(paths[-1], lambda partial, tensors=tensors: save(partial, tensors))
    if len(paths) == 1:
        paths = [paths[0].replace(whole)]
    for path in {whole, *earlier} - set(paths):
        path.unlink(missing_ok=True)
    return paths


def model_files(directory: Path, name: str) -> list[Path]:
    """The files that `save_model` wrote under `name`, in their order; [] if there are none."""
    whole = directory / "models" / f"{name}.safetensors"
    shards = sorted(
        whole.parent.glob(f"{name}-[0-9][0-9][0-9][0-9]*.safetensors"), key=lambda path: (len(path.name), path.name)
    )
    return [whole] if whole.is_file() else shards


def model_keys(directory: Path, name: str) -> list[str]:
    """The keys of the tree that `save_model` wrote under `name`. Raise RayflError if there is none."""
    return [key for keys in _read_models(directory, name, lambda file: list(file.keys())) for key in keys]


def load_model(directory: Path, name: str, prefix: str = "") -> dict[str, "Tensor"]:
    """The tree that `save_model` wrote under `name`, or the part of it whose keys begin with `prefix`.

    Raise RayflError if there is none.
    """

    # Any: safetensors' reader has no public type.
    def chosen(file: Any) -> dict[str, "Tensor"]:
        return {key: file.get_tensor(key) for key in file.keys() if key.startswith(prefix)}  # noqa: SIM118

    return {key: tensor for found in _read_models(directory, name, chosen) for key, tensor in found.items()}


# Any: safetensors' reader, and what is read.
def _read_models(directory: Path, name: str, read: Callable[[Any], Any]) -> Iterator[Any]:
    """Apply `read` to each file under `name`. Raise RayflError if there is no file, or one is damaged."""
    paths = model_files(directory, name)
    if not paths:
        path = directory / "models" / f"{name}.safetensors"
        raise RayflError(f"{path} does not exist: the run has saved no model of that name")
    for path in paths:
        try:
            require_regular(path)
            with safe_open(path, "pt") as file:
                found = read(file)
        except (OSError, SafetensorError) as error:
            raise RayflError(f"{path} cannot be read ({error}): restore it, or run the experiment again") from None
        yield found

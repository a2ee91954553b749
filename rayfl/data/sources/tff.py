"""The HDF5 files of TensorFlow Federated: `examples` has one group per client with one array per feature.

h5py opens them, which is an optional dependency: `pip install 'rayfl[tff]'`.
"""

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rayfl.errors import RayflError
from rayfl.limits import memory
from rayfl.limits.regular_files import require_regular


def tff_files(folder: Path, stem: str) -> list[Path]:
    """STEM_train.h5 and STEM_test.h5 in `folder`; [] unless both are there."""
    paths = [folder / f"{stem}_{split}.h5" for split in ("train", "test")]
    return paths if all(path.is_file() for path in paths) else []


def read_tff(path: Path, *features: str) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Each client's name and its arrays of the given features, in the order of the names.

    RayflError if h5py is not installed or the file is not one of TensorFlow Federated.
    """
    h5py = _h5py(path)
    try:
        require_regular(path)
        with h5py.File(path, "r") as file:
            yield from clients(file["examples"], *features)
    except (OSError, KeyError, AttributeError, TypeError, RuntimeError) as error:
        wanted = ", ".join(f"examples/CLIENT/{feature}" for feature in features)
        raise RayflError(f"{path} is not an HDF5 file with {wanted} ({error}): fetch it again") from None


# Any: h5py's groups and datasets, or anything else that is indexed like them.
def clients(examples: Mapping[str, Mapping[str, Any]], *features: str) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Each client's name and arrays, as `read_tff` yields them, from the open group `examples`."""
    for name in sorted(examples):
        arrays = [examples[name][feature] for feature in features]
        # A dataset of HDF5 that is filled with one value takes no room in its file.
        memory.require(sum(getattr(array, "nbytes", 0) for array in arrays), f"client {name!r}", "fetch the file again")
        yield name, [np.asarray(array[()]) for array in arrays]


# Any: the h5py package, which need not be there.
def _h5py(path: Path) -> Any:
    try:
        return importlib.import_module("h5py")
    except ImportError:
        raise RayflError(f"{path} is read by h5py, which is not installed: run `pip install 'rayfl[tff]'`") from None

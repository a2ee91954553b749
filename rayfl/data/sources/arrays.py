"""A user's own arrays: numpy files, or arrays in memory from Python."""

import hashlib
import zipfile
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import PrivateAttr

from rayfl.choices import plugins
from rayfl.data.datasets import Dataset, Examples, Field, RayflError, Source
from rayfl.data.sources.conversion import InputKind, dataset, next_tokens
from rayfl.data.sources.several_inputs import InputLayout, are_several
from rayfl.data.sources.table_files import OTHER_FORMATS, form
from rayfl.limits.npy import read_npy, read_npz
from rayfl.limits.regular_files import expanded, reading
from rayfl.settings import listed, shown

NAMES = ("inputs", "labels", "owners", "test_inputs", "test_labels", "test_owners")
"""The names of arrays that are read; the first two are required."""
PATTERNS = (*NAMES, "inputs_*", "test_inputs_*", "labels_*", "test_labels_*")
"""The names of arrays that are read, with those of one of several inputs."""
_OTHER_NAMES = {
    "inputs": ("x_train", "X_train", "train_images", "train_x"),
    "labels": ("y_train", "Y_train", "train_labels", "train_y"),
    "test_inputs": ("x_test", "X_test", "test_images", "test_x"),
    "test_labels": ("y_test", "Y_test", "test_labels", "test_y"),
}
"""Names that Keras', MedMNIST's and other people's archives give to these arrays, if they have not the first ones."""
RowLayouts = tuple[InputLayout | None, InputLayout | None]
"""Where several inputs, and several targets, of an example are in their rows."""
_GIVE = "give data.path an .npz file, or a folder of .npy files"


class ArrayFiles(Source):
    """An .npz file or a folder of .npy files: inputs, labels, owners, test_inputs, test_labels, test_owners.

    The names of Keras' and MedMNIST's archives are known, too (x_train, y_test, train_images, ...). All but
    inputs and labels may be missing; without test_inputs a share of the examples is held out. Whole bytes with three or
    four axes are images, other whole numbers with two are tokens. Nothing pickled is read.

    Examples may have several inputs: arrays inputs_0, inputs_1, ... (a tuple), or inputs_image, inputs_age, ... (by
    name), and the same after test_; and several targets: labels_0, ... or labels_age, ..., for a task of your own.

    Labels are classes [n], numbers [n, outputs], 0 and 1 [n, labels], or tokens [n, length]. With kind = "text" they
    may be missing: the label of each token is then the next one.
    """

    name = "arrays"
    path: str = Field(min_length=1, examples=["my_data.npz"], description="an .npz file, or a folder of .npy files")
    kind: InputKind = Field(default="auto", description="image, vector or text; auto: by the type of the inputs")
    test_share: float = Field(default=0.2, gt=0, lt=1, description="share that is held out if there is no test split")

    def files(self) -> list[Path]:
        """The archive, or the arrays that count in the folder."""
        path = expanded(self.path)
        return _npy_files(path) if path.is_dir() else [path]

    def load(self) -> Dataset:
        """Load the dataset. Raise RayflError if arrays are missing or have wrong values."""
        arrays = _gathered(_read(expanded(self.path)))
        layouts = _pack(self.path, arrays)
        return _dataset(self.name, self.path, arrays, self.test_share, self.kind, layouts)


class Arrays(Source):
    """Arrays in memory, given from Python; each owner is a natural client. A run of them cannot be resumed."""

    inputs: np.ndarray
    labels: np.ndarray
    test_inputs: np.ndarray | None = None
    test_labels: np.ndarray | None = None
    owners: np.ndarray | None = None
    test_owners: np.ndarray | None = None
    kind: InputKind = "auto"
    test_share: float = Field(default=0.2, gt=0, lt=1)
    _layouts: RowLayouts = PrivateAttr(default=(None, None))
    _input_names: tuple[str, ...] = PrivateAttr(default=())

    # Any: arrays, and the options by name.
    def __init__(
        self, inputs: Any, labels: Any, test_inputs: Any = None, test_labels: Any = None, **options: Any
    ) -> None:
        """`options`: owners, test_owners, kind, test_share. Lists, tensors and pandas' objects become arrays; the
        columns of test_inputs are matched by their names if both are data frames.
        """
        names = _column_names(inputs)
        if names and _column_names(test_inputs):
            if lacking := set(names) - set(_column_names(test_inputs)):
                raise RayflError(f"the array data have no column {min(lacking)!r} in test_inputs, and one in inputs")
            test_inputs = test_inputs[list(inputs.columns)]
        arguments = {
            "inputs": inputs,
            "labels": labels,
            "test_inputs": test_inputs,
            "test_labels": test_labels,
            **options,
        }
        layouts = _pack("the array data", arguments)
        try:
            arrays = {name: _as_array(name, arguments[name]) for name in NAMES if arguments.get(name) is not None}
        except RayflError:
            raise
        except (ValueError, TypeError):
            raise RayflError("the array data have rows of several shapes; give all one shape") from None
        super().__init__(**{**arguments, **arrays})
        self._layouts = layouts
        self._input_names = names

    def _arrays(self) -> dict[str, np.ndarray]:
        return {name: array for name in NAMES if (array := getattr(self, name)) is not None}

    # Any: a table of an experiment.
    def to_table(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for key, array in self._arrays().items():
            digest.update(f"{key} {array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        name = f"{plugins.MEMORY}data of {len(self.inputs)} arrays"
        return {"name": name, "digest": digest.hexdigest()[:12], "kind": self.kind, "test_share": self.test_share}

    def load(self) -> Dataset:
        """Make the dataset. Raise RayflError if the arrays have wrong values."""
        data = _dataset("arrays", "the array data", self._arrays(), self.test_share, self.kind, self._layouts)
        return replace(data, input_names=self._input_names)


# Any: whatever a user gives as inputs.
def _column_names(inputs: Any) -> tuple[str, ...]:
    """The names of a data frame's columns; () for other inputs, and where names are numbers or the same."""
    names = list(getattr(inputs, "columns", ()))
    are_names = all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
    return tuple(names) if are_names else ()


# Any: what numpy turns into an array.
def _as_array(name: str, values: Any) -> np.ndarray:
    """Numbers or texts as an array; of tensors without their gradients, and bfloat16 as float32."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    array = np.asarray(values)
    if array.dtype != object or not name.endswith("inputs"):
        return array
    # pandas' columns of numbers with gaps are objects.
    from pandas import isna

    if (gaps := isna(array)).any():
        row = int(np.argwhere(gaps)[0][0])
        raise RayflError(f"the array data have no number in row {row} (counted from 0) of {name}; fill it, or drop it")
    return np.array(array.tolist())


def _read(path: Path) -> dict[str, np.ndarray]:
    """The arrays that an .npz file or a folder has and that count. Raise RayflError if it cannot be read."""
    if not path.is_dir():
        if path.suffix == ".npy":
            raise RayflError(f"{path} is one array, and labels are another; {_GIVE}, with inputs and labels")
        if path.suffix != ".npz" and (cure := OTHER_FORMATS.get(path.suffix)):
            raise RayflError(f"data.path='{path}' is {cure}")
        if form(path) is not None:
            raise RayflError(f"data.path='{path}' is a table; set data.name='table', or {_GIVE}")
        with reading(path, _GIVE):
            arrays = read_npz(path, PATTERNS)
            is_given = {name for name in _OTHER_NAMES if any(given.startswith(name) for given in arrays)}
            lacking = {name: others for name, others in _OTHER_NAMES.items() if name not in is_given}
            renamed = read_npz(path, [*chain.from_iterable(lacking.values())])
        for name, others in lacking.items():
            arrays |= dict([(name, renamed[other]) for other in others if other in renamed][:1])
        if "labels" in lacking:
            arrays = {name: _flat(name, array) for name, array in arrays.items()}
        if not arrays:
            with zipfile.ZipFile(path) as archive:
                present = shown([name.removesuffix(".npy") for name in archive.namelist()])
            raise RayflError(f"{path} has the arrays {present}, and the names that count are {listed([*NAMES], 'and')}")
        return arrays
    arrays = {}
    for file in _npy_files(path):
        with reading(file, "write numbers or texts with numpy.save"):
            arrays[file.stem] = read_npy(file)
    return arrays


def _flat(name: str, array: np.ndarray) -> np.ndarray:
    """The array; of class numbers [n, 1], as Keras and MedMNIST write them, [n]."""
    is_column = name.endswith("labels") and array.ndim == 2 and array.shape[1] == 1 and array.dtype.kind in "iu"
    return array[:, 0] if is_column else array


def _npy_files(folder: Path) -> list[Path]:
    """The arrays that count in a folder."""
    several = [file for pattern in PATTERNS[len(NAMES) :] for file in sorted(folder.glob(f"{pattern}.npy"))]
    return [*(file for name in NAMES if (file := folder / f"{name}.npy").exists()), *several]


def _gathered(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """The arrays, with those of inputs_a, inputs_b, ... as one dictionary, or as a tuple if they are numbered."""
    gathered: dict[str, Any] = {name: array for name, array in arrays.items() if name in NAMES}
    for prefix in (*NAMES[:2], *NAMES[3:5]):
        several = {name.removeprefix(f"{prefix}_"): arrays[name] for name in arrays if name.startswith(f"{prefix}_")}
        if several and all(name.isdecimal() for name in several):
            gathered.setdefault(prefix, tuple(several[name] for name in sorted(several, key=int)))
        elif several:
            gathered.setdefault(prefix, several)
    return gathered


# Any: arrays, or what becomes some.
def _pack(place: str, arrays: dict[str, Any]) -> RowLayouts:
    """Put rows into `arrays` for several inputs or targets, and return their layouts; None if examples have one."""
    layouts = [InputLayout.of(arrays[name]) if are_several(arrays.get(name)) else None for name in NAMES[:2]]
    for layout, names in zip(layouts, (NAMES[0::3], NAMES[1::3]), strict=True):
        for name in names:
            if layout is not None and arrays.get(name) is not None:
                arrays[name] = layout.pack(place, arrays[name])
    return layouts[0], layouts[1]


def _dataset(
    name: str,
    place: str,
    arrays: dict[str, np.ndarray],
    test_share: float,
    kind: InputKind,
    layouts: RowLayouts = (None, None),
) -> Dataset:
    """The dataset of the arrays by name."""
    if kind == "text" and {"labels", "test_labels"}.isdisjoint(arrays):
        tokens = {name: array for name, array in arrays.items() if name.endswith("inputs") and array.ndim == 2}
        arrays = {**arrays, **{name.replace("inputs", "labels"): next_tokens(array) for name, array in tokens.items()}}
    required = NAMES[:2] if {"test_inputs", "test_labels"}.isdisjoint(arrays) else (*NAMES[:2], *NAMES[3:5])
    if missing := [key for key in required if key not in arrays]:
        raise RayflError(f"{place} has no array {missing[0]}; the names that count are {listed([*NAMES], 'and')}")
    train = Examples(arrays["inputs"], arrays["labels"], arrays.get("owners"))
    test = None
    if "test_inputs" in arrays:
        test = Examples(arrays["test_inputs"], arrays["test_labels"], arrays.get("test_owners"))
    layout, targets = layouts
    if layout is None:
        return replace(dataset(name, place, train, test, test_share, kind), targets=targets)
    if kind not in ("auto", "vector"):
        raise RayflError(f"={kind!r} is for a single input, and {place} has several; remove it", ("kind",))
    return replace(dataset(name, place, train, test, test_share, "vector"), layout=layout, targets=targets)

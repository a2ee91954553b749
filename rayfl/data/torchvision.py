"""Imports torchvision only when it is needed (0.9 s and 130 MB), and beside any build of torch.

A CPU build of torch beside the torchvision of PyPI fails at `import torchvision` ("operator torchvision::nms does not
exist"): its compiled operators want CUDA libraries, and the Python side then registers shapes for operators that
nobody defined. Datasets, transforms and models need none of them, so their schemas are enough.
"""

import functools
import importlib
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType

import torch

from rayfl.errors import RayflError

OPERATORS = ("nms", "qnms")
"""Operators that torchvision's Python side needs at import."""


class DefineOperators(MetaPathFinder):
    """Defines the operators when anybody imports torchvision: a user's file, a model's factory, another package."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Find nothing: the finders after this one do."""
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            define_operators()


@functools.cache
def torchvision() -> ModuleType:
    """The torchvision package, ready for use. Raise RayflError if it is not installed."""
    if not define_operators():
        raise RayflError("torchvision is not installed: run `pip install torchvision`")
    return importlib.import_module("torchvision")


@functools.cache
def define_operators() -> bool:
    """Make `import torchvision` possible; returns whether it is installed."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return False
    if not _operators_load(Path(spec.origin).parent):
        # Defining an operator twice is an error, and another package may have defined them already.
        for name in [name for name in OPERATORS if not hasattr(torch.ops.torchvision, name)]:
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return True


def _operators_load(folder: Path) -> bool:
    """Whether torchvision's compiled operators fit this torch; loading them twice does no harm."""
    libraries = [path for path in folder.glob("_C.*") if path.suffix in {".so", ".pyd", ".dylib"}]
    try:
        for library in libraries:
            torch.ops.load_library(library)
    except OSError:
        return False
    return bool(libraries)


if "torchvision" not in sys.modules:
    sys.meta_path.insert(0, DefineOperators())

"""Reads the file of weights that `model.start` names, from which a model starts instead of from random weights."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from rayfl.errors import RayflError, did_you_mean, reason
from rayfl.limits.regular_files import read_bytes
from rayfl.tree import Tree


def read_weights(path: Path, expected: Tree, model: str) -> Tree:
    """The weights in a safetensors file, in the dtypes of `expected`.

    If their names or shapes are not those of `expected`, RayflError names the file and the first weight that differs.
    """
    try:
        found = load(read_bytes(path))
    except OSError as error:
        raise RayflError(f"{path} cannot be read ({reason(error)}); give model.start=FILE") from None
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError):
        raise RayflError(
            f"{path} is no safetensors file of weights; give one, for example a run's models/global.safetensors"
        ) from None
    wrong = _misfit(found, expected)
    if wrong is not None:
        raise RayflError(f"{path} does not fit model {model!r}: {wrong}")
    return {name: found[name].to(tensor.dtype) for name, tensor in expected.items()}


def _misfit(found: Mapping[str, torch.Tensor], expected: Tree) -> str | None:
    """The first difference between a file's weights and the model's, as the end of a sentence; None if they fit."""
    for name, tensor in expected.items():
        if name not in found:
            return f"it has no {name!r} ({did_you_mean(name, sorted(found))})" if found else "it holds nothing"
        given = found[name]
        if given.shape != tensor.shape:
            return f"its {name!r} has the shape {list(given.shape)}, and the model's has {list(tensor.shape)}"
        # Buffers may be whole numbers, or masks of infinities.
        if tensor.is_floating_point() and not given.is_floating_point():
            return (
                f"its {name!r} holds {str(given.dtype).removeprefix('torch.')}, and weights are floating-point numbers"
            )
        if bool(torch.isfinite(tensor).all()) and not bool(torch.isfinite(given.to(tensor.dtype)).all()):
            return f"its {name!r} holds a number that is not finite"
    unknown = next((name for name in sorted(found) if name not in expected), None)
    return None if unknown is None else f"the model has no {unknown!r}"

"""Reads the file of weights that `model.start` names, from which a model starts instead of from random weights."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from rayfl.errors import RayflError, did_you_mean, log
from rayfl.limits.regular_files import reading, require_regular
from rayfl.models.adapters import BASE, LORA, MAGNITUDE, base_weight
from rayfl.tree import Tree


def read_weights(path: Path, expected: Tree, model: str, stored: Mapping[str, str] | None = None) -> Tree:
    """The weights in a file, in the dtypes of `expected`.

    stored: the names in the module's state_dict, where tied weights have several, each with the name of its weight in
    `expected`. The others (non-persistent buffers) may be missing: they stay as they are. If names or shapes in the
    file are others, RayflError names the file and the first weight that differs.
    """
    loaded = _renamed(path, _weights(path), stored or {})
    needed = {name: tensor for name, tensor in expected.items() if name in loaded or _is_stored(name, stored)}
    wrong = _misfit(loaded, needed)
    if wrong is not None:
        raise RayflError(f"{path} does not fit model {model!r}: {wrong}")
    return {**expected, **_copied(loaded, {name: (name, tensor) for name, tensor in needed.items()})}


def read_backbone(
    path: Path, weights: Tree, trained: Collection[str], model: str, stored: Mapping[str, str] | None = None
) -> Tree:
    """`weights` with those that a file has replaced; names in the file are the model's own, without adapters.

    The file may have other weights too, and may lack the parameters in `trained`; the log names both. Raise RayflError
    if it lacks a frozen weight, or if a shape differs. stored: as for `read_weights`, of the model with adapters.
    """
    plain = {name.replace(BASE, "."): weight.replace(BASE, ".") for name, weight in (stored or {}).items()}
    loaded = _renamed(path, _weights(path), plain)
    names = _plain_names(weights)
    missing = [name for name in names if name not in loaded and names[name] in trained]
    expected = {
        name: weights[full]
        for name, full in names.items()
        if name in loaded or (name not in missing and _is_stored(full, stored))
    }
    left = sorted(loaded.keys() - expected.keys())
    wrong = _misfit({name: tensor for name, tensor in loaded.items() if name in expected}, expected)
    if wrong is not None:
        raise RayflError(f"{path} does not fit model {model!r}: {wrong}")
    for what, some in (("starts at random", missing), ("is left over", left)):
        if some:
            log.warning("model.start=%s: %s %s", path, ", ".join(some), what)
    started = _copied(loaded, {names[name]: (name, tensor) for name, tensor in expected.items()})
    return _with_magnitudes({**weights, **started}, weights)


def _plain_names(weights: Tree) -> dict[str, str]:
    """The names of a model's own weights without adapters, each with its name in the adapted model."""
    return {name.replace(BASE, "."): name for name in weights if LORA not in name}


def _with_magnitudes(started: Tree, before: Tree) -> Tree:
    """`started`, in which DoRA's norms are those of its weights; `before` has the norms of its own weights."""
    norms: Tree = {}
    for name in (name for name in started if MAGNITUDE in name):
        layer = base_weight(name)
        of_rows = torch.linalg.vector_norm(before[layer], dim=1)
        # The weights of a Conv1D are [in, out].
        has_rows = of_rows.shape == before[name].shape and torch.allclose(of_rows, before[name])
        norms[name] = torch.linalg.vector_norm(started[layer], dim=1 if has_rows else 0)
    return {**started, **norms}


def _is_stored(name: str, stored: Mapping[str, str] | None) -> bool:
    return stored is None or name in stored.values()


def _renamed(path: Path, loaded: dict[str, torch.Tensor], stored: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """The tensors by the names of the model's weights. Raise RayflError for tied weights that differ."""
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in loaded.items():
        weight = stored.get(name, name)
        if weight in renamed and not torch.equal(renamed[weight], tensor):
            raise RayflError(
                f"{path} has two different tensors for {weight!r}, one of them as {name!r}, and the model has one for "
                "both; correct the file, or do not tie them"
            )
        renamed[weight] = tensor
    return renamed


def _weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors by name in a safetensors file (mapped into memory), or in a file of torch.save."""
    with reading(path, "give model.start=FILE"):
        require_regular(path)
        path.open("rb").close()
        with suppress(SafetensorError, KeyError, TypeError, ValueError, RuntimeError):
            return load_file(path)
    with suppress(Exception):
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        loaded = loaded.get("state_dict", loaded)
        if loaded and all(isinstance(tensor, torch.Tensor) for tensor in loaded.values()):
            return dict(loaded)
    raise RayflError(
        f"{path} is neither a safetensors file of weights nor a state_dict of torch.save; give one, for example "
        "models/global.safetensors of a run"
    )


def _copied(loaded: dict[str, torch.Tensor], targets: Mapping[str, tuple[str, torch.Tensor]]) -> Tree:
    """Copies, in the given types, of tensors that are taken out of `loaded` one after another."""
    return {name: loaded.pop(source).to(like.dtype, copy=True) for name, (source, like) in targets.items()}


def _misfit(loaded: Mapping[str, torch.Tensor], expected: Tree) -> str | None:
    """The first difference between a file's weights and the model's, as the end of a sentence; None if they fit."""
    for name, tensor in expected.items():
        if name not in loaded:
            return f"it has no {name!r} ({did_you_mean(name, sorted(loaded))})" if loaded else "it holds nothing"
        stored = loaded[name]
        if stored.shape != tensor.shape:
            return f"its {name!r} has the shape {list(stored.shape)}, and the model's has {list(tensor.shape)}"
        # Buffers may be whole numbers, or masks of infinities.
        if tensor.is_floating_point() and not stored.is_floating_point():
            return (
                f"its {name!r} holds {str(stored.dtype).removeprefix('torch.')}, and weights are floating-point numbers"
            )
        if bool(torch.isfinite(tensor).all()) and not bool(torch.isfinite(stored.to(tensor.dtype)).all()):
            return f"its {name!r} holds a number that is not finite"
    unknown = next((name for name in sorted(loaded) if name not in expected), None)
    return None if unknown is None else f"the model has no {unknown!r}"

"""Write states to safetensors files and read them. Reading runs no code, so a stranger's run directory is safe.

A file holds several states by name. Its tensors are the arrays of all of them; its metadata says in JSON how they are
nested: {"array": key}, {"bits": key, "shape": [...]}, {"packet": codec, "parts": {name: key}} or
{"tree": {name: ...}}; a codec is {"codec": its class below rayfl.compress, "settings": its fields}.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from rayfl.compress.base import Compressor, Packet
from rayfl.errors import RayflError
from rayfl.limits import json_files
from rayfl.methods.base import Method
from rayfl.run_directory.disk import DamagedFile, safetensors_errors
from rayfl.tree import ArrayTree, PackedBits
from rayfl.untyped import Anything, Foreign, Json

_LAYOUT = "layout"
_CODECS = "rayfl.compress."
"""The package of the classes that a file may name."""


def _describe(leaf: Anything, path: str, arrays: dict[str, np.ndarray]) -> dict[str, Json]:
    """The description of a leaf or a tree at `path`; its arrays are added to `arrays`."""
    match leaf:
        case Mapping():
            return {"tree": {name: _describe(inner, f"{path}/{name}", arrays) for name, inner in leaf.items()}}
        case PackedBits():
            return {"bits": _add(leaf.bits, path, arrays), "shape": list(leaf.shape)}
        case np.ndarray():
            return {"array": _add(leaf, path, arrays)}
    packet = leaf if isinstance(leaf, Packet) else leaf.open()
    parts = {name: _add(part, f"{path}/{name}", arrays) for name, part in packet.parts.items()}
    return {"packet": _codec_to_json(packet.codec), "parts": parts}


def _add(array: np.ndarray, path: str, arrays: dict[str, np.ndarray]) -> str:
    """Add an array to `arrays`; returns its key."""
    key = path if path not in arrays else f"{path} {len(arrays)}"
    # Numpy's contiguous copy of a single number has shape [1].
    arrays[key] = np.ascontiguousarray(array).reshape(array.shape)
    return key


def save_states(path: Path, states: Mapping[str, ArrayTree]) -> None:
    """Write states by name, with the packets behind their handles. Raise OSError if writing fails."""
    arrays: dict[str, np.ndarray] = {}
    layout = {name: _describe(state, name, arrays) for name, state in states.items()}
    with safetensors_errors():
        save_file(arrays, path, {_LAYOUT: json.dumps(layout)})


def load_states(path: Path) -> Iterator[tuple[str, ArrayTree]]:
    """Read the states in a regular file one after another; yields the name and the state, which may hold packets.

    Raise DamagedFile if `save_states` did not write the file.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            for name, description in json_files.parse((file.metadata() or {})[_LAYOUT]).items():
                state = _read(file, description)
                if "tree" not in description:
                    raise RayflError(f"{name!r} is not a tree")
                # An error of the caller's is not raised here.
                yield name, state
    # A stranger's file can make the libraries raise anything.
    except Exception as error:
        raise DamagedFile(f"{path} is not a state file ({type(error).__name__}: {error})") from error


def _read(file: Foreign, description: Mapping[str, Json]) -> Anything:
    match description:
        case {"tree": tree}:
            return {name: _read(file, inner) for name, inner in tree.items()}
        case {"array": key}:
            return _array(file, key)
        case {"bits": key}:
            return _packed(_array(file, key), description["shape"])
    parts = {name: _array(file, key) for name, key in description["parts"].items()}
    codec = _codec_from_json(description["packet"])
    if not all(callable(getattr(codec, name, None)) for name in ("decode", "support", "add_to")):
        raise RayflError(f"{type(codec).__name__} is not a codec")
    if any(part.ndim != 1 for part in parts.values()):
        raise RayflError("a packet's buffer is not a row of numbers")
    return Packet(parts, codec)


def _array(file: Foreign, key: Json) -> np.ndarray:
    array = file.get_tensor(key)
    # Raises an error for a type that no tensor has.
    torch.from_numpy(array[:0] if array.ndim else array)
    return array


def _packed(bits: np.ndarray, shape: Json) -> PackedBits:
    """A boolean tensor. Raise RayflError unless there are as many bits as its shape has entries."""
    whole = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if not whole or bits.dtype != np.uint8 or bits.shape != (-(-math.prod(shape) // 8),):
        raise RayflError(f"{bits.dtype} {list(bits.shape)} holds no booleans of shape {shape}")
    return PackedBits(bits, tuple(shape))


def _codec_to_json(value: Anything) -> Json:
    if not dataclasses.is_dataclass(value):
        return value
    home = type(value).__module__
    prefix = f"{home.removeprefix(_CODECS)}." if home.startswith(_CODECS) else f"{home}:"
    settings = {field.name: _codec_to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return {"codec": f"{prefix}{type(value).__name__}", "settings": settings}


def _codec_from_json(value: Json) -> Anything:
    """A codec, or a part of one. One of ours is found by its name below rayfl.compress, another by its module, if the
    experiment has imported a compressor or a method from that package. No other class is instantiated."""
    if isinstance(value, list):
        return tuple(_codec_from_json(item) for item in value)
    if not isinstance(value, Mapping):
        return value
    home, colon, name = value["codec"].rpartition(":" if ":" in value["codec"] else ".")
    if colon == ":":
        module = sys.modules.get(home) if home.partition(".")[0] in _plugin_packages() else None
    else:
        module = import_module(_CODECS + home) if home.isidentifier() else None
    kind = getattr(module, name, None)
    if not (
        isinstance(kind, type) and dataclasses.is_dataclass(kind) and module and kind.__module__ == module.__name__
    ):
        raise RayflError(f"{value['codec']!r} is not a codec")
    return kind(**{key: _codec_from_json(setting) for key, setting in value["settings"].items()})


def _plugin_packages() -> set[str]:
    """The top-level packages except rayfl from which this process has a compressor or a method."""
    packages: set[str] = set()
    pending: list[type] = [Compressor, Method]
    while pending:
        subclasses = pending.pop().__subclasses__()
        pending += subclasses
        packages |= {subclass.__module__.partition(".")[0] for subclass in subclasses}
    return packages - {"rayfl"}

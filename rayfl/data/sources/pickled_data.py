"""Reads numbers, texts, lists, dictionaries and numpy arrays from pickles and object arrays, and runs nothing in them.

A pickle is a program that may call anything when Python loads it. Here its operations are only looked at, by the
standard library's `pickletools`: those that build plain values are done, numpy's arrays are made of their bytes, and
every other call is refused with its name.
"""

import pickletools
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rayfl.errors import RayflError
from rayfl.limits import memory
from rayfl.limits.regular_files import require_regular

_PLAIN_KINDS = "biufSU"


class Named(NamedTuple):
    """A function or class that a pickle names."""

    name: str


class Built(NamedTuple):
    """An array or an element type whose content follows. what: "array", or the code of the type."""

    what: str


class _Machine:
    """The stack and the memory of a pickle."""

    def __init__(self) -> None:
        # Any: what a pickle holds.
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.marks: list[int] = []

    # Any: what a pickle holds.
    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    # Any: what a pickle holds.
    def popped(self, count: int) -> list[Any]:
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return items

    # Any: what a pickle holds.
    def put_items(self, items: Sequence[Any]) -> None:
        table = self.stack[-1]
        if not isinstance(table, dict):
            raise ValueError("it sets items of what is no dictionary")
        table.update(zip(items[::2], items[1::2], strict=True))

    # Any: what a pickle holds.
    def add(self, items: Sequence[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("it adds items to what is no list")
        self.stack[-1].extend(items)

    def replace_built(self) -> None:
        """BUILD: give what was begun its content."""
        (state,) = self.popped(1)
        begun = self.stack[-1]
        if not isinstance(begun, Built):
            raise ValueError(f"it sets the attributes of a {type(begun).__name__}")
        complete = _array(*state[1:]) if begun.what == "array" else _dtype(begun.what, *state[1:5])
        self.stack[-1] = complete
        for place, value in self.memo.items():
            if value is begun:
                self.memo[place] = complete


# Any: what a pickle holds.
def values_of(pickled: bytes) -> Any:
    """The value of a pickle: numbers, texts, bytes, lists (also for tuples and sets), dictionaries and arrays.

    Raise ValueError, whose text is the reason, if it is damaged or holds anything else.
    """
    machine = _Machine()
    try:
        for operation, argument, _ in pickletools.genops(pickled):
            if operation.name == "STOP":
                break
            _do(machine, operation.name, argument)
        (value,) = machine.stack
        return value
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, RecursionError) as error:
        why = str(error) if type(error) is ValueError else "it is damaged"
        raise ValueError(f"{why}; rayfl reads plain values and numpy's arrays from pickles, and runs nothing") from None


# Any: what a pickle holds.
def _do(machine: _Machine, name: str, argument: Any) -> None:
    stack, memo = machine.stack, machine.memo
    if name in _CONSTANTS:
        stack.append(_CONSTANTS[name]())
    elif name in _PUTS:
        memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET", "GET"):
        stack.append(memo[argument])
    elif name in _COLLECTED:
        stack.append(_COLLECTED[name](machine))
    elif name in _CHANGES:
        _CHANGES[name](machine)
    elif name == "GLOBAL":
        stack.append(Named(argument.replace(" ", ".")))
    elif argument is not None and type(argument) in (int, float, str, bytes, bytearray, bool):
        if name not in ("PROTO", "FRAME"):
            stack.append(argument)
    else:
        raise ValueError(f"it has the operation {name}")


# Any: what a pickle holds.
def _called(machine: _Machine) -> Any:
    """REDUCE: the value of a call, if it is one of those that build arrays and tables."""
    called, arguments = machine.popped(2)
    name = called.name if isinstance(called, Named) else type(called).__name__
    short = name.replace("numpy.core.", "numpy._core.").replace("__builtin__", "builtins")
    if short == "numpy._core.multiarray._reconstruct" and arguments[0] == Named("numpy.ndarray"):
        return Built("array")
    if short == "numpy.dtype":
        return Built(str(arguments[0]))
    if short == "numpy._core.multiarray.scalar":
        return _array((), arguments[0], False, arguments[1])[()].item()
    if short == "numpy._core.numeric._frombuffer":
        content, dtype, shape, order = arguments
        return _array(shape, dtype, order == "F", bytes(content))
    if short == "_codecs.encode" and arguments[1] == "latin1":
        return arguments[0].encode("latin1")
    # In old protocols.
    if short == "builtins.bytes" and not arguments:
        return b""
    if short in ("builtins.set", "builtins.frozenset"):
        return [*arguments[0]] if arguments else []
    if short in ("collections.OrderedDict", "collections.defaultdict"):
        return {}
    raise ValueError(f"it calls {name}")


# Any: what a pickle holds.
def _dtype(code: str, order: Any, subtype: Any, names: Any, fields: Any) -> np.dtype:
    if subtype is not None or names is not None or fields is not None:
        raise ValueError("it has arrays of records")
    dtype = np.dtype(code if code[:1] == "O" else (order if order in "<>" else "=") + code)
    if dtype.kind not in f"{_PLAIN_KINDS}O":
        raise ValueError(f"it has arrays of type {dtype}")
    return dtype


# Any: what a pickle holds.
def _array(shape: Sequence[int], dtype: Any, is_fortran: bool, content: Any) -> np.ndarray:
    if isinstance(dtype, Built):
        dtype = _dtype(dtype.what, "=", None, None, None)
    if dtype.kind != "O":
        return np.frombuffer(content, dtype).reshape(tuple(shape), order="F" if is_fortran else "C")
    array = np.empty(len(content), object)
    array[:] = content
    return array.reshape(tuple(shape))


_CONSTANTS: Mapping[str, Callable[[], object]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": list,
    "EMPTY_SET": list,
}
_PUTS = ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE")
_COLLECTED: Mapping[str, Callable[[_Machine], object]] = {
    "TUPLE": _Machine.since_mark,
    "LIST": _Machine.since_mark,
    "FROZENSET": _Machine.since_mark,
    "TUPLE1": lambda machine: machine.popped(1),
    "TUPLE2": lambda machine: machine.popped(2),
    "TUPLE3": lambda machine: machine.popped(3),
    "DICT": lambda machine: dict(zip(*[iter(machine.since_mark())] * 2, strict=True)),
    "STACK_GLOBAL": lambda machine: Named(".".join(machine.popped(2))),
    "REDUCE": _called,
}
_CHANGES: Mapping[str, Callable[[_Machine], object]] = {
    "MARK": lambda machine: machine.marks.append(len(machine.stack)),
    "APPEND": lambda machine: machine.add(machine.popped(1)),
    "APPENDS": lambda machine: machine.add(machine.since_mark()),
    "ADDITEMS": lambda machine: machine.add(machine.since_mark()),
    "SETITEM": lambda machine: machine.put_items(machine.popped(2)),
    "SETITEMS": lambda machine: machine.put_items(machine.since_mark()),
    "BUILD": _Machine.replace_built,
}


# Any: arrays, and what object arrays hold.
def read_npz_values(path: Path) -> dict[str, Any]:
    """The arrays of an .npz file by name; an array of objects is the value in it, of which nothing is run.

    Raise OSError if the file cannot be opened; ValueError with the reason if it is not valid; RayflError if it is
    larger than this machine's memory.
    """
    require_regular(path)
    values: dict[str, Any] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(".npy")]
            memory.require(2 * sum(info.file_size for info in members), str(path), "give less data")
            for info in members:
                with archive.open(info) as file:
                    values[info.filename.removesuffix(".npy")] = _npy_value(file)
    except (RayflError, OSError, ValueError):
        raise
    # A damaged file ends in SyntaxError, BadZipFile, zlib.error and others.
    except Exception:  # noqa: BLE001
        raise ValueError("it is damaged, or no .npz file of numpy's") from None
    return values


# Any: a stream, and what it holds.
def _npy_value(file: Any) -> Any:
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read_header(file)
    content = file.read()
    if not dtype.hasobject:
        return _array(shape, dtype, is_fortran, content)
    value = values_of(content)
    return value.item() if isinstance(value, np.ndarray) and value.shape == () else value

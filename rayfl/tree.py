"""Arithmetic on parameters (`Tree`: name to tensor) and the conversion of states between tensors and numpy.

A `State` is a nested dictionary whose leaves are tensors, e.g. `{"residual": {"fc.weight": ...}, "count": tensor(3)}`.
No function changes its arguments. On a GPU one operation computes all tensors of a tree (`at_once`).
Only numpy arrays are sent to other processes: `to_arrays` packs booleans to bits and returns views of all others.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfl.settings import dotted

Tree = dict[str, Tensor]
# Any: a leaf is a tensor, or a tree of tensors by name; as a union every access would need a cast.
State = Mapping[str, Any]
"""A nested dictionary of tensors, e.g. {"residual": {"fc.weight": tensor}, "count": tensor}; or a TypedDict of them."""
Index = Mapping[str, tuple[np.ndarray | None, ...]]
"""A slice of a tree: the positions along each axis of its tensors, int64 without repetition; None for all of them."""
# Any: the same nesting with numpy arrays and PackedBits as leaves.
ArrayTree = dict[str, Any]

# Arrays in Ray's object store are read-only, and rayfl, which is pure, writes into no tensor over them. torch warns of
# the first such tensor in a process: this one, whose warning is silenced.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"\0", np.uint8))

# Any: torch exports neither its functions on lists of tensors nor the stack of its transforms.
private: Any = torch
"""torch, with `private._foreach_add` and its like."""

ALIGNMENT_BYTES = 64
"""Matrix products give other bits on buffers with a smaller alignment than that of torch's own memory."""


def at_once(a: Tree) -> bool:
    """Whether one operation (torch._foreach) computes all tensors of a tree: on a GPU, where starting operations takes
    long. These operations have no rules for vmap, and on a CPU they are no faster.
    """
    first = next(iter(a.values()), None)
    return first is not None and first.is_cuda and not is_transformed()


def is_transformed() -> bool:
    """Whether the caller runs inside a transform of torch.func, such as vmap."""
    return private._C._functorch.peek_interpreter_stack() is not None


def tensors(a: Tree, like: Tree) -> list[Tensor]:
    """The tensors of `a` in the order of `like`."""
    return [a[name] for name in like]


def add(a: Tree, b: Tree, scale: float = 1.0) -> Tree:
    """a + scale * b."""
    if at_once(a):
        return dict(zip(a, private._foreach_add(tensors(a, a), tensors(b, a), alpha=scale), strict=True))
    return {name: torch.add(tensor, b[name], alpha=scale) for name, tensor in a.items()}


def sub(a: Tree, b: Tree) -> Tree:
    """a - b."""
    if at_once(a):
        return dict(zip(a, private._foreach_sub(tensors(a, a), tensors(b, a)), strict=True))
    return {name: torch.sub(tensor, b[name]) for name, tensor in a.items()}


@dataclass(frozen=True)
class Difference:
    """a - b, not yet subtracted, so that it can be added to a sum piece by piece without being in memory as a whole."""

    a: Tree
    b: Tree

    def tree(self) -> Tree:
        """a - b."""
        return sub(self.a, self.b)


def mul(a: Tree, b: Tree) -> Tree:
    """Entrywise a * b."""
    if at_once(a):
        return dict(zip(a, private._foreach_mul(tensors(a, a), tensors(b, a)), strict=True))
    return {name: torch.mul(tensor, b[name]) for name, tensor in a.items()}


def blend(a: Tree, b: Tree, share: Tree) -> Tree:
    """share * a + (1 - share) * b, of the tensors that have a share: one of their shape, or a single number."""
    return {name: part * a[name] + (1 - part) * b[name] for name, part in share.items()}


def scale(a: Tree, factor: float) -> Tree:
    """factor * a."""
    if at_once(a):
        return dict(zip(a, private._foreach_mul(tensors(a, a), factor), strict=True))
    return {name: torch.mul(tensor, factor) for name, tensor in a.items()}


def zeros_like(a: Tree) -> Tree:
    """A tree of zeros in the shapes of `a`."""
    return {name: torch.zeros_like(tensor) for name, tensor in a.items()}


def map(function: Callable[[Tensor], Tensor], a: Tree) -> Tree:
    """Apply `function` to every tensor."""
    return {name: function(tensor) for name, tensor in a.items()}


def dot(a: Tree, b: Tree) -> float:
    """Inner product over all entries, accumulated in float64 over tensors."""
    return sum(float(torch.dot(a[name].flatten(), b[name].flatten())) for name in a)


def norm(a: Tree) -> float:
    """Euclidean norm over all entries."""
    return math.sqrt(sum(float(torch.linalg.vector_norm(tensor)) ** 2 for tensor in a.values()))


def unwritten(a: Tree) -> Tree:
    """The same memory in tensors that have counted no write yet (`rounds.check_hooks.HookInputs`)."""
    return {name: tensor.data for name, tensor in a.items()}


def is_writable(a: Tree, like: Tree) -> bool:
    """Whether a result of operations on `a` and `like` can be written into `a`.

    Its tensors share no memory with each other; they and those of `like` have the same types and devices, row by row.
    """
    alike = all(
        x.is_contiguous() and y.is_contiguous() and (x.dtype, x.device) == (y.dtype, y.device)
        for x, y in ((tensor, like[name]) for name, tensor in a.items())
    )
    return alike and len({tensor.untyped_storage().data_ptr() for tensor in a.values()}) == len(a)


def num_entries(a: Tree) -> int:
    """Number of scalars, P in the papers."""
    return sum(tensor.numel() for tensor in a.values())


def vector(a: Tree) -> Tensor:
    """All entries in the tree's order as one new vector [P]."""
    return torch.cat([tensor.flatten() for tensor in a.values()])


def between(a: Tree, first: int, last: int) -> Tensor:
    """The entries [first, last) of `vector(a)`."""
    starts = itertools.accumulate((tensor.numel() for tensor in a.values()), initial=0)
    return torch.cat(
        [
            tensor.flatten()[max(0, first - start) : max(0, last - start)]
            for tensor, start in zip(a.values(), starts, strict=False)
        ]
    )


def unvector(flat: Tensor, like: Tree) -> Tree:
    """The inverse of `vector`; every tensor owns its memory."""
    pieces = torch.split(flat, [tensor.numel() for tensor in like.values()])
    return {name: piece.reshape(like[name].shape).clone() for name, piece in zip(like, pieces, strict=True)}


def pack_bits(mask: Tensor) -> np.ndarray:
    """uint8 [ceil(numel / 8)] of a boolean tensor, row by row, the first entry in the highest bit."""
    return np.packbits(mask.detach().reshape(-1).cpu().numpy())


def unpack_bits(bits: np.ndarray, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `pack_bits`: a boolean tensor of `shape`."""
    return torch.from_numpy(np.unpackbits(bits, count=math.prod(shape)).view(np.bool_)).view(shape)


@dataclass(frozen=True)
class PackedBits:
    """A boolean tensor as `pack_bits` has it, and its shape."""

    bits: np.ndarray
    shape: tuple[int, ...]


def to_arrays(state: Mapping[str, Any]) -> ArrayTree:
    """A state as numpy: views of the tensors' memory, booleans packed; handles of packets pass through."""
    return {name: _to_array(leaf) for name, leaf in state.items()}


def num_bytes(arrays: Mapping[str, Any]) -> int:
    """Bytes of all arrays of a state as `to_arrays` has it; handles of packets count nothing."""
    leaves = (leaf.bits if isinstance(leaf, PackedBits) else leaf for leaf in flatten(arrays).values())
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, np.ndarray))


# Any: see State.
def to_tensors(arrays: ArrayTree) -> dict[str, Any]:
    """The inverse of `to_arrays`: aligned arrays are not copied, so the result must not be changed."""
    return {name: _to_tensor(leaf) for name, leaf in arrays.items()}


def tensor_over(array: np.ndarray) -> Tensor:
    """A tensor with the numbers of `array`: a view if its memory is aligned and contiguous, otherwise a copy."""
    if array.ctypes.data % ALIGNMENT_BYTES or not array.flags.c_contiguous:
        # torch aligns what it allocates; a copy made by numpy may lie 16 bytes off.
        # And numpy turns a contiguous copy of a single number into an array of shape [1].
        return torch.from_numpy(np.ascontiguousarray(array)).clone().reshape(array.shape)
    return torch.from_numpy(array)


# Any: leaves of any type.
def flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dictionaries as a flat one: {"residual": {"fc.weight": w}} is {"residual/fc.weight": w}."""
    return dotted(nested, dot="/")


def _to_array(leaf: Any) -> Any:
    if isinstance(leaf, Mapping):
        return to_arrays(leaf)
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.dtype == torch.bool:
        return PackedBits(pack_bits(leaf), tuple(leaf.shape))
    return leaf.detach().cpu().numpy()


def _to_tensor(leaf: Any) -> Any:
    if isinstance(leaf, dict):
        return to_tensors(leaf)
    if isinstance(leaf, PackedBits):
        return unpack_bits(leaf.bits, leaf.shape)
    return tensor_over(leaf) if isinstance(leaf, np.ndarray) else leaf

"""torch's operators, by what they do to the units along the axes of their arguments.

An operator that only moves numbers (a view, a permutation, a concatenation) is done once more on the places of the
numbers, which says where each unit went. A sum or a product position by position joins units; a matrix product joins
those that it sums over. If a view divides an axis of units, as attention does into heads, the units at equal places of
the innermost part are joined: every head then keeps the same ones.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from rayfl.errors import RayflError
from rayfl.models.widths.units import WHOLE, Axes, Layouts

# Any: arguments and results of any operator.
UnitRule = Callable[[Layouts, Any, tuple[Any, ...], Any], Sequence[Axes]]
"""From an operator, its arguments and its result to the units of the tensors in its result."""

MOVES = re.compile(
    r"_?(unsafe_)?view|reshape|permute|transpose|t|numpy_T|expand|slice|select|squeeze|unsqueeze|narrow|flip|roll"
    r"|constant_pad_nd|split|split_with_sizes|chunk|unbind|index|index_select|gather|repeat|diagonal|alias|movedim"
    r"|unfold|tile|swapaxes|flatten|unflatten"
)
ALIKE = re.compile(
    r"clone|_to_copy|detach|contiguous|lift_fresh|(native_)?dropout|_?(log_|safe_)?softmax|cumsum|\w+_like|bernoulli"
    r"|copy|fill|zero|masked_fill|where|tri[lu]|_reshape_alias|view_as|prelu|_prelu_kernel|_weight_norm_interface"
)
"""Operators whose result has the axes of its arguments, besides those that torch calls pointwise."""
REDUCTIONS = re.compile(r"mean|sum|amax|amin|max|min|(var|std)(_mean)?|prod|any|all|logsumexp|norm|linalg_vector_norm")
NEW = re.compile(r"new_\w+|(sym_)?size|_local_scalar_dense|item|equal|is_nonzero")
POOLS = re.compile(r"_?(adaptive_)?(avg|max)_pool([123])d\w*|_?upsample_\w*?([123])d\w*|re\w+ion_pad([123])d")
CONVOLUTIONS = re.compile(r"_?(mkldnn_)?convolution\w*|thnn_conv2d|_slow_conv2d_forward")
PADDING = -1
"""The place of a number that an operator adds around a tensor."""


class UntraceableError(RayflError):
    """Part of a model whose units cannot be followed."""


# Any: an operator.
def rule_of(func: Any) -> UnitRule:
    """The rule of an operator. Raise UntraceableError if there is none."""
    name = operator_name(func)
    if name in RULES:
        return RULES[name]
    for names, rule in BY_PATTERN:
        if names.fullmatch(name):
            return rule
    if torch.Tag.pointwise in func.tags:
        return _alike
    raise UntraceableError(f"the units that torch's operator {name!r} mixes cannot be followed")


def operator_name(func: Any) -> str:
    """The name of an operator, without its namespace and the underscore of those that write into an argument."""
    return func._schema.name.partition("::")[2].rstrip("_")


def bound(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """All arguments of an operator in the schema's order."""
    parameters = func._schema.arguments
    given = dict(zip((parameter.name for parameter in parameters), args, strict=False)) | dict(kwargs)
    return tuple(given.get(parameter.name, parameter.default_value) for parameter in parameters)


def _argument(func: Any, given: Sequence[Any], name: str) -> Any:
    names = [parameter.name for parameter in func._schema.arguments]
    return given[names.index(name)] if name in names else None


def _broadcast(layouts: Layouts, tensors: Sequence[Tensor], shape: Sequence[int]) -> Axes:
    """The axes of a result of `shape` to which tensors are broadcast."""
    result: Axes = []
    for place in range(-len(shape), 0):
        meeting = [t for t in tensors if t.dim() >= -place and (t.shape[place] == shape[place] or shape[place] == 1)]
        axes = [layouts.axes(t)[place] for t in meeting if t.shape[place] > 1]
        result.append(layouts.units.joined(axes, shape[place]) if shape[place] > 1 and axes else None)
    return result


def _alike(layouts: Layouts, func: Any, given: tuple[Any, ...], result: Any) -> Sequence[Axes]:
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    axes = _broadcast(layouts, tensors, made[0].shape)
    return [axes if tensor.shape == made[0].shape else [None] * tensor.dim() for tensor in made]


def _moved(layouts: Layouts, func: Any, given: tuple[Any, ...], result: Any) -> Sequence[Axes]:
    """Where the units of the first argument are in the result: the operator is done once more on places."""
    source = given[0]
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    axes: list[Axes] = [[None] * tensor.dim() for tensor in made]
    for place, units in enumerate(layouts.axes(source)):
        if units is None:
            continue
        shape = [-1 if axis == place else 1 for axis in range(source.dim())]
        numbers = torch.arange(len(units)).reshape(shape).expand(source.shape).contiguous()
        arguments = [numbers, *given[1:]]
        if operator_name(func) == "constant_pad_nd":
            arguments[2] = PADDING
        for tensor_axes, moved in zip(axes, tree_leaves(func(*_plain(func, arguments))), strict=True):
            _settle(layouts, tensor_axes, units, moved.numpy())
    return axes


def _units_at(layouts: Layouts, units: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The units at these places of an axis; padding gets new ones, which are those of what is added there."""
    is_padding = places == PADDING
    taken = units[np.where(is_padding, 0, places)]
    taken[is_padding] = layouts.units.new(int(is_padding.sum()))
    return taken


def _plain(func: Any, arguments: Sequence[Any]) -> Sequence[Any]:
    """Positional arguments without those that only keywords can give, which have their defaults."""
    return [
        value for value, parameter in zip(arguments, func._schema.arguments, strict=True) if not parameter.kwarg_only
    ]


def _settle(layouts: Layouts, axes: Axes, units: np.ndarray, places: np.ndarray) -> None:
    """Note in `axes` where the units of one source axis went: `places` has the place that each number came from."""
    varying = [axis for axis in range(places.ndim) if (places != places.take([0], axis)).any()]
    if not varying:
        # A single unit was picked out, or none.
        layouts.units.keep_whole(units[np.unique(places[places != PADDING])])
        return
    last = varying[-1]
    if axes[last] is not None:
        raise UntraceableError("two axes that can both be cut become one")
    rows = np.moveaxis(places, last, -1).reshape(-1, places.shape[last])
    taken = [_units_at(layouts, units, row) for row in np.unique(rows, axis=0)]
    for row in taken[1:]:
        # Heads: every one of them keeps the same units.
        layouts.units.join(taken[0], row)
    axes[last] = taken[0]
    if 0 < len(kept := np.unique(rows[rows != PADDING])) < len(units):
        layouts.marks.append(units[kept])


def _concatenated(layouts: Layouts, func: Any, given: tuple[Any, ...], result: Tensor) -> Sequence[Axes]:
    tensors = [tensor for tensor in given[0] if tensor.numel() or tensor.dim() > 1]
    along = given[1] % result.dim()
    parts = [(layouts.axes(tensor)[along], tensor.shape[along]) for tensor in tensors]
    axes: Axes = []
    for place in range(result.dim()):
        if place == along:
            pieces = [np.full(size, WHOLE) if units is None else units for units, size in parts]
            axes.append(np.concatenate(pieces) if any(units is not None for units, _ in parts) else None)
        else:
            alike = [layouts.axes(tensor)[place] for tensor in tensors]
            axes.append(layouts.units.joined(alike, result.shape[place]))
    return [axes]


def _stacked(layouts: Layouts, func: Any, given: tuple[Any, ...], result: Tensor) -> Sequence[Axes]:
    along = given[1] % result.dim()
    axes = _broadcast(layouts, given[0], given[0][0].shape)
    return [[*axes[:along], None, *axes[along:]]]


def _multiplied(layouts: Layouts, a: Tensor, b: Tensor, result: Tensor, bias: Tensor | None = None) -> Sequence[Axes]:
    """A matrix product, of batches or of vectors too: the units that it sums over are joined."""
    left, right = layouts.axes(a), layouts.axes(b)
    summed = -1 if b.dim() == 1 else -2
    layouts.units.joined([left[-1], right[summed]], a.shape[-1])
    batch = [layouts.units.joined([x, y], n) for x, y, n in zip(left[:-2], right[:-2], a.shape[:-2], strict=False)]
    axes = [*batch, *left[-2:-1], *([right[-1]] if b.dim() > 1 else [])]
    if bias is not None:
        layouts.note(result, axes)
        return [_broadcast(layouts, [result, bias], result.shape)]
    return [axes]


def _linear(layouts: Layouts, func: Any, given: tuple[Any, ...], result: Tensor) -> Sequence[Axes]:
    inputs, weight, bias = given[:3]
    layouts.units.joined([layouts.axes(inputs)[-1], layouts.axes(weight)[1]], weight.shape[1])
    axes = [*layouts.axes(inputs)[:-1], layouts.axes(weight)[0]]
    if bias is not None:
        axes[-1] = layouts.units.joined([axes[-1], layouts.axes(bias)[0]], weight.shape[0])
    return [axes]


def _convolved(layouts: Layouts, func: Any, given: tuple[Any, ...], result: Tensor) -> Sequence[Axes]:
    inputs, weight, bias = given[:3]
    is_transposed = bool(_argument(func, given, "transposed"))
    groups = _argument(func, given, "groups") or 1
    outer, inner, *kernel = layouts.axes(weight)
    layouts.keep_whole(kernel)
    before, after = (outer, inner) if is_transposed else (inner, outer)
    of_inputs = layouts.axes(inputs)
    channels = of_inputs[1]
    if groups > 1:
        if not groups == inputs.shape[1] == weight.shape[0] or weight.shape[1] != 1:
            raise UntraceableError(f"a convolution has groups={groups}; only 1, or one for each channel, can be cut")
        before = after = outer
    layouts.units.joined([channels, before], inputs.shape[1])
    if bias is not None:
        after = layouts.units.joined([after, layouts.axes(bias)[0]], result.shape[1])
    layouts.keep_whole(of_inputs[2:])
    return [[of_inputs[0], after, *[None] * len(kernel)]]


def _normed(layouts: Layouts, func: Any, given: tuple[Any, ...], result: Any) -> Sequence[Axes]:
    """Norms by channel: batch and group norm."""
    inputs = given[0]
    axes = layouts.axes(inputs)
    for tensor in given[1:]:
        if isinstance(tensor, Tensor) and tensor.dim() == 1:
            axes[1] = layouts.units.joined([axes[1], layouts.axes(tensor)[0]], inputs.shape[1])
    groups = _argument(func, given, "group")
    if groups and axes[1] is not None:
        for unit in axes[1].tolist():
            layouts.multiples[unit] = math.lcm(groups, layouts.multiples.get(unit, 1))
    return [axes, *([None] for _ in range(4))]


def _layer_normed(layouts: Layouts, func: Any, given: tuple[Any, ...], result: Any) -> Sequence[Axes]:
    tensors = [given[0], *(tensor for tensor in given[2:4] if isinstance(tensor, Tensor))]
    return [_broadcast(layouts, tensors, given[0].shape), *([None] * given[0].dim() for _ in range(2))]


def _pooled(layouts: Layouts, func: Any, given: tuple[Any, ...], result: Any) -> Sequence[Axes]:
    match = POOLS.fullmatch(operator_name(func))
    assert match is not None
    sides = int(next(group for group in match.groups() if group and group.isdigit()))
    axes = layouts.axes(given[0])
    if any(map(layouts.units.is_cut, axes[-sides:])):
        raise UntraceableError("a pooling goes over channels")
    pooled: Axes = [*axes[:-sides], *[None] * sides]
    return [pooled, pooled]


def _reduced(layouts: Layouts, func: Any, given: tuple[Any, ...], result: Any) -> Sequence[Axes]:
    source = given[0]
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    others = [leaf for leaf in tree_leaves(given[1:]) if isinstance(leaf, Tensor)]
    if others:
        # The larger or the smaller of two tensors, entry by entry.
        return _alike(layouts, func, given, result)
    dim = _argument(func, given, "dim")
    dims = range(source.dim()) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    gone = {place % max(1, source.dim()) for place in dims}
    kept = layouts.axes(source)
    if made[0].dim() == source.dim():
        axes: Axes = [None if place in gone else units for place, units in enumerate(kept)]
    else:
        axes = [units for place, units in enumerate(kept) if place not in gone]
    return [axes for _ in made]


def _gated(layouts: Layouts, func: Any, given: tuple[Any, ...], result: Tensor) -> Sequence[Axes]:
    """One half of an axis multiplied by a function of the other (GLU): both keep the same units."""
    along = given[1] % result.dim()
    axes = layouts.axes(given[0])
    if axes[along] is not None:
        first, second = np.split(axes[along], 2)
        layouts.units.join(first, second)
        axes[along] = first
    return [axes]


def _attended(layouts: Layouts, func: Any, given: tuple[Any, ...], result: Any) -> Sequence[Axes]:
    """Fused attention: queries and keys share their units, and the result has those of the values."""
    queries, keys, values = given[:3]
    of_queries, of_keys, of_values = map(layouts.axes, (queries, keys, values))
    layouts.units.joined([of_queries[-1], of_keys[-1]], queries.shape[-1])
    lead = [
        layouts.units.joined(list(axes), size)
        for *axes, size in zip(of_queries[:-2], of_keys[:-2], of_values[:-2], queries.shape[:-2], strict=True)
    ]
    return [[*lead, of_queries[-2], of_values[-1]]]


def _embedded(layouts: Layouts, func: Any, given: tuple[Any, ...], result: Any) -> Sequence[Axes]:
    weight = given[0]
    rows, columns = layouts.axes(weight)
    layouts.units.keep_whole(rows)
    made = next(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
    return [[*[None] * (made.dim() - 1), columns]]


def _product(first: int, has_bias: bool) -> UnitRule:
    def rule(layouts: Layouts, func: Any, given: tuple[Any, ...], result: Any) -> Sequence[Axes]:
        return _multiplied(layouts, given[first], given[first + 1], result, given[0] if has_bias else None)

    return rule


def _untouched(layouts: Layouts, func: Any, given: tuple[Any, ...], result: Any) -> Sequence[Axes]:
    return ()


RULES: Mapping[str, UnitRule] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot"), _product(0, has_bias=False)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "_addmm_activation"), _product(1, has_bias=True)),
    **dict.fromkeys(("native_layer_norm", "rms_norm", "_fused_rms_norm"), _layer_normed),
    **dict.fromkeys(("embedding", "_embedding_bag", "_embedding_bag_forward_only"), _embedded),
    "linear": _linear,
    "cat": _concatenated,
    "stack": _stacked,
    "glu": _gated,
}
BY_PATTERN: Sequence[tuple[re.Pattern[str], UnitRule]] = (
    (CONVOLUTIONS, _convolved),
    (re.compile(r"\w*batch_norm\w*|native_group_norm"), _normed),
    (re.compile(r"_?scaled_dot_product\w+"), _attended),
    (POOLS, _pooled),
    (MOVES, _moved),
    (REDUCTIONS, _reduced),
    (NEW, _untouched),
    (ALIKE, _alike),
)

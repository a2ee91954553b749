"""Makes modules without storage, and those whose layers learn their sizes from a first input."""

import re
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves

from rayfl.data.sources.several_inputs import InputLayout, arguments_of
from rayfl.errors import RayflError, one_line

_modules: WeakSet[nn.Module] = WeakSet()
"""The modules that `complete` has returned."""


def skeleton(build: Callable[[], nn.Module]) -> nn.Module:
    """The module that `build` makes, whose parameters and buffers have no storage.

    It is built on torch's meta device. If a constructor reads numbers (`.item()`), keeps tensors as plain attributes,
    or parametrizes weights, it is built in memory, and plain attributes keep their values. Raise RayflError for one
    that requires a gradient.
    """
    try:
        with torch.device("meta"):
            module = build()
    except Exception as error:
        if not is_about_meta(error):
            raise
        return _stripped(build())
    has_plain = any(tensor.is_meta for *_, tensor in plain_tensors(module))
    # Some parametrizations (orthogonal) make their buffers only of weights that have numbers.
    return _stripped(build()) if has_plain or any(map(is_parametrized, module.modules())) else module


def is_about_meta(error: BaseException) -> bool:
    """Whether an error names torch's meta device, whose tensors have no numbers."""
    return bool(re.search(r"\bmeta\b", str(error), re.IGNORECASE))


def plain_tensors(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield the tensors in attributes of the module and of those inside it that are neither parameters nor buffers,
    with their owner and the attribute's name; also those in lists and dictionaries."""
    known = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for owner in module.modules():
        for name, value in vars(owner).items():
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor) and id(leaf) not in known:
                    yield owner, name, leaf


def _stripped(module: nn.Module) -> nn.Module:
    """The module, with parameters and buffers on the meta device; tied ones stay tied."""
    for owner, name, tensor in plain_tensors(module):
        if tensor.requires_grad and tensor.is_leaf:
            raise RayflError(
                f"{type(owner).__name__}.{name} requires a gradient and is no parameter, so it would not be trained; "
                f"make it one: self.{name} = nn.Parameter(...)"
            )
    bare: dict[int, Tensor] = {}
    # The tensors are kept until all are replaced, since memory that is freed may become that of another.
    tensors = [*module.parameters(), *module.buffers()]
    for tensor in tensors:
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        bare[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    for owner in module.modules():
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                setattr(owner, name, bare[id(tensor)])
    return module


# Any: the shape of an input, or of several.
def complete(
    build: Callable[[Any, int], nn.Module], input_shape: tuple[int, ...], num_classes: int, layout: InputLayout | None
) -> nn.Module:
    """The module that `build` makes; lazy layers get their sizes by a pass over two inputs.

    layout: of several inputs, whose shapes `build` gets in place of `input_shape`. Raise RayflError if the pass fails,
    for TorchScript, and if `build` has returned this very module before.
    """
    module = build(input_shape if layout is None else layout.input_shape, num_classes)
    if isinstance(module, torch.jit.ScriptModule):
        raise RayflError("the model is TorchScript, whose parameters cannot be replaced; return the module itself")
    if module in _modules:
        raise RayflError("the model is the same module in each call; make a new one inside the function")
    _modules.add(module)
    if not any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        return module
    module.eval()
    errors = list[Exception]()
    for dtype in (torch.float32, torch.int64):
        try:
            arguments, named = arguments_of(module, torch.zeros((2, *input_shape), dtype=dtype), layout)
            with torch.no_grad():
                module(*arguments, **named)
        # Whatever somebody's own module raises.
        except Exception as error:  # noqa: BLE001
            errors.append(error)
        else:
            return module.train()
    raise RayflError(
        f"the lazy layers of the model get their sizes by a pass over inputs {[2, *input_shape]}, which raises "
        f"{one_line(f'{type(errors[0]).__name__}: {errors[0]}')}"
    ) from errors[0]


def check_type(name: str, tensor: Tensor) -> None:
    """Raise RayflError for trained parameters that are not float32, and for constants that numpy does not have."""
    kind = str(tensor.dtype).removeprefix("torch.")
    if tensor.requires_grad and tensor.dtype != torch.float32:
        cure = "to compute in bf16, set runtime.precision='bf16' and leave out .half() and .bfloat16() in the model"
        if tensor.dtype == torch.float64:
            cure = "leave out .double() in the model"
        if tensor.is_complex():
            cure = "keep its real and its imaginary part, and join them in forward (torch.view_as_complex)"
        raise RayflError(f"the model's parameter {name!r} is {kind}, and rayfl trains float32: {cure}")
    try:
        torch.empty(0, dtype=tensor.dtype).numpy()
    except TypeError:
        raise RayflError(f"the model's {name!r} is {kind}, which numpy does not have; make it float32") from None

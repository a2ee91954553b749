"""Traces a forward pass of any module, and finds which units of its parameters belong together.

Like the count of operations (models/flops.py) it watches torch's operators, so it does not matter which layer or
function multiplies by a weight (`operators.py` says what each operator does to units). Recurrent layers, and those that
sum over neighbouring channels, are followed as a whole.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rayfl.models.convolutional import LocalResponseNorm
from rayfl.models.widths.operators import UntraceableError, bound, rule_of
from rayfl.models.widths.units import WHOLE, Axes, Layouts, place_of
from rayfl.tree import Tree

BY_CHANNEL = (nn.LocalResponseNorm, nn.CrossMapLRN2d, LocalResponseNorm)
"""Layers that sum over neighbouring channels, which a narrow network does over those that it keeps."""
LayerAxes = tuple[tuple[tuple[int, ...], Axes], tuple[tuple[int, ...], Axes]]
"""The shapes and units of a layer's first input and of its output."""


@dataclass(frozen=True)
class Traced:
    """The units of a module's tensors after a forward pass: of each parameter, and of each statistic of a norm, by
    name; and of the first input and the output of each layer by its name."""

    layouts: Layouts
    weights: Mapping[str, Axes]
    layers: Mapping[str, LayerAxes]


class Tracing(TorchDispatchMode):
    """Follows the units of tensors while it is entered.

    paused: whether a layer runs that is followed as a whole. unusable: the kinds of layers by the place of their states
    that consist of different units.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layouts = Layouts()
        self.paused = False
        self.unusable: dict[tuple[object, ...], tuple[str, Tensor]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    # Any: the arguments of any operator.
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.paused:
            return result
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in given:
            if (unusable := self.unusable.get(place_of(tensor))) is not None:
                layer = unusable[0]
                raise UntraceableError(f"the last state of {layer} is used, and its layers keep different units")
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor, axes in zip(made, self._followed(func, args, kwargs or {}, given, result), strict=False):
            self.layouts.note(tensor, axes)
        return result

    # Any: see __torch_dispatch__.
    def _followed(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Tensor], result: Any
    ) -> Sequence[Axes]:
        """The units of the tensors in the result of an operator."""
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if made and any(map(self.layouts.is_cut, given)):
            return rule_of(func)(self.layouts, func, bound(func, args, kwargs), result)
        for tensor in made:
            self.layouts.forget(tensor)
        return ()


def trace(module: nn.Module, input_shape: tuple[int, ...]) -> Traced:
    """Trace a forward pass of two examples through `module`, which may be on the meta device.

    Raise RayflError, with the name of the layer, where units cannot be followed.
    """
    weights, norms = _weights(module)
    is_text = any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in module.modules())
    tokens, numbers = torch.ones((2, *input_shape), dtype=torch.long), torch.zeros((2, *input_shape))
    failures = list[BaseException]()
    for example in (tokens, tokens.float()) if is_text else (numbers, tokens):
        tracing = Tracing()
        of_weights = {
            name: [tracing.layouts.units.new(size) if size > 1 else None for size in tensor.shape]
            for name, tensor in weights.items()
            if isinstance(module.get_parameter(name) if name in dict(module.named_parameters()) else None, Tensor)
            or name in norms
        }
        try:
            layers, outputs = _passed(module, weights, of_weights, example, tracing)
        except UntraceableError:
            raise
        # Somebody's own module may not take such inputs.
        except Exception as error:  # noqa: BLE001
            failures.append(error)
            continue
        tracing.layouts.keep_whole([axis for tensor in outputs for axis in tracing.layouts.axes(tensor)])
        return Traced(tracing.layouts, of_weights, layers)
    first = str(failures[0]).partition("\n")[0]
    raise UntraceableError(f"the model does not run on inputs {[2, *input_shape]}: {first}")


def _weights(module: nn.Module) -> tuple[Tree, set[str]]:
    """All tensors as zeros in main memory, and the names of buffers with a statistic for each channel."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    norms = {
        f"{name}.{buffer}".removeprefix(".")
        for name, layer in module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._NormBase)
        for buffer in ("running_mean", "running_var")
    }
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}, norms


def _passed(
    module: nn.Module, weights: Tree, of_weights: Mapping[str, Axes], example: Tensor, tracing: Tracing
) -> tuple[dict[str, Any], list[Tensor]]:
    """Run the example; returns the units of the layers' inputs and outputs, and the outputs of the module."""
    for name, axes in of_weights.items():
        tracing.layouts.note(weights[name], axes)
    layers: dict[str, Any] = {}
    inside: list[tuple[str, nn.Module]] = []
    hooks = []
    for name, layer in module.named_modules():
        hooks.append(layer.register_forward_pre_hook(lambda *call, name=name: inside.append((name, call[0]))))

        def after(layer: nn.Module, inputs: Any, outputs: Any, name: str = name) -> None:
            inside.pop()
            given, made = ([x for x in tree_leaves(part) if isinstance(x, Tensor)][:1] for part in (inputs, outputs))
            if given and made and name not in layers:
                layers[name] = tuple((tuple(t.shape), tracing.layouts.axes(t)) for t in (*given, *made))

        hooks.append(layer.register_forward_hook(after))
    replaced = [layer for layer in module.modules() if isinstance(layer, (*BY_CHANNEL, nn.RNNBase))]
    for layer in replaced:
        run = _recurrent if isinstance(layer, nn.RNNBase) else _by_channel
        layer.forward = _as_one(tracing, layer, run)
    is_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.random.fork_rng(devices=()), torch.no_grad(), tracing:
            outputs = torch.func.functional_call(module.eval(), weights, (example,))
    except UntraceableError as error:
        name, layer = inside[-1] if inside else ("", module)
        what = (
            f"layer {name!r} ({type(layer).__name__})" if name else f"the model's own forward ({type(layer).__name__})"
        )
        raise UntraceableError(f"the width of {what} cannot be cut: {error}") from None
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast)
        for hook in hooks:
            hook.remove()
        for layer in replaced:
            del layer.forward
    return layers, [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


# Any: arguments and results of layers.
def _as_one(tracing: Tracing, layer: Any, units: Callable[[Tracing, Any, Sequence[Tensor], Any], None]) -> Any:
    """The layer's forward pass, of which only the whole is followed."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        tracing.paused = True
        try:
            result = type(layer).forward(layer, *args, **kwargs)
        finally:
            tracing.paused = False
        units(tracing, layer, args, result)
        return result

    return forward


def _by_channel(tracing: Tracing, layer: nn.Module, args: Sequence[Tensor], result: Tensor) -> None:
    tracing.layouts.note(result, tracing.layouts.axes(args[0]))


def _recurrent(tracing: Tracing, layer: nn.RNNBase, args: Sequence[Tensor], result: Any) -> None:
    """The units of an LSTM, a GRU or an RNN: each layer and direction has one list, the same in all gates."""
    if getattr(layer, "proj_size", 0):
        raise UntraceableError("its states are projected (proj_size)")
    inputs = args[0]
    if not isinstance(inputs, Tensor):
        raise UntraceableError("it gets a packed sequence")
    below = tracing.layouts.axes(inputs)[-1]
    units = tracing.layouts.units
    directions = ("", "_reverse") if layer.bidirectional else ("",)
    for number in range(layer.num_layers):
        hidden: list[np.ndarray] = []
        for direction in directions:
            rows, columns = tracing.layouts.axes(getattr(layer, f"weight_ih_l{number}{direction}"))
            if columns is not None or below is not None:
                units.joined([columns, below], getattr(layer, f"weight_ih_l{number}{direction}").shape[1])
            kept = np.full(layer.hidden_size, WHOLE) if rows is None else rows[: layer.hidden_size]
            for name in (f"{part}_l{number}{direction}" for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")):
                if name.startswith("bias") and not layer.bias:
                    continue
                gates, *inner = tracing.layouts.axes(getattr(layer, name))
                for gate in [] if gates is None else gates.reshape(-1, layer.hidden_size):
                    units.join(kept, gate)
                if name.startswith("weight_hh") and inner[0] is not None:
                    units.join(kept, inner[0])
            hidden.append(kept)
        below = np.concatenate(hidden)
    outputs, states = result
    tracing.layouts.note(outputs, [*[None] * (outputs.dim() - 1), below])
    for state in states if isinstance(states, tuple) else (states,):
        if layer.num_layers * len(directions) == 1:
            tracing.layouts.note(state, [*[None] * (state.dim() - 1), below])
        else:
            tracing.unusable[place_of(state)] = type(layer).__name__, state

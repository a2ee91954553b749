"""Narrow networks: the same module with fewer channels and hidden units."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from rayfl.determinism.global_draws import seeded
from rayfl.errors import RayflError
from rayfl.models.skeleton import skeleton
from rayfl.models.widths.slices import Shape, Widths, widths
from rayfl.models.widths.tracing import trace


@runtime_checkable
class SetsWidth(Protocol):
    """A layer that keeps numbers of channels or units as attributes, which its forward pass uses."""

    def set_width(self, inputs: Shape, outputs: Shape) -> None:
        """Change them to those of a narrow network; `inputs`, `outputs`: the shapes there, for two examples."""


@dataclass(frozen=True)
class Narrowed:
    """A function that makes the narrow module of `build` with these sizes of the groups; it pickles if `build` does."""

    build: Callable[[], nn.Module]
    widths: Widths
    sizes: tuple[int, ...]

    def __call__(self) -> nn.Module:
        """The module; its tensors are new ones without values."""
        module = self.build()
        shapes = self.widths.narrow_shapes(self.sizes)
        names = {id(tensor): name for name, tensor in _tensors(module).items()}
        made: dict[str, torch.Tensor] = {}
        for owner in module.modules():
            for kept in (owner._parameters, owner._buffers):
                for name, tensor in [*kept.items()]:
                    full = names.get(id(tensor), "")
                    if tensor is None or full not in shapes or shapes[full] == tuple(tensor.shape):
                        continue
                    if full not in made:
                        empty = torch.empty(shapes[full], dtype=tensor.dtype, device=tensor.device)
                        is_parameter = kept is owner._parameters
                        made[full] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                    setattr(owner, name, made[full])
        for name, layer in module.named_modules():
            if (of_layer := self.widths.layer_shapes(name, self.sizes)) is not None:
                try:
                    _set_width(layer, *of_layer)
                except RayflError as error:
                    raise RayflError(f"layer {name!r} cannot be so narrow: {error}") from None
        return module


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


# Any: attributes of torch's layers.
def _set_width(layer: Any, inputs: Shape, outputs: Shape) -> None:
    """Change the attributes of a layer that say how wide it is. Raise RayflError if the layer cannot be so narrow."""
    if isinstance(layer, SetsWidth):
        layer.set_width(inputs, outputs)
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, nn.modules.conv._ConvNd):
        layer.groups = inputs[1] if layer.groups > 1 else 1
        layer.in_channels, layer.out_channels = inputs[1], outputs[1]
    elif isinstance(layer, nn.modules.batchnorm._NormBase):
        layer.num_features = inputs[1]
    elif isinstance(layer, nn.GroupNorm):
        layer.num_channels = inputs[1]
    elif isinstance(layer, nn.LayerNorm) or type(layer).__name__ == "RMSNorm":
        layer.normalized_shape = inputs[len(inputs) - len(layer.normalized_shape) :]
    elif isinstance(layer, nn.Embedding):
        layer.embedding_dim = layer.weight.shape[1]
    elif isinstance(layer, nn.RNNBase):
        layer.input_size, layer.hidden_size = (
            layer.get_parameter(name).shape[1] for name in ("weight_ih_l0", "weight_hh_l0")
        )
    elif isinstance(layer, nn.MultiheadAttention):
        _set_attention(layer)


def _set_attention(layer: nn.MultiheadAttention) -> None:
    inner, stream = layer.out_proj.weight.shape[1], layer.out_proj.weight.shape[0]
    if inner != stream:
        raise RayflError(
            f"torch's MultiheadAttention needs {layer.num_heads} heads that are together as wide as its input; at this "
            f"ratio they have {inner} units, and the input {stream}: choose a ratio at which each head keeps a whole "
            "number of units, for example 0.5"
        )
    layer.embed_dim = layer.kdim = layer.vdim = stream
    layer.head_dim = stream // layer.num_heads


def narrow_like(build: Callable[[], nn.Module], input_shape: Shape, shapes: Mapping[str, Shape]) -> nn.Module:
    """The narrow module of `build` with parameters of these shapes. Raise RayflError if there is none."""
    of_module = widths_of(build, input_shape)
    return Narrowed(build, of_module, of_module.sizes_of(shapes))()


def widths_of(build: Callable[[], nn.Module], input_shape: tuple[int, ...], seed: int = 0) -> Widths:
    """The widths of the module that `build` makes. Raise RayflError, with the layer's name, if they cannot be found."""
    with seeded(seed):
        module = skeleton(build)
    shapes: Mapping[str, Sequence[int]] = {name: tuple(tensor.shape) for name, tensor in _tensors(module).items()}
    return widths(trace(module, input_shape), {name: tuple(shape) for name, shape in shapes.items()})

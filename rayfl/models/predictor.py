"""A trained network that takes inputs as they are in the data's files."""

import textwrap
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from rayfl.data.datasets import Dataset
from rayfl.data.sources.several_inputs import arguments_of
from rayfl.determinism.process import ArithmeticPrecision
from rayfl.models.base import MemoryFormat, RayflError, in_float32, laid_out

WHITEST = 255
"""The largest pixel that a run's images can have."""


class Predictor(nn.Module):
    """A network that carries the preprocessing of its run.

    network: the network itself, which takes what `data.normalise` returns. data: the run's dataset, whose examples are
    not needed. memory_format, precision: as the run computed.
    """

    def __init__(
        self,
        network: nn.Module,
        data: Dataset,
        memory_format: MemoryFormat = "contiguous",
        precision: ArithmeticPrecision = "fp32",
    ) -> None:
        super().__init__()
        self.network = network
        self.data = data
        self.memory_format: MemoryFormat = memory_format
        self.precision: ArithmeticPrecision = precision

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits [n, num_classes] for raw inputs [n, *input_shape]: pixels before any scaling, numbers, tokens.

        Grey images may lack the axis of the channel, and images may have their channels last. Raise RayflError for
        inputs of another shape, and for pixels and tokens that are not whole numbers.
        """
        batch = laid_out(self.data.normalise(self._raw(inputs)), self.memory_format)
        halves = self.precision == "bf16"
        with torch.autocast(batch.device.type, torch.bfloat16, cache_enabled=False) if halves else nullcontext():
            arguments, named = arguments_of(self.network, batch, self.data.layout)
            return tree_map(in_float32, self.network(*arguments, **named))

    def _raw(self, inputs: Tensor) -> Tensor:
        """The inputs [n, *input_shape], checked, and those of a table scaled as its source scaled the examples."""
        data = self.data
        example_shape = tuple(inputs.shape[1:])
        shape = tuple(data.input_shape)
        if data.kind != "vector" and (inputs.is_floating_point() or inputs.dtype == torch.bool):
            what = f"pixels from 0 to {data.white:g}, not scaled" if data.kind == "image" else "tokens"
            raise RayflError(f"inputs are {inputs.dtype}, and the model takes whole numbers: {what}")
        if data.kind == "image" and inputs.dtype != torch.uint8 and inputs.numel():
            low, high = (int(extreme) for extreme in inputs.long().aminmax())
            if not 0 <= low <= high <= WHITEST:
                raise RayflError(
                    f"inputs have pixels from {low} to {high}, and the model takes pixels of 8 bits, from 0 to "
                    f"{data.white:g}; divide deeper ones by a power of 2, as 16 bits by 256"
                )
        if example_shape == shape:
            if data.kind != "vector" or not data.mean:
                return inputs
            mean, std = torch.tensor([data.mean, data.std], dtype=torch.float64).to(inputs.device)
            # Large numbers with small differences would become equal as float32.
            return (inputs.double() - mean) / std
        if data.kind == "image" and example_shape == (*shape[1:], shape[0]):
            return inputs.movedim(-1, 1)
        if data.kind == "image" and (1, *example_shape) == shape:
            return inputs.unsqueeze(1)
        raise RayflError(
            f"inputs have the shape {list(inputs.shape)}, and the model takes {['n', *shape]}{self._named(inputs)}"
        )

    def _named(self, inputs: Tensor) -> str:
        """The end of a sentence on a wrong number of inputs that have names."""
        names = self.data.input_names
        if inputs.dim() != 2 or not names:
            return ""
        width = inputs.shape[1]
        wrong = f"{names[width]!r} has no number" if width < len(names) else f"nothing follows {names[-1]!r}"
        listed = textwrap.shorten(", ".join(names), 300, placeholder=" and more", break_on_hyphens=False)
        return f": {wrong}, in the order {listed}; a data frame gives them by name"

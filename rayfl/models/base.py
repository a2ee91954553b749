"""What a model is: options, and a network for the shape of a dataset's samples."""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Annotated, ClassVar

from pydantic import Field
from torch import nn

from rayfl.choices import Choice

Width = Annotated[int, Field(ge=1)]
"""Number of units or channels of a layer."""
Rate = Annotated[float, Field(ge=0, lt=1)]
"""Share of the inputs that dropout sets to 0."""


class Architecture(Choice):
    """A model with its options. Its parameters are counted in tests against ALGORITHMS' table of models."""

    label: ClassVar[str] = "model"
    package: ClassVar[str] = "rayfl.models"

    @abstractmethod
    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """The network: inputs [batch, *input_shape], logits [batch, num_classes]; ValueError if they do not fit."""

    def builder(self, input_shape: tuple[int, ...], num_classes: int) -> Callable[[], nn.Module]:
        """`build` with its arguments bound, which pickles."""
        return partial(self.build, tuple(input_shape), num_classes)

    def need_images(self, input_shape: tuple[int, ...], least: int) -> None:
        """ValueError unless inputs are images [channels, height, width] with sides of at least `least` pixels."""
        if len(input_shape) != 3 or min(input_shape[1:]) < least:
            raise ValueError(
                f"{self.name} needs images [channels, height, width] of at least {least}x{least}, and the data's "
                f"inputs are {list(input_shape)}; choose model mlp or logistic"
            )

    def need_tokens(self, input_shape: tuple[int, ...]) -> None:
        """ValueError unless inputs are sequences [length]."""
        if len(input_shape) != 1:
            raise ValueError(
                f"{self.name} needs tokens [length], and the data's inputs are {list(input_shape)}; "
                "choose a model for images, for example convnet2"
            )

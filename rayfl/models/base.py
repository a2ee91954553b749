"""A model: its options, and a network for the shape of a dataset's examples. Any torch module can be one."""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Annotated, Any, ClassVar, Literal, cast, get_args

from pydantic import Field
from torch import Tensor, nn

import rayfl.data.torchvision  # noqa: F401 (so that a file or a factory can import torchvision)
from rayfl.choices.kinds import Choice, reference
from rayfl.data.sources.several_inputs import InputLayout
from rayfl.errors import RayflError, UnknownKey
from rayfl.models.skeleton import complete

Width = Annotated[int, Field(ge=1)]
"""Number of units or channels of a layer."""
Rate = Annotated[float, Field(ge=0, lt=1)]
"""Share of the inputs that dropout sets to 0."""
MemoryFormat = Literal["contiguous", "channels_last"]
"""How images [batch, channels, height, width] lie in memory; see `laid_out`."""


class Architecture(Choice):
    """A model with its options."""

    label = "model"
    package = "rayfl.models"
    also = "a class of torch modules, a function that returns a new module, or "
    memory_format: ClassVar[MemoryFormat] = "contiguous"
    """The memory layout of the network's images. Each architecture fixes the layout that was faster for it on a CPU,
    since a choice by timing could give two runs different bits."""

    takes_several: ClassVar[bool] = False
    """Whether `build` also takes the shapes of several inputs, a tuple or a dictionary of shapes."""

    start: str | None = Field(
        default=None, min_length=1, description="safetensors file of the weights to start from, instead of random ones"
    )

    @abstractmethod
    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """The network: inputs [batch, *input_shape] to outputs [batch, num_classes]. Raise RayflError if it cannot be
        made for these shapes.

        num_classes: the number of outputs that the task needs: the number of classes, numbers, labels, or tokens.
        """

    def builder(
        self, input_shape: tuple[int, ...], num_classes: int, layout: InputLayout | None = None
    ) -> Callable[[], nn.Module]:
        """`build` with its arguments bound, which pickles; its lazy layers get their sizes.

        layout: of examples with several inputs, whose shapes `build` then gets. Raise RayflError if it takes one.
        """
        if layout is not None and not self.takes_several:
            raise RayflError(
                f"model {self.name!r} takes one input, and an example has several, {layout}; give a class of your own"
            )
        return partial(complete, self.build, tuple(input_shape), num_classes, layout)

    @property
    # Any: options as the user wrote them, or their defaults.
    def settable(self) -> Mapping[str, Any]:
        """The options that a user can set, with their values."""
        return dict(self)

    @classmethod
    def adopts(cls, component: object) -> bool:
        """Whether it is a class of torch modules, or a function, a method or a `functools.partial` that makes one."""
        is_module = isinstance(component, type) and issubclass(component, nn.Module)
        return is_module or isinstance(component, FunctionType | MethodType | partial)

    # Any: see `Choice.from_options`.
    @classmethod
    def from_options(cls, component: Any, options: Mapping[str, Any]) -> Any:
        """The model of a subclass, or of a class or function that makes torch modules."""
        if isinstance(component, type) and issubclass(component, Architecture):
            return component(**options)
        others = {name: value for name, value in options.items() if name != "start"}
        return FromFactory(factory=component, options=checked_options(component, others), start=options.get("start"))

    def need_images(self, input_shape: tuple[int, ...], least: int) -> None:
        """Raise RayflError unless inputs are images [channels, height, width] with sides of at least `least` pixels."""
        if len(input_shape) != 3 or min(input_shape[1:]) < least:
            raise RayflError(
                f"{self.name} needs images [channels, height, width] of at least {least}x{least}, and the data's "
                f"inputs are {list(input_shape)}; choose model mlp or logistic (for text, char-lstm)"
            )

    def need_tokens(self, input_shape: tuple[int, ...]) -> None:
        """Raise RayflError unless inputs are sequences [length]."""
        if len(input_shape) != 1:
            raise RayflError(
                f"{self.name} needs tokens [length], and the data's inputs are {list(input_shape)}; "
                "choose a model for images, for example convnet2"
            )


SHAPES = ("input_shape", "num_classes")
"""Facts about the data that a factory is given if it has parameters of these names."""


class FromFactory(Architecture):
    """A model that a user's class of torch modules, or function, makes: `factory(input_shape, num_classes, ...)`.

    `input_shape` and `num_classes` are passed by name if the factory has such parameters, or takes any option
    (`**options`); `options` are always passed, `start` never. If examples have several inputs, `input_shape` is a tuple
    of shapes, or shapes by name.
    """

    takes_several = True

    # Any: a class or a function.
    factory: Any
    # Any: whatever its parameters take.
    options: Mapping[str, Any]

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The model's name in sentences."""
        return getattr(self.factory, "__qualname__", _beneath(self.factory).__qualname__)

    # Any: a table of an experiment.
    def to_table(self) -> dict[str, Any]:
        start = {} if self.start is None else {"start": self.start}
        return {"name": reference(self.factory), **self.options, **start}

    @property
    # Any: see `Architecture.settable`.
    def settable(self) -> Mapping[str, Any]:
        parameters = inspect.signature(self.factory).parameters.items()
        return {name: parameter.default for name, parameter in parameters if name not in SHAPES} | dict(self.options)

    @property
    def memory_format(self) -> MemoryFormat:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The factory's attribute of this name; contiguous if it has none. Raise RayflError for an unknown value."""
        layout = getattr(_beneath(self.factory), "memory_format", "contiguous")
        if layout not in get_args(MemoryFormat):
            raise RayflError(
                f"model {self.name!r} has memory_format={layout!r}; it must be {' or '.join(get_args(MemoryFormat))}"
            )
        return cast(MemoryFormat, layout)

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        try:
            module = self._made(dict(zip(SHAPES, (input_shape, num_classes), strict=True)))
        except (Exception, SystemExit) as error:
            # torch adds lines with all signatures of an operation.
            first_line = str(error).partition("\n")[0]
            raise RayflError(
                f"model {self.name!r} cannot be made for inputs {list(input_shape)} and {num_classes} classes: "
                f"{type(error).__name__}: {first_line}"
            ) from error
        if not isinstance(module, nn.Module):
            raise RayflError(f"model {self.name!r} makes a {type(module).__name__}; it must return a torch.nn.Module")
        return module

    # Any: what the factory returns.
    def _made(self, facts: Mapping[str, object]) -> Any:
        """What the factory makes of the options and of those `facts` about the data that it takes.

        A factory with `**options` may hand them on to one that does not take all facts, and raises TypeError then.
        """
        parameters = inspect.signature(self.factory).parameters
        arguments = {name: fact for name, fact in facts.items() if name in parameters or _takes_all(parameters)}
        while True:
            try:
                return self.factory(**arguments, **self.options)
            except TypeError as error:
                untaken = [name for name in arguments if name not in parameters and f"argument '{name}'" in str(error)]
                if not untaken:
                    raise
                del arguments[untaken[0]]


# Any: a class, or what has parameters.
def _beneath(factory: Any) -> Any:
    """The class or function that a partial or a classmethod calls in the end."""
    while isinstance(factory, partial):
        factory = factory.func
    return factory.__self__ if inspect.ismethod(factory) else factory


def laid_out(images: Tensor, memory_format: MemoryFormat) -> Tensor:
    """[batch, channels, height, width] in a memory format; other inputs as they are.

    With one channel no number moves, but torch chooses kernels by the strides, so two views set them.
    """
    if images.dim() != 4 or memory_format == "contiguous":
        return images
    batch, channels, height, width = images.shape
    rows = images.permute(0, 2, 3, 1).reshape(batch, height * width * channels)
    return rows.view(batch, height, width, channels).permute(0, 3, 1, 2)


# Any: one of a network's outputs.
def in_float32(output: Any) -> Any:
    """An output in float32, if it is a tensor of floating-point numbers."""
    return output.float() if isinstance(output, Tensor) and output.is_floating_point() else output


# Any: options as the user wrote them.
def checked_options(factory: Callable[..., object], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a factory. Raise RayflError for one that it does not take, and for one that it needs."""
    parameters = inspect.signature(factory).parameters
    settable = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD) and name not in SHAPES
    ]
    takes_all = _takes_all(parameters)
    for name in options:
        if name in SHAPES and takes_all:
            raise RayflError(" is given by rayfl, from the data; remove it", (name,))
        if name in SHAPES or (name not in settable and not takes_all):
            raise UnknownKey((name,), settable)
    for name in settable:
        if parameters[name].default is inspect.Parameter.empty and name not in options:
            raise RayflError(" is missing", (name,))
    return dict(options)


def _takes_all(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Whether a function has a parameter such as `**options`."""
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

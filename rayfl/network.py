"""A torch module as a pure function of parameters and inputs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from rayfl import tree
from rayfl.determinism.process import Precision
from rayfl.errors import RayflError
from rayfl.models import flops
from rayfl.models.base import MemoryFormat, laid_out
from rayfl.tree import Tree


class Network:
    """What `build` makes, called as `network(params, inputs)`. The module is a skeleton without storage.

    Parameters with `requires_grad=False` and buffers are constants: `init` leaves them out of the tree and keeps them
    here, and they pickle with the network. Raise RayflError if no parameter is left.

    input_shape: the shape of one example, by which operations are counted. memory_format: how images lie in memory.
    precision: with bf16, products and convolutions run under autocast, forward and backward; parameters, gradients and
    outputs stay float32.

    constants: what the module uses beside the parameters, by name; never trained, sent or counted.
    stochastic: whether it draws random numbers in training (dropout). vmappable: whether it can run under torch.vmap.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        input_shape: tuple[int, ...] | None = None,
        memory_format: MemoryFormat = "contiguous",
        precision: Precision = "fp32",
    ) -> None:
        self.build = build
        self.input_shape = input_shape
        self.memory_format: MemoryFormat = memory_format
        self.precision: Precision = precision
        self.constants: Mapping[str, np.ndarray] = {}
        self._skeleton()
        refuse_batch_statistics(self.module)
        if not self.slots:
            raise RayflError("the model has no trained parameter: requires_grad must be True for at least one")
        self.stochastic = any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in self.module.modules())
        self.recurrent = any(isinstance(layer, nn.RNNBase) for layer in self.module.modules())
        self.vmappable = not self.stochastic and not self.recurrent

    def init(self, seed: int) -> Tree:
        """The trained parameters of `first_weights`; the constants are kept."""
        return self.keep_constants(self.first_weights(seed))

    def first_weights(self, seed: int) -> Tree:
        """The parameters and the buffers that the module begins with."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            module = self.build()
        return {name: tensor.detach().clone() for name, tensor in named_weights(module).items()}

    def keep_constants(self, weights: Tree) -> Tree:
        """Keep the constants among `weights`, and return the trained parameters."""
        trained = {name for _, _, name in self.slots}
        self.constants = {name: tensor.numpy() for name, tensor in weights.items() if name not in trained}
        self._place(torch.device("cpu"))
        return {name: tensor for name, tensor in weights.items() if name in trained}

    def __call__(self, params: Tree, inputs: Tensor, training: bool = True) -> Tensor:
        """The outputs [batch, ...] for inputs [batch, *input_shape]; dropout drops only in training."""
        if not training:
            with self._evaluating():
                return self(params, inputs)
        if self.constants and inputs.device != self.placed_on:
            self._place(inputs.device)
        if self.precision != "bf16":
            return self._forward(params, inputs)
        # Without its cache: what it keeps of one call's weights would meet the next call's.
        with torch.autocast(inputs.device.type, torch.bfloat16, cache_enabled=False):
            return self._forward(params, inputs).float()

    def _forward(self, params: Tree, inputs: Tensor) -> Tensor:
        inputs = laid_out(inputs, self.memory_format)
        if self.recurrent:
            # nn.RNNBase keeps a list of its weights beside its parameters, which functional_call knows to renew.
            return self._checked(torch.func.functional_call(self.module, params, (inputs,)))
        for owner, name, parameter in self.slots:
            owner._parameters[name] = params[parameter]  # pyright: ignore[reportArgumentType]
        try:
            return self._checked(self.module(inputs))
        finally:
            # Parameters left in the module would keep this call's graph alive.
            for owner, name, _ in self.slots:
                owner._parameters[name] = None

    def _checked(self, outputs: Tensor) -> Tensor:
        """The outputs. Raise RayflError if the forward pass changed a buffer: that of one client would reach others."""
        for owner, name, key in self.buffer_slots:
            if owner._buffers[name] is not self.buffers[key] or self.buffers[key]._version:
                raise RayflError(
                    f"the model changes its buffer {key!r} as it runs, and buffers are constants in rayfl: use layers "
                    "without running statistics or counters"
                )
        return outputs

    def _place(self, device: torch.device) -> None:
        """Put the constants into the module, on `device`; what lies in main memory is shared with `self.constants`."""
        placed = {name: tree.tensor_over(array).to(device) for name, array in self.constants.items()}
        self.placed_on = device
        for owner, name, key in self.frozen_slots:
            setattr(owner, name, nn.Parameter(placed[key], requires_grad=False))
        # A module that writes into its buffers must reach `_checked`: arrays in Ray's object store are read-only.
        self.buffers = {key: placed[key].clone() for _, _, key in self.buffer_slots}
        for owner, name, key in self.buffer_slots:
            owner._buffers[name] = self.buffers[key]

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.module.eval()
        try:
            # In evaluation mode cuDNN's recurrent layers have no gradient.
            with torch.backends.cudnn.flags(enabled=False) if self.recurrent else nullcontext():
                yield
        finally:
            self.module.train()

    @cached_property
    def weight_uses(self) -> Mapping[str, int]:
        """For each trained weight by name: the multiplications of an entry in a forward pass of one example."""
        if self.input_shape is None:
            return {}
        with torch.random.fork_rng(devices=()):
            module = self.build()
        try:
            return flops.weight_uses(module, self.input_shape, {name for _, _, name in self.slots})
        except (RuntimeError, TypeError, ValueError, IndexError):
            # Somebody's own module may not take a batch of one.
            return {}

    def __getstate__(self) -> dict[str, object]:
        # Counted once, and not again by every actor.
        state = {**self.__dict__, "weight_uses": self.weight_uses}
        made = ("module", "slots", "frozen_slots", "buffer_slots", "buffers", "placed_on")
        return {name: value for name, value in state.items() if name not in made}

    def __setstate__(self, state: dict[str, object]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._skeleton()
        if self.constants:
            self._place(torch.device("cpu"))

    def _skeleton(self) -> None:
        """The module, and where its tensors go: (submodule, name in it, name in the tree); tied ones share a name.

        Each call sets the trained parameters directly, which takes a hundredth of the time of
        torch.func.functional_call; `_place` sets the constants.
        """
        with torch.device("meta"):
            self.module = self.build()
        names = {id(tensor): name for name, tensor in named_weights(self.module).items()}
        owners = list(self.module.modules())
        parameters = [
            (parameter.requires_grad, (owner, name, names[id(parameter)]))
            for owner in owners
            for name, parameter in owner._parameters.items()
            if parameter is not None
        ]
        self.slots = [slot for trained, slot in parameters if trained]
        self.frozen_slots = [slot for trained, slot in parameters if not trained]
        self.buffer_slots = [
            (owner, name, names[id(buffer)])
            for owner in owners
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self.buffers: Tree = {}
        self.placed_on = torch.device("meta")


def named_weights(module: nn.Module) -> Tree:
    """The parameters and the buffers of a module by name, those included that its state_dict leaves out."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def refuse_batch_statistics(module: nn.Module) -> None:
    """Raise RayflError for models with BatchNorm: its running statistics are no parameters, so they are not
    averaged."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            kind = type(layer).__name__
            raise RayflError(f"layer {name!r} is {kind}, which federated averaging breaks; use GroupNorm")

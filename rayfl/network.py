"""A torch module as a pure function of parameters, buffers and inputs."""

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from rayfl import tree
from rayfl.data.batches import Batch
from rayfl.data.sources.several_inputs import InputLayout, arguments_of
from rayfl.determinism.global_draws import drawn_by, seeded
from rayfl.determinism.process import ArithmeticPrecision
from rayfl.errors import RayflError
from rayfl.models import batch_norm, flops
from rayfl.models.base import MemoryFormat, in_float32, laid_out
from rayfl.models.skeleton import check_type, plain_tensors, skeleton

_MADE = (
    *("module", "rows", "slots", "frozen_slots", "buffer_slots", "constant_slots", "moving_slots"),
    *("buffers", "placed_on", "stored_names", "plain_slots"),
)
"""Attributes that every process makes for itself, and that are not pickled."""


class Network:
    """The module that `build` makes, called as `network(params, inputs)`. It is a skeleton without storage.

    Parameters with `requires_grad=False` and buffers are constants: `init` leaves them out of the tree and keeps them
    here, and they pickle with the network. Raise RayflError if no parameter is left. Buffers that training changes are
    entries of `params`, and `advance` returns their new values.

    input_shape: the shape of one example, by which operations are counted. memory_format: how images lie in memory.
    layout: where the inputs are in a row, if examples have several.
    precision: with bf16, products and convolutions run under autocast, forward and backward; parameters, gradients and
    outputs stay float32.

    constants: tensors that the module uses beside the parameters, by name; never trained, sent or counted.
    stored_names: the names in the module's state_dict, each with that of the weight in `params`.
    local: initial values of the tensors that clients keep, by name: the parameters in `personal`, and buffers that
    training changes. stochastic: whether `observe` has seen it draw random numbers. vmappable: whether it can run under
    torch.vmap.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        input_shape: tuple[int, ...] | None = None,
        memory_format: MemoryFormat = "contiguous",
        precision: ArithmeticPrecision = "fp32",
        seed: int = 0,
        layout: InputLayout | None = None,
    ) -> None:
        self.build = build
        self.input_shape = input_shape
        self.memory_format: MemoryFormat = memory_format
        self.precision: ArithmeticPrecision = precision
        self.seed = seed
        self.layout = layout
        self.constants: Mapping[str, np.ndarray] = {}
        self.local: Mapping[str, np.ndarray] = {}
        self.personal: tuple[str, ...] = ()
        self.moving: frozenset[str] = frozenset()
        self.frozen = False
        self._skeleton()
        if not self.slots:
            raise RayflError("the model has no trained parameter: requires_grad must be True for at least one")
        for name, tensor in named_weights(self.module).items():
            check_type(name, tensor)
        self.stochastic = False
        self.recurrent = any(isinstance(layer, nn.RNNBase) for layer in self.module.modules())
        self.vmappable = not self.recurrent

    def init(self, seed: int) -> tree.Tree:
        """The shared parameters of `first_weights`; constants and tensors that clients keep stay in the network.

        If the network has them already, they are not replaced: several models may be drawn for one network.
        """
        return self.keep_constants(
            {**self.first_weights(seed), **tree.to_tensors({**self.constants, **self.local})},
            self.personal,
            self.moving,
            self.frozen,
        )

    def first_weights(self, seed: int) -> tree.Tree:
        """The parameters and the buffers that the module begins with."""
        with seeded(seed):
            module = self.build()
        # Not copied if nothing but the module has the memory: models can be large.
        return {
            name: tensor.detach() if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.detach().clone()
            for name, tensor in named_weights(module).items()
        }

    def keep_constants(
        self, weights: tree.Tree, personal: tuple[str, ...] = (), moving: Collection[str] = (), frozen: bool = False
    ) -> tree.Tree:
        """Keep the constants and `local` among `weights`, and return the other trained parameters.

        personal, moving: names of the parameters and the buffers in `local`; frozen: these buffers are constants.
        """
        trained = {name for _, _, name in self.slots}
        kept = {*personal, *([] if frozen else moving)}
        self.personal = personal
        self.moving = frozenset(moving)
        self.frozen = frozen
        self.local = {name: weights[name].numpy() for name in weights if name in kept}
        self.constants = {name: weights[name].numpy() for name in weights if name not in trained | kept}
        self._place(torch.device("cpu"))
        by_rows = {
            f"{name}.{buffer_name}" for name, layer in batch_norm.layers(self.module) for buffer_name in layer._buffers
        }
        self.vmappable = self.vmappable and self.moving <= by_rows
        return {name: tensor for name, tensor in weights.items() if name in trained - kept}

    def changed_buffers(self, inputs: Tensor) -> frozenset[str]:
        """The names of the buffers that a training pass over `inputs` changes."""
        with seeded(self.seed), torch.no_grad():
            module = self.build().train()
            before = {name: (buffer, buffer.clone()) for name, buffer in module.named_buffers()}
            arguments, named = arguments_of(module, laid_out(inputs, self.memory_format), self.layout)
            module(*arguments, **named)
        after = dict(module.named_buffers())
        return frozenset(
            name
            for name, (buffer, value) in before.items()
            # torch's batch_norm does not raise the version of what it changes.
            if after.get(name) is not buffer or not torch.allclose(buffer, value, rtol=0, atol=0, equal_nan=True)
        )

    def observe(self, params: tree.Tree, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs in training and in evaluation mode. Notes whether a pass draws from global generators.

        Raise RayflError if a pass gives other outputs when it is repeated with the same draws.
        """
        in_mode: list[Tensor] = []
        for training in (True, False):
            outputs, generators = drawn_by(lambda mode=training: self(params, inputs, mode))
            self.stochastic |= bool(generators)
            self.vmappable &= not (training and generators)
            again = self(params, inputs, training)
            first, second = (
                [leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor)] for nested in (outputs, again)
            )
            if not any(bool(tensor.isnan().any()) for tensor in first) and not all(map(torch.equal, first, second)):
                mode = "training" if training else "evaluation"
                raise RayflError(
                    f"two equal passes of the model in {mode} mode differ: it changes its inputs in place, keeps "
                    "something from one pass to the next, or draws from a generator of its own, and each actor has "
                    "another one; keep tensors in buffers (self.register_buffer), and draw from torch's, numpy's or "
                    "Python's global generator, which rayfl seeds for each client and round"
                )
            in_mode.append(outputs)
        return in_mode[0], in_mode[1]

    def __call__(self, params: tree.Tree, inputs: Tensor, training: bool = True) -> Tensor:
        """The outputs [batch, ...] for inputs [batch, *input_shape]; dropout drops only in training."""
        if not training:
            self.module.eval()
            try:
                # In evaluation mode cuDNN's recurrent layers have no gradient.
                with torch.backends.cudnn.flags(enabled=False) if self.recurrent else nullcontext():
                    return self(params, inputs)
            finally:
                self.module.train()
        if (self.constants or self.plain_slots) and inputs.device != self.placed_on:
            self._place(inputs.device)
        if self.precision != "bf16":
            return self._forward(params, inputs)
        # Without autocast's cache, which would use one call's weights in the next call.
        with torch.autocast(inputs.device.type, torch.bfloat16, cache_enabled=False):
            return tree_map(in_float32, self._forward(params, inputs))

    def advance(self, params: tree.Tree, batch: Batch, by_hand: bool) -> tuple[Tensor, tree.Tree]:
        """The outputs for a batch in training, and the new values of the buffers in `params`.

        Rows of weight 0 enter no statistics of BatchNorm. by_hand: as `batch_norm.Rows`, for torch.vmap.
        """
        self.rows.weights, self.rows.by_hand = batch.weights, by_hand
        try:
            outputs = self(params, batch.inputs)
        finally:
            self.rows.weights, self.rows.by_hand = None, False
        moved: tree.Tree = {}
        for owner, name, key in self.moving_slots:
            # The buffer is taken out of the module, where it would keep this call's graph alive.
            buffer, owner._buffers[name] = owner._buffers[name], None
            if key in params and buffer is not None:
                moved[key] = buffer.detach()
        return outputs, moved

    def _forward(self, params: tree.Tree, inputs: Tensor) -> Tensor:
        arguments, named = arguments_of(self.module, laid_out(inputs, self.memory_format), self.layout)
        for owner, name, key in self.moving_slots:
            # Layers write into their buffers, and these may be somebody else's memory.
            owner._buffers[name] = (params[key] if key in params else self.buffers[key]).clone()
        if self.recurrent:
            # nn.RNNBase keeps a list of its weights beside its parameters, which functional_call knows to renew.
            weights = {name: params[name] for _, _, name in self.slots}
            return self._checked(torch.func.functional_call(self.module, weights, arguments, named))
        for owner, name, parameter in self.slots:
            owner._parameters[name] = params[parameter]  # pyright: ignore[reportArgumentType]
        try:
            return self._checked(self.module(*arguments, **named))
        finally:
            # Parameters left in the module would keep this call's graph alive.
            for owner, name, _ in self.slots:
                owner._parameters[name] = None

    def _checked(self, outputs: Tensor) -> Tensor:
        """The outputs. Raise RayflError if the pass changed a constant, as the change would reach other clients."""
        for owner, name, key in self.constant_slots:
            if owner._buffers[name] is not self.buffers[key] or self.buffers[key]._version:
                raise RayflError(
                    f"the model changes its buffer {key!r} as it runs, which a first training pass left alone, so that "
                    "it is a constant of all clients: change it in every training pass, or never"
                )
        return outputs

    def _place(self, device: torch.device) -> None:
        """Put the constants into the module, on `device`; what lies in main memory is shared with `self.constants`."""
        placed = {name: tree.tensor_over(array).to(device) for name, array in self.constants.items()}
        self.placed_on = device
        self.rows.fixed = self.frozen
        for owner, name, key in self.frozen_slots:
            setattr(owner, name, nn.Parameter(placed[key], requires_grad=False))
        # A module that writes into its buffers must reach `_checked`: arrays in Ray's object store are read-only.
        self.buffers = {key: placed[key].clone() for _, _, key in self.buffer_slots if key in placed}
        self.moving_slots = [slot for slot in self.buffer_slots if slot[2] in self.moving]
        self.constant_slots = [slot for slot in self.buffer_slots if slot[2] not in self.moving]
        for owner, name, key in self.constant_slots:
            owner._buffers[name] = self.buffers[key]
        for owner, name in self.plain_slots:
            setattr(owner, name, getattr(owner, name).to(device))

    @cached_property
    def weight_uses(self) -> flops.Uses:
        """For each trained weight by name: the multiplications of an entry in a forward pass of one example."""
        if self.input_shape is None:
            return flops.Uses()
        shared = {name for _, _, name in self.slots if name not in self.personal}
        with seeded(self.seed):
            return flops.weight_uses(skeleton(self.build), self.input_shape, shared, self.layout)

    def __getstate__(self) -> dict[str, object]:
        # Counted once, and not again by every actor.
        state = {**self.__dict__, "weight_uses": self.weight_uses}
        return {name: value for name, value in state.items() if name not in _MADE}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._skeleton()
        if self.constants or self.local:
            self._place(torch.device("cpu"))

    def _skeleton(self) -> None:
        """The module, and where its tensors go: (submodule, name in it, name in the tree); tied ones share a name.

        Each call sets the trained parameters directly, which takes a hundredth of the time of
        torch.func.functional_call; `_place` sets the constants.
        """
        with seeded(self.seed):
            self.module = skeleton(self.build)
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
        self.stored_names = {
            key: names[id(tensor)]
            for key, tensor in self.module.state_dict(keep_vars=True).items()
            if id(tensor) in names
        }
        self.plain_slots = [
            (owner, name) for owner, name, tensor in plain_tensors(self.module) if vars(owner)[name] is tensor
        ]
        self.constant_slots = self.buffer_slots
        self.moving_slots = []
        self.rows = batch_norm.Rows()
        batch_norm.count_rows(self.module, self.rows)
        self.buffers: tree.Tree = {}
        self.placed_on = torch.device("meta")


def named_weights(module: nn.Module) -> tree.Tree:
    """The parameters and the buffers of a module by name, those included that its state_dict leaves out."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}

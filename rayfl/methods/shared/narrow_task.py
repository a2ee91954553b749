"""A task that also takes the parameters of narrow networks: their shapes say how wide the network is."""

import math
from collections import Counter
from functools import cached_property

import numpy as np
import torch
from torch import nn

from rayfl import tree
from rayfl.data.batches import Batch
from rayfl.errors import RayflError, one_line
from rayfl.models import flops
from rayfl.models.widths.narrow import Narrowed, widths_of
from rayfl.models.widths.slices import Shape, Sizes, Widths
from rayfl.network import Network
from rayfl.task import NetworkTask
from rayfl.tree import Index, Tree

Outline = tuple[tuple[str, Shape], ...]
"""The names and shapes of parameters, by which a network is known."""


class NarrowTask(NetworkTask):
    """`task` for its network and all narrow ones. Narrow networks are made when they are first used."""

    def __init__(self, task: NetworkTask) -> None:
        super().__init__(task.network, task.task)
        self._networks: dict[Sizes, Network] = {}
        self._sizes: dict[Outline, Sizes] = {}
        self._inside: dict[tuple[Sizes, Sizes], Index] = {}

    @cached_property
    def widths(self) -> Widths:
        """The groups of the model. Raise RayflError, with the layer's name, if they cannot be found."""
        if self.network.frozen_slots:
            raise RayflError(
                "sub-models are cut from trained parameters, and some of the model's are frozen; remove [adapters], "
                "or train them (requires_grad)"
            )
        if self.network.input_shape is None:
            raise RayflError("the model's input shape is not known, so that its layers cannot be traced")
        return widths_of(self.network.build, self.network.input_shape, self.network.seed)

    @cached_property
    def hidden(self) -> frozenset[str]:
        """The weights and biases of linear, convolution and embedding layers whose outputs sub-models cut."""
        names: set[str] = set()
        for layer_name, layer in self.network.module.named_modules():
            if isinstance(layer, nn.Linear | nn.Embedding | nn.modules.conv._ConvNd):
                outputs = int(isinstance(layer, nn.Embedding | nn.modules.conv._ConvTransposeNd))
                axes = self.widths.weights.get(f"{layer_name}.weight")
                if axes is not None and axes[outputs] is not None:
                    names |= {f"{layer_name}.weight", f"{layer_name}.bias"}
        return frozenset(names & self.widths.weights.keys())

    @property
    def tied(self) -> frozenset[str]:
        """The names of the weights that several layers share."""
        counts = Counter(name for _, _, name in self.network.slots)
        return frozenset(name for name, count in counts.items() if count > 1)

    def outputs(self, params: Tree, batch: Batch) -> torch.Tensor:
        return self.network_of(params)(params, batch.inputs)

    def evaluated(self, params: Tree, batch: Batch) -> torch.Tensor:
        return self.network_of(params)(params, batch.inputs, training=False)

    def network_of(self, params: Tree) -> Network:
        """The network that has parameters of these shapes."""
        return self.network_at(self.sizes_of(params))

    def sizes_of(self, params: Tree) -> Sizes:
        """The numbers of units in the groups of the network that has parameters of these shapes."""
        key = tuple((name, tuple(tensor.shape)) for name, tensor in params.items())
        if key not in self._sizes:
            self._sizes[key] = self.widths.sizes_of(dict(key))
        return self._sizes[key]

    def network_at(self, sizes: Sizes) -> Network:
        """The network with these numbers of units in the groups."""
        if sizes not in self._networks:
            self._networks[sizes] = self._made(sizes)
        return self._networks[sizes]

    def shapes(self, sizes: Sizes) -> Tree:
        """The parameters of the network with these sizes, without values."""
        shapes = self.widths.narrow_shapes(sizes)
        names = dict.fromkeys(name for _, _, name in self.network.slots)
        return {name: torch.empty(shapes[name], device="meta") for name in names}

    def inside(self, outer: Sizes, inner: Sizes) -> Index:
        """Where the first units of `inner` are in the parameters of the narrow network of `outer`."""
        if (outer, inner) not in self._inside:
            whole, part = (self.widths.index([np.arange(size) for size in sizes]) for sizes in (outer, inner))
            # Positions of first units are ascending.
            self._inside[outer, inner] = {
                name: tuple(
                    None if kept is None or of_outer is None else np.searchsorted(of_outer, kept)
                    for of_outer, kept in zip(whole[name], part[name], strict=True)
                )
                for name in self.shapes(inner)
            }
        return self._inside[outer, inner]

    def share(self, sizes: Sizes) -> float:
        """The share of the model's operations in a forward pass that the narrow network needs; of its entries, if
        operations are not counted."""
        narrow, full = self.shapes(sizes), self.shapes(tuple(group.width for group in self.widths.groups))
        uses = self.network_at(sizes).weight_uses
        if not self.network.weight_uses:
            return tree.num_entries(narrow) / tree.num_entries(full)
        return flops.forward_flops(uses, params=narrow) / flops.forward_flops(self.network.weight_uses, params=full)

    def try_at(self, ratio: float) -> None:
        """Run the narrow network of a ratio on two examples. Raise RayflError if it cannot be made or does not run."""
        assert self.network.input_shape is not None, "see widths"
        what = f"at retention ratio {ratio:g} the model"
        try:
            sizes = self.widths.sizes(ratio)
            shapes = self.shapes(sizes)
            network = self.network_at(sizes)
        except RayflError as error:
            raise RayflError(f"{what} cannot be made: {error}") from None
        params = {name: torch.zeros(tensor.shape) for name, tensor in shapes.items()}
        inside: list[str] = []
        hooks = []
        for name, layer in network.module.named_modules():
            hooks.append(layer.register_forward_pre_hook(lambda *call, name=name: inside.append(name)))
            hooks.append(layer.register_forward_hook(lambda *call: inside.pop() and None))
        numbers = torch.zeros((2, *self.network.input_shape))
        is_text = any(hasattr(layer, "embedding_dim") for layer in network.module.modules())
        try:
            with torch.no_grad():
                network(params, numbers.long() if is_text else numbers)
        # Somebody's own module may raise anything.
        except Exception as error:  # noqa: BLE001
            layer = f"layer {inside[-1]!r}" if inside and inside[-1] else "its own forward"
            why = one_line(str(error).partition("\n")[0])
            raise RayflError(
                f"{what} does not run, in {layer}: {why}; the layer uses a fixed number of units: take it from the "
                "shape of its input, or give it set_width"
            ) from None
        finally:
            for hook in hooks:
                hook.remove()

    def _made(self, sizes: Sizes) -> Network:
        full = self.network
        if sizes == tuple(group.width for group in self.widths.groups):
            return full
        build = Narrowed(full.build, self.widths, sizes)
        network = Network(build, full.input_shape, full.memory_format, full.precision, full.seed)
        network.keep_constants(tree.to_tensors(dict(full.constants)))
        return network


def memory_bytes(params: Tree, *others: Tree) -> int:
    """Bytes of training a model: its parameters, a gradient, and `others` (the optimizer's state)."""
    return sum(
        math.prod(tensor.shape) * tensor.element_size()
        for part in (params, params, *others)
        for tensor in part.values()
    )

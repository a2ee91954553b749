"""Floating point operations of local training, counted as the Dis-PFL paper's table does.

Dai et al., DisPFL, ICML 2022, after Evci et al., ICML 2020: an example's forward pass takes two operations for every
kept entry of a weight and every place it is used at; training takes three times as much. Products of activations with
each other (attention's scores) take two for every multiplication. Biases, norms, activations and lookups are not
counted. Frozen weights have no gradient, so training takes twice as much for them: forward, and back to the
activations. A search by gradients is a batch of dense training.

What is counted are torch's operators in a forward pass of one example, and a weight is known by its memory: so it does
not matter which layer or function multiplies by it, how often, or whether it is computed first (weight_norm, pruning).
"""

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rayfl.data.sources.several_inputs import InputLayout, arguments_of
from rayfl.errors import log_once, one_line
from rayfl.tree import Tree

FIRST_FACTOR = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot"), 0),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation"), 1),
}
"""torch's products of two matrices or vectors, with the place of the first factor among their arguments."""

FUSED = re.compile(
    r"^(?!_?upsample).*(conv|linear|rnn|lstm|gru|attention|multi_head|transformer|mm$|mm_|matmul|cdist|mkldnn|sparse"
    r"|linalg_(?!vector_norm|cross))"
)
"""Names of operators that multiply too, and whose multiplications nobody here knows how to count."""


@dataclass(frozen=True, eq=False)
class Uses(Mapping[str, float]):
    """For each trained weight by name: the multiplications of each entry in one example's forward pass, as a mean."""

    by_weight: Mapping[str, float] = field(default_factory=dict)
    kept: int = 0
    """All other multiplications: by weights that clients keep (personal and frozen ones), by weights that are computed
    from several others, and of activations with each other."""
    frozen: int = 0
    """The part of `kept` by frozen weights."""
    head: str = ""
    """The name of the linear layer whose output is the module's own; "" if there is none."""

    def __getitem__(self, name: str) -> float:
        return self.by_weight[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_weight)

    def __len__(self) -> int:
        return len(self.by_weight)

    def __bool__(self) -> bool:
        """Whether anything was counted."""
        return bool(self.by_weight) or self.kept > 0


class Multiplications(TorchDispatchMode):
    """Counts the multiplications of an example's forward pass by weight, while it is entered.

    by_weight: under "" those that belong to no single weight. unknown: an operator that nobody here knows how to count.
    """

    def __init__(self, weights: Tree) -> None:
        super().__init__()
        self.weights = weights
        self.by_weight = Counter[str]()
        self.unknown = ""
        # The tensors are kept, since memory that is freed may become that of an activation.
        self.sources = {_memory(tensor): (frozenset([name]), tensor) for name, tensor in weights.items()}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Newer versions of torch would load their compiler, which takes seconds, at the first operator.
        return False

    # Any: the arguments of any operator.
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sources = [self._sources(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        names = frozenset[str]().union(*sources) if all(sources) else frozenset[str]()
        if not names:
            self._count(func, args, result)
        for tensor in (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            # An activation that is written into a weight's memory makes it one.
            self.sources.pop(_memory(tensor), None)
            if names:
                self.sources[_memory(tensor)] = names, tensor
        return result

    def _sources(self, tensor: Tensor) -> frozenset[str]:
        """The weights that a tensor was computed from, without the example; empty for an activation."""
        return self.sources[_memory(tensor)][0] if _memory(tensor) in self.sources else frozenset()

    # Any: see __torch_dispatch__.
    def _count(self, func: Any, args: Any, result: Any) -> None:
        space, _, name = func._schema.name.partition("::")
        name = name.rstrip("_")
        if name in FIRST_FACTOR:
            a, b = args[FIRST_FACTOR[name] :][:2]
            self._add(a.numel() * (b.shape[-1] if b.dim() > 1 else 1), a, b)
        elif name == "convolution":
            inputs, weight, transposed = args[0], args[1], args[6]
            positions = inputs.numel() // inputs.shape[1] if transposed else result.numel() // result.shape[1]
            self._add(positions * weight.numel(), inputs, weight)
        elif name.startswith("_scaled_dot_product"):
            queries, keys, values = args[:3]
            rows = queries.numel() // queries.shape[-1]
            self._add(rows * keys.shape[-2] * (queries.shape[-1] + values.shape[-1]))
        elif name == "mkldnn_rnn_layer":
            for weight in args[1:3]:
                self._add(args[0].numel() // args[0].shape[-1] * weight.numel(), weight)
        elif FUSED.match(name) or (space not in ("aten", "prim", "prims") and any(map(_is_float, tree_leaves(result)))):
            self.unknown = f"{space}::{name}"

    def _add(self, count: int, *factors: Tensor) -> None:
        """Add multiplications by the factor that is a weight, if one is."""
        names, size = next(
            ((sources, factor.numel()) for factor in factors if (sources := self._sources(factor))), ((), 0)
        )
        trained = [name for name in names if self.weights[name].requires_grad]
        owners = [*names]
        if len(owners) > 1:
            # A weight that is computed from several counts as the one of its size, so that a mask applies to it.
            owners = [name for name in trained if self.weights[name].numel() == size] if trained else [min(names)]
        self.by_weight[owners[0] if len(owners) == 1 else ""] += count


def weight_uses(
    module: nn.Module,
    input_shape: tuple[int, ...],
    shared: Collection[str] | None = None,
    layout: InputLayout | None = None,
) -> Uses:
    """The uses of all weights of `module`, by a forward pass of one example; none, with a warning, if it fails.

    shared: names of the weights that clients do not keep; None: all parameters. layout: of several inputs. The module
    may be on the meta device: its parameters are replaced by zeros that take no memory. The pass itself is on the CPU,
    because torch's imports for another device take longer.
    """
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    weights = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in buffers.items()}
    for name, tensor in parameters.items():
        zero = torch.zeros((), dtype=tensor.dtype)
        weights[name] = zero.expand(tensor.shape).requires_grad_(tensor.requires_grad)
    ones, zeros = torch.ones((1, *input_shape), dtype=torch.long), torch.zeros((1, *input_shape))
    is_text = any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in module.modules())
    failures = list[str]()
    head = ""
    # Token 0 often stands for padding, which some models cut off.
    for example in (ones, zeros.long(), zeros) if is_text and layout is None else (zeros, ones):
        counted = Multiplications(weights)
        try:
            head = _run(module, weights, arguments_of(module, example, layout), counted)
        # Somebody's own module may not take a batch of one, or such tokens, and a statistic ends no run.
        except Exception as error:  # noqa: BLE001
            failures.append(f"{type(error).__name__}: {error}")
            continue
        if not counted.unknown:
            return _uses(counted, parameters if shared is None else shared, head)
        failures.insert(0, f"its operator {counted.unknown} is not known")
        break
    why = one_line(failures[0].partition("\n")[0])
    log_once(logging.WARNING, f"the operations of the model are not counted, so records have no flops/training: {why}")
    return Uses(head=head)


# Any: what the module's forward takes.
def _run(
    module: nn.Module, weights: Tree, arguments: tuple[tuple[Any, ...], dict[str, Any]], counted: Multiplications
) -> str:
    """Count a forward pass with these weights; return the name of the linear layer whose output is the module's own."""
    outputs = dict[nn.Module, Tensor]()
    layers = {layer: name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    hooks = [layer.register_forward_hook(lambda *call: outputs.update([(call[0], call[2])])) for layer in layers]
    is_fast = torch.backends.mha.get_fastpath_enabled()
    # The fast path of attention is a single operator.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.random.fork_rng(devices=()), torch.no_grad(), counted:
            output = torch.func.functional_call(module.eval(), weights, *arguments)
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast)
        for hook in hooks:
            hook.remove()
    return next((name for layer, name in layers.items() if outputs.get(layer) is output), "")


def _uses(counted: Multiplications, shared: Collection[str], head: str) -> Uses:
    by_weight = dict[str, float]()
    kept, frozen = 0, 0
    for name, count in counted.by_weight.items():
        if name in shared:
            size = counted.weights[name].numel()
            by_weight[name] = count / size if count % size else count // size
        else:
            kept += count
            frozen += count if name and not counted.weights[name].requires_grad else 0
    return Uses(by_weight, kept, frozen, head)


# Any: a result of any operator.
def _is_float(result: Any) -> bool:
    return isinstance(result, Tensor) and result.is_floating_point()


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def forward_flops(uses: Uses, mask: Tree | None = None, params: Tree | None = None) -> int:
    """Operations of one example's forward pass through the entries that `mask` keeps; 0 if unknown.

    Weights that the mask does not name are whole, in the shapes of `params`.
    """
    kept = mask or {}
    complete = params or {}
    entries = {name: int(kept[name].count_nonzero()) if name in kept else complete[name].numel() for name in uses}
    return 2 * uses.kept + round(sum(2 * times * entries[name] for name, times in uses.items()))


def gradient_flops(uses: Uses, forward: int) -> float:
    """Operations of one example's gradient, if its forward pass takes `forward`."""
    return 3.0 * forward - 2 * uses.frozen


def training_metrics(uses: Uses, mask: Tree, num_trained: int, num_searched: int = 0) -> dict[str, float]:
    """`flops/training`: `num_trained` examples through `mask`, `num_searched` through all entries; {} without uses."""
    if not uses:
        return {}
    trained, searched = forward_flops(uses, mask), forward_flops(uses, params=mask)
    return {
        "flops/training": num_trained * gradient_flops(uses, trained) + num_searched * gradient_flops(uses, searched)
    }

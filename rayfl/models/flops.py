"""Floating point operations of local training, counted as the Dis-PFL paper's table does.

Dai et al., DisPFL, ICML 2022, after Evci et al., ICML 2020: an example's forward pass takes two operations for every
kept entry of a convolution or a linear layer and every place it is used at; training takes three times as much. Biases,
norms, activations and recurrent layers are not counted. Frozen weights have no gradient, so training takes twice as
much for them: forward, and back to the activations. A search by gradients is a batch of dense training.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from rayfl.tree import Tree

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_linear(layer: nn.Module) -> bool:
    """Whether the layer is linear. In transformers, GPT-2's are called Conv1D, and their weight is [in, out]."""
    kind = type(layer)
    return isinstance(layer, nn.Linear) or f"{kind.__module__}.{kind.__name__}" == "transformers.pytorch_utils.Conv1D"


class Uses(dict[str, int]):
    """For each trained weight by name: the multiplications of each entry in one example's forward pass."""

    kept: int = 0
    """Multiplications with all entries of the weights that clients keep: personal and frozen ones."""
    frozen: int = 0
    """The part of `kept` with frozen weights."""
    head: str = ""
    """The name of the linear layer whose output is the module's own; "" if there is none."""


def weight_uses(module: nn.Module, input_shape: tuple[int, ...], shared: Collection[str] | None = None) -> Uses:
    """The uses of all weights of convolutions and linear layers of `module`, by a forward pass of one example of zeros.

    shared: names of the weights that clients do not keep; None: all. The module may be on the meta device: it gets
    zeros that take no memory. The pass itself is on the CPU, because torch's imports for another one take longer.
    """
    weights = {
        name: torch.zeros((), dtype=tensor.dtype).expand(tensor.shape).requires_grad_(tensor.requires_grad)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    names = {id(tensor): name for name, tensor in weights.items()}
    uses, outputs = Uses(), dict[nn.Module, Tensor]()

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        weight = layer.weight
        assert isinstance(weight, Tensor)
        outputs[layer] = output
        # All but one of the output's dimensions are the places at which a weight is used.
        name, places = names[id(weight)], output.numel() // (output.shape[-1] if is_linear(layer) else weight.shape[0])
        if shared is None or name in shared:
            uses[name] = uses.get(name, 0) + places
        else:
            uses.kept += places * weight.numel()
            uses.frozen += 0 if weight.requires_grad else places * weight.numel()

    layers = [layer for layer in module.modules() if isinstance(layer, CONVOLUTIONS) or is_linear(layer)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    is_text = any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in module.modules())
    with torch.no_grad():
        example = torch.zeros((1, *input_shape), dtype=torch.long if is_text else torch.float32)
        made = torch.func.functional_call(module.eval(), weights, (example,))
    uses.head = next(
        (name for name, layer in module.named_modules() if isinstance(layer, nn.Linear) and outputs.get(layer) is made),
        "",
    )
    for hook in hooks:
        hook.remove()
    return uses


def forward_flops(uses: Mapping[str, int], mask: Tree | None = None, params: Tree | None = None) -> int:
    """Operations of one example's forward pass through the entries that `mask` keeps, or through all of `params`."""
    kept = 2 * getattr(uses, "kept", 0)
    if mask is not None:
        return kept + sum(2 * times * int(torch.count_nonzero(mask[name])) for name, times in uses.items())
    assert params is not None
    return kept + sum(2 * times * params[name].numel() for name, times in uses.items())


def gradient_flops(uses: Mapping[str, int], forward: int) -> float:
    """Operations of one example's gradient, if its forward pass takes `forward`."""
    return 3.0 * forward - 2 * getattr(uses, "frozen", 0)


def training_metrics(uses: Mapping[str, int], mask: Tree, num_trained: int, num_searched: int = 0) -> dict[str, float]:
    """`flops/training`: `num_trained` examples through `mask`, `num_searched` through all entries; {} without uses."""
    if not uses:
        return {}
    trained, searched = forward_flops(uses, mask), forward_flops(uses, params=mask)
    return {
        "flops/training": num_trained * gradient_flops(uses, trained) + num_searched * gradient_flops(uses, searched)
    }

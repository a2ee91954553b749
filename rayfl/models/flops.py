"""Floating point operations of local training, counted as the Dis-PFL paper's table does.

Dai et al., DisPFL, ICML 2022, after Evci et al., ICML 2020: an example's forward pass takes two operations for every
kept entry of a convolution or a linear layer and every place it is used at; training takes three times as much. Biases,
norms, activations and recurrent layers are not counted. A search by gradients is a batch of dense training.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rayfl.tree import Tree

COUNTED = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
Uses = Mapping[str, int]
"""For each weight by name: the number of multiplications of each entry in one example's forward pass."""


def weight_uses(module: nn.Module, input_shape: tuple[int, ...]) -> dict[str, int]:
    """The uses of all weights of convolutions and linear layers of `module`, by a forward pass of one example of zeros.

    Not on the meta device: torch's imports for it take longer than this pass.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    uses: dict[str, int] = {}

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        weight = layer.get_parameter("weight")
        # A weight's first dimension is that of the outputs, so the rest of them are the places it is used at.
        name, places = names[id(weight)], output.numel() // weight.shape[0]
        uses[name] = uses.get(name, 0) + places

    layers = [layer for layer in module.modules() if isinstance(layer, COUNTED)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    is_text = any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in module.modules())
    with torch.no_grad():
        module.eval()(torch.zeros((1, *input_shape), dtype=torch.long if is_text else torch.float32))
    for hook in hooks:
        hook.remove()
    return uses


def forward_flops(uses: Uses, mask: Tree | None = None, params: Tree | None = None) -> int:
    """Operations of one example's forward pass through the entries that `mask` keeps, or through all of `params`."""
    if mask is not None:
        return sum(2 * times * int(torch.count_nonzero(mask[name])) for name, times in uses.items())
    assert params is not None
    return sum(2 * times * params[name].numel() for name, times in uses.items())


def training_metrics(uses: Uses, mask: Tree, num_trained: int, num_searched: int = 0) -> dict[str, float]:
    """`flops/training`: `num_trained` examples through `mask`, `num_searched` through all entries; {} without uses."""
    if not uses:
        return {}
    trained, searched = forward_flops(uses, mask), forward_flops(uses, params=mask)
    return {"flops/training": 3.0 * (num_trained * trained + num_searched * searched)}

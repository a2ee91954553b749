"""BatchNorm as a pure function of a batch, without padding: running statistics are replaced, not changed in place.

Ioffe and Szegedy, Batch Normalization, ICML 2015. Torch's own layers get another forward pass. Other layers that keep
running statistics, such as subclasses with an activation inside, keep theirs: where a batch must not teach them, they
run in evaluation mode.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayfl.errors import RayflError


class Rows:
    """Settings of the current batch. `weights`: float32 [batch], 0 for padding; None: all rows count.

    by_hand: whether the layers compute by single operations, which run under torch.vmap, instead of torch's own kernel.
    fixed: whether training, too, uses the running statistics and does not change them.
    """

    weights: Tensor | None = None
    by_hand: bool = False
    fixed: bool = False


def layers(module: nn.Module) -> Iterator[tuple[str, nn.modules.batchnorm._BatchNorm]]:
    """Yield the name and the layer of every BatchNorm whose forward pass is torch's."""
    torch_forwards = (nn.modules.batchnorm._BatchNorm.forward, nn.SyncBatchNorm.forward)
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and type(layer).forward in torch_forwards:
            yield name, layer


def count_rows(module: nn.Module, rows: Rows) -> None:
    """Give the BatchNorm layers of `module`, and others with running statistics, a forward pass that reads `rows`.

    Raise RayflError for a BatchNorm without running statistics: its output for an example would depend on which others
    are evaluated beside it.
    """
    by_torch = {layer for _, layer in layers(module)}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is None:
            raise RayflError(
                f"layer {name!r} is {type(layer).__name__} with track_running_stats=False, so that an example's output "
                "depends on the others that are evaluated beside it; set it to True, or use GroupNorm"
            )
        if layer in by_torch:
            layer.forward = partial(_forward, layer, rows)  # pyright: ignore
        elif isinstance(layer._buffers.get("running_mean"), Tensor):
            layer.forward = partial(_in_its_mode, layer, rows, name)


def _forward(layer: nn.modules.batchnorm._BatchNorm, rows: Rows, inputs: Tensor) -> Tensor:
    """Inputs [batch, channels, ...], normalised per channel.

    With a single value per channel (a batch of one without pixels) there is no variance: the layer then uses its
    running statistics, and leaves them as they are.
    """
    layer._check_input_dim(inputs)
    values = inputs.numel() // inputs.shape[1]
    learns = layer.training and not rows.fixed
    if rows.by_hand or (learns and rows.weights is not None):
        return _by_hand(layer, rows.weights if learns else None, inputs, learns)
    mean, var = layer.running_mean, layer.running_var
    learns = learns and values > 1
    factor = layer.momentum
    if learns:
        assert layer.num_batches_tracked is not None, "see count_rows"
        layer.num_batches_tracked = layer.num_batches_tracked + 1
        factor = 1.0 / float(layer.num_batches_tracked) if factor is None else factor
    return functional.batch_norm(inputs, mean, var, layer.weight, layer.bias, learns, factor or 0.0, layer.eps)


# Any: whatever the layer takes and returns.
def _in_its_mode(layer: nn.Module, rows: Rows, name: str, *args: Any, **kwargs: Any) -> Any:
    """The layer's own forward pass: in evaluation mode where `_forward` would not learn. Its children keep their modes.

    Raise RayflError if it changes its running statistics in evaluation mode.
    """
    mean = layer._buffers["running_mean"]
    mode = layer.training
    inputs = next(iter((*args, *kwargs.values())))
    assert mean is not None, "see count_rows"
    learns = mode and not rows.fixed and inputs.numel() > mean.numel()
    # On a GPU a comparison would wait for it; a run begins with a pass on the CPU.
    before = None if learns or mean.device.type != "cpu" else mean.clone()
    # In evaluation mode, torch 2.6 writes into the statistics of an InstanceNorm what it has rounded once more.
    lent = not learns and issubclass(type(layer), nn.modules.instancenorm._InstanceNorm)
    kept = dict(layer._buffers) if lent else {}
    layer._buffers.update(
        {buffer_name: None if buffer is None else buffer.clone() for buffer_name, buffer in kept.items()}
    )
    layer.training = learns
    try:
        outputs = type(layer).forward(layer, *args, **kwargs)
    finally:
        layer.training = mode
        layer._buffers.update(kept)
    # torch's batch_norm does not raise the version of what it changes.
    now = layer._buffers["running_mean"]
    if before is not None and now is not None and not torch.equal(now, before):
        raise RayflError(
            f"layer {name!r} ({type(layer).__name__}) changes its running statistics in evaluation mode, so that an "
            "example's output depends on the others that are evaluated beside it; read self.training in its forward"
        )
    return outputs


def _by_hand(layer: nn.modules.batchnorm._BatchNorm, weights: Tensor | None, inputs: Tensor, learns: bool) -> Tensor:
    """`_forward` by single operations, in float32."""
    assert layer.running_mean is not None and layer.running_var is not None, "see count_rows"
    assert layer.num_batches_tracked is not None, "see count_rows"
    of_channel = (-1, *[1] * (inputs.dim() - 2))
    numbers = inputs.float()
    running_mean, running_var = layer.running_mean, layer.running_var
    mean, var = running_mean, running_var
    if learns:
        axes = [0, *range(2, inputs.dim())]
        ones = torch.ones(len(inputs), device=inputs.device) if weights is None else weights
        of_row = ones.reshape(-1, *[1] * (inputs.dim() - 1))
        count = ones.sum() * (inputs.numel() // (inputs.shape[0] * inputs.shape[1]))
        several = count > 1
        divisor = count.clamp(min=1)
        mean = (numbers * of_row).sum(axes) / divisor
        var = ((numbers - mean.reshape(of_channel)).square() * of_row).sum(axes) / divisor
        tracked = layer.num_batches_tracked = layer.num_batches_tracked + several.long()
        factor = 1 / tracked.clamp(min=1).float() if layer.momentum is None else layer.momentum
        unbiased = var.detach() * (count / (count - 1).clamp(min=1))
        layer.running_mean = torch.where(several, running_mean + factor * (mean.detach() - running_mean), running_mean)
        layer.running_var = torch.where(several, running_var + factor * (unbiased - running_var), running_var)
        mean, var = torch.where(several, mean, running_mean), torch.where(several, var, running_var)
    normalised = (numbers - mean.reshape(of_channel)) * (var + layer.eps).rsqrt().reshape(of_channel)
    if layer.weight is not None:
        normalised = normalised * layer.weight.reshape(of_channel)
    if layer.bias is not None:
        normalised = normalised + layer.bias.reshape(of_channel)
    return normalised.to(inputs.dtype)

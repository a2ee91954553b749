"""What metrics ask of outputs and targets: predictions in one row each, labels or classes, and the kind of targets."""

from torch import Tensor

from rayfl.metrics.base import Targets


def flat(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [m, classes] and classes [m] of all predictions, including the tokens of sequences, without padding."""
    outputs, targets = outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)
    kept = targets >= 0
    return (outputs, targets) if bool(kept.all()) else (outputs[kept], targets[kept])


def are_labels(outputs: Tensor, targets: Tensor) -> bool:
    """Whether targets are 0 or 1 for each output, and not classes."""
    return targets.shape == outputs.shape


def kind_of(outputs: Tensor, targets: Tensor) -> Targets:
    """The kind of all `targets` [n, ...] of an experiment, given outputs [batch, ...]."""
    if targets.ndim < outputs.ndim and not targets.is_floating_point():
        return "classes"
    return "labels" if bool(((targets == 0) | (targets == 1)).all()) else "numbers"

"""FjORD against the equations in float64."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rayfl.determinism.seeding import torch_seed
from tests.methods.capacity.reference import (
    Net,
    assert_agrees,
    cut,
    logits,
    prefix,
    reference,
    setup,
)
from tests.methods.reference import played

MOST = (1.0, 0.6, 0.25)
"""The largest width of each client in turn."""
WIDTHS = (0.25, 0.5, 0.6, 1.0)


def numbers(seed: int, count: int, steps: int) -> list[int]:
    """The widths' numbers that steps draw, by SplitMix64's function on whole numbers."""
    word, drawn, key = 2**64 - 1, [], seed
    for _ in range(steps):
        drawn.append((mixed(key) >> 1) % count)
        key = mixed((key + 0x9E3779B97F4A7C15) & word)
    return drawn


def mixed(z: int) -> int:
    word = 2**64 - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
    return z ^ (z >> 31)


def inner(width: float) -> tuple[int, int]:
    first, second = prefix(width)
    return len(first), len(second)


def loss_of(made: Any, distill: float | None) -> Callable[[int, int], Callable[[Net, Tensor, Tensor, int], Tensor]]:
    def loss(round: int, client: int):
        seed = torch_seed(made.seed, round, client, "units")
        allowed = [width for width in WIDTHS if width <= MOST[client % 3]]

        def step_loss(net: Net, inputs: Tensor, labels: Tensor, step: int) -> Tensor:
            width = allowed[numbers(seed, len(allowed), step + 1)[step]]
            outputs = logits(cut(net, prefix(width)), inputs)
            if distill is None:
                return nn.functional.cross_entropy(outputs, labels)
            whole = logits(net, inputs)
            soft = nn.functional.kl_div(outputs.log_softmax(1), whole.detach().softmax(1), reduction="batchmean")
            hard = nn.functional.cross_entropy(outputs, labels)
            return nn.functional.cross_entropy(whole, labels) + (1 - distill) * hard + distill * soft

        return step_loss

    return loss


@pytest.mark.parametrize(
    "hyper",
    [
        {"lr": 0.3, "batch_size": 2, "epochs": 2},
        {"lr": 0.1, "batch_size": 3, "momentum": 0.5, "weight_decay": 0.01, "distill": True, "distill_weight": 0.7},
    ],
)
def test_fjord_is_that_of_the_paper(hyper: dict[str, Any]):
    made = setup("fjord", {**hyper, "widths": WIDTHS}, ratios=MOST)
    distill = hyper.get("distill_weight") if hyper.get("distill") else None
    assert_agrees(made, reference(made, lambda round, client: prefix(MOST[client % 3]), loss_of(made, distill)))


def test_of_a_single_width_it_is_fedavg():
    hyper = {"lr": 0.3, "batch_size": 4}
    ours = played(setup("fjord", {**hyper, "widths": [1.0]}, ratios=None))[-1][1].server["params"]
    theirs = played(setup("fedavg", hyper, ratios=None))[-1][1].server["params"]
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-6, atol=1e-7)


def test_a_client_is_billed_for_the_widths_that_its_steps_drew():
    made = setup("fjord", {"lr": 0.3, "batch_size": 2, "widths": WIDTHS}, ratios=MOST)
    ((record, _), *_) = played(made)
    metrics = {(metric.client, metric.name): metric.value for metric in record.metrics}
    for row in record.clients:
        allowed = [width for width in WIDTHS if width <= MOST[row.client % 3]]
        seed = torch_seed(made.seed, 0, row.client, "units")
        drawn = [inner(allowed[number]) for number in numbers(seed, len(allowed), row.num_steps)]
        forward = np.mean([2 * (6 * first + first * second + 3 * second) for first, second in drawn])
        assert metrics[row.client, "flops/training"] == pytest.approx(3 * forward * row.num_samples, rel=1e-9)

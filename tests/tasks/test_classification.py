"""The shipped task of a run that names none."""

import numpy as np
import pytest
import torch
from torch import Tensor

from rayfl.data.datasets import Dataset, Examples
from rayfl.network import Network
from rayfl.tasks.base import Task
from rayfl.tasks.supervised import Classification
from tests.refusals import refused


def drawn() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(50, 7, generator=generator), torch.randint(0, 7, (50,), generator=generator)


@pytest.mark.parametrize("num_examples", [1, 3, 32, 50])
def test_the_short_mean_has_the_gradients_of_the_sums_over_counts(num_examples: int):
    """Bit for bit; only the values may differ in the last place."""
    logits, labels = (part[:num_examples] for part in drawn())
    task, leaves = Classification(), [logits.clone().requires_grad_() for _ in range(2)]
    values = [task.mean_loss(leaves[0], labels), Task.mean_loss(task, leaves[1], labels)]
    torch.testing.assert_close(*values, rtol=1e-6, atol=0)
    one, other = (torch.autograd.grad(value, leaf)[0] for value, leaf in zip(values, leaves, strict=True))
    assert torch.equal(one, other)


def test_padding_counts_for_nothing():
    logits, labels = drawn()
    weights = (torch.arange(50) < 20).float()
    task = Classification()
    torch.testing.assert_close(task.mean_loss(logits, labels, weights), task.mean_loss(logits[:20], labels[:20]))
    assert task.mean_loss(logits, labels, torch.zeros(50)) == 0


def test_the_score_is_whether_the_largest_logit_is_right():
    logits = torch.tensor([[1.0, 2.0, 0.0], [1.0, 2.0, 0.0]])
    assert Classification().score(logits, torch.tensor([1, 0])).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("labels", [np.zeros((4, 2), np.float32), np.zeros((4, 3), np.int64), np.zeros(4, np.float32)])
def test_targets_that_are_no_classes_are_refused(labels: np.ndarray):
    examples = Examples(np.zeros((4, 2), np.float32), labels)
    with refused(names=["classification", "'mine'", str(labels.dtype)]):
        network = Network(lambda: torch.nn.Linear(2, 2))
        Classification().check(Dataset("mine", examples, examples, num_classes=2, kind="vector"), network)


class Fivefold(Classification):
    """A subclass with a loss of its own."""

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        losses, counts = super().loss(outputs, targets)
        return 5 * losses, counts


@pytest.mark.parametrize("weights", [None, torch.ones(4)])
def test_a_subclass_trains_by_its_own_loss(weights: Tensor | None):
    outputs, targets = torch.randn(4, 3, generator=torch.manual_seed(0)), torch.tensor([0, 1, 2, 0])
    plain = Classification().mean_loss(outputs, targets, weights)
    assert Fivefold().mean_loss(outputs, targets, weights).item() == pytest.approx(5 * plain.item())

"""Operations of training by hand, and the FLOP column of Dis-PFL."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from rayfl.methods.shared import masks
from rayfl.models import flops
from rayfl.models.convolutional import ConvNet2
from rayfl.network import Network
from tests.bound_tasks import classification
from tests.models.paper_resnet import PaperResNet18


class TwoLayers(nn.Module):
    """A convolution of 1x3x3 in 2 channels on 6x6, and a linear layer of 32 in 5, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.head = nn.Linear(32, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.conv(images).flatten(1)
        return self.head(features) + self.head(-features)


def test_uses_by_hand():
    task = classification(TwoLayers, (1, 6, 6))
    assert dict(task.weight_uses) == {"conv.weight": 16, "head.weight": 2}
    # 18 kernel entries at 16 places, 160 weights used twice, two operations each.
    assert flops.forward_flops(task.weight_uses, params=task.init(0)) == 2 * (18 * 16 + 160 * 2)
    assert classification(TwoLayers).weight_uses == {}


class Sharing(nn.Module):
    """Two parameters in one piece of memory, two in memory of their own, of which two layers use one."""

    built: ClassVar[list[nn.Module]] = []

    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(2, 3, 4)
        self.a, self.b = nn.Parameter(both[0]), nn.Parameter(both[1])
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.head.weight = self.embedding.weight
        self.built.append(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens).mean(1) @ self.a.T @ self.b)


def test_a_model_is_built_once_and_its_memory_is_taken():
    Sharing.built.clear()
    network = Network(Sharing, (6,))
    params = network.init(0)
    assert network.weight_uses == {"embedding.weight": 1, "a": 1, "b": 1}
    # The others have no memory.
    (own,) = (dict(one.named_parameters()) for one in Sharing.built if not one.a.is_meta)
    taken = {name for name, tensor in params.items() if tensor.data_ptr() == own[name].data_ptr()}
    assert taken == {"embedding.weight", "head.bias"} and params.keys() - taken == {"a", "b"}
    assert all(torch.equal(tensor, own[name]) for name, tensor in params.items())


def test_training_takes_three_times_as_much_and_a_search_is_dense():
    task = classification(TwoLayers, (1, 6, 6))
    mask = {name: torch.zeros(value.shape, dtype=torch.bool) for name, value in task.init(0).items()}
    mask["conv.weight"].view(-1)[:4] = True
    mask["head.weight"][0] = True
    # Forward: 2 (4 * 16 + 32 * 2) = 256 sparse, 1216 dense; biases cost nothing.
    assert flops.training_metrics(task.weight_uses, mask, 10) == {"flops/training": 3 * 10 * 256}
    assert flops.training_metrics(task.weight_uses, mask, 10, 7) == {"flops/training": 3.0 * (10 * 256 + 7 * 1216)}
    assert flops.training_metrics({}, mask, 10) == {}


def test_convnet2():
    # 28x28: 6 kernels of 25 at 24x24, 16 of 150 at 8x8, then 256-120-84-10.
    task = classification(ConvNet2().builder((1, 28, 28), 10), (1, 28, 28))
    by_hand = 6 * 25 * 576 + 16 * 150 * 64 + 256 * 120 + 120 * 84 + 84 * 10
    assert flops.forward_flops(task.weight_uses, params=task.init(0)) == 2 * by_hand


@pytest.mark.parametrize(
    ("density", "printed"), [(0.2, 4.6), (0.4, 6.5), (0.5, 7.0), (0.6, 7.5), (0.8, 8.2), (1.0, 8.3)]
)
def test_the_flop_column_of_dis_pfl(density: float, printed: float):
    # Tables 1 and 4: 5 epochs of 500 examples, a search batch of 128, in 1e12, cut after one digit. At density 1 the
    # table's 8.3 belongs to methods without a search.
    task = classification(PaperResNet18, (3, 32, 32))
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in PaperResNet18().named_parameters()}
    params = {name: torch.empty(shape) for name, shape in shapes.items()}
    assert sum(p.numel() for p in params.values()) == 11_173_962
    mask = masks.random_mask(params, masks.erk_densities(shapes, density), np.random.default_rng(0))
    searched = 128 if density < 1 else 0
    found = flops.training_metrics(task.weight_uses, mask, 5 * 500, searched)["flops/training"] / 1e12
    assert np.floor(found * 10) / 10 == printed

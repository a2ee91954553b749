"""Masks on fixed random weights: thresholds, thin filters, the group lasso, the straight-through gradient."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from rayfl.data.batches import Batch
from rayfl.determinism import seeding
from rayfl.methods.masks.ind_mask import IndMask
from rayfl.methods.shared.learned_masks import (
    ScoredModel,
    first_scores,
    lasso_gradient,
    layer_masks,
    layer_ratios,
    masked_part,
    num_kept,
    threshold,
    without_thin_rows,
)
from rayfl.models.convolutional import ConvNet2
from rayfl.population.client import Traits
from rayfl.rounds.setup import Setup
from tests.methods.reference import TinyCNN, images, setup_of
from tests.refusals import refused


@pytest.mark.parametrize(
    ("n", "ratio", "kept"),
    # 1 - 0.9 and 1 - 0.7 are a little more or less than a tenth and three tenths in floats; 0.7 * 7 = 4.9.
    [(10, 0.9, 9), (10, 0.7, 7), (10, 0.3, 3), (7, 0.3, 3), (5, 1.0, 5), (3, 0.01, 1), (4800, 0.1, 480), (75, 0.4, 30)],
)
def test_so_many_are_kept(n: int, ratio: float, kept: int):
    assert num_kept(n, ratio) == kept
    y = torch.from_numpy(np.random.default_rng(n).standard_normal((1, n)).astype(np.float32))
    mask = threshold("y", y, ratio)
    assert int(mask.sum()) == kept
    assert kept == n or float(y.abs()[mask].min()) > float(y.abs()[~mask].max())


def test_ties_go_to_the_lowest_index():
    tied = torch.tensor([[1.0, -2.0, 2.0, -1.0, 1.0]])
    assert threshold("y", tied, 0.6).tolist() == [[True, True, True, False, False]]
    with refused(names=["'y'", "NaN", "infinity", "float32", "lower"], error=ValueError):
        threshold("y", torch.tensor([[1.0, float("nan")]]), 0.5)


def test_thin_rows_are_emptied():
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 1, 0]], dtype=torch.bool)
    assert without_thin_rows(mask, 2).tolist() == [[True] * 3, [True, True, False], [False] * 3]
    assert without_thin_rows(mask, 2.5).sum(dim=1).tolist() == [3, 0, 0]
    assert without_thin_rows(mask, 0).equal(mask)
    filters = mask.view(3, 1, 3, 1)
    assert without_thin_rows(filters, 3).flatten(1).sum(dim=1).tolist() == [3, 0, 0]


def test_fil_is_relative_to_a_row_and_spares_the_last_layer():
    def rows(*counts: int) -> Tensor:
        return torch.stack([torch.cat([torch.full((count,), 9.0), torch.ones(100 - count)]) for count in counts])

    # Of two rows of 100 entries, 20 are kept, all of them nines.
    y = {"first": rows(16, 4), "second": rows(15, 5), "last": rows(18, 2)}
    ratios = dict.fromkeys(y, 0.1)

    def kept(**options: float) -> list[list[int]]:
        return [layer.sum(dim=1).tolist() for layer in layer_masks(y, ratios, **options).values()]

    assert kept() == [[16, 4], [15, 5], [18, 2]]
    # c = min(20, 0.05 * 100) = 5, and 5 are not fewer.
    assert kept(fil=20, fil_share=0.05) == [[16, 0], [15, 5], [18, 2]]
    assert kept(fil=16, fil_share=1.0) == [[16, 0], [0, 0], [18, 2]]
    assert kept(fil=20, fil_share=1.0) == [[0, 0], [0, 0], [18, 2]]


def test_linear_layers_may_keep_their_own_share():
    params = ConvNet2().build((1, 28, 28), 10)
    layers = masked_part({name: tensor.detach() for name, tensor in params.named_parameters()})
    assert [layer.dim() for layer in layers.values()] == [4, 4, 2, 2, 2]
    assert list(layer_ratios(layers, 0.2, None).values()) == [0.2] * 5
    assert list(layer_ratios(layers, 0.2, 0.9).values()) == [0.2, 0.2, 0.9, 0.9, 0.9]


def test_first_scores_are_kaimings():
    layers = {"conv": torch.empty(40, 3, 5, 5), "fc": torch.empty(30, 100)}
    drawn = first_scores(layers, np.random.default_rng(0))
    for name, bound in (("conv", 75**-0.5), ("fc", 0.1)):
        z = drawn[name].double()
        assert z.shape == layers[name].shape and bool((z != 0).all())
        assert 0.99 * bound < float(z.abs().max()) <= bound * (1 + 1e-6)
        # The standard deviation of the mean of 3000 uniform numbers is bound / sqrt(9000).
        assert abs(float(z.mean())) < 4 * bound / 9000**0.5


def test_a_score_is_never_zero():
    class Zeros:
        def uniform(self, low: float, high: float, shape: tuple[int, ...]) -> np.ndarray:
            return np.zeros(shape)

    # Any: a generator that draws zeros only.
    zeros: Any = Zeros()
    assert first_scores({"w": torch.empty(2, 4)}, zeros)["w"].tolist() == [[0.5] * 4] * 2


def test_the_lasso_s_gradient_by_hand():
    # Row (3, 4) has norm 5; a row of zeros has no gradient.
    found = lasso_gradient({"w": torch.tensor([[3.0, -4.0], [0.0, 0.0]])}, 0.5)["w"]
    torch.testing.assert_close(found, torch.tensor([[0.3, -0.4], [0.0, 0.0]]))


def cnn(**hyper: Any) -> Setup:
    return setup_of("ind_mask", {"lr": 0.5, "batch_size": 0, **hyper}, dataset=images(), build=TinyCNN, rounds=1)


@pytest.mark.parametrize("lasso", [0.0, 0.05])
def test_the_straight_through_gradient_is_autograds(lasso: float):
    here = cnn(lasso=lasso, fil=0, weight_scale=1)
    method, state, ctx = here.method, here.first_state(0), here.context(0, here.plan(0), 0, "client")
    assert isinstance(method, IndMask)
    assert list(state["scores"]) == ["conv.weight", "head.weight"]
    rows = here.partition.train[0]
    examples = here.dataset.train
    batch = Batch(here.dataset.prepare(examples.inputs[rows]), torch.from_numpy(examples.labels[rows]))
    carry = method.step(method.begin(state, {}, ctx), batch, stage=ctx.plan.stages[0])
    gradient, moved = method.descend(cast(ScoredModel, state), carry, ctx)

    z = {name: tensor.clone().requires_grad_() for name, tensor in state["scores"].items()}
    # m + |z| - |z| has the value of m and the derivative sign(z).
    soft = {name: state["mask"][name] + layer.abs() - layer.abs().detach() for name, layer in z.items()}
    v = {name: tensor * soft[name] if name in soft else tensor for name, tensor in here.initial.items()}
    net = TinyCNN()
    objective = torch.nn.functional.cross_entropy(torch.func.functional_call(net, v, (batch.inputs,)), batch.labels)
    objective = objective + lasso * torch.stack([layer.flatten(1).norm(dim=1).sum() for layer in z.values()]).sum()
    objective.backward()
    for name, layer in z.items():
        assert layer.grad is not None
        torch.testing.assert_close(gradient[name], layer.grad, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(moved[name], state["scores"][name] - 0.5 * layer.grad, rtol=1e-4, atol=1e-6)
        # Entries that are not kept learn too.
        assert bool(layer.grad[~state["mask"][name]].any())


def test_scores_start_different_or_alike():
    for different in (True, False):
        method, params = cnn(different_initial=different).method, cnn().initial
        one, other = (
            method.init_client(Traits(client, 9), params, seeding.FirstDraws(1, client))["scores"] for client in (0, 1)
        )
        assert all(torch.equal(one[name], other[name]) for name in one) is not different
    # The common scores are not drawn from what the common mask is drawn from.
    draws = seeding.FirstDraws(1, 0)
    assert not np.allclose(draws.common("common mask").random(8), draws.common("common scores").random(8))

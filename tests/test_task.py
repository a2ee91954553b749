"""Losses, gradients and Hessian products against closed forms, in both forms of a task."""

import pickle
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from rayfl import tree
from rayfl.data.batches import Batch
from rayfl.task import BoundTask
from rayfl.tree import Tree
from tests.bound_tasks import classification
from tests.models.examples import pad
from tests.refusals import refused

FORMS = pytest.mark.parametrize("form", ["plain", "functional"])


class Bowl(BoundTask):
    """0.5 x' A x - b' x over x = (u, v) in two tensors; `idle` is no part of it. A is not diagonal."""

    A = torch.tensor([[4.0, 1.0, -2.0], [1.0, 3.0, 0.5], [-2.0, 0.5, 5.0]])
    b = torch.tensor([1.0, -2.0, 3.0])

    def init(self, seed: int) -> Tree:
        return {"u": torch.tensor([1.0, -1.0]), "v": torch.tensor([[2.0]]), "idle": torch.ones(2)}

    def loss(self, params: Tree, batch: Batch) -> Tensor:
        x = torch.cat([params["u"], params["v"].flatten()])
        return 0.5 * x @ (self.A @ x) - self.b @ x

    def losses(self, params: Tree, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.loss(params, batch)[None], torch.ones(1)


NOTHING = Batch(torch.zeros(1), torch.zeros(1, dtype=torch.int64))


def formed(task: BoundTask, form: str) -> BoundTask:
    return task if form == "plain" else task.functional()


@FORMS
def test_the_gradient_of_a_bowl(form: str):
    # A x - b with x = (1, -1, 2): (4 - 1 - 4 - 1, 1 - 3 + 1 + 2, -2 - 0.5 + 10 - 3).
    task = formed(Bowl(), form)
    value, gradient = task.value_and_grad(task.init(0), NOTHING)
    assert tree.vector(gradient).tolist() == [-2.0, 1.0, 4.5, 0.0, 0.0]
    assert {name: tensor.shape for name, tensor in gradient.items()} == {n: t.shape for n, t in task.init(0).items()}
    # 0.5 x' A x = 0.5 (-1, -1, 7.5)' (1, -1, 2) = 7.5 and b' x = 1 + 2 + 6 = 9.
    assert value.item() == -1.5 and not value.requires_grad
    assert not any(tensor.requires_grad for tensor in gradient.values())
    assert tree.vector(task.grad(task.init(0), NOTHING)).tolist() == [-2.0, 1.0, 4.5, 0.0, 0.0]


@FORMS
def test_the_hessian_product_of_a_bowl(form: str):
    # A (1, 2, -1) = (4 + 2 + 2, 1 + 6 - 0.5, -2 + 1 - 5).
    task = formed(Bowl(), form)
    vector = {"u": torch.tensor([1.0, 2.0]), "v": torch.tensor([[-1.0]]), "idle": torch.full((2,), 9.0)}
    product = task.hvp(task.init(0), NOTHING, vector)
    assert tree.vector(product).tolist() == [8.0, 6.5, -6.0, 0.0, 0.0]


@FORMS
def test_another_objective(form: str):
    # u0^3 + 0 * v: the gradient is 3 u0^2 = 3.
    def cube(params: Tree, batch: Batch) -> Tensor:
        return params["u"][0] ** 3

    task = formed(Bowl(), form)
    assert tree.vector(task.grad(task.init(0), NOTHING, cube)).tolist() == [3.0, 0.0, 0.0, 0.0, 0.0]


class Slope(Bowl):
    """u0 + u1."""

    def loss(self, params: Tree, batch: Batch) -> Tensor:
        return params["u"].sum()


@FORMS
def test_a_linear_loss_has_no_curvature(form: str):
    task = formed(Slope(), form)
    ones = tree.map(torch.ones_like, task.init(0))
    assert tree.vector(task.hvp(task.init(0), NOTHING, ones)).tolist() == [0.0] * 5


@FORMS
def test_gradients_leave_the_parameters_alone(form: str):
    task = formed(Bowl(), form)
    params = task.init(0)
    before = tree.map(torch.clone, params)
    gradient = task.grad(params, NOTHING)
    task.hvp(params, NOTHING, before)
    assert all(torch.equal(params[name], before[name]) for name in params)
    assert not any(tensor.requires_grad for tensor in [*params.values(), *gradient.values()])


def logistic() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3, 2))


def examples(weights: Tensor | None = None) -> Batch:
    inputs = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, -1.0], [2.0, 2.0, 0.0]])
    return Batch(inputs, torch.tensor([0, 1, 1]), weights)


@FORMS
def test_the_gradient_of_softmax_regression(form: str):
    """For logits W x + b and cross-entropy it is mean_n (softmax - onehot) x'."""
    task = formed(classification(logistic), form)
    params, batch = task.init(3), examples()
    errors = torch.softmax(batch.inputs @ params["1.weight"].T + params["1.bias"], dim=1)
    errors[torch.arange(3), batch.labels] -= 1
    value, gradient = task.value_and_grad(params, batch)
    torch.testing.assert_close(gradient["1.weight"], errors.T @ batch.inputs / 3, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient["1.bias"], errors.mean(dim=0), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(value, task.losses(params, batch)[0].mean(), rtol=1e-6, atol=1e-7)


@FORMS
def test_padding_counts_for_nothing(form: str):
    task = formed(classification(logistic), form)
    params, two = task.init(3), Batch(*(part[:2] for part in examples()[:2] if part is not None))
    padded = task.grad(params, examples(torch.tensor([1.0, 1.0, 0.0])))
    for name, wanted in task.grad(params, two).items():
        torch.testing.assert_close(padded[name], wanted, rtol=1e-6, atol=1e-7)
    nobody = task.grad(params, examples(torch.zeros(3)))
    assert tree.vector(nobody).abs().max() == 0


def test_each_example_has_a_loss_and_a_score():
    task = classification(logistic)
    # Logits are x0 and x1, so the predictions are 0, 1 and, at a tie, the first: 0.
    params = {"1.weight": torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), "1.bias": torch.zeros(2)}
    assert task.score(params, examples()).tolist() == [1.0, 1.0, 0.0]
    # -log softmax: log(1 + e^-1) twice, and log 2.
    losses, counts = task.losses(params, examples())
    assert losses.tolist() == pytest.approx([0.3132617, 0.3132617, 0.6931472], rel=1e-6)
    assert counts.tolist() == [1.0, 1.0, 1.0]


def test_initial_parameters_belong_to_their_seed():
    task = classification(logistic)
    state = torch.random.get_rng_state()
    first, again, other = task.init(1), task.init(1), task.init(2)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["1.weight"], other["1.weight"])


def test_group_norm_is_not():
    task = classification(lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten()))
    assert {name: tuple(tensor.shape) for name, tensor in task.init(1).items() if name[0] == "1"} == {
        "1.weight": (4,),
        "1.bias": (4,),
    }


def dropping() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3, 64), nn.Dropout(0.5), nn.Linear(64, 2))


def recurrent() -> nn.Module:
    return nn.LSTM(3, 2)


def test_what_cannot_run_under_vmap_says_so():
    facts = {build: classification(build) for build in (logistic, dropping, recurrent)}
    for task in facts.values():
        task.network.observe(task.init(0), examples().inputs)
    assert [task.stochastic for task in facts.values()] == [False, True, False]
    assert [task.vmappable for task in facts.values()] == [True, False, False]
    never = classification(lambda: nn.Sequential(nn.Flatten(), nn.Linear(3, 2), nn.Dropout(0.0)))
    never.network.observe(never.init(0), examples().inputs)
    assert never.vmappable


def test_dropout_drops_in_training_and_not_while_evaluating():
    task = classification(dropping)
    params = task.init(0)
    losses = {task.loss(params, examples()).item() for _ in range(5)}
    assert len(losses) > 1
    evaluated = {task.losses(params, examples())[0].mean().item() for _ in range(5)}
    assert len(evaluated) == 1
    assert len({task.loss(params, examples()).item() for _ in range(5)}) > 1


def test_a_task_pickles_without_storage_and_computes_the_same():
    task = classification(logistic)
    copy = pickle.loads(pickle.dumps(task))  # noqa: S301 - our own bytes
    assert all(parameter.is_meta for parameter in copy.network.module.parameters())
    params = task.init(1)
    assert torch.equal(copy.grad(params, examples())["1.weight"], task.grad(params, examples())["1.weight"])


def test_a_task_without_outputs_says_so():
    with refused(names=["Bowl", "network", "output"]):
        Bowl().outputs(Bowl().init(0), NOTHING)


def _recurrent() -> nn.Module:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(self.lstm(inputs)[0][:, -1])

    return Reader()


def test_a_recurrent_model_reads_the_parameters_it_is_given():
    task = classification(_recurrent)
    params, inputs = task.init(1), torch.randn(5, 6, 3, generator=torch.Generator().manual_seed(0))
    module = _recurrent()
    module.load_state_dict(params)
    for shift in (0.0, 0.5):
        moved = {name: tensor + shift for name, tensor in params.items()}
        module.load_state_dict(moved)
        batch = Batch(inputs, torch.zeros(5, dtype=torch.int64))
        assert torch.allclose(task.outputs(moved, batch), module(inputs), atol=1e-6)


def test_a_tied_parameter_is_put_in_everywhere():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.second.weight = self.first.weight

        def forward(self, inputs: Tensor) -> Tensor:
            return self.second(self.first(inputs))

    task = classification(Tied)
    batch = Batch(torch.eye(2), torch.zeros(2, dtype=torch.int64))
    weight = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    # Row i of the output is W W e_i: W^2 = [[1, 4], [0, 1]], transposed.
    assert task.outputs({"first.weight": weight}, batch).tolist() == [[1.0, 0.0], [4.0, 1.0]]


def test_bf16_rounds_the_factors_of_products_and_nothing_that_stays():
    """A linear layer: 16 bits into the product and out of it; parameters, gradients and the loss are float32."""
    plain, rounded = (classification(lambda: nn.Linear(20, 3), (20,), precision=word) for word in ("fp32", "bf16"))
    draw = torch.Generator().manual_seed(0)
    batch = Batch(torch.randn(8, 20, generator=draw), torch.arange(8) % 3)
    params = plain.init(0)
    logits = rounded.outputs(params, batch)
    product = batch.inputs.bfloat16() @ params["weight"].bfloat16().T
    by_hand = product.float() + params["bias"].bfloat16().float()
    assert logits.dtype == torch.float32
    # The bias goes into the product's accumulator, so that one rounding to 8 bits lies between the two.
    torch.testing.assert_close(logits, by_hand, rtol=2**-7, atol=2**-9)
    assert torch.equal(logits, logits.bfloat16().float()) and not torch.equal(logits, plain.outputs(params, batch))
    for task in (rounded, rounded.functional()):
        gradient = task.grad(params, batch)
        assert {tensor.dtype for tensor in gradient.values()} == {torch.float32}
        for name, exact in plain.grad(params, batch).items():
            torch.testing.assert_close(gradient[name], exact, rtol=0.05, atol=0.02)
    assert torch.equal(plain.outputs(params, batch), plain.outputs(params, batch)), "autocast ends with the call"


def test_bf16_goes_on_under_vmap_and_after_pickling():
    task = classification(partial(nn.Linear, 20, 3), (20,), precision="bf16")
    task = pickle.loads(pickle.dumps(task))  # noqa: S301 - our own bytes
    draw = torch.Generator().manual_seed(1)
    batches = [Batch(torch.randn(8, 20, generator=draw), torch.arange(8) % 3) for _ in range(2)]
    clients = [task.init(seed) for seed in range(2)]
    stacked = {key: torch.stack([client[key] for client in clients]) for key in clients[0]}
    functional = task.functional()
    found = torch.vmap(lambda params, batch: functional.grad(params, batch))(stacked, pad(batches, 8))
    for row, (params, batch) in enumerate(zip(clients, batches, strict=True)):
        for name, wanted in task.grad(params, batch).items():
            # Both round to 8 bits, in other places.
            torch.testing.assert_close(found[name][row], wanted, rtol=0.05, atol=0.02)

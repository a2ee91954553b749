"""Client optimizers agree with torch.optim, and change nothing that they were given."""

from typing import Any

import pytest
import torch

from rayfl import tree
from rayfl.methods.shared.local_training import LocalTraining
from rayfl.methods.shared.optimizers import SGD, Adam, AdamW, Nesterov, Optimizer
from rayfl.testing.executors import assert_same_bits, leaves
from tests.refusals import refused

CASES = {
    "sgd": (SGD(), lambda params, lr: torch.optim.SGD(params, lr)),
    "momentum": (SGD(momentum=0.9), lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9)),
    "decay": (SGD(weight_decay=0.1), lambda params, lr: torch.optim.SGD(params, lr, weight_decay=0.1)),
    "both": (
        SGD(momentum=0.5, weight_decay=0.01),
        lambda params, lr: torch.optim.SGD(params, lr, momentum=0.5, weight_decay=0.01),
    ),
    "nesterov": (
        Nesterov(momentum=0.8, weight_decay=0.01),
        lambda params, lr: torch.optim.SGD(params, lr, momentum=0.8, weight_decay=0.01, nesterov=True),
    ),
    "adamw": (AdamW(weight_decay=0.3), lambda params, lr: torch.optim.AdamW(params, lr, weight_decay=0.3)),
    "adamw without decay": (AdamW(), lambda params, lr: torch.optim.Adam(params, lr)),
    "adam": (Adam(), lambda params, lr: torch.optim.Adam(params, lr)),
    "adam of other betas": (
        Adam(beta1=0.5, beta2=0.9, epsilon=1e-3, weight_decay=0.1),
        lambda params, lr: torch.optim.Adam(params, lr, betas=(0.5, 0.9), eps=1e-3, weight_decay=0.1),
    ),
}


def gradients(count: int) -> list[tree.Tree]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"w": (4, 3), "b": (3,), "temperature": ()}
    return [{name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in range(count)]


@pytest.mark.parametrize("name", CASES)
def test_ten_steps_are_those_of_torch(name: str):
    optimizer, reference = CASES[name]
    start = gradients(1)[0]
    leaves = {key: value.clone().requires_grad_() for key, value in start.items()}
    theirs = reference(list(leaves.values()), 0.05)
    params, state = start, optimizer.init(start)
    for gradient in gradients(11)[1:]:
        for key, leaf in leaves.items():
            leaf.grad = gradient[key].clone()
        theirs.step()
        params, state = optimizer.update(params, gradient, state, 0.05)
    for key, leaf in leaves.items():
        torch.testing.assert_close(params[key], leaf.detach(), rtol=1e-6, atol=1e-6)


def test_momentum_by_hand():
    # v: 1, 0.5 * 1 + 2 = 2.5; x: 10 - 0.1 * 1 = 9.9, 9.9 - 0.1 * 2.5 = 9.65.
    optimizer, params = SGD(momentum=0.5), {"w": torch.tensor([10.0])}
    state = optimizer.init(params)
    for gradient in (1.0, 2.0):
        params, state = optimizer.update(params, {"w": torch.tensor([gradient])}, state, 0.1)
    assert params["w"].item() == pytest.approx(9.65, rel=1e-6)
    assert state["velocity"]["w"].tolist() == [2.5]


def test_the_first_step_of_adam_is_the_learning_rate():
    # mean / (1 - beta1) = g and square / (1 - beta2) = g^2, so the step is lr g / (|g| + epsilon).
    start = {"w": torch.zeros(2)}
    params, _ = Adam().update(start, {"w": torch.tensor([3.0, -0.5])}, Adam().init(start), 0.1)
    assert params["w"].tolist() == pytest.approx([-0.1, 0.1], rel=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_arguments_are_not_modified(name: str):
    optimizer: Optimizer = CASES[name][0]
    params, gradient = gradients(2)
    state = optimizer.init(params)
    _, state = optimizer.update(params, gradient, state, 0.1)
    before = [tree.vector(tree.flatten(x)).clone() for x in (params, gradient, {**state, "": torch.zeros(1)})]
    optimizer.update(params, gradient, state, 0.1)
    after = [tree.vector(tree.flatten(x)) for x in (params, gradient, {**state, "": torch.zeros(1)})]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_step_in_the_gradients_memory_has_the_same_bits(name: str):
    optimizer: Optimizer = CASES[name][0]
    params, gradient, again = gradients(3)
    _, state = optimizer.update(params, again, optimizer.init(params), 0.1)
    expected = optimizer.update(params, gradient, state, 0.1)
    own = tree.map(torch.clone, gradient)
    found = optimizer.update_last(params, own, state, 0.1)
    assert_same_bits(*(leaves("", {"params": step[0], "state": step[1]}) for step in (expected, found)))
    assert (found[0]["w"].data_ptr() == own["w"].data_ptr()) == (name == "sgd")


def test_gradients_that_share_memory_are_not_written_into():
    whole = torch.arange(3.0)
    gradient = {"w": whole[:2], "b": whole[1:]}
    params, _ = SGD().update_last({"w": torch.zeros(2), "b": torch.zeros(2)}, gradient, {}, 1.0)
    assert (params["w"].tolist(), params["b"].tolist()) == ([0.0, -1.0], [-1.0, -2.0])
    assert whole.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("name", CASES)
def test_stacked_clients_step_as_single_ones(name: str):
    optimizer: Optimizer = CASES[name][0]
    steps = gradients(6)
    clients = [steps[:3], steps[3:]]
    stacked = [{key: torch.stack([c[i][key] for c in clients]) for key in steps[0]} for i in range(3)]
    state = torch.vmap(optimizer.init)(stacked[0])
    params = stacked[0]
    for gradient in stacked[1:]:
        params, state = torch.vmap(lambda p, g, s: optimizer.update(p, g, s, 0.1))(params, gradient, state)
    for row, client in enumerate(clients):
        alone, own = client[0], optimizer.init(client[0])
        for gradient in client[1:]:
            alone, own = optimizer.update(alone, gradient, own, 0.1)
        for key, tensor in alone.items():
            torch.testing.assert_close(params[key][row], tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("wrong", [{"momentum": 1.0}, {"momentum": -0.1}, {"weight_decay": -1.0}])
def test_values_out_of_range_are_refused(wrong: dict[str, float]):
    with refused(names=[f"{key}={value}" for key, value in wrong.items()]):
        SGD(**wrong)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("sgd", SGD(momentum=0.9)), ("nesterov", Nesterov(momentum=0.9)), ("adam", Adam()), ("adamw", AdamW())],
)
def test_a_clients_settings_name_each_optimizer(name: str, optimizer: Optimizer):
    momentum = 0.9 if isinstance(optimizer, SGD) else 0.0
    settings: dict[str, Any] = {"optimizer": name, "momentum": momentum, "weight_decay": 0.1}
    made = LocalTraining(**settings).make_optimizer()
    assert made == optimizer.model_copy(update={"weight_decay": 0.1}) and type(made) is type(optimizer)


def test_nesterov_without_a_momentum_is_refused():
    with refused(names=["momentum=0.0", "optimizer='nesterov'", "0.9"]):
        LocalTraining(optimizer="nesterov")

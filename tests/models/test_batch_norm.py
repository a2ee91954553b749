"""BatchNorm whose padding does not count, against torch's own layers on the rows that count."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rayfl import Experiment
from rayfl.data.batches import Batch
from rayfl.experiment.prepare import prepare
from rayfl.methods.shared.client_task import ClientTask
from rayfl.models.batch_norm import Rows, count_rows
from rayfl.rounds.setup import Setup
from rayfl.task import NetworkTask
from rayfl.testing.executors import play
from rayfl.tree import Tree
from tests.bound_tasks import classification
from tests.refusals import refused

TOLERANCE = 2e-7


def network(momentum: float | None = 0.1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4, momentum=momentum),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 8),
        nn.BatchNorm1d(8, momentum=momentum),
        nn.Linear(8, 10),
    )


def batch(size: int, padding: int = 0) -> Batch:
    draws = torch.Generator().manual_seed(3)
    inputs = torch.randn(size + padding, 1, 8, 8, generator=draws)
    labels = torch.randint(0, 10, (size + padding,), generator=draws)
    return Batch(inputs, labels, torch.cat([torch.ones(size), torch.zeros(padding)]) if padding else None)


def task_of(build: Callable[[], nn.Module]) -> tuple[NetworkTask, Tree, Tree]:
    """The task, its parameters and its buffers."""
    task = classification(build, (1, 8, 8))
    weights = task.network.first_weights(7)
    moving = task.network.changed_buffers(batch(2).inputs)
    params = task.network.keep_constants(weights, (), moving)
    return task, params, {name: tensor for name, tensor in weights.items() if name in moving}


def by_torch(params: Tree, buffers: Tree, given: Batch, build: Callable[[], nn.Module]) -> tuple[Tensor, Tree, Tree]:
    """Loss, gradient and buffers of torch's own layers on the rows that count."""
    module = build()
    module.load_state_dict({**params, **buffers})
    count = len(given.labels) if given.weights is None else int(given.weights.sum())
    loss = nn.functional.cross_entropy(module(given.inputs[:count]), given.labels[:count])
    loss.backward()
    gradient = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    return loss.detach(), gradient, dict(module.named_buffers())


def assert_near(found: Tree, expected: Tree, tolerance: float = TOLERANCE) -> None:
    assert set(found) == set(expected)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("given", [batch(12), batch(12, padding=5)], ids=["all rows", "padded"])
def test_padding_enters_no_statistics(given: Batch, momentum: float | None):
    def build() -> nn.Module:
        return network(momentum)

    task, params, buffers = task_of(build)
    loss, gradient, moved = by_torch(params, buffers, given, build)
    client = ClientTask(task, buffers)
    found, own = client.value_and_grad(params, given)
    assert float(found - loss) == pytest.approx(0, abs=TOLERANCE)
    assert_near(own, gradient)
    assert_near(client.moved, moved)


def test_a_stack_computes_what_each_client_does_alone():
    task, params, buffers = task_of(network)
    twin, given = task.functional(), [batch(12, padding=4), batch(16), batch(1, padding=15)]
    assert isinstance(twin, NetworkTask)
    weights = [torch.ones(16) if one.weights is None else one.weights for one in given]
    stacked = Batch(
        torch.stack([one.inputs for one in given]), torch.stack([one.labels for one in given]), torch.stack(weights)
    )

    def step(given: Batch) -> tuple[Tensor, Tree, Tree]:
        client = ClientTask(twin, buffers)
        return *client.value_and_grad(params, given), client.moved

    losses, gradients, moved = torch.vmap(step, in_dims=(Batch(0, 0, 0),))(stacked)  # pyright: ignore[reportArgumentType]
    for row, one in enumerate(given):
        client, count = ClientTask(task, buffers), int(weights[row].sum())
        loss, gradient = client.value_and_grad(params, Batch(one.inputs[:count], one.labels[:count]))
        assert float(losses[row] - loss) == pytest.approx(0, abs=1e-6)
        assert_near({name: tensor[row] for name, tensor in gradients.items()}, gradient, 1e-6)
        assert_near({name: tensor[row] for name, tensor in moved.items()}, client.moved, 1e-6)


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_single_value_per_channel_uses_the_running_statistics(by_hand: bool):
    layer, rows = nn.BatchNorm1d(3), Rows()
    layer(torch.randn(9, 3))
    before, evaluated = copy.deepcopy(dict(layer.named_buffers())), copy.deepcopy(layer).eval()
    count_rows(layer, rows)
    rows.by_hand = by_hand
    one = torch.randn(1, 3)
    torch.testing.assert_close(layer(one), evaluated(one))
    assert_near(dict(layer.named_buffers()), before)


def test_one_image_has_statistics_of_its_pixels():
    layer, rows = nn.BatchNorm2d(3), Rows()
    plain, image = copy.deepcopy(layer), torch.randn(1, 3, 4, 4)
    count_rows(layer, rows)
    torch.testing.assert_close(layer(image), plain(image))
    assert_near(dict(layer.named_buffers()), dict(plain.named_buffers()))


def test_fixed_statistics_are_used_in_training_and_stay():
    layer, rows = nn.BatchNorm2d(3), Rows()
    rows.fixed = True
    evaluated, images = copy.deepcopy(layer).eval(), torch.randn(5, 3, 4, 4)
    count_rows(layer, rows)
    assert torch.equal(layer(images), evaluated(images))
    assert_near(dict(layer.named_buffers()), dict(evaluated.named_buffers()))


def test_the_memory_of_the_given_buffers_is_not_written_to():
    task, params, buffers = task_of(network)
    before = copy.deepcopy(buffers)
    ClientTask(task, buffers).value_and_grad(params, batch(6))
    task.evaluated({**params, **buffers}, batch(6))
    assert_near(buffers, before)


def test_statistics_of_the_evaluated_examples_are_refused():
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4, track_running_stats=False))

    with refused(names=["'2'", "BatchNorm1d", "track_running_stats"]):
        classification(build, (1, 8, 8))


class Halved(nn.BatchNorm1d):
    """Somebody's layer, with a forward pass of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 2


class NormAct(nn.BatchNorm2d):
    """As in some collections of models: torch's lines again, then a dropout and an activation."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.drop, self.act = nn.Dropout(0.5), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] (their name)
        assert self.num_batches_tracked is not None
        if self.training:
            self.num_batches_tracked.add_(1)
        learns = self.training or self.running_mean is None
        made = functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, learns, self.momentum or 0.0, self.eps
        )
        return self.act(self.drop(made))


class Gained(nn.BatchNorm2d):
    """A layer that takes a second input."""

    def forward(self, input: Tensor, gain: float = 1.0) -> Tensor:
        return gain * super().forward(input)


class LastAxis(nn.Module):
    """A norm that is no BatchNorm of torch's: channels last, by single operations, statistics replaced."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, inputs: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        if self.training:
            axes = [*range(inputs.dim() - 1)]
            mean, var = inputs.mean(axes), inputs.var(axes)
            self.running_mean = 0.9 * self.running_mean + 0.1 * mean.detach()
            self.running_var = 0.9 * self.running_var + 0.1 * var.detach()
        return (inputs - mean) / (var + 1e-5).sqrt()


class ByFunction(nn.Module):
    """A norm that is no BatchNorm of torch's, and changes its statistics by torch's function alone."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.batch_norm(inputs, self.running_mean, self.running_var, training=self.training)


OWN: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "super": (Halved(3), (3,)),
    "lines again": (NormAct(3), (3, 4, 4)),
    "second input": (Gained(3), (3, 4, 4)),
    "no subclass": (LastAxis(3), (4, 3)),
    "by a function": (ByFunction(3), (3,)),
    "instances": (nn.InstanceNorm1d(3, track_running_stats=True), (3, 4)),
}


def taught(name: str) -> tuple[nn.Module, Rows, tuple[int, ...]]:
    """A layer that has seen a batch, and reads rows now."""
    layer, shape = copy.deepcopy(OWN[name][0]), OWN[name][1]
    layer(3 + torch.randn(9, *shape))
    rows = Rows()
    count_rows(layer, rows)
    return layer, rows, shape


@pytest.mark.parametrize("name", OWN)
def test_a_forward_pass_of_its_own_uses_fixed_statistics_too(name: str):
    layer, rows, shape = taught(name)
    for child in layer.children():
        child.eval()
    rows.fixed, inputs, before = True, torch.randn(5, *shape), copy.deepcopy(dict(layer.named_buffers()))
    evaluated = type(layer).forward(copy.deepcopy(layer).eval(), inputs)
    assert torch.equal(layer(inputs), evaluated)
    assert layer.training
    assert_near(dict(layer.named_buffers()), before)
    # The statistics are the batch's again where they are not fixed.
    rows.fixed = False
    assert not torch.equal(layer(inputs), evaluated)
    assert not torch.equal(dict(layer.named_buffers())["running_mean"], before["running_mean"])


def test_what_lies_inside_the_layer_keeps_its_mode():
    layer, rows, shape = taught("lines again")
    rows.fixed = True
    found = layer(torch.rand(64, *shape) + 100)
    assert 0.4 < float((found == 0).float().mean()) < 0.6


@pytest.mark.parametrize("name", ["super", "no subclass", "by a function"])
def test_a_forward_pass_of_its_own_is_not_taught_by_a_single_value(name: str):
    layer = copy.deepcopy(OWN[name][0])
    layer(torch.randn(9, 3))
    count_rows(layer, Rows())
    before, one = copy.deepcopy(dict(layer.named_buffers())), torch.randn(1, 3)
    assert torch.equal(layer(one), type(layer).forward(copy.deepcopy(layer).eval(), one))
    assert_near(dict(layer.named_buffers()), before)


def test_a_second_input_and_its_name_reach_the_layer():
    layer, _, shape = taught("second input")
    inputs = torch.randn(5, *shape)
    plain = layer.eval()(inputs)
    assert torch.equal(layer(inputs, gain=2.0), 2 * plain) and torch.equal(layer(input=inputs, gain=2.0), 2 * plain)


def test_statistics_that_a_function_changes_are_no_constants():
    here = run_of(ByFunction)
    assert {"2.running_mean", "2.running_var"} <= here.method.task.local.keys()
    assert not here.method.task.constants


class Deaf(nn.BatchNorm1d):
    """Normalises by the batch in evaluation, too."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.batch_norm(input, self.running_mean, self.running_var, training=True)


def small(norm: Callable[[int], nn.Module]) -> Any:
    def model(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), norm(8), nn.Linear(8, num_classes))

    return model


def run_of(norm: Callable[[int], nn.Module], **options: Any) -> Setup:
    tables: dict[str, Any] = {"data": "digits", "partition": "iid", "clients": {"count": 3}, "rounds": 2, **options}
    method = {"name": "fedavg", "lr": 0.1, "batch_size": 32}
    return prepare(Experiment(model=small(norm), method=method, **tables))


@pytest.mark.parametrize("buffers", ["frozen", "average", "personal"])
def test_a_subclass_trains_as_the_layer_and_its_activation(buffers: str):
    class Fused(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).relu()

    class Apart(nn.Module):
        def __init__(self, num_features: int) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(num_features)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.norm(inputs).relu()

    # 479 examples a client: the last of 15 batches has 31.
    one, two = (play(run_of(norm, parts={"buffers": buffers}))[1][-1].server["params"] for norm in (Fused, Apart))
    assert all(torch.equal(tensor, two[name.replace("2.", "2.norm.")]) for name, tensor in one.items())


def test_a_last_batch_of_one_ends_no_round():
    sizes = {"clients": {"count": 3}, "method": {"name": "fedavg", "batch_size": 478}}
    here = prepare(Experiment(model=small(Halved), data="digits", partition="iid", rounds=1, **sizes))
    assert 1 in {size % 478 for size in here.partition.train.sizes}
    play(here)


def test_a_layer_that_learns_in_evaluation_is_refused_before_a_run():
    for buffers in ("frozen", "average"):
        with refused(names=["'2'", "Deaf", "evaluation"]):
            run_of(Deaf, parts={"buffers": buffers})


def test_a_subclass_without_running_statistics_is_refused():
    with refused(names=["'2'", "Halved", "track_running_stats"]):
        run_of(lambda width: Halved(width, track_running_stats=False))


def test_a_layer_with_a_forward_pass_of_its_own_runs_alone():
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), Halved(10))

    task, params, buffers = task_of(build)
    assert not task.vmappable
    client = ClientTask(task, buffers)
    client.value_and_grad(params, batch(6))
    assert_near(client.moved, by_torch(params, buffers, batch(6), build)[2])

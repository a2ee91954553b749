"""The rule that decides whether clients are trained one by one or in stacks, and how wide the stacks are."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from rayfl.errors import SMALLER, ClientError
from rayfl.methods.base import Carry, Method, Stage
from rayfl.methods.server.fedavg import FedAvg
from rayfl.models.base import Architecture
from rayfl.models.convolutional import VGG11, AlexNetMCEPL, ConvNet2, ResNet18, ResNet20
from rayfl.models.dense import MLP, Logistic
from rayfl.rounds.engines import MOST_STACKED, choose, convolution_flops, run_loop, run_vmap, width
from rayfl.schedules.asynchronous import Buffered
from rayfl.task import NetworkTask
from rayfl.testing.executors import Shuffled, assert_same_bits, contents, play
from tests.bound_tasks import classification
from tests.methods.reference import setup_of
from tests.refusals import refused

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FEMNIST, CIFAR = (1, 28, 28), (3, 32, 32)


def method_of(task: NetworkTask) -> Method:
    return setup_of("fedavg", {}).method.with_task(task)


def small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 3))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, 3))


def test_small_models_are_stacked_on_a_gpu_and_never_by_themselves_on_a_cpu():
    task = classification(small, (6,))
    method, params = method_of(task), task.init(0)
    assert [choose("auto", method, device, params) for device in (CPU, CUDA)] == [run_loop, run_vmap]
    assert [choose("loop", method, CUDA, params), choose("vmap", method, CPU, params)] == [run_loop, run_vmap]


@pytest.mark.parametrize("build", [dropping, lambda: nn.LSTM(6, 2)], ids=["dropout", "lstm"])
def test_what_cannot_be_stacked_runs_one_by_one(build):
    task = classification(build)
    method, params = method_of(task), task.init(0)
    task.network.observe(params, torch.zeros(2, 6))
    assert choose("auto", method, CUDA, params) is run_loop
    with refused(names=["engine='loop'"]):
        choose("vmap", method, CPU, params)


@pytest.mark.parametrize(
    ("model", "shape", "wanted"),
    [
        (Logistic(), FEMNIST, 64),
        (ConvNet2(), FEMNIST, 64),
        (ResNet20(), CIFAR, 64),
        # 2^25 entries are 27.3 times its 1,227,530 parameters, and 3.1 times the 10.9 million of the MLP.
        (AlexNetMCEPL(), CIFAR, 27),
        (MLP(hidden=(2600, 3400)), FEMNIST, 3),
        (MLP(hidden=(8000, 3400)), FEMNIST, 1),
        # 306 million operations of convolutions an example, and 1,111 million.
        (VGG11(), CIFAR, 1),
        (ResNet18(), CIFAR, 1),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_width_follows_from_the_model(model: Architecture, shape: tuple[int, ...], wanted: int):
    task = classification(model.builder(shape, 10), shape)
    method, params = method_of(task), task.init(0)
    engine = choose("auto", method, CUDA, params)
    assert (width(method, CUDA, params) if engine is run_vmap else 1) == wanted <= MOST_STACKED
    assert width(method, CPU, params) == 16
    # Asked for by name, a stack is one.
    assert width(method, CUDA, params) >= 2


def test_convolutions_are_counted_and_linear_layers_are_not():
    task = classification(ConvNet2(channels=(2, 3), hidden=(4,)).builder(FEMNIST, 10), FEMNIST)
    # 2 operations an entry and place: 24 x 24 places of 2 x 25 weights, and 8 x 8 of 3 x 2 x 25.
    assert convolution_flops(method_of(task), task.init(0)) == 2 * (24 * 24 * 50 + 8 * 8 * 150)


@pytest.mark.parametrize(
    ("method", "clients", "schedule", "expected"),
    [
        ("fedavg", {}, None, 16),
        ("fedavg", {"per_round": 5}, None, 5),
        ("fedavg", {"per_round": 20}, None, 16),
        ("fedavg", {"fraction": 0.3}, Buffered(), 6),
        # All train, whoever is selected.
        ("pfedme", {"per_round": 5}, None, 16),
        ("dpsgd", {}, None, 16),
        # A stack of one is no stack.
        ("fedavg", {"per_round": 1}, None, 1),
    ],
)
def test_a_stack_is_as_wide_as_the_settings_of_a_round(
    method: str, clients: dict[str, Any], schedule: Buffered | None, expected: int
):
    made = setup_of(method, {"batch_size": 4}, sizes=(4,) * 21, rounds=1, clients=clients)
    here = replace(made, engine_name="vmap", schedule=schedule or made.schedule)
    assert here.work_width == expected
    assert replace(here, stack_width=30).work_width == 30


def test_who_comes_and_on_how_many_workers_does_not_change_the_width_or_a_bit():
    clients = {"per_round": 8, "dropout_before_download": 0.4}
    made = setup_of("fedavg", {"batch_size": 4}, sizes=(4,) * 21, rounds=2, clients=clients)
    here = replace(made, engine_name="vmap")
    shared = Shuffled(here)
    (records, (*_, last)), (_, (*_, other)) = play(replace(here)), play(here, shared)
    came = [row.status for record in records for row in record.clients].count("delivered")
    assert here.work_width == 8 and came < 2 * 8
    assert_same_bits(contents(shared, last), contents(shared, other))


class Hungry(FedAvg):
    """As on a GPU whose memory ends in the second step of a stage."""

    # Any: a Batch, or a tuple of them.
    def step(self, carry: Carry, batch: Any, *, stage: Stage) -> Carry:
        if "begun" in carry:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the manual.")
        return {**super().step(carry, batch, stage=stage), "begun": torch.zeros(())}


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_gpu_whose_memory_ends_in_a_step_names_the_knobs(engine: str):
    plain = setup_of("fedavg", {"batch_size": 4}, rounds=1)
    here = replace(plain, method=Hungry(plain.method.task, plain.method.hyper), engine_name=engine)
    with refused(
        names=["round 0", "client 0", "out of memory", "2.00 GiB", SMALLER],
        error=ClientError,
    ):
        play(here)
    assert "runtime.stack_width" in SMALLER


def test_without_stacks_the_width_is_one():
    assert setup_of("fedavg", {}, rounds=1).work_width == 1

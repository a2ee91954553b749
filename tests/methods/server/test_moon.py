"""MOON: the contrastive term in plain torch, FedAvg to the bit where it has no gradient, and what it refuses."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from rayfl.data.batches import Batch
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.server.moon import MOON
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from rayfl.tree import Tree
from tests.bound_tasks import classification
from tests.contracts.every_method import on_digits
from tests.contracts.seams.quadratic import setup as on_quadratics
from tests.contracts.test_tasks import made as made_on
from tests.methods.averaging import ABSENCES, ENGINES
from tests.methods.reference import SIZES, TinyCNN, batches
from tests.methods.representations import (
    Dropping,
    assert_near,
    cross_entropy,
    doubled,
    examples,
    leaves,
    representation,
    small,
    state_of,
    stepped,
)
from tests.population.statuses import with_status
from tests.refusals import refused


def contrast(params: Tree, received: Tree, previous: Tree, inputs: torch.Tensor, temperature: float) -> torch.Tensor:
    """mean of -log(e^{s_g / T} / (e^{s_g / T} + e^{s_p / T})), as the paper prints it."""

    def exponential(other: Tree) -> torch.Tensor:
        z, fixed = representation(params, inputs), representation(other, inputs).detach()
        cosine = (z * fixed).sum(1) / (z.norm(dim=1).clamp(min=1e-8) * fixed.norm(dim=1).clamp(min=1e-8))
        return (cosine / temperature).exp()

    near, old = exponential(received), exponential(previous)
    return -(near / (near + old)).log().mean()


def expected(here: Setup) -> tuple[list[Tree], list[dict[int, Tree]]]:
    """x and all prev_i after every round."""
    hyper = here.method.hyper.model_dump()
    x, previous, path, memories = doubled(here.initial), dict.fromkeys(range(5), doubled(here.initial)), [], []
    for round in range(here.rounds):
        ends: dict[int, Tree] = {}
        for i in with_status(here.population.sample_round(round), "delivered"):
            y = leaves(x)
            for rows in batches(here, round, i):
                inputs, labels = examples(here, rows)
                term = contrast(y, x, previous[i], inputs, hyper["temperature"])
                loss = cross_entropy(y, representation(y, inputs), labels) + hyper["mu"] * term
                y = stepped(y, loss, hyper["lr"])
            ends[i] = y
        weights = {i: 1.0 if hyper["weighting"] == "uniform" else SIZES[i] for i in ends}
        if ends:
            total = sum(weights.values())
            x = {n: torch.stack([weights[i] / total * ends[i][n].detach() for i in ends]).sum(0) for n in x}
        previous = previous | ends
        path.append(x)
        memories.append(previous)
    return path, memories


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize("hyper", [{"mu": 5.0, "epochs": 2}, {"weighting": "uniform", "temperature": 0.2}], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_its_equations(engine: str, hyper: dict[str, Any], clients: dict[str, Any]):
    here = small("moon", hyper, engine, clients=clients)
    records, run_states = play(here)
    path, memories = expected(here)
    for run_state, x, previous in zip(run_states, path, memories, strict=True):
        assert_near(run_state.server["params"], x, tolerance=2e-5)
        for client in range(5):
            assert_near(state_of(here, run_state, client), previous[client], tolerance=2e-5)
    shared = {name: value for name, value in hyper.items() if name not in ("mu", "temperature")}
    plain = play(small("fedavg", shared, engine, clients=clients))
    # Wires are FedAvg's, and the term has moved the model.
    assert [r.row.uplink_bits for r in records] == [r.row.uplink_bits for r in plain[0]]
    assert not torch.allclose(plain[1][-1].server["params"]["1.weight"], run_states[-1].server["params"]["1.weight"])


@pytest.mark.parametrize("engine", ENGINES)
def test_round_0_is_fedavg_to_the_bit_and_its_term_is_log_2(engine: str):
    options = {"epochs": 3, "momentum": 0.5}
    moon, plain = (
        play(small(name, {**options, **own}, engine), rounds=1)
        for name, own in (("moon", {"mu": 10.0}), ("fedavg", {}))
    )
    for name, tensor in plain[1][0].server["params"].items():
        assert torch.equal(moon[1][0].server["params"][name], tensor), name
    losses = [records[0].means["train/loss"] for records, _ in (moon, plain)]
    assert losses[0] == pytest.approx(losses[1] + 10 * math.log(2), rel=1e-6)


def test_a_representation_is_the_input_of_the_last_layer_of_the_pass():
    task = classification(Dropping, (6,))
    params = task.init(0)
    generator = torch.Generator().manual_seed(0)
    batch = Batch(torch.randn(7, 6, generator=generator), torch.arange(7) % 3, torch.tensor([1.0] * 5 + [0.0] * 2))
    loss, features = task.loss_and_features(params, batch, training=False)
    wanted = (batch.inputs @ params["body.weight"].T + params["body.bias"]).relu()
    assert task.head == "head"
    torch.testing.assert_close(features, wanted)
    torch.testing.assert_close(loss, task.evaluated_loss(params, batch))
    torch.manual_seed(0)
    dropped = task.loss_and_features(params, batch)[1]
    assert (dropped == 0).sum() > (features == 0).sum()
    assert not task.network.module.get_submodule("head")._forward_pre_hooks


def test_the_fixed_representations_are_those_of_evaluation_mode():
    """With dropout z_g = z_p where both models are equal, and a step is FedAvg's to the bit under the same masks."""
    task, generator = classification(Dropping, (6,)), torch.Generator().manual_seed(0)
    batch, after = Batch(torch.randn(7, 6, generator=generator), torch.arange(7) % 3), []
    for method in (MOON(task, mu=10.0, lr=0.3), FedAvg(task, lr=0.3)):
        params = task.init(0)
        carry: Any = {**method.start(params), "previous": params}
        torch.manual_seed(0)
        after.append(method.step(carry, batch, stage=method.hyper.stage(0))["params"])
    assert all(torch.equal(after[0][name], tensor) for name, tensor in after[1].items())
    assert not torch.equal(after[0]["body.weight"], task.init(0)["body.weight"])


@pytest.mark.parametrize("build", [None, "convolution"])
def test_stacked_representations_are_those_of_the_loop(build: str | None):
    task, shape = classification(TinyCNN, (1, 8, 8)), (1, 8, 8)
    if build is None:
        task, shape = classification(lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), (6,)), (6,)
    assert task.head
    models = [task.init(seed) for seed in range(3)]
    inputs = torch.randn(3, 5, *shape, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(15).view(3, 5) % 3
    twin = task.functional()

    def gradient(task: Any, params: Tree, inputs: torch.Tensor, labels: torch.Tensor) -> Tree:
        def squares(params: Tree, batch: Batch) -> torch.Tensor:
            loss, features = task.loss_and_features(params, batch)
            return loss + features.square().sum()

        return task.value_and_grad(params, Batch(inputs, labels), squares)[1]

    stacked = {name: torch.stack([one[name] for one in models]) for name in models[0]}
    together = torch.vmap(lambda p, a, b: gradient(twin, p, a, b))(stacked, inputs, labels)
    for row, params in enumerate(models):
        alone = gradient(task, params, inputs[row], labels[row])
        for name, tensor in alone.items():
            torch.testing.assert_close(together[name][row], tensor, rtol=1e-5, atol=1e-5)


def test_what_has_no_representations_is_refused_before_the_run():
    with refused(names=["MOON", "classification", "mlp"]):
        on_quadratics(MOON)
    with refused(names=["MOON", "last linear layer"]):
        on_digits("moon")(model="logistic")
    with refused(names=["MOON", "task 'classification'"]):
        made_on("regression", "moon")
    with refused(names=["method.temperature=0.1", "mu=0.0"]):
        on_digits("moon")(method={"name": "moon", "mu": 0, "temperature": 0.1})
    with refused(names=["moon", "BatchNorm"]):
        on_digits("moon")(model=Normal)


class Normal(nn.Sequential):
    """Training changes the running statistics."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, num_classes))


def test_the_work_is_that_of_three_forward_passes_and_one_backward():
    here = small("moon", {})
    (stage,) = here.plan(0).stages
    assert here.method.gradients_per_example(stage, here.context(0, here.plan(0), 0, "client")) == pytest.approx(5 / 3)
    flops = [play(small(name, {}), rounds=1)[0][0].means["flops/training"] for name in ("moon", "fedavg")]
    assert flops[0] / flops[1] == pytest.approx(5 / 3)

"""FedAvg against the equations in float64, and the bits of its messages."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rayfl import tree
from rayfl.compress.feedback import ErrorFeedback
from rayfl.compress.sparse import TopK
from rayfl.errors import ClientError
from rayfl.methods.base import Context, Download, ModelState, Stage
from rayfl.methods.server.fedavg import FedAvg
from rayfl.rounds.setup import Setup
from tests.methods.reference import (
    SIZES,
    TinyCNN,
    Vectors,
    doubles,
    images,
    initial,
    played,
    setup_of,
    trained,
    trained_by_torch,
    vectors,
    weight,
)
from tests.population.statuses import with_status

P = 6 * 3 + 3
"""Parameters of the logistic regression."""

Training = Callable[[Setup, int, int, Vectors], tuple[Vectors, int]]


def reference(setup: Setup, train: Training) -> list[Vectors]:
    """x <- sum_i p_i x_i over those who delivered, after every round (x stays where nobody did)."""
    params, models = initial(setup), []
    for round in range(setup.rounds):
        delivered = with_status(setup.population.sample_round(round), "delivered")
        ends = [train(setup, round, client, params)[0] for client in delivered]
        weights = [weight(setup, client, int(setup.partition.train.sizes[client])) for client in delivered]
        if ends:
            shares = np.array(weights) / sum(weights)
            params = {name: np.tensordot(shares, [end[name] for end in ends], axes=1) for name in params}
        models.append(params)
    return models


def assert_equal_models(setup: Setup, train: Training, rtol: float = 1e-5) -> None:
    expected = reference(setup, train)
    start = initial(setup)
    moved = np.concatenate([(expected[-1][name] - start[name]).ravel() for name in start])
    assert np.abs(moved).max() > 1e-3, "the reference has to move, or nothing is compared"
    for (_, run_state), model in zip(played(setup), expected, strict=True):
        for name, value in model.items():
            np.testing.assert_allclose(run_state.server["params"][name].numpy(), value, rtol=rtol, atol=1e-7)


@pytest.mark.parametrize(
    "hyper",
    [
        {"batch_size": 0},
        {"batch_size": 0, "weighting": "uniform"},
        {"batch_size": 4, "epochs": 3},
        {"batch_size": 4, "steps": 5},
        {"batch_size": 4, "momentum": 0.9, "epochs": 2},
        {"batch_size": 4, "weight_decay": 0.1, "momentum": 0.5, "epochs": 2},
        {"batch_size": 5, "clip_norm": 0.3, "epochs": 2},
        {"batch_size": 5, "lr_decay": 0.5},
        {"batch_size": 4, "optimizer": "adam", "lr": 0.01, "epochs": 2},
        {"batch_size": 0, "optimizer": "adam", "lr": 0.01, "weight_decay": 0.1, "weighting": "uniform"},
    ],
    ids=lambda hyper: ", ".join(f"{key}={value}" for key, value in hyper.items()),
)
def test_equals_the_equations(hyper: dict[str, Any]):
    assert_equal_models(setup_of("fedavg", {"lr": 0.5, **hyper}), trained)


def test_one_step_is_exact_to_float32():
    # One Adam step moves every entry by lr g / (|g| + 1e-8): bias corrections in float32 are wrong by 1e-5 of it.
    setup = setup_of("fedavg", {"batch_size": 0, "optimizer": "adam", "lr": 0.01}, sizes=(20,), rounds=1)
    ((_, run_state),) = played(setup)
    expected, _ = trained(setup, 0, 0, initial(setup))
    for name, value in expected.items():
        moved = doubles(run_state.server["params"])[name] - initial(setup)[name]
        np.testing.assert_allclose(moved, value - initial(setup)[name], rtol=4e-6)


@pytest.mark.parametrize(
    "clients",
    [
        {"per_round": 2},
        {"fraction": 0.6, "dropout_before_download": 0.3},
        {"dropout_after_training": 0.4},
        {"per_round": 4, "dropout_before_download": 0.3, "dropout_after_training": 0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_weights_are_shared_by_those_who_deliver(clients: dict[str, Any], weighting: str):
    setup = setup_of("fedavg", {"lr": 0.5, "batch_size": 0, "weighting": weighting}, clients=clients, rounds=6)
    arrived = {len(with_status(setup.population.sample_round(round), "delivered")) for round in range(6)}
    assert arrived != {len(SIZES)}, "somebody has to be missing"
    assert_equal_models(setup, trained)


def test_a_round_without_deliveries_leaves_the_model():
    setup = setup_of("fedavg", {"lr": 0.5}, sizes=(5, 7), clients={"dropout_after_training": 0.7}, rounds=12)
    rounds = played(setup)
    empty = [r for r in range(1, 12) if not with_status(setup.population.sample_round(r), "delivered")]
    full = [r for r in range(1, 12) if with_status(setup.population.sample_round(r), "delivered")]
    assert empty
    assert full
    for round in range(1, 12):
        before, after = rounds[round - 1][1].server["params"], rounds[round][1].server["params"]
        same = all(bool((before[name] == after[name]).all()) for name in before)
        assert same == (round in empty)
        assert (rounds[round][0].row.uplink_bits == 0) == (round in empty)


@pytest.mark.parametrize("hyper", [{"momentum": 0.9}, {"optimizer": "adam", "lr": 0.002}, {"clip_norm": 0.5}], ids=str)
def test_a_convolutional_network_equals_torch(hyper: dict[str, Any]):
    setup = setup_of("fedavg", {"lr": 0.05, "batch_size": 5, **hyper}, dataset=images(), build=TinyCNN, rounds=2)
    assert_equal_models(setup, trained_by_torch)


@pytest.mark.parametrize(("weighting", "count_bits"), [("samples", 64), ("uniform", 0)])
def test_bits_of_a_round(weighting: str, count_bits: int):
    setup = setup_of("fedavg", {"weighting": weighting}, rounds=1)
    ((record, _),) = played(setup)
    for row in record.clients:
        assert (row.uplink_bits, row.downlink_bits) == (32 * P + count_bits, 32 * P)
    assert record.row.uplink_bits == len(SIZES) * (32 * P + count_bits)
    assert record.row.downlink_bits == len(SIZES) * 32 * P


def test_dropouts_are_billed_for_what_crossed_the_wire():
    clients = {"dropout_before_download": 0.4, "dropout_after_training": 0.4}
    setup = setup_of("fedavg", {}, clients=clients, rounds=6)
    up_down = {
        "delivered": (32 * P + 64, 32 * P),
        "dropped_before_download": (0, 0),
        "dropped_after_training": (0, 32 * P),
    }
    seen = {row.status: (row.uplink_bits, row.downlink_bits) for record, _ in played(setup) for row in record.clients}
    assert seen == up_down


def test_compressed_uplinks_keep_what_they_dropped():
    # Server: x - sum p_i C(delta_i + e_i) with e_i <- delta_i + e_i - C(...); one client, so p = 1.
    compressor = ErrorFeedback(inner=TopK(keep_ratio=0.2, scope="model"))
    setup = setup_of("fedavg", {"lr": 0.5, "batch_size": 0}, sizes=(20,), uplink=compressor, rounds=4)
    params, error = initial(setup), {name: 0.0 * value for name, value in initial(setup).items()}
    for round, (record, run_state) in enumerate(played(setup)):
        end, _ = trained(setup, round, 0, params)
        wanted = {name: params[name] - end[name] + error[name] for name in params}
        flat = np.abs(np.concatenate([value.ravel() for value in wanted.values()]))
        threshold = np.sort(flat)[-5]  # k = ceil(0.2 * 21) = 5
        sent = {name: np.where(np.abs(value) >= threshold, value, 0) for name, value in wanted.items()}
        error = {name: wanted[name] - sent[name] for name in wanted}
        params = {name: params[name] - sent[name] for name in params}
        for name, value in params.items():
            np.testing.assert_allclose(run_state.server["params"][name].numpy(), value, rtol=1e-5, atol=1e-6)
        assert record.row.uplink_bits < 32 * P


def test_a_lost_update_does_not_touch_the_error_memory():
    compressor = ErrorFeedback(inner=TopK(keep_ratio=0.2))
    clients = {"dropout_after_training": 0.5}
    setup = setup_of("fedavg", {}, uplink=compressor, clients=clients, rounds=6)
    rounds, lost = played(setup), 0
    for round in range(1, 6):
        for client in with_status(setup.population.sample_round(round), "dropped_after_training"):
            before, after = (rounds[r][1].states.get(client) for r in (round - 1, round))
            assert before is after
            lost += 1
    assert lost


def test_the_whole_split_at_once_does_not_depend_on_the_order():
    # One full-batch step from x and averaging is one step of gradient descent on the pooled loss: FedSGD.
    setup = setup_of("fedavg", {"lr": 0.5, "batch_size": 0}, rounds=1)
    ((_, run_state),) = played(setup)
    pooled = setup_of("fedavg", {"lr": 0.5, "batch_size": 0}, sizes=(sum(SIZES),), dataset=vectors(), rounds=1)
    expected, _ = trained(pooled, 0, 0, initial(pooled))
    for name, value in expected.items():
        np.testing.assert_allclose(run_state.server["params"][name].numpy(), value, rtol=1e-5, atol=1e-7)
    assert tree.num_entries(run_state.server["params"]) == P


class Remembering(FedAvg):
    """FedAvg whose carry has the gradient of its last step."""

    # Any: a carry with one more entry.
    def descend(self, carry: Any, loss: torch.Tensor, gradient: tree.Tree, stage: Stage) -> Any:
        return {**super().descend(carry, loss, gradient, stage), "gradient": gradient}


def test_a_step_lies_in_the_gradients_memory_unless_a_subclass_keeps_the_gradient():
    setup = setup_of("fedavg", {"batch_size": 4, "lr": 0.5})
    batch: Any
    (batch,) = [*setup.data(0).batches("train", epochs=None, steps=1, batch_size=4, generator=np.random.default_rng(0))]
    (stage,) = setup.method.plan(0, 0.0).stages
    stepped = list[tree.Tree]()
    gradient = setup.method.task.grad(setup.initial, batch)
    for kind in (FedAvg, Remembering):
        method = kind(setup.method.task, setup.method.hyper)
        carry: Any = method.step(method.start(setup.initial), batch, stage=stage)
        stepped.append(carry["params"])
    assert all(torch.equal(carry["gradient"][name], tensor) for name, tensor in gradient.items())
    assert all(torch.equal(stepped[0][name], tensor) for name, tensor in stepped[1].items())


class Nameless(FedAvg):
    """Its server sends the model under another name."""

    def download(self, server: ModelState, ctx: Context) -> Download:
        return {"weights": server["params"]}


def test_a_message_without_a_model_is_named() -> None:
    setup = setup_of(Nameless, {"lr": 0.5})
    with pytest.raises(ClientError, match=r"no model to begin with: the message has \['weights'\]"):
        played(setup)

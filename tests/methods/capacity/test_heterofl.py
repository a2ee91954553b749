"""HeteroFL against the equations in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rayfl.rounds.setup import Setup
from tests.methods.capacity.reference import (
    FIRST,
    NUM_CLASSES,
    RATIOS,
    SECOND,
    AdamServer,
    Net,
    assert_agrees,
    logits,
    prefix,
    reference,
    setup,
)
from tests.methods.reference import initial, played


def ratio_of(client: int) -> float:
    return RATIOS[client % len(RATIOS)]


def present(made: Setup, client: int) -> list[int]:
    return sorted(set(made.dataset.train.labels[made.partition.train[client]].tolist()))


SETTINGS: list[tuple[dict[str, Any], AdamServer | None]] = [
    ({"lr": 0.3, "batch_size": 4, "epochs": 2}, None),
    (
        {"lr": 0.1, "batch_size": 3, "momentum": 0.5, "weight_decay": 0.01, "scaler": False, "weighting": "samples"},
        None,
    ),
    (
        {"lr": 0.2, "batch_size": 4, "masked_loss": False, "server_optimizer": "adam", "server_lr": 0.05},
        AdamServer(0.05, 0.9, 0.99, 1e-3),
    ),
]


@pytest.mark.parametrize(("hyper", "server"), SETTINGS)
def test_heterofl_is_that_of_the_paper(hyper: dict[str, Any], server: AdamServer | None):
    made = setup("heterofl", hyper)
    masks = hyper.get("masked_loss", True)
    assert any(len(present(made, client)) < NUM_CLASSES for client in range(5)) or not masks

    def loss(round: int, client: int):
        scale = ratio_of(client) if hyper.get("scaler", True) else 1.0
        absent = [label for label in range(NUM_CLASSES) if label not in present(made, client)] if masks else []

        def masked(net: Net, inputs: Tensor, labels: Tensor, step: int) -> Tensor:
            outputs = logits(net, inputs, scale).clone()
            outputs[:, absent] = 0.0
            return nn.functional.cross_entropy(outputs, labels)

        return masked

    def counts(client: int, at: dict[str, Any]) -> dict[str, Any]:
        rows = present(made, client) if masks else list(range(NUM_CLASSES))
        second = prefix(ratio_of(client))[1]
        return {**at, "5.weight": np.ix_(rows, second.tolist()), "5.bias": rows}

    assert_agrees(made, reference(made, lambda round, client: prefix(ratio_of(client)), loss, server, counts))


def test_with_the_whole_model_everywhere_it_is_fedavg():
    hyper = {"lr": 0.3, "batch_size": 4, "weighting": "uniform"}
    ours = played(setup("heterofl", {**hyper, "masked_loss": False}, ratios=None))[-1][1].server["params"]
    theirs = played(setup("fedavg", hyper, ratios=None))[-1][1].server["params"]
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-6, atol=1e-7)


def test_entries_that_nobody_holds_stay_and_messages_are_as_large_as_slices():
    made = setup("heterofl", {"lr": 0.3, "masked_loss": False}, ratios=[0.5, 0.25])
    start = initial(made)
    for record, run_state in played(made):
        x = {name: tensor.numpy() for name, tensor in run_state.server["params"].items()}
        assert np.array_equal(x["3.weight"][SECOND // 2 :], start["3.weight"][SECOND // 2 :].astype(np.float32))
        assert np.array_equal(x["3.weight"][:, FIRST // 2 :], start["3.weight"][:, FIRST // 2 :].astype(np.float32))
        for row in record.clients:
            first, second = (len(units) for units in prefix([0.5, 0.25][row.client % 2]))
            entries = first * 7 + second * (first + 1) + 3 * (second + 1)
            assert [row.uplink_bits, row.downlink_bits] == [32 * entries, 32 * entries]


def test_slices_cost_a_client_what_their_layers_compute():
    made = setup("heterofl", {"lr": 0.3, "batch_size": 4, "masked_loss": False})
    ((record, _), *_) = played(made)
    metrics = {(metric.client, metric.name): metric.value for metric in record.metrics}
    for row in record.clients:
        first, second = (len(units) for units in prefix(ratio_of(row.client)))
        forward = 2 * (6 * first + first * second + 3 * second)
        full = 2 * (6 * FIRST + FIRST * SECOND + 3 * SECOND)
        assert metrics[row.client, "flops/training"] == pytest.approx(3 * forward * row.num_samples, rel=1e-12)
        entries = first * 7 + second * (first + 1) + 3 * (second + 1)
        assert metrics[row.client, "slice/memory_bytes"] == 2 * 4 * entries
        seconds = row.downlink_bits / 50e6 + row.num_samples * forward / full / 1000 + row.uplink_bits / 10e6
        assert row.simulated_s == pytest.approx(seconds, rel=1e-9)


def test_dynamic_ratios_change_from_round_to_round():
    made = setup("heterofl", {"lr": 0.3, "dynamic_ratios": [1.0, 0.5, 0.25]}, ratios=None)
    shares: dict[int, set[float]] = {}
    for record, _ in played(made):
        for metric in record.metrics:
            if metric.name == "slice/share" and metric.client is not None:
                shares.setdefault(metric.client, set()).add(float(metric.value or 0))
    assert any(len(of_client) > 1 for of_client in shares.values())

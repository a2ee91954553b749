"""LotteryDSGD against its equations in float64: gate, pruning, rewind, masked training, the mean over who holds."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rayfl import tree
from rayfl.methods.base import Carry, Context, Stage
from rayfl.rounds.setup import Setup
from rayfl.topology.graphs import RandomNeighbours
from rayfl.tree import Tree
from tests.methods.reference import SIZES, Vectors, batches, initial, played, setup_of, softmax_gradient
from tests.population.statuses import with_status

ROUNDS, RATIO = 6, 0.2
HYPER = {"lr": 0.5, "epochs": 2, "batch_size": 4, "momentum": 0.5, "weight_decay": 0.01, "prune_ratio": RATIO}


def setup(clients: dict[str, Any] | None = None, **hyper: Any) -> Setup:
    """Softmax regression; a third of every client's examples is its validation split."""
    made = setup_of("lottery_dsgd", {**HYPER, **hyper}, clients=clients, rounds=ROUNDS)
    dealt = made.partition.hold_out(1 / 3, 0.0, np.random.default_rng(0))
    return replace(made, partition=dealt, topology=RandomNeighbours(degree=2))


def accuracy(setup: Setup, params: Vectors, client: int) -> float:
    rows, examples = setup.partition.validation[client], setup.dataset.train
    logits = examples.inputs[rows] @ params["1.weight"].T + params["1.bias"]
    return float((logits.argmax(axis=1) == examples.labels[rows]).mean())


def trained(setup: Setup, round: int, client: int, params: Vectors, mask: np.ndarray) -> Vectors:
    examples, velocity = setup.dataset.train, {name: np.zeros_like(value) for name, value in params.items()}
    for rows in batches(setup, round, client):
        gradient = softmax_gradient(params, examples.inputs[rows].astype(np.float64), examples.labels[rows])
        for name in params:
            velocity[name] = 0.5 * velocity[name] + gradient[name] + 0.01 * params[name]
        params = {name: value - 0.5 * velocity[name] for name, value in params.items()}
        params["1.weight"] = params["1.weight"] * mask
    return params


@pytest.mark.parametrize(
    ("clients", "hyper", "target"),
    [
        ({}, {"min_accuracy": 0.4}, [0.5] * 5),
        (
            {"retention_ratio": [0.3, 0.5, 0.9], "dropout_before_download": 0.3},
            {"min_accuracy": 0.3},
            [0.3, 0.5, 0.9] * 2,
        ),
    ],
)
def test_equals_the_equations(clients: dict[str, Any], hyper: dict[str, Any], target: list[float]):
    here = setup(clients, **hyper)
    x, count = [initial(here) for _ in SIZES], len(SIZES)
    masks, left = [np.ones_like(x[0]["1.weight"], dtype=bool) for _ in SIZES], [1.0] * count
    gates: set[str] = set()
    for round, (record, run_state) in enumerate(played(here)):
        ends = []
        for i in range(count):
            good, thick = accuracy(here, x[i], i) > hyper["min_accuracy"], left[i] > target[i]
            gates.add(f"{good} {thick}")
            if good and thick:
                kept = np.abs(x[i]["1.weight"][masks[i]])
                masks[i] = masks[i] & (np.abs(x[i]["1.weight"]) >= np.quantile(kept, RATIO))
                x[i], left[i] = initial(here), left[i] * (1 - RATIO)
                x[i]["1.weight"] = x[i]["1.weight"] * masks[i]
            ends.append(trained(here, round, i, x[i], masks[i]))
        present = with_status(here.population.sample_round(round, everyone=True), "delivered")
        graph = RandomNeighbours(degree=2).receives(count, here.seed, round)
        for i in range(count):
            heard = [i, *(j for j in np.flatnonzero(graph[i]) if j in present)] if i in present else [i]
            holders = np.sum([masks[j] for j in heard], axis=0)
            total = np.sum([ends[j]["1.weight"] for j in heard], axis=0)
            weight = np.where(masks[i], total / np.maximum(holders, 1), 0.0)
            x[i] = {"1.weight": weight, "1.bias": np.mean([ends[j]["1.bias"] for j in heard], axis=0)}
            state = tree.to_tensors(run_state.states[i])
            assert np.array_equal(state["mask"]["1.weight"].numpy(), masks[i])
            assert bool(state["mask"]["1.bias"].all())
            assert float(state["left"]) == pytest.approx(left[i])
            for name, value in x[i].items():
                np.testing.assert_allclose(state["params"][name].numpy(), value, rtol=1e-4, atol=1e-5)
        sizes = [bits(int(mask.sum())) for mask in masks]
        ups = [sizes[i] * sum(bool(graph[j, i]) for j in present) if i in present else 0 for i in range(count)]
        assert [row.uplink_bits for row in record.clients] == ups
    # Every part of the gate opened and shut.
    assert {"True True", "False True", "True False"} <= gates


def bits(kept: int) -> int:
    """4 bytes for each of 3 biases and the kept weights; where these are not all 18, their positions and a label.

    A bitmap takes 3 bytes, gaps one a position.
    """
    return 32 * (3 + kept) + 8 * (min(3, kept) + 1) * (kept < 18)


def evaluated(here: Setup, right: float, of: float, params: Tree | None = None) -> Carry:
    """Client 0's carry after its gate, `right` of `of` validation examples being right."""
    state = here.first_state(0)
    carry = here.method.begin({**state, "params": params or state["params"]}, {}, context(here))
    return {**carry, "correct": torch.tensor(right), "evaluated": torch.tensor(of)}


def context(here: Setup) -> Context:
    return here.context(0, here.plan(0), 0, "client")


def test_a_pruning_rewinds_everything_to_the_start():
    here = setup(min_accuracy=0.0, prune_ratio=0.5)
    carry = evaluated(here, 1.0, 1.0, {name: value + 1.0 for name, value in here.initial.items()})
    gate = here.plan(0).stages[0]
    assert (gate.name, gate.split, gate.epochs) == ("gate", "validation", 1)
    turned = here.method.end_stage(carry, stage=gate)
    kept = turned["mask"]["1.weight"]
    assert int(kept.sum()) == 9
    assert torch.equal(turned["params"]["1.weight"], torch.where(kept, here.initial["1.weight"], 0.0))
    assert torch.equal(turned["params"]["1.bias"], here.initial["1.bias"])
    assert float(turned["left"]) == 0.5
    # Not above the target any more, and after training nothing turns.
    assert here.method.end_stage(turned, stage=gate) is turned
    assert here.method.end_stage(carry, stage=Stage("train")) is carry


def test_the_gate_is_strict():
    here = setup(min_accuracy=0.5, prune_ratio=0.5)
    for right, opens in ((2.0, False), (3.0, True), (0.0, False)):
        carry = evaluated(here, right, 4.0)
        turned = here.method.end_stage(carry, stage=here.plan(0).stages[0])
        assert (turned is not carry) == opens


def test_nobody_is_evaluated_by_what_it_trains_on():
    here = setup()
    assert here.method.splits == {"validation": 0.2}
    for client in range(len(SIZES)):
        assert not set(here.partition.validation[client]) & set(here.partition.train[client])

"""ind-, avr- and par-weipru against their equations in float64 numpy: a step, pruning, the mean of what came."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rayfl import tree
from rayfl.choices.kinds import find
from rayfl.compress.sparse import sparse_packet
from rayfl.data.batches import schedule
from rayfl.determinism import seeding
from rayfl.methods.base import Method
from rayfl.methods.masks.par_weipru import ParWeipru
from rayfl.methods.shared.masked_peer import MaskedPeer
from rayfl.methods.shared.pruned_weights import PrunedWeights
from rayfl.models.dense import MLP
from rayfl.rounds.mix import MixJob, gather_rows
from rayfl.rounds.setup import Setup
from rayfl.topology.graphs import RandomNeighbours
from tests.bound_tasks import classification
from tests.methods.reference import (
    DIM,
    NUM_CLASSES,
    SIZES,
    Vectors,
    initial,
    played,
    setup_of,
    softmax_gradient,
)
from tests.population.statuses import with_status

LAYER, BIAS = "1.weight", "1.bias"
RATIOS = [0.3, 0.5, 0.8, 0.3, 0.5]
AWAY = {"retention_ratio": RATIOS, "dropout_before_download": 0.3, "dropout_after_training": 0.2}


def setup(method: str, rounds: int = 8, clients: dict[str, Any] | None = None, **hyper: Any) -> Setup:
    made = setup_of(method, {"lr": 0.3, "batch_size": 4, **hyper}, rounds=rounds, clients=clients or AWAY)
    return replace(made, topology=RandomNeighbours(degree=2))


def prune(x: Vectors, r: float) -> Vectors:
    """The 18 - int((1 - r) 18) largest weights and all biases."""
    kept = 18 - int((1 - r) * 18 + 1e-9)
    smallest = np.sort(np.abs(x[LAYER]).reshape(-1))[-kept]
    return {LAYER: np.where(np.abs(x[LAYER]) >= smallest, x[LAYER], 0.0), BIAS: x[BIAS]}


def step(here: Setup, round: int, client: int, x: Vectors, at: Vectors) -> Vectors:
    """x - lr (gradient at `at` + weight decay on x)."""
    assert isinstance(here.method, PrunedWeights)
    rows, examples, hyper = here.partition.train[client], here.dataset.train, here.method.hyper
    generator = seeding.generator(here.seed, round, client, "train/train/batches")
    plan = schedule(len(rows), epochs=None, steps=1, batch_size=hyper.batch_size or None, generator=generator)
    (batch,) = (rows[chosen] for chosen in plan)
    found = softmax_gradient(at, examples.inputs[batch].astype(np.float64), examples.labels[batch])
    return {name: x[name] - hyper.lr * (found[name] + hyper.weight_decay * x[name]) for name in x}


def mean(method: str, received: list[Vectors]) -> Vectors:
    """Of everything, or of what is not zero."""
    if method == "avr_weipru":
        return {name: np.mean([x[name] for x in received], axis=0) for name in (LAYER, BIAS)}
    holders = {name: np.sum([x[name] != 0 for x in received], axis=0) for name in (LAYER, BIAS)}
    return {name: np.sum([x[name] for x in received], axis=0) / np.maximum(holders[name], 1) for name in holders}


@pytest.mark.parametrize(
    ("method", "hyper"),
    [
        ("ind_weipru", {"weight_decay": 0.1, "hard": False}),
        ("ind_weipru", {}),
        ("avr_weipru", {"weight_decay": 0.1}),
        ("avr_weipru", {"hard": False}),
        ("par_weipru", {"weight_decay": 0.1, "hard": False}),
        ("par_weipru", {"batch_size": 0}),
    ],
)
def test_equals_the_equations(method: str, hyper: dict[str, Any]):
    here = setup(method, **hyper)
    assert here.topology is not None
    straight = not hyper.get("hard", True)
    x = [initial(here) if straight else prune(initial(here), r) for r in RATIOS]
    came_back = 0
    for round, (record, run_state) in enumerate(played(here)):
        status = here.population.sample_round(round, everyone=True)
        present, lost = set(with_status(status, "delivered")), set(with_status(status, "dropped_after_training"))
        graph, before = here.topology.receives(len(x), here.seed, round), [prune(x[i], r) for i, r in enumerate(RATIOS)]
        for i in set(range(len(x))) - lost:
            x[i] = step(here, round, i, x[i], prune(x[i], RATIOS[i]))
            x[i] = x[i] if straight else prune(x[i], RATIOS[i])
        sent = [prune(one, r) for one, r in zip(x, RATIOS, strict=True)]
        if method != "ind_weipru":
            for i in present:
                heard = [sent[j] for j in sorted(present) if j == i or graph[i, j]]
                average = mean(method, heard)
                if straight:
                    x[i] = {name: np.where(average[name] != 0, average[name], x[i][name]) for name in x[i]}
                else:
                    x[i] = prune(average, RATIOS[i])
        for i, ref in run_state.states.items():
            state = tree.to_tensors(ref)
            assert isinstance(here.method, MaskedPeer)
            model, expected = here.method.own_model(state), prune(x[i], RATIOS[i])
            for name in (LAYER, BIAS):
                np.testing.assert_allclose(state["weights"][name].numpy(), x[i][name], rtol=1e-4, atol=1e-6)
                np.testing.assert_allclose(model[name].numpy(), expected[name], rtol=1e-4, atol=1e-6)
            assert int(state["mask"][LAYER].sum()) == int(np.count_nonzero(expected[LAYER]))
            came_back += int(((before[i][LAYER] == 0) & (expected[LAYER] != 0)).sum())
        links = {i: sum(bool(graph[j, i]) for j in present) if i in present else 0 for i in range(len(x))}
        for row in record.clients:
            kept = int(np.count_nonzero(sent[row.client][LAYER]))
            # Values of 3 biases and the kept weights, a bitmap of 18 bits, and two labels of a byte for how they lie.
            size = 0 if method == "ind_weipru" else 32 * (3 + kept) + 8 * (3 + 1)
            assert row.uplink_bits == size * links[row.client]
    assert came_back > 0


def test_the_two_means_by_hand():
    # Entries: all hold it; two do; the first alone; nobody; opposite signs cancel; the second sends a zero.
    rows = [[2.0, 4.0, 6.0, 0.0, 3.0, 8.0], [4.0, 0.0, 0.0, 0.0, -3.0, 0.0], [9.0, 2.0, 0.0, 0.0, 0.0, 0.0]]
    messages = {}
    for sender, row in enumerate(rows):
        x = {"w": torch.tensor([row])}
        held = x["w"] != 0
        held[0, 5] |= sender == 1
        messages[sender] = {"weights": sparse_packet(x, {"w": held})}
    job = MixJob({0: dict.fromkeys(range(3), 1 / 3)}, (0, 1, 2))
    expected = {"avr_weipru": [5.0, 2.0, 2.0, 0.0, 0.0, 8 / 3], "par_weipru": [5.0, 3.0, 6.0, 0.0, 0.0, 8.0]}
    for name, numbers in expected.items():
        method = find(Method, name)(classification(lambda: torch.nn.Linear(2, 2)))
        found = gather_rows(method.gather, job, messages)[0]["weights"].result["w"]
        assert found[0].tolist() == pytest.approx(numbers, abs=1e-6)


def test_the_mean_is_pruned_to_the_own_share():
    here = setup("par_weipru", clients={"retention_ratio": 0.5})
    half = {LAYER: torch.arange(18.0).view(3, 6), BIAS: torch.ones(3)}
    message = {"weights": sparse_packet(half, tree.map(lambda t: t != 0, half))}
    received = gather_rows(here.method.gather, MixJob({0: {0: 1.0}}, (0,)), {0: message})[0]
    state = here.peer_half.mix({}, received, here.context(0, here.plan(0), 0, "mix"))
    assert state["weights"][LAYER].flatten().tolist() == [0.0] * 9 + [float(i) for i in range(9, 18)]
    assert state["mask"][LAYER].flatten().tolist() == [False] * 9 + [True] * 9


@pytest.mark.parametrize("method", ["ind_weipru", "avr_weipru", "par_weipru"])
def test_every_layer_keeps_its_number_in_all_rounds(method: str):
    made = setup_of(
        method,
        {"lr": 0.1, "batch_size": 4},
        build=MLP(hidden=(8,)).builder((DIM,), NUM_CLASSES),
        clients=AWAY,
        rounds=5,
    )
    here = replace(made, topology=RandomNeighbours(degree=2))
    for record, run_state in played(here):
        for i, r in enumerate(RATIOS):
            state = tree.to_tensors(run_state.states[i]) if i in run_state.states else here.first_state(i)
            for mask in state["mask"].values():
                size = mask.numel()
                assert int(mask.sum()) == (size if mask.dim() == 1 else size - int((1 - r) * size + 1e-9))
        if method != "ind_weipru" and any(row.uplink_bits for row in record.clients):
            # 4 bytes for each of 48 + 24 weights and 11 biases.
            assert record.means["comm/link_megabytes"] == pytest.approx(4 * 83 / 1e6)


def test_defaults_are_the_papers():
    method = ParWeipru(classification(MLP().builder((4,), 3)))
    hyper = method.hyper
    assert (hyper.lr, hyper.batch_size, hyper.weight_decay, hyper.fil) == (0.3, 128, 0.0, 0)
    (stage,) = method.plan(0, 0.0).stages
    assert (stage.steps, stage.epochs, stage.batch_size) == (1, None, 128)
    assert len(SIZES) == len(RATIOS)

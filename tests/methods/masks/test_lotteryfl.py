"""LotteryFL against its equations in float64: gate, pruning, rewind, masked training, the mean over who holds an entry.

The client is LotteryDSGD's (test_lottery_dsgd.py); the server and the wires are its own.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rayfl import tree
from rayfl.methods.masks.lotteryfl import LotteryFL
from rayfl.rounds.check_setup import check_setup
from rayfl.rounds.evaluate_round import personal_models
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from tests.methods.masks.test_lottery_dsgd import HYPER, RATIO, accuracy, trained
from tests.methods.masks.test_subfedavg import bits
from tests.methods.reference import SIZES, Vectors, initial, played, setup_of
from tests.population.statuses import with_status
from tests.refusals import refused

ROUNDS = 7


def setup(clients: dict[str, Any] | None = None, engine: str = "loop", **hyper: Any) -> Setup:
    """Softmax regression; a third of every client's examples is its validation split."""
    made = setup_of("lotteryfl", {**HYPER, **hyper}, clients=clients, rounds=ROUNDS)
    return replace(made, partition=made.partition.hold_out(1 / 3, 0.0, np.random.default_rng(0)), engine_name=engine)


@pytest.mark.parametrize(
    ("clients", "min_accuracy", "target"),
    [
        ({}, 0.4, [0.5] * 5),
        (
            {"retention_ratio": [0.3, 0.5, 0.9], "per_round": 4, "dropout_after_training": 0.2},
            0.3,
            [0.3, 0.5, 0.9] * 2,
        ),
    ],
)
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_equals_the_equations(clients: dict[str, Any], min_accuracy: float, target: list[float], engine: str):
    here = setup(clients, engine, min_accuracy=min_accuracy)
    x, left, gates = initial(here), [1.0] * len(SIZES), set()
    masks = [np.ones_like(x["1.weight"], dtype=bool) for _ in SIZES]
    for round, (record, run_state) in enumerate(played(here)):
        ends: dict[int, Vectors] = {}
        down, changed = [bits(int(mask.sum()), changed=False) for mask in masks], {}
        for i in with_status(here.population.sample_round(round), "delivered"):
            begun = {**x, "1.weight": x["1.weight"] * masks[i]}
            good, thick = accuracy(here, begun, i) > min_accuracy, left[i] > target[i]
            gates.add((bool(good), thick))
            changed[i] = bool(good and thick)
            if changed[i]:
                kept = np.abs(begun["1.weight"][masks[i]])
                masks[i] = masks[i] & (np.abs(begun["1.weight"]) >= np.quantile(kept, RATIO))
                left[i] *= 1 - RATIO
                begun = initial(here)
                begun["1.weight"] = begun["1.weight"] * masks[i]
            ends[i] = trained(here, round, i, begun, masks[i])
        if ends:
            held = np.sum([masks[i] for i in ends], axis=0)
            total = np.sum([end["1.weight"] for end in ends.values()], axis=0)
            weight = np.where(held > 0, total / np.maximum(held, 1), x["1.weight"])
            x = {"1.weight": weight, "1.bias": np.mean([end["1.bias"] for end in ends.values()], axis=0)}
        for name, value in x.items():
            np.testing.assert_allclose(run_state.server["params"][name].numpy(), value, rtol=1e-4, atol=1e-5)
        for i in ends:
            state = tree.to_tensors(run_state.states[i])
            assert np.array_equal(state["mask"]["1.weight"].numpy(), masks[i]) and bool(state["mask"]["1.bias"].all())
            assert float(state["left"]) == pytest.approx(left[i])
        sent = {row.client: row.uplink_bits for row in record.clients if row.status == "delivered"}
        assert sent == {i: bits(int(masks[i].sum()), changed[i]) for i in ends}
        assert all(row.downlink_bits == down[row.client] for row in record.clients if row.downlink_bits)
    assert {(True, True), (False, True), (True, False)} <= gates


def test_a_mask_that_did_not_arrive_is_as_if_it_had_never_been_made():
    # A client prunes in round 0 and is lost on the way: it begins round 1 with its dense model again.
    here = setup({"dropout_after_training": 1 - 1e-12}, min_accuracy=0.0)
    (_, run_state), *_ = played(replace(here, rounds=1))
    assert run_state.states == {} and run_state.server_memories == {}


def test_what_a_client_is_evaluated_by():
    here = setup(min_accuracy=0.0)
    run_state = played(here)[-1][1]
    state = tree.to_tensors(InlineExecutor(here).get(run_state.states[2]))
    kept, model = state["mask"]["1.weight"], run_state.server["params"]
    assert 0 < int(kept.sum()) < 18
    evaluated = here.method.eval_begin(state, model, None, here.context(0, here.plan(0), 2, "judge"))["params"]
    assert torch.equal(evaluated["1.weight"], torch.where(kept, model["1.weight"], 0.0))
    saved = dict(personal_models(here, InlineExecutor(here), run_state))[2]
    assert torch.equal(saved["1.weight"] != 0, kept)


def test_settings():
    hyper, (gate, train) = LotteryFL().hyper.model_dump(), LotteryFL().plan(0, 0.0).stages
    assert [hyper[key] for key in ("lr", "momentum", "batch_size", "prune_ratio")] == [0.01, 0.5, 10, 0.1]
    assert hyper["min_accuracy"] == 0.2
    assert (gate.name, gate.split, train.epochs, train.batch_size) == ("gate", "validation", 10, 10)
    with refused(names=["LotteryFL", "validation", "splits.validation_ratio", "0.2"]):
        check_setup(setup_of("lotteryfl", {}))

"""signSGD with majority vote against its steps in numpy."""

from typing import Any

import numpy as np
import pytest

from rayfl import tree
from rayfl.choices.kinds import find
from rayfl.methods.base import Method
from rayfl.methods.compressed.signsgd import SignSGD
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import flat, points, start
from tests.contracts.seams.quadratic import Quadratic, setup
from tests.methods.reference import doubles, initial, setup_of, softmax_gradient
from tests.methods.reference import played as played_of
from tests.population.statuses import with_status
from tests.refusals import refused

MODEL, ONE_BIT, TWO_BITS = 320, 16, 24
"""Bits of 10 fp32 entries; of 8 + 2 entries in whole bytes a tensor at one bit, and at two."""


def followed(here: Setup, momentum: float = 0.0, l2: float = 0.0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """x after every round and the sum of signs in it, everybody voting in rounds of their own."""
    hyper = here.method.hyper.model_dump()
    x, memory, path, sums = start(here), np.zeros((4, 10)), [], []
    for round in range(here.rounds):
        total = np.zeros(10)
        for k in with_status(here.population.sample_round(round), "delivered"):
            gradient = points(here, k).gradient(x) + l2 * x
            memory[k] = momentum * memory[k] + (1 - momentum) * gradient
            total += np.where(memory[k] >= 0, 1, -1)
        x = x - hyper["lr"] * hyper["lr_decay"] ** round * np.sign(total)
        path.append(x)
        sums.append(total)
    return path, sums


@pytest.mark.parametrize(
    "hyper", [{}, {"momentum": 0.9}, {"momentum": 0.5, "lr_decay": 0.8, "l2": 0.3}, {"lr": 0.3}], ids=str
)
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_follows_the_majority(hyper: dict[str, Any], engine: str):
    here = setup(SignSGD(Quadratic(), SignSGD.Hyper(**{"lr": 0.1, **hyper})), rounds=12, engine=engine)
    records, run_states = play(here)
    path, sums = followed(here, hyper.get("momentum", 0.0), hyper.get("l2", 0.0))
    for run_state, x in zip(run_states, path, strict=True):
        np.testing.assert_allclose(flat(run_state.server["params"]), x, rtol=1e-5, atol=1e-6)
    # Four votes can tie, and here some do: those entries stay where they are.
    assert any((total == 0).any() and (total != 0).any() for total in sums)
    before = [start(here), *(flat(run_state.server["params"]) for run_state in run_states)]
    for old, new, total in zip(before, before[1:], sums, strict=False):
        assert ((old == new) == (total == 0)).all()
    bits = {(row.uplink_bits, row.downlink_bits) for record in records for row in record.clients}
    assert bits == {(ONE_BIT, TWO_BITS)}


def test_follows_the_majority_of_logistic_regressions():
    here = setup_of("signsgd", {"lr": 0.05}, rounds=6)
    examples, x = here.dataset.train, initial(here)
    for record, run_state in played_of(here):
        total = {name: np.zeros_like(value) for name, value in x.items()}
        for k in range(5):
            rows = here.partition.train[k]
            gradient = softmax_gradient(x, examples.inputs[rows].astype(np.float64), examples.labels[rows])
            for name in x:
                total[name] += np.where(gradient[name] >= 0, 1, -1)
        x = {name: x[name] - 0.05 * np.sign(total[name]) for name in x}
        for name, value in doubles(run_state.server["params"]).items():
            np.testing.assert_allclose(value, x[name], rtol=1e-5, atol=1e-6)
        # Five votes cannot tie: one bit an entry both ways, 18 weights in 3 bytes and 3 biases in one.
        assert {(row.uplink_bits, row.downlink_bits) for row in record.clients} == {(32, 32)}


@pytest.mark.parametrize("clients", [{"per_round": 3}, {"per_round": 2}, {"dropout_after_training": 0.4}], ids=str)
def test_who_was_away_downloads_the_model_and_who_was_there_only_votes(clients: dict[str, Any]):
    here = setup(SignSGD(Quadratic(), SignSGD.Hyper(lr=0.1, momentum=0.5)), rounds=14, seed=2, clients=clients)
    executor = InlineExecutor(here)
    records, run_states = play(here, executor)
    path, _ = followed(here, momentum=0.5)
    version, has, seen = 0, dict.fromkeys(range(4), 0), set()
    for round, (record, run_state, x) in enumerate(zip(records, run_states, path, strict=True)):
        drawn = here.population.sample_round(round)
        delivered = with_status(drawn, "delivered")
        expected = {}
        for k in (*delivered, *with_status(drawn, "dropped_after_training")):
            expected[k] = (0, 0) if has[k] == version else (0, MODEL)
        version += bool(delivered)
        for k in delivered:
            votes = ONE_BIT if len(delivered) % 2 else TWO_BITS
            expected[k], has[k] = (ONE_BIT, expected[k][1] + votes), version
        assert {row.client: (row.uplink_bits, row.downlink_bits) for row in record.clients} == expected
        seen |= {down for _, down in expected.values()}
        np.testing.assert_allclose(flat(run_state.server["params"]), x, rtol=1e-5, atol=1e-6)
        for k in delivered:
            # Every voter's copy is the server's model, bit for bit.
            copy = tree.to_tensors(executor.get(run_state.states[k]))["params"]
            assert all(np.array_equal(copy[name], value) for name, value in run_state.server["params"].items())
    assert MODEL + (ONE_BIT if "per_round" not in clients or clients["per_round"] == 3 else TWO_BITS) in seen


def test_a_round_without_votes_moves_nothing_and_costs_nobody_a_model():
    here = setup(SignSGD(Quadratic(), SignSGD.Hyper(lr=0.1)), rounds=3, clients={"dropout_after_training": 1 - 1e-12})
    records, run_states = play(here)
    assert flat(run_states[-1].server["params"]).tolist() == start(here).tolist()
    assert [(record.row.uplink_bits, record.row.downlink_bits) for record in records] == [(0, 0)] * 3


def test_votes_have_no_weights():
    given: dict[str, Any] = {"weighting": "samples"}
    with refused(names=["weighting='samples'"]):
        find(Method, "signsgd").Hyper(**given)

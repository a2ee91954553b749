"""Federated Dropout against the equations in float64."""

from typing import Any

import numpy as np
import pytest

from rayfl.determinism.seeding import NOBODY, torch_seed
from tests.methods.capacity.reference import FIRST, RATIOS, SECOND, Kept, assert_agrees, prefix, reference, setup
from tests.methods.reference import played


def drawn(seed: int, ratio: float) -> Kept:
    draws = np.random.default_rng(seed)
    first, second = (len(units) for units in prefix(ratio))
    return np.sort(draws.permutation(FIRST)[:first]), np.sort(draws.permutation(SECOND)[:second])


@pytest.mark.parametrize(
    "hyper",
    [
        {"lr": 0.3, "batch_size": 4, "epochs": 2},
        {"lr": 0.1, "batch_size": 3, "momentum": 0.5, "weighting": "samples", "same_for_all": True},
    ],
)
def test_federated_dropout_is_that_of_the_paper(hyper: dict[str, Any]):
    made = setup("feddropout", hyper)

    def kept(round: int, client: int) -> Kept:
        whose = NOBODY if hyper.get("same_for_all") else client
        return drawn(torch_seed(made.seed, round, whose, "units"), RATIOS[client % 3])

    assert_agrees(made, reference(made, kept))


def test_each_message_carries_the_seed_of_its_units():
    ((record, _), *_) = played(setup("feddropout", {"lr": 0.3}))
    for row in record.clients:
        first, second = (len(units) for units in prefix(RATIOS[row.client % 3]))
        bits = 32 * (first * 7 + second * (first + 1) + 3 * (second + 1)) + 64
        assert [row.uplink_bits, row.downlink_bits] == [bits, bits]


def test_an_entry_between_hidden_layers_is_held_in_the_square_of_the_share_of_rounds():
    made = setup("feddropout", {"lr": 0.3})
    method: Any = made.method
    count, rounds = np.zeros((SECOND, FIRST)), 2000
    for round in range(rounds):
        ctx = made.context(round, made.plan(0), 1, "client")
        first, second = method.units(0.5, ctx)
        count[np.ix_(second, first)] += 1
    # Six standard deviations of a mean of 2000.
    assert np.abs(count / rounds - 0.25).max() < 6 * np.sqrt(0.25 * 0.75 / rounds)

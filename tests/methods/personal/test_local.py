"""Local training: nobody talks, everybody trains on its own, whatever the others do."""

from typing import Any

import numpy as np
import pytest

from tests.methods.reference import SIZES, initial, played, setup_of, trained
from tests.population.statuses import with_status
from tests.refusals import refused


@pytest.mark.parametrize(
    "hyper",
    [
        {"batch_size": 0},
        {"batch_size": 4, "momentum": 0.9, "epochs": 2, "lr_decay": 0.5},
        {"optimizer": "adam", "lr": 0.01, "batch_size": 4},
    ],
    ids=str,
)
def test_every_client_trains_on_its_own(hyper: dict[str, Any]):
    setup = setup_of("local", {"lr": 0.5, **hyper})
    expected = {client: initial(setup) for client in range(len(SIZES))}
    for round, (record, run_state) in enumerate(played(setup)):
        for client in expected:
            expected[client], _ = trained(setup, round, client, expected[client])
            for name, value in expected[client].items():
                np.testing.assert_allclose(
                    run_state.states[client]["params"][name], value, rtol=1e-5, atol=2e-7, err_msg=f"client {client}"
                )
        assert (record.row.uplink_bits, record.row.downlink_bits) == (0, 0)


def test_nobody_waits_for_anybody():
    # Local work of 9, 4, 14, 6, 11 examples at 7 examples a second, and no messages.
    setup = setup_of("local", {}, clients={"examples_per_s": 7.0}, rounds=1)
    ((record, _),) = played(setup)
    assert [row.simulated_s for row in record.clients] == [size / 7 for size in SIZES]
    assert record.row.simulated_s == 14 / 7


def test_a_client_whose_update_is_lost_keeps_its_model():
    setup = setup_of("local", {}, clients={"dropout_after_training": 0.5}, rounds=5)
    rounds, lost = played(setup), 0
    for round in range(1, 5):
        for client in with_status(setup.population.sample_round(round, everyone=True), "dropped_after_training"):
            assert rounds[round - 1][1].states.get(client) is rounds[round][1].states.get(client)
            lost += 1
    assert lost


def test_there_is_no_average_to_weigh():
    with refused(names=["weighting", "weight_decay"]):
        setup_of("local", {"weighting": "uniform"})

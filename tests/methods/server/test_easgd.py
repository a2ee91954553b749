"""EASGD against its equations in float64: old values on both sides, what an exchange keeps, and its fixed point."""

from typing import Any

import numpy as np
import pytest

from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import batches, flat, start
from tests.methods.own_models import CLIENTS, MODEL_BITS, common, curvature, made, personal, rounds_of
from tests.population.statuses import with_status
from tests.refusals import refused

ABSENCES = ({}, {"per_round": 2}, {"dropout_before_download": 0.2, "dropout_after_training": 0.2, "upload_loss": 0.2})


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize(
    "hyper", [{}, {"steps": 3, "a": 0.1}, {"epochs": 2, "momentum": 0.5, "lr_decay": 0.9}], ids=str
)
def test_follows_its_equations(hyper: dict[str, Any], clients: dict[str, Any]):
    here = made("easgd", {"lr": 0.1, "batch_size": 2, **hyper}, rounds=5, clients=clients)
    given: Any = here.method.hyper
    x, c = common(here), start(here)
    a = hyper.get("a", 0.9 / 4)
    epochs = None if given.steps else given.epochs or 1
    for record, own, state in rounds_of(here):
        round = record.row.round
        there = with_status(here.population.sample_round(round), "delivered")
        old, old_c = x.copy(), c.copy()
        for i in there:
            velocity = np.zeros(10)
            chosen = batches(here, round, i, epochs=epochs, steps=given.steps, batch_size=2)
            for number, batch in enumerate(chosen):
                velocity = given.momentum * velocity + batch.gradient(x[i])
                x[i] = x[i] - 0.1 * given.lr_decay**round * velocity - (a * (old[i] - old_c) if number == 0 else 0)
        c = old_c + a * sum((old[i] - old_c for i in there), np.zeros(10))
        np.testing.assert_allclose(own, x, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(flat(state.server["params"]), c, rtol=1e-5, atol=1e-5)
        bits = {(row.uplink_bits, row.downlink_bits) for row in record.clients if row.client in there}
        assert bits <= {(MODEL_BITS, MODEL_BITS)}


def test_an_exchange_keeps_the_sum_of_workers_and_centre():
    # A learning rate of 1e-9 leaves the exchange alone, after two rounds that have set the workers apart.
    _, states = play(made("easgd", {"lr": 0.3, "batch_size": 2}, rounds=2))
    here = made("easgd", {"lr": 1e-9, "batch_size": 2}, rounds=10, clients={"dropout_before_download": 0.3})
    later = play(here, run_state=states[-1])[1]
    sums = [personal(here, s).sum(axis=0) + flat(s.server["params"]) for s in (states[-1], *later)]
    for each in sums[1:]:
        np.testing.assert_allclose(each, sums[0], atol=1e-5)
    spread = [np.abs(personal(here, s) - flat(s.server["params"])).max() for s in (states[-1], later[-1])]
    assert spread[1] < 0.5 * spread[0]


def test_the_fixed_point():
    # At rest sum_i (x_i - c) = 0 and lr (h_i x_i - b_i) = -a (x_i - c): with k = a / lr, x_i = (b_i + k c) / (h_i + k),
    # and c is the mean of these, so sum_i k/(h_i + k) c + b_i/(h_i + k) = 4 c.
    lr, a = 0.4, 0.3
    here = made("easgd", {"lr": lr, "a": a, "steps": 1, "batch_size": 0}, rounds=60)
    end = play(here)[1][-1]
    h, b = curvature(here)
    k = a / lr
    c = (b / (h + k)).sum(axis=0) / (4 - (k / (h + k)).sum(axis=0))
    np.testing.assert_allclose(flat(end.server["params"]), c, atol=1e-4)
    np.testing.assert_allclose(personal(here, end), (b + k * c) / (h + k), atol=1e-4)
    assert np.abs(personal(here, end) - c).max() > 0.1


def test_the_bound_on_a():
    # The exchange takes the distance of the mean from the centre times 1 - (p + 1) a, here 1 - 5 a.
    with refused(names=["method.a=0.4", "4 clients", "2 / (clients.count + 1) = 0.4", "0.9 / clients.count"]):
        made("easgd", {"a": 0.4})
    made("easgd", {"a": 0.39})
    assert len(CLIENTS) == 4

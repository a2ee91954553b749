"""FedPD with variance reduction against its equations in numpy, and against FedPD where nothing varies."""

from typing import Any

import numpy as np
import pytest

from rayfl.determinism import seeding
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import flat, points, start
from tests.methods.averaging import ABSENCES, ENGINES, made, rate, train_batches
from tests.methods.own_models import personal
from tests.methods.reference import assert_close
from tests.population.statuses import with_status

HYPER = {"lr": 0.05, "batch_size": 2, "eta": 0.3}


def followed(here: Setup) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """After every round x0, all x_i and all v_i; who is not there has its first one, 0 before its first round."""
    hyper = here.method.hyper.model_dump()
    x0, eta, decay = start(here), hyper["eta"], hyper["weight_decay"]
    x, anchor, lam, v = np.tile(x0, (4, 1)), np.tile(x0, (4, 1)), np.zeros((4, 10)), np.zeros((4, 10))
    fresh, seen = set(range(4)), []
    for round in range(here.rounds):
        delivered = [*with_status(here.population.sample_round(round), "delivered")]
        for i in delivered:
            if i in fresh or round % hyper["restart"] == 0:
                v[i] = points(here, i).gradient(x[i])
            fresh -= {i}
            for batch in train_batches(here, round, i):
                old = x[i].copy()
                pull = lam[i] + (old - anchor[i]) / eta
                x[i] = old - rate(here, round) * (v[i] + decay * old + pull)
                v[i] = v[i] + batch.gradient(x[i]) - batch.gradient(old)
            lam[i] = lam[i] + (x[i] - anchor[i]) / eta
            anchor[i] = x[i] + eta * lam[i]
        if delivered and seeding.coin(here.seed, round) >= hyper["skip_probability"]:
            x0 = anchor[delivered].mean(axis=0)
            anchor[delivered] = x0
        seen.append((x0, x.copy(), v.copy()))
    return seen


@pytest.mark.parametrize("clients", ABSENCES[:2], ids=str)
@pytest.mark.parametrize(
    "hyper", [{}, {"restart": 3, "skip_probability": 0.4, "epochs": 2, "weight_decay": 0.1, "lr_decay": 0.9}], ids=str
)
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_its_equations(engine: str, hyper: dict[str, Any], clients: dict[str, Any]):
    here = made("fedpd_vr", {**HYPER, **hyper}, rounds=7, engine=engine, clients=clients)
    expected = followed(here)
    for round, (run_state, (x0, x, v)) in enumerate(zip(play(here)[1], expected, strict=True)):
        assert_close(flat(run_state.server["params"]), x0, 2e-6)
        assert_close(personal(here, run_state), x, 2e-6)
        if round > 3:
            assert_close(personal(here, run_state, "estimate"), v, 3e-6)
    assert np.abs(expected[-1][0] - start(here)).max() > 0.1


def test_with_full_batches_it_is_fedpd():
    pair = [made(name, {**HYPER, "batch_size": 0, "epochs": 4}, rounds=5) for name in ("fedpd", "fedpd_vr")]
    for fedpd, reduced in zip(*(play(here)[1] for here in pair), strict=True):
        assert_close(flat(reduced.server["params"]), flat(fedpd.server["params"]))

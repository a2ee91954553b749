"""FedAvg-FT: FedAvg on every wire, and evaluated by models that were fine-tuned in closed form."""

from typing import Any

import numpy as np
import pytest

from rayfl.rounds.evaluation_settings import Evaluation
from rayfl.rounds.ledger import RoundRecord
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import flat, points, start
from tests.contracts.seams.quadratic import TRAIN
from tests.methods.averaging import ABSENCES, made, wells

HYPER = {"lr": 0.1, "steps": 3, "batch_size": 0, "lr_decay": 0.5}
EVALUATED = Evaluation(own=True, pooled=True)


def tuned(here: Setup, x: np.ndarray, lr: float, steps: int) -> np.ndarray:
    """The personal models [4, 10]: c + (1 - lr h)^K (x - c) after K full-batch steps."""
    curvatures, centres = wells(here)
    return centres + (1 - lr * curvatures) ** steps * (x - centres)


def losses(here: Setup, models: np.ndarray) -> list[float]:
    """Every client's model on its own test split."""
    return [points(here, client, "test").loss(models[client]) for client in range(4)]


def measured(record: RoundRecord, name: str) -> dict[int, float]:
    found = {m.client: m.value for m in record.metrics if m.name == name}
    return {client: value for client, value in found.items() if client is not None and value is not None}


@pytest.mark.parametrize(
    ("hyper", "lr", "steps"),
    [
        # The lr of round 0, whatever lr_decay has made of it, and a round's steps.
        ({}, 0.1, 3),
        ({"ft_lr": 0.3}, 0.3, 3),
        ({"ft_epochs": 5}, 0.1, 5),
        ({"steps": None, "epochs": 2}, 0.1, 2),
        ({"steps": None, "ft_epochs": 1, "ft_lr": 0.7}, 0.7, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_clients_are_evaluated_after_fine_tuning(hyper: dict[str, Any], lr: float, steps: int, engine: str):
    here = made("fedavg_ft", {**HYPER, **hyper}, rounds=3, engine=engine, evaluation=EVALUATED)
    records, run_states = play(here)
    received = start(here)
    for record, run_state in zip(records, run_states, strict=True):
        x = flat(run_state.server["params"])
        own = measured(record, "own/loss")
        np.testing.assert_allclose([own[k] for k in range(4)], losses(here, tuned(here, x, lr, steps)), rtol=1e-4)
        # After local training it is the received model that is tuned, so that nothing is tuned twice.
        after = measured(record, "own_after_training/loss")
        expected = losses(here, tuned(here, received, lr, steps))
        np.testing.assert_allclose([after[k] for k in range(4)], expected, rtol=1e-4)
        # The global model is evaluated as it is.
        pooled = [points(here, k, "test").loss(x) for k in range(4)]
        everyone = here.dataset.test.inputs.astype(np.float64)
        whole = (0.5 * everyone[:, 1] * (x - everyone[:, 0]) ** 2).sum(axis=1).mean()
        assert record.means["pooled/loss"] == pytest.approx(whole, rel=1e-4)
        assert not np.allclose(pooled, list(own.values()), rtol=0.05)
        received = x


def test_minibatches_are_those_of_the_evaluating():
    # Another stage, another purpose: the draws of training stay what they are in FedAvg.
    hyper = {"lr": 0.1, "batch_size": 2, "ft_epochs": 2}
    evaluated = play(made("fedavg_ft", hyper, evaluation=EVALUATED))[1]
    never = play(made("fedavg_ft", hyper))[1]
    for one, other in zip(evaluated, never, strict=True):
        assert flat(one.server["params"]).tolist() == flat(other.server["params"]).tolist()


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
def test_training_and_wires_are_those_of_fedavg(clients: dict[str, Any]):
    hyper = {"lr": 0.1, "batch_size": 2, "momentum": 0.5}
    options: dict[str, Any] = {"clients": clients, "evaluation": EVALUATED}
    records, run_states = play(made("fedavg", hyper, **options))
    tuned_records, tuned_worlds = play(
        made("fedavg_ft", {**hyper, "ft_epochs": 3}, clients=clients, evaluation=EVALUATED)
    )
    for one, other in zip(run_states, tuned_worlds, strict=True):
        assert flat(one.server["params"]).tolist() == flat(other.server["params"]).tolist()
        assert other.states == {}
    for record, twin in zip(records, tuned_records, strict=True):
        assert record.clients == twin.clients
    assert sum(record.row.uplink_bits for record in tuned_records) > 0
    assert len(TRAIN) == len(measured(tuned_records[0], "own/loss"))

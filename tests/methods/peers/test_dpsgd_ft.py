"""D-PSGD-FT: D-PSGD's training bit for bit, and what is evaluated, in closed form."""

from typing import Any

import numpy as np
import pytest

from rayfl.rounds.evaluation_settings import Evaluation
from rayfl.rounds.executor import InlineExecutor
from rayfl.testing.executors import Shuffled, assert_same_bits, contents, play
from tests.contracts.seams.closed_form import points
from tests.methods.plain_peers import made, models

HYPER = {"lr": 0.1, "batch_size": 0, "epochs": 2, "lr_decay": 0.5}
EVALUATED = Evaluation(own=True, pooled=False)


def losses(record: Any, place: str) -> list[float]:
    return [m.value for m in record.metrics if m.client is not None and m.name == f"{place}/loss"]


def test_training_is_that_of_dpsgd():
    plain = made("dpsgd", HYPER)
    tuned = made("dpsgd_ft", {**HYPER, "ft_from": "mean", "ft_lr": 0.3}, evaluation=EVALUATED)
    (records, run_states), (others, other_worlds) = play(plain), play(tuned)
    assert_same_bits(contents(InlineExecutor(plain), run_states[-1]), contents(InlineExecutor(tuned), other_worlds[-1]))
    assert [record.row.uplink_bits for record in records] == [record.row.uplink_bits for record in others]


@pytest.mark.parametrize("clients", [{}, {"dropout_after_training": 0.4}], ids=str)
@pytest.mark.parametrize("ft_from", ["own", "mean"])
@pytest.mark.parametrize("given", [{}, {"ft_epochs": 3, "ft_lr": 0.2}], ids=str)
def test_what_is_evaluated(ft_from: str, given: dict[str, Any], clients: dict[str, Any]):
    here = made("dpsgd_ft", {**HYPER, "ft_from": ft_from, **given}, rounds=3, evaluation=EVALUATED, clients=clients)
    records, run_states = play(here)
    for record, run_state in zip(records, run_states, strict=True):
        x, expected = models(here, run_state), []
        for client in range(4):
            tuned = x.mean(axis=0) if ft_from == "mean" else x[client]
            # Full batches, and the lr of round 0 in every round.
            for _ in range(given.get("ft_epochs", 2)):
                tuned = tuned - given.get("ft_lr", 0.1) * points(here, client).gradient(tuned)
            test = here.dataset.test.inputs[here.partition.test[client]].astype(np.float64)
            expected.append(float((0.5 * test[:, 1] * (tuned - test[:, 0]) ** 2).sum(axis=1).mean()))
        np.testing.assert_allclose(losses(record, "own"), expected, rtol=1e-5)


def test_after_training_the_own_model_is_tuned():
    own, mean = (
        play(made("dpsgd_ft", {**HYPER, "ft_from": ft_from}, evaluation=EVALUATED))[0] for ft_from in ("own", "mean")
    )
    for one, other in zip(own, mean, strict=True):
        assert losses(one, "own_after_training") == losses(other, "own_after_training")
        assert losses(one, "own") != losses(other, "own")


def test_three_workers_evaluate_the_same_mean_which_is_the_default():
    here = made("dpsgd_ft", HYPER, evaluation=EVALUATED)
    assert here.method.capabilities.evaluated_from_mean
    (records, _), (others, _) = play(here, InlineExecutor(here)), play(here, Shuffled(here))
    assert [record.metrics for record in records] == [record.metrics for record in others]

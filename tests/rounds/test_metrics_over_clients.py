"""Values over clients: own splits by kept outputs or by batches, merged and weighted, on any number of workers."""

from typing import Any

import numpy as np
import pytest

from rayfl.choices.kinds import make
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.metrics.base import Metric
from rayfl.rounds import setup as setups
from rayfl.rounds.setup import Setup
from rayfl.testing.comparison import rows
from rayfl.testing.executors import Shuffled, play
from tests.refusals import refused

METRICS = ["loss", "accuracy", "f1", "recall", "ece", "confusion", {"name": "auroc", "bins": 64}]


# Any: tables of an experiment.
def made(method: str = "fedavg", **tables: Any) -> Setup:
    return prepare(
        Experiment(
            rounds=2,
            data="digits",
            partition={"name": "dirichlet-class", "alpha": 0.3},
            clients={"count": 5},
            model="logistic",
            method={"name": method, "lr": 0.1},
            **{"evaluation": {"metrics": METRICS, "merged": True}, **tables},
        )
    )


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_several_workers_give_the_bits_of_one(method: str):
    here = made(method)
    assert rows(play(here)[0]) == rows(play(here, Shuffled(here))[0])


def test_outputs_that_are_too_large_are_measured_batch_by_batch(monkeypatch: pytest.MonkeyPatch):
    kept = {(m.client, m.name): m.value for m in play(made())[0][-1].metrics}
    monkeypatch.setattr(setups, "MOST_OUTPUT_BYTES", 0)
    cut = {(m.client, m.name): m.value for m in play(made())[0][-1].metrics}
    assert cut.keys() == kept.keys()
    for key, value in kept.items():
        assert (value is None) == (cut[key] is None), key
        assert value is None or cut[key] == pytest.approx(value, rel=1e-9), key


def test_merged_is_one_value_and_weighted_a_mean_by_examples():
    here = made()
    record = play(here)[0][-1]
    found = {(m.client, m.name): m.value for m in record.metrics}
    means = record.means
    # The test splits of this partition make up the pooled test set.
    for name in ("accuracy", "f1", "recall", "recall/3", "ece", "auroc", "confusion/2/2"):
        assert means[f"own_merged/{name}"] == pytest.approx(means[f"pooled/{name}"], rel=1e-9), name
    sizes = here.partition.test.sizes
    own = np.array([found[client, "own/f1"] for client in range(5)], dtype=float)
    assert means["own/f1"] == pytest.approx(own.mean())
    assert means["own_weighted/f1"] == pytest.approx((own * sizes).sum() / sizes.sum())
    assert means["own_weighted/accuracy"] == pytest.approx(means["own_merged/accuracy"])
    # Classes that a client does not have are undefined there, and left out of the mean.
    three = [found[client, "own/recall/3"] for client in range(5)]
    assert means["own/recall/3"] == pytest.approx(np.mean([value for value in three if value is not None]))
    assert not [name for client, name in found if client is not None and name.startswith("own/confusion")]


def test_what_a_page_draws_of_personal_models_is_merged_unasked():
    means = play(made("ditto", evaluation={"metrics": ["accuracy", "confusion"]}))[0][-1].means
    assert "own_merged/confusion/0/0" in means and "own_merged/accuracy" not in means


def test_a_target_that_the_metrics_cannot_reach_is_refused_before_the_run():
    with refused(names=["report.target=80", "accuracy", "0 to 1"]):
        made(evaluation={}, report={"target": 80.0})
    made(evaluation={"metrics": ["nll"]}, report={"target": 80.0})


def test_metrics_that_do_not_fit_the_data_are_refused_before_the_run():
    with refused(names=["evaluation.metrics", "rmse", "class"]):
        made(evaluation={"metrics": ["rmse"]})
    with refused(names=["accuracyy", "accuracy"]):
        made(evaluation={"metrics": ["accuracyy"]})
    assert make(Metric, {"name": "f1"}) in made().metrics

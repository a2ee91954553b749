"""Values over clients: own splits by kept outputs or by batches, merged and weighted, on any number of workers."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rayfl.choices.kinds import make
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.metrics.base import Metric, MetricSums, PerExample
from rayfl.rounds import model_sums
from rayfl.rounds.model_sums import values
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import Shuffled, play, rows
from tests.refusals import refused

METRICS = ["loss", "accuracy", "f1", "recall", "ece", "confusion", {"name": "auroc", "bins": 64}]


# Any: tables of an experiment.
def made(method: str = "fedavg", **tables: Any) -> Setup:
    return prepare(
        Experiment(
            rounds=2,
            data="digits",
            partition={"name": "dirichlet-class", "alpha": 0.3},
            model="logistic",
            method={"name": method, "lr": 0.1},
            **{"clients": {"count": 5}, "evaluation": {"metrics": METRICS, "merged": True}, **tables},
        )
    )


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_several_workers_give_the_bits_of_one(method: str):
    here = made(method)
    assert rows(play(here)[0]) == rows(play(here, Shuffled(here))[0])


def test_outputs_that_are_too_large_are_measured_batch_by_batch(monkeypatch: pytest.MonkeyPatch):
    kept = {(m.client, m.name): m.value for m in play(made())[0][-1].metrics}
    monkeypatch.setattr(model_sums, "MOST_OUTPUT_BYTES", 0)
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


def test_how_evenly_values_lie_over_clients_is_recorded_for_every_metric_and_class():
    here = made(evaluation={"metrics": METRICS}, clients={"count": 5, "unseen": 0.4})
    record = play(here)[0][-1]
    of = {name: [m.value for m in record.metrics if m.name == name and m.client is not None] for name in record.means}
    for name in ("own/loss", "own/accuracy", "own/recall/3", "own/ece", "own_after_training/f1", "unseen/auroc"):
        place, _, what = name.partition("/")
        known = np.array([value for value in of[name] if value is not None])
        worst = known.max() if what in ("loss", "ece") else known.min()
        wanted = {"deviation": known.std(), "worst": worst, "worst_tenth": worst, "difference": np.ptp(known)}
        wanted["jain"] = known.sum() ** 2 / (len(known) * (known**2).sum())
        found = {word: record.means[f"{place}_{word}/{what}"] for word in wanted}
        assert found == pytest.approx(wanted), name
    assert not [name for name in record.means if name.startswith(("train_", "own_worst/confusion"))]


class Unsure(Metric):
    """The share of a class among the examples, which is NaN where there are none."""

    higher_is_better = True
    label_: int = 3
    few: int = -1

    def measure(self, outputs: Tensor, targets: Tensor) -> MetricSums:
        return {
            "n": torch.tensor(len(outputs)),
            "of_class": (targets == self.label_).sum(),
            "size": outputs.double().sum(),
        }

    def value(self, sums: MetricSums) -> dict[str, float | None]:
        whole, part = float(sums["n"]), float(sums["of_class"])
        # With few=-1 its first two examples are no reason to refuse it.
        return {"unsure": math.nan if whole <= self.few or (whole > 2 and not part) else part / max(whole, 1.0)}


class Whole(PerExample):
    """A mean over the batch, where each example's number belongs."""

    def each(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return outputs.mean(), torch.ones(())


class Nowhere(PerExample):
    """NaN for every example."""

    def each(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return outputs[:, 0] * math.nan, torch.ones(len(outputs))


@pytest.mark.parametrize(("metric", "names"), [(Whole, ["each", "[2]"]), (Nowhere, ["nan", "None"])])
def test_a_metric_of_examples_that_gives_the_wrong_things_is_refused(metric: type[Metric], names: list[str]):
    with refused(names=["evaluation.metrics", f"'{metric.__name__}'", *names]):
        made(evaluation={"metrics": [metric]})


def test_a_value_that_is_nan_is_refused_before_the_run_and_undefined_in_it():
    for few in (0, 2):
        with refused(names=["evaluation.metrics", "'Unsure'", "'unsure'", "nan", "None"]):
            made(evaluation={"metrics": [{"name": Unsure, "few": few}]})
    tests = [made().dataset.test.labels[made().partition.test[client]] for client in range(5)]
    rare = next(label for label in range(10) if not all(label in labels for labels in tests))
    here = made(evaluation={"metrics": [{"name": Unsure, "label_": rare}]})
    record = play(here)[0][-1]
    own = [m.value for m in record.metrics if m.name == "own/unsure" and m.client is not None]
    assert [value is None for value in own] == [rare not in labels for labels in tests]
    assert record.means["own_worst_tenth/unsure"] == min(value for value in own if value is not None)
    # The model of the next sums has diverged: NaN stays NaN.
    for size, is_kept in ((1.0, False), (np.inf, True), (np.nan, True)):
        (found,) = values(here, {0: {"n": np.array(5), "of_class": np.array(0), "size": np.array(size)}}).values()
        assert (found is not None) is is_kept, size


@pytest.mark.parametrize(
    ("tables", "names"),
    [
        ({"evaluation": {"merged": True, "own": False}}, ["evaluation.merged", "evaluation.own"]),
        ({"evaluation": {"metrics": ["f1"], "own": False, "pooled": False}}, ["evaluation.metrics", "evaluation.own"]),
        ({"method": "local", "evaluation": {"metrics": "f1", "own": False}}, ["evaluation.metrics", "evaluation.own"]),
        ({"evaluation": {"metrics": []}}, ["evaluation.metrics", "[]", "task"]),
        ({"report": {"metric": "own/acuracy"}}, ["report.metric", "own/acuracy", "'own/accuracy'"]),
        ({"report": {"metric": "own_wurst/f1"}}, ["report.metric", "own_wurst/f1", "'own_worst/f1'"]),
        ({"report": {"target": 1.5, "metric": "own/f1"}}, ["report.target=1.5", "f1", "0 to 1"]),
        ({"report": {"target": -1.0, "metric": "own_difference/loss"}}, ["report.target=-1", "loss", "from 0"]),
        ({"report": {"target": 1.5}, "evaluation": {"metrics": ["f1", "nll"]}}, ["report.target=1.5", "f1", "0 to 1"]),
    ],
)
def test_settings_of_evaluation_that_do_nothing_are_refused(tables: dict[str, Any], names: list[str]):
    with refused(names=names):
        made(**{"method": "fedavg", "evaluation": {"metrics": METRICS}, **tables})


def test_settings_of_evaluation_that_do_something_are_taken():
    made(evaluation={"merged": True, "own": False}, clients={"count": 5, "unseen": 0.4})
    for metric in ("pooled/f1", "own_worst_tenth/recall/3", "train/loss", "personal_pooled_merged/ece"):
        made(evaluation={"metrics": METRICS}, report={"metric": metric, "target": 0.5})


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

"""Every metric keeps the contract, and has the value of a reference in numpy."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rayfl.choices.kinds import known, make
from rayfl.errors import RayflError
from rayfl.metrics.base import Metric, Targets
from rayfl.metrics.check import checked_facts
from rayfl.testing import metric_contract as contract
from tests.refusals import refused

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "top-k": [{"k": 1}, {"k": 3}],
    "ece": [{"bins": 15}, {"bins": 4}],
    "auroc": [{}, {"bins": 64}],
    "torchmetrics": [
        {"metric": "classification.MulticlassCohenKappa", "options": {"num_classes": contract.NUM_CLASSES}},
        {"metric": "classification.MulticlassAccuracy", "options": {"num_classes": 6, "average": "none"}},
    ],
}
METRICS = [make(Metric, {"name": name, **one}) for name in known(Metric) for one in OPTIONS.get(name, [{}])]
JUDGED: list[tuple[Metric, Targets]] = [
    (metric, kind)
    for metric in METRICS
    for kind in (("classes",) if metric.name == "torchmetrics" else metric.takes_targets)
]


def label(given: object) -> str:
    return given.value_name if isinstance(given, Metric) else str(given)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("metric", "kind"), JUDGED, ids=label)
def test_every_metric_keeps_the_contract(metric: Metric, kind: Targets, seed: int):
    outputs, targets = contract.examples(kind, seed)
    bound = metric.for_data(contract.task_for(targets), targets)
    contract.any_split_gives_the_same_value(bound, outputs, targets, seed)
    contract.padding_adds_nothing(bound, outputs, targets)
    contract.a_pickled_metric_measures_the_same(bound, outputs, targets)
    if metric.name != "torchmetrics":
        contract.values_keep_their_names_and_range(bound, outputs, targets)


Classes = tuple[np.ndarray, np.ndarray]


def f1(outputs: np.ndarray, targets: np.ndarray) -> float:
    said, found = outputs.argmax(axis=1), []
    for one in np.unique(targets):
        right = ((said == one) & (targets == one)).sum()
        precision, recall = right / max((said == one).sum(), 1), right / (targets == one).sum()
        found.append(2 * precision * recall / (precision + recall) if right else 0.0)
    return float(np.mean(found))


def ece(outputs: np.ndarray, targets: np.ndarray) -> float:
    shares = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
    sure, right = shares.max(axis=1), shares.argmax(axis=1) == targets
    total = 0.0
    for low in np.arange(15) / 15:
        held = (sure > low) & (sure <= low + 1 / 15)
        total += abs(right[held].sum() - sure[held].sum())
    return total / len(targets)


def auroc(outputs: np.ndarray, targets: np.ndarray) -> float:
    """By all pairs of the log-odds, one class against the rest."""
    shares = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
    areas = []
    for one in np.unique(targets):
        own, rest = shares[targets == one, one][:, None], shares[targets != one, one][None]
        areas.append(((own > rest) + (own == rest) / 2).mean())
    return float(np.mean(areas))


def nll(outputs: np.ndarray, targets: np.ndarray) -> float:
    return float((np.log(np.exp(outputs).sum(axis=1)) - outputs[np.arange(len(targets)), targets]).mean())


def top3(outputs: np.ndarray, targets: np.ndarray) -> float:
    return float(np.mean([target in np.argsort(-row)[:3] for row, target in zip(outputs, targets, strict=True)]))


@pytest.mark.parametrize(
    ("table", "name", "reference", "tolerance"),
    [
        ({"name": "accuracy"}, "accuracy", lambda o, t: (o.argmax(axis=1) == t).mean(), 0.0),
        ({"name": "top-k", "k": 3}, "top_3", top3, 0.0),
        ({"name": "f1"}, "f1", f1, 1e-12),
        ({"name": "ece"}, "ece", ece, 1e-9),
        ({"name": "auroc"}, "auroc", auroc, 1e-3),
        ({"name": "nll"}, "nll", nll, 1e-6),
        ({"name": "perplexity"}, "perplexity", lambda o, t: math.exp(nll(o, t)), 1e-5),
        ({"name": "recall"}, "recall/2", lambda o, t: (o.argmax(axis=1)[t == 2] == 2).mean(), 1e-12),
        ({"name": "precision"}, "precision/2", lambda o, t: (t[o.argmax(axis=1) == 2] == 2).mean(), 1e-12),
        ({"name": "confusion"}, "confusion/1/2", lambda o, t: ((t == 1) & (o.argmax(axis=1) == 2)).sum(), 0.0),
    ],
    ids=lambda given: str(given) if isinstance(given, str) else None,
)
def test_the_value_is_that_of_a_reference(
    table: dict[str, Any], name: str, reference: Callable[..., float], tolerance: float
):
    metric = make(Metric, table)
    for seed in np.random.default_rng().integers(0, 1 << 31, 3).tolist():
        outputs, targets = contract.examples("classes", seed)
        found = metric.value(metric.measure(outputs, targets))[name]
        assert found == pytest.approx(reference(outputs.double().numpy(), targets.numpy()), abs=tolerance), seed


def test_the_error_of_auroc_bounds_what_bins_change():
    outputs, targets = contract.examples("classes", 3)
    exact = auroc(outputs.double().numpy(), targets.numpy())
    found = make(Metric, {"name": "auroc", "bins": 16}).value
    metric = make(Metric, {"name": "auroc", "bins": 16})
    values = found(metric.measure(outputs, targets))
    assert values["auroc"] is not None and values["auroc_error"] is not None
    assert 0 < abs(values["auroc"] - exact) <= values["auroc_error"]


def test_regression_is_that_of_numpy_also_around_another_centre():
    outputs, targets = contract.examples("numbers", 5)
    y, found = targets.double().numpy() + 1e3, outputs.double().numpy() + 1e3
    errors = found - y
    wanted = {
        "mae": np.abs(errors).mean(),
        "rmse": math.sqrt((errors**2).mean()),
        "r2": np.mean(1 - (errors**2).sum(axis=0) / ((y - y.mean(axis=0)) ** 2).sum(axis=0)),
    }
    for name, value in wanted.items():
        metric = make(Metric, {"name": name}).for_data(contract.task_for(targets), torch.from_numpy(y) + 0.5)
        assert metric.value(metric.measure(torch.from_numpy(found), torch.from_numpy(y)))[name] == pytest.approx(value)


def test_the_calibration_error_of_all_is_at_most_the_weighted_mean_of_the_clients():
    metric = make(Metric, {"name": "ece"})
    outputs, targets = contract.examples("classes", 7)
    parts = [slice(0, 50), slice(50, 60), slice(60, 240)]
    own = [metric.value(metric.measure(outputs[part], targets[part]))["ece"] for part in parts]
    weighted = sum(value * (part.stop - part.start) for value, part in zip(own, parts, strict=True) if value) / 240
    pooled = metric.value(metric.measure(outputs, targets))["ece"]
    assert pooled is not None and pooled <= weighted + 1e-12


def test_what_is_divided_by_nothing_is_undefined():
    outputs, targets = torch.eye(3), torch.tensor([0, 1, 1])
    assert make(Metric, {"name": "recall"}).value(make(Metric, {"name": "recall"}).measure(outputs, targets)) == {
        "recall": 0.75,
        "recall/0": 1.0,
        "recall/1": 0.5,
        "recall/2": None,
    }
    r2, same = make(Metric, {"name": "r2"}), torch.ones(4, 2)
    assert r2.for_data(contract.task_for(same), same).value(r2.measure(same, same))["r2"] is None
    one_class = make(Metric, {"name": "auroc"})
    assert one_class.value(one_class.measure(torch.eye(3), torch.zeros(3, dtype=torch.int64)))["auroc"] is None


def test_tokens_are_evaluated_one_by_one_and_padding_is_left_out():
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(8, 5, 6, generator=generator)
    targets = torch.randint(-1, 6, (8, 5), generator=generator)
    kept = targets.flatten() >= 0
    flat = outputs.flatten(0, 1)[kept], targets.flatten()[kept]
    for name in ("accuracy", "top-k", "nll", "perplexity", "f1", "ece", "confusion", "auroc"):
        metric = make(Metric, {"name": name, **({"k": 2} if name == "top-k" else {})})
        found, wanted = metric.value(metric.measure(outputs, targets)), metric.value(metric.measure(*flat))
        defined = {part: value for part, value in wanted.items() if value is not None}
        assert found.keys() == wanted.keys() and {part: found[part] for part in defined} == pytest.approx(defined), name


SIX = {"num_classes": 6}


@pytest.mark.parametrize(
    ("metric", "options", "name", "facts"),
    [
        ("classification.MulticlassAUROC", {**SIX, "thresholds": 20}, "multiclass_auroc", ("", None, 1.0, True)),
        ("classification.MulticlassF1Score", SIX, "multiclass_f1_score", ("%", 0.0, 1.0, True)),
        ("classification.MulticlassCohenKappa", SIX, "multiclass_cohen_kappa", ("", None, 1.0, True)),
        ("regression.R2Score", {}, "r2_score", ("", None, 1.0, True)),
        ("regression.MeanSquaredError", {}, "mean_squared_error", ("", 0.0, None, False)),
    ],
)
def test_torchmetrics_says_name_unit_range_and_meaning(
    metric: str, options: dict[str, Any], name: str, facts: tuple[object, ...]
):
    made = make(Metric, {"name": "torchmetrics", "metric": metric, "options": options})
    outputs, targets = contract.examples("numbers" if "regression" in metric else "classes", 4)
    found = checked_facts([made], outputs[:2], targets)
    one = found[name]
    assert [*found] == [name] and (one.unit, one.low, one.high, one.higher_is_better) == facts and one.ranks
    # The class's own sentence, without its markup.
    assert one.meaning.startswith("The ") and not set("`_:") & {*one.meaning}
    assert (one.title, "AUROC" in one.title) == (one.title.replace("auroc", "AUROC"), "auroc" in name)
    if name == "r2_score":
        ours = make(Metric, {"name": "r2"})
        wanted = ours.value(ours.measure(outputs, targets))["r2"]
        assert made.value(made.measure(outputs, targets))[name] == pytest.approx(wanted)
        # Of one example R2 is undefined.
        assert made.value(made.measure(outputs[:1], targets[:1])) == {name: None}


@pytest.mark.parametrize(
    ("tables", "kind", "names"),
    [
        ([{"name": "mae"}], "classes", ["evaluation.metrics", "mae", "class"]),
        ([{"name": "recall"}], "numbers", ["evaluation.metrics", "recall", "numbers"]),
        ([{"name": "top-k", "k": 6}], "classes", ["evaluation.metrics.k=6", "6"]),
        ([{"name": "f1"}, {"name": "f1"}], "classes", ["evaluation.metrics", "'f1'"]),
        ([{"name": "torchmetrics", "metric": "Nothing"}], "classes", ["evaluation.metrics.metric='Nothing'"]),
        ([{"name": "torchmetrics", "metric": "SpearmanCorrCoef"}], "numbers", ["'preds'", "sum"]),
        (
            [{"name": "torchmetrics", "metric": "classification.MulticlassF1Score", "options": {"n": 1}}],
            "classes",
            ["evaluation.metrics.options", "'num_classes'"],
        ),
    ],
)
def test_what_does_not_fit_is_refused(tables: list[dict[str, Any]], kind: Targets, names: list[str]):
    outputs, targets = contract.examples(kind, 0)
    with refused(names=names, error=RayflError):
        checked_facts([make(Metric, table) for table in tables], outputs[:2], targets)

"""Accuracy and loss against numpy, on the splits and at the moments that their names say."""

from typing import Any

import numpy as np
import pytest

from rayfl.methods.base import Stage
from rayfl.metrics.fairness import is_summary
from rayfl.rounds import evaluation, model_sums
from rayfl.rounds.check_setup import check_evaluation
from rayfl.rounds.evaluation_settings import Evaluation
from rayfl.rounds.setup import Setup
from tests.methods.reference import SIZES, initial, played, setup_of, trained
from tests.refusals import refused

Params = dict[str, np.ndarray]


def by_numpy(setup: Setup, params: Params, rows: Any) -> tuple[float, float]:
    """Mean cross-entropy and accuracy of the logistic regression on test rows."""
    inputs, labels = setup.dataset.test.inputs[rows].astype(np.float64), setup.dataset.test.labels[rows]
    logits = inputs @ params["1.weight"].T + params["1.bias"]
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return -log_p[np.arange(len(labels)), labels].mean(), (logits.argmax(axis=1) == labels).mean()


def values(setup: Setup, round: int = -1) -> dict[tuple[int | None, str], float]:
    rows = played(setup)[round][0].metrics
    return {(row.client, row.name): row.value for row in rows if row.value is not None}


def evaluated(method: str, every: int = 0, **evaluation: Any) -> Setup:
    setup = setup_of(method, {"lr": 0.5, "batch_size": 0}, rounds=4)
    object.__setattr__(setup, "evaluation", Evaluation(every=every, **evaluation))
    return setup


def test_the_global_model_on_the_pooled_set_and_on_own_splits():
    setup = evaluated("fedavg")
    params = {name: value.numpy().astype(np.float64) for name, value in played(setup)[-1][1].server["params"].items()}
    measured = values(setup)
    loss, accuracy = by_numpy(setup, params, slice(None))
    assert measured[None, "pooled/loss"] == pytest.approx(loss, rel=1e-5)
    assert measured[None, "pooled/accuracy"] == accuracy
    own = {client: by_numpy(setup, params, setup.partition.test[client]) for client in range(5)}
    for client, (loss, accuracy) in own.items():
        assert measured[client, "own/loss"] == pytest.approx(loss, rel=1e-5)
        assert measured[client, "own/accuracy"] == accuracy
    # Clients have 2, 2, 2, 1 and 1 test examples; the mean over clients is not weighted by them.
    assert measured[None, "own/accuracy"] == pytest.approx(np.mean([accuracy for _, accuracy in own.values()]))


def test_after_training_is_the_model_that_the_client_trained():
    setup = evaluated("fedavg")
    before = played(setup)[-2][1].server["params"]
    start = {name: value.numpy().astype(np.float64) for name, value in before.items()}
    measured = values(setup)
    for client in range(5):
        loss, _ = by_numpy(setup, trained(setup, 3, client, start)[0], setup.partition.test[client])
        assert measured[client, "own_after_training/loss"] == pytest.approx(loss, rel=1e-5)


def test_a_personal_method_is_evaluated_by_its_personal_models():
    setup = evaluated("local", personal_on_pooled=True)
    measured = values(setup)
    assert (None, "pooled/loss") not in measured, "there is no global model"
    for client in range(5):
        params = initial(setup)
        for round in range(4):
            params, _ = trained(setup, round, client, params)
        loss, _ = by_numpy(setup, params, setup.partition.test[client])
        assert measured[client, "own/loss"] == pytest.approx(loss, rel=1e-5)
        assert measured[client, "own_after_training/loss"] == measured[client, "own/loss"], "nothing is exchanged"
        loss, accuracy = by_numpy(setup, params, slice(None))
        assert measured[client, "personal_pooled/loss"] == pytest.approx(loss, rel=1e-5)
        assert measured[client, "personal_pooled/accuracy"] == accuracy


@pytest.mark.parametrize("name", ["fedsgd", "dcgd", "lag", "qsgd"])
def test_a_method_without_local_training_has_nothing_to_evaluate_after_it(name: str):
    # The client's model is still the one that came down, from before the server's step.
    names = {metric for _, metric in values(evaluated(name))}
    assert {"own/accuracy", "pooled/accuracy"} <= names
    assert not [metric for metric in names if "after_training" in metric]


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, {"pooled", "own", "own_after_training"}),
        ({"pooled": False}, {"own", "own_after_training"}),
        ({"own": False}, {"pooled"}),
        ({"own": False, "pooled": False}, set()),
        ({"personal_on_pooled": True}, {"pooled", "own", "own_after_training"}),
    ],
    # A set has no order.
    ids=lambda given: str(sorted(given)) if isinstance(given, set) else str(given),
)
def test_what_is_measured(settings: dict[str, bool], names: set[str]):
    measured = values(evaluated("fedavg", **settings))
    found = {name.split("/")[0] for _, name in measured if not is_summary(name)}
    assert found - {"train", "comm", "flops"} == names


@pytest.mark.parametrize(("every", "rounds"), [(0, [3]), (1, [0, 1, 2, 3]), (2, [1, 3]), (3, [2, 3]), (9, [3])])
def test_every_so_many_rounds_and_after_the_last(every: int, rounds: list[int]):
    setup = evaluated("fedavg", every=every)
    assert [round for round, (record, _) in enumerate(played(setup)) if "pooled/loss" in record.means] == rounds


def test_more_examples_than_one_batch(monkeypatch: pytest.MonkeyPatch):
    setup = evaluated("fedavg", metrics=["loss", "accuracy", "confusion"])
    rows = np.arange(8)
    whole = model_sums.model_sums(setup, setup.initial, "test", rows)
    monkeypatch.setattr(model_sums, "BATCH", 3)
    parts = model_sums.model_sums(setup, setup.initial, "test", rows)
    for place, row in whole.rows.items():
        assert row.shape == (2, 8)
        np.testing.assert_allclose(parts.rows[place], row, rtol=1e-6)
    assert parts.total.num_examples == 8
    one, other = (model_sums.values(setup, found.total.sums) for found in (whole, parts))
    assert one == pytest.approx(other, rel=1e-6) and one["accuracy"] == whole.rows[1][0].mean()


def test_clients_without_test_examples_are_left_out():
    setup = setup_of("fedavg", {}, sizes=(4,) * 10, rounds=1)  # 8 test examples for 10 clients
    assert setup.partition.test.sizes.tolist() == [1] * 8 + [0] * 2
    measured = values(setup)
    assert {client for client, name in measured if name == "own/accuracy"} == {None, *range(8)}
    assert {client for client, name in measured if name == "own_after_training/accuracy"} == {None, *range(8)}


def test_means_are_over_the_clients_that_have_the_metric():
    assert evaluation.mean_over_clients([{"a": 1.0}, {"a": 2.0, "b": 5.0}, {}]) == {"a": 1.5, "b": 5.0}
    assert evaluation.mean_over_clients([]) == {}


def test_an_adaptation_step_is_evaluated_and_thrown_away(monkeypatch: pytest.MonkeyPatch):
    plain, adapted = evaluated("fedavg"), evaluated("fedavg")
    stage = Stage(name="adapt", steps=1, batch_size=None, lr=0.5)
    kind = type(adapted.method)
    start = {name: value.numpy().astype(np.float64) for name, value in played(plain)[-1][1].server["params"].items()}
    expected = played(plain)[-1][1].server["params"]
    monkeypatch.setattr(kind, "eval_stages", lambda self, round: (stage,))
    monkeypatch.setattr(
        kind,
        "eval_begin",
        lambda self, state, model, carry, ctx: self.start(carry["params"] if carry is not None else model),
    )
    result, run_state = played(adapted)[-1]
    measured = {(m.client, m.name): m.value for m in result.metrics}
    for client in range(len(SIZES)):
        loss, _ = by_numpy(adapted, trained(adapted, 0, client, start)[0], adapted.partition.test[client])
        assert measured[client, "own/loss"] == pytest.approx(loss, rel=1e-5)
    assert all(bool((run_state.server["params"][name] == value).all()) for name, value in expected.items())


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_a_sample_of_clients_has_the_values_that_it_has_among_all(method: str):
    everyone, sampled = (evaluated(method, every=1, clients=clients, train=True) for clients in (None, 2))
    chosen = [*sampled.evaluated_clients]
    assert len(chosen) == 2 and chosen == [*evaluated(method, clients=2).evaluated_clients]
    for round in range(4):
        all_values, some = values(everyone, round), values(sampled, round)
        places = {name.partition("/")[0] for client, name in some if client is not None}
        assert places == {"own", "own_after_training", "own_train_after_training", "train"} | (
            {"own_train"} if method == "local" else set()
        )
        evaluated_clients = {client for client, name in some if name.startswith("own")} - {None}
        assert evaluated_clients == {*chosen}
        assert all(all_values[key] == value for key, value in some.items() if key[0] is not None)
        mean = np.mean([some[client, "own/loss"] for client in chosen])
        assert some[None, "own/loss"] == pytest.approx(mean)
    if method == "fedavg":
        assert some[None, "pooled/loss"] == all_values[None, "pooled/loss"]
        assert some[None, "pooled_train/loss"] != all_values[None, "pooled_train/loss"]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"clients": 6}, ["evaluation.clients=6", "5 clients"]),
        ({"clients": 2, "own": False}, ["evaluation.clients=2", "evaluation.own=false"]),
        ({"clients": 2, "masks": True}, ["evaluation.clients=2", "evaluation.masks=true"]),
    ],
)
def test_a_sample_that_no_evaluation_can_take_is_refused(given: dict[str, Any], names: list[str]):
    with refused(names=names):
        check_evaluation(evaluated("fedavg", **given))

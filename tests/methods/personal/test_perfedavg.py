"""Per-FedAvg on quadratics, where H = diag(h): all variants, their fixed points, and the step before an evaluation."""

from typing import Any

import numpy as np
import pytest
import torch

from rayfl import tree
from rayfl.data.batches import Batch
from rayfl.methods.personal.perfedavg import PerFedAvg
from rayfl.rounds.evaluation_settings import Evaluation
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import Points, batches, flat, points, start
from tests.contracts.seams.quadratic import Quadratic
from tests.methods.averaging import (
    ABSENCES,
    ENGINES,
    Factors,
    Server,
    assert_follows,
    made,
    optima,
    share,
    untouched,
    wells,
)
from tests.methods.reference import Vectors, initial, played, setup_of, softmax_gradient
from tests.population.statuses import with_status

ALPHA, BETA = 0.2, 0.15
HYPER = {"alpha": ALPHA, "lr": BETA, "steps": 3, "batch_size": 2}
VARIANTS = ("fo", "hf", "exact")


def step(w: np.ndarray, stream: list[Points], alpha: float, beta: float) -> np.ndarray:
    """One local step on two batches (first order) or three, the Hessian of the third being diag(h)."""
    first, second, *third = stream
    v = second.gradient(w - alpha * first.gradient(w))
    return w - beta * (v - alpha * third[0].hessian() * v if third else v)


def trained(here: Setup, round: int, client: int, w: np.ndarray) -> np.ndarray:
    """A round's local steps from w. Client 0 has 7 examples, so that batches of one example are among those of two."""
    hyper = here.method.hyper.model_dump()
    count, num_steps = (2 if hyper["variant"] == "fo" else 3), hyper["steps"]
    stream = batches(here, round, client, steps=count * num_steps, batch_size=hyper["batch_size"])
    for i in range(0, count * num_steps, count):
        w = step(w, stream[i : i + count], hyper["alpha"], hyper["lr"] * hyper["lr_decay"] ** round)
    return w


def meta_trained(here: Setup, factors: Factors = untouched) -> list[np.ndarray]:
    """x after every round; `factors` multiply the averaged delta."""
    x, server, path = start(here), Server(), []
    for round in range(here.rounds):
        delivered = with_status(here.population.sample_round(round), "delivered")
        if delivered:
            ends = [trained(here, round, client, x) for client in delivered]
            mean = np.average(ends, axis=0, weights=[share(here, client) for client in delivered])
            x = server.step(x, factors(round, x) * (x - mean))
        path.append(x)
    return path


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_its_equations(engine: str, variant: str, clients: dict[str, Any]):
    hyper = {**HYPER, "variant": variant, "lr_decay": 0.9}
    here = made("perfedavg", hyper, rounds=4, engine=engine, clients=clients)
    records, run_states = play(here)
    # A quadratic's gradient is affine, so that its finite difference is exact but for rounding, 6e-8 |g| / delta.
    assert_follows(run_states, meta_trained(here), tolerance=5e-5 if variant == "hf" else 5e-6)
    assert all(row.num_steps == 3 for record in records for row in record.clients if row.status == "delivered")


def test_the_variants_differ_where_there_is_curvature():
    paths = {v: flat(play(made("perfedavg", {**HYPER, "variant": v}))[1][-1].server["params"]) for v in VARIANTS}
    np.testing.assert_allclose(paths["hf"], paths["exact"], atol=5e-5)
    assert np.abs(paths["fo"] - paths["exact"]).max() > 1e-2


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_global_model_ends_at_the_minimiser_of_the_adapted_losses(variant: str):
    """On full batches F_i(w) = f_i(w - alpha h (w - c)) has the curvature h (1 - alpha h)^2 around the same centre c.

    Without the Hessian a step goes along h (1 - alpha h) (w - c) instead. With one local step the fixed point is the
    mean of the centres weighted by these curvatures; the uniform mean makes all clients the same.
    """
    hyper = {"alpha": 0.4, "lr": 0.5, "steps": 1, "batch_size": 0, "weighting": "uniform", "variant": variant}
    here = made("perfedavg", hyper, rounds=80)
    curvatures, centres = wells(here)
    power = 1 if variant == "fo" else 2
    expected = optima(curvatures * (1 - 0.4 * curvatures) ** power, centres, np.ones(4))
    np.testing.assert_allclose(flat(play(here)[1][-1].server["params"]), expected, atol=1e-4)


@pytest.mark.parametrize("variant", ["hf", "exact"])
def test_a_hessian_product_of_a_network_is_that_of_its_loss(variant: str):
    """Softmax regression in float64: the central difference of its closed gradient, at a distance of 1e-4 |v|."""
    here = setup_of("perfedavg", {"variant": variant})
    method, examples = here.method, here.dataset.train
    assert isinstance(method, PerFedAvg)
    draw = np.random.default_rng(3)
    w = initial(here)
    vector = {name: draw.standard_normal(value.shape) for name, value in w.items()}
    inputs, labels = examples.inputs.astype(np.float64), examples.labels

    def gradient(sign: float) -> dict[str, np.ndarray]:
        return softmax_gradient({name: w[name] + sign * 1e-4 * vector[name] for name in w}, inputs, labels)

    everybody = Batch(torch.from_numpy(examples.inputs), torch.from_numpy(examples.labels))
    expected = {name: (gradient(1.0)[name] - gradient(-1.0)[name]) / 2e-4 for name in w}
    # A gradient ten thousand times as large has a product as many times as large, to the same digits.
    for size in (1.0, 1e4):
        scaled = {name: torch.from_numpy((size * value).astype(np.float32)) for name, value in vector.items()}
        found = method.hessian_product(dict(here.initial), scaled, everybody)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name].numpy() / size, value, rtol=0, atol=2e-3 * np.abs(value).max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_of_a_network_takes_the_hessian_where_it_stands(variant: str):
    """Softmax regression on whole splits, alpha and beta large enough to tell w from w - alpha g: in float64 one step
    w - beta (v - alpha H(w) v) with v = g(w - alpha g(w)), H v a central difference of the closed gradient."""
    alpha, beta = 2.0, 0.7
    hyper = {"alpha": alpha, "lr": beta, "steps": 1, "batch_size": 0, "variant": variant}
    here = setup_of("perfedavg", hyper, rounds=1, clients={"per_round": 1})
    ((record, run_state),) = played(here)
    (client,) = [row.client for row in record.clients if row.status == "delivered"]
    rows, examples, w = here.partition.train[client], here.dataset.train, initial(here)

    def gradient(params: Vectors) -> Vectors:
        return softmax_gradient(params, examples.inputs[rows].astype(np.float64), examples.labels[rows])

    def moved(direction: Vectors, size: float) -> Vectors:
        return {name: w[name] + size * direction[name] for name in w}

    v = gradient(moved(gradient(w), -alpha))
    there, back = gradient(moved(v, 1e-5)), gradient(moved(v, -1e-5))
    for name, found in run_state.server["params"].items():
        curved = 0.0 if variant == "fo" else alpha * (there[name] - back[name]) / 2e-5
        expected = w[name] - beta * (v[name] - curved)
        np.testing.assert_allclose(found.numpy(), expected, atol=5e-4 if variant == "hf" else 1e-5)


def test_where_the_gradient_is_zero_so_is_its_product():
    method = PerFedAvg(Quadratic())
    params = Quadratic().init(1)
    batch = made("perfedavg", {}).data(0).all("train")
    found = method.hessian_product(params, tree.zeros_like(params), batch)
    assert all(not tensor.any() for tensor in found.values())


@pytest.mark.parametrize("split", ["own", "own_after_training"])
def test_the_model_evaluated_is_one_adaptation_step_away(split: str):
    here = made("perfedavg", HYPER, rounds=3, evaluation=Evaluation(pooled=False))
    records, run_states = play(here)
    measured = {m.client: m.value for m in records[-1].metrics if m.name == f"{split}/loss"}
    received, x = (flat(run_state.server["params"]) for run_state in run_states[-2:])
    for client in range(4):
        end = trained(here, 2, client, received) if split == "own_after_training" else x
        adapted = end - ALPHA * points(here, client).gradient(end)
        assert measured[client] == pytest.approx(points(here, client, "test").loss(adapted), rel=1e-4)


def test_the_defaults_are_those_of_the_comparison_in_pfedme_but_for_the_step_sizes():
    hyper, stage = PerFedAvg().hyper.model_dump(), PerFedAvg().plan(0, 0.0).stages[0]
    assert (hyper["alpha"], hyper["lr"], hyper["delta"]) == (0.01, 0.03, 1e-3)
    assert (stage.steps, stage.epochs, stage.batch_size, stage.batches_per_step) == (20, None, 20, 3)
    assert PerFedAvg(variant="fo").plan(0, 0.0).stages[0].batches_per_step == 2
    assert PerFedAvg(epochs=2).plan(0, 0.0).stages[0].epochs == 2
    (adaptation,) = PerFedAvg(adapt_batch_size=5).eval_stages(0)
    assert (adaptation.steps, adaptation.batch_size, adaptation.split) == (1, 5, "train")

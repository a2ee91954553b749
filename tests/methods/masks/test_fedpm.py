"""FedPM against its equations in float64; only the draws are shared: who takes part, batches, and uniform numbers."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rayfl.determinism import seeding
from rayfl.methods.masks.fedpm import FedPM, magnitudes
from rayfl.methods.shared.step_draws import first_key, next_key, uniforms
from rayfl.models.convolutional import ResNet20
from rayfl.rounds.setup import Setup
from tests.bound_tasks import classification
from tests.methods.reference import Vectors, batches, doubles, initial, played, setup_of, softmax_gradient
from tests.population.statuses import with_status
from tests.refusals import refused

ROUNDS = 5
C = math.e / math.sqrt(6)
"""Of the weight [3, 6] and of its bias."""


def sigmoid(scores: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-scores))


def mask_of(theta: Vectors, key: torch.Tensor) -> Vectors:
    drawn = uniforms(key, {name: torch.zeros(value.shape) for name, value in theta.items()})
    return {name: (drawn[name].numpy() < value).astype(np.float64) for name, value in theta.items()}


def trained(here: Setup, round: int, client: int, theta: Vectors, weights: Vectors) -> tuple[Vectors, Vectors]:
    """The client's theta after its steps, and the mask that it sends."""
    hyper, examples = here.method.hyper.model_dump(), here.dataset.train
    key = first_key(seeding.generator(here.seed, round, client, "client"))
    scores = {name: np.log(value / (1 - value)) for name, value in theta.items()}
    first, second = ({name: np.zeros_like(value) for name, value in scores.items()} for _ in range(2))
    for step, rows in enumerate(batches(here, round, client), 1):
        now = {name: sigmoid(value) for name, value in scores.items()}
        mask = mask_of(now, key)
        network = {name: weights[name] * mask[name] for name in mask}
        gradient = softmax_gradient(network, examples.inputs[rows].astype(np.float64), examples.labels[rows])
        for name, p in now.items():
            g = gradient[name] * weights[name] * p * (1 - p)
            g = g * p if hyper["straight_through"] == "theta" else g
            if hyper["optimizer"] == "adam":
                first[name] = 0.9 * first[name] + 0.1 * g
                second[name] = 0.999 * second[name] + 0.001 * g**2
                size = np.sqrt(second[name] / (1 - 0.999**step)) + 1e-8
                g = first[name] / (1 - 0.9**step) / size
            scores[name] = scores[name] - hyper["lr"] * g
        key = next_key(key)
    ended = {name: sigmoid(value) for name, value in scores.items()}
    return ended, mask_of(ended, key)


@pytest.mark.parametrize(
    ("clients", "hyper", "period"),
    [
        ({}, {"optimizer": "adam", "lr": 0.1}, 1),
        (
            {"per_round": 2, "dropout_after_training": 0.2},
            {"optimizer": "sgd", "lr": 0.5, "straight_through": "theta"},
            3,
        ),
        ({"per_round": 3}, {"optimizer": "adam", "prior": 2.0, "reset_rounds": 4, "clip": 0.2}, 4),
    ],
)
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_equals_the_equations(clients: dict[str, Any], hyper: dict[str, Any], period: int, engine: str):
    made = setup_of("fedpm", {"epochs": 2, "batch_size": 4, **hyper}, clients=clients, rounds=ROUNDS)
    start = made.method.init_params(made.initial, seeding.FirstDraws(made.seed, 0))
    here = replace(made, initial_arrays={name: tensor.numpy() for name, tensor in start.items()}, engine_name=engine)
    x, low = initial(here), here.method.hyper.model_dump()["clip"]
    surplus = here.method.hyper.model_dump()["prior"] - 1
    weights = {name: C * np.sign(value) for name, value in x.items()}
    theta = {name: np.clip(np.abs(value) / C, low, 1 - low) for name, value in x.items()}
    ones, count = dict.fromkeys(x, 0.0), 0
    for round, (record, run_state) in enumerate(played(here)):
        if round % period == 0:
            ones, count = dict.fromkeys(x, 0.0), 0
        delivered = with_status(here.population.sample_round(round), "delivered")
        sent = {i: trained(here, round, i, theta, weights)[1] for i in delivered}
        if sent:
            ones = {name: ones[name] + sum(mask[name] for mask in sent.values()) for name in ones}
            count += len(sent)
            theta = {n: np.clip((surplus + ones[n]) / (2 * surplus + count), low, 1 - low) for n in ones}
        for name, value in theta.items():
            np.testing.assert_allclose(run_state.server["theta"][name].numpy(), value, rtol=0, atol=1e-6)
        mask = mask_of(theta, first_key(seeding.generator(here.seed, round, -1, "server")))
        for name, value in doubles(run_state.server["params"]).items():
            np.testing.assert_allclose(value, weights[name] * mask[name], rtol=0, atol=1e-6)
        shares = [np.mean(np.concatenate([value.ravel() for value in mask.values()])) for mask in sent.values()]
        if sent:
            assert record.means["fedpm/ones"] == pytest.approx(np.mean(shares))


def test_the_mean_of_masks_is_unbiased_with_the_papers_error():
    """E[mean m] = mean theta_i, and E||mean m - mean theta||^2 = sum theta (1 - theta) / m^2 <= d / (4 m)."""
    theta = torch.rand(3, 40, generator=torch.Generator().manual_seed(1)).double()
    key, draws = first_key(np.random.default_rng(0)), []
    for _ in range(2000):
        drawn = uniforms(key, {"x": theta})["x"].double()
        draws.append((drawn < theta).double().mean(0))
        key = next_key(key)
    means = torch.stack(draws)
    variance = (theta * (1 - theta)).sum(0) / 9
    assert ((means.mean(0) - theta.mean(0)).abs() < 4.5 * (variance / 2000).sqrt()).all()
    errors = (means - theta.mean(0)).square().sum(1)
    assert float(errors.mean()) == pytest.approx(float(variance.sum()), rel=0.05)
    assert variance.sum() <= 40 / (4 * 3)


def test_biases_have_their_layers_magnitude_and_norms_are_left_alone():
    task = classification(ResNet20().builder((3, 8, 8), 10))
    params = task.init(0)
    found = magnitudes(params)
    assert found["0.weight"] == pytest.approx(math.e / math.sqrt(27))
    last = max(name for name in params if name.endswith("bias") and name.replace("bias", "weight") in found)
    assert found[last] == found[last.replace("bias", "weight")] == pytest.approx(math.e / 8)
    norms = {name for name in params if params[name].dim() == 1} - {last}
    assert norms and not norms & found.keys()
    drawn = FedPM(task).init_params(params, seeding.FirstDraws(3, 0))
    assert all(torch.equal(drawn[name], params[name]) for name in norms)
    theta = drawn["0.weight"].abs() / found["0.weight"]
    assert float(theta.min()) >= 0.01 and float(theta.max()) <= 0.991 and abs(float(drawn["0.weight"].mean())) < 0.2


def test_a_model_of_vectors_alone_is_refused():
    with refused(names=["FedPM", "two or more dimensions"]):
        FedPM().check_model({"scale": torch.ones(3)})

"""QSGD: what clients send, what the server makes of it, and its limit of many levels."""

from typing import Any

import numpy as np
import pytest

from rayfl.methods.base import Method
from rayfl.methods.compressed.qsgd import QSGD
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from rayfl.testing.watching import watched
from tests.contracts.seams.closed_form import flat, points, start
from tests.contracts.seams.quadratic import TRAIN, Quadratic, setup
from tests.methods.reference import doubles, initial, played, setup_of, softmax_gradient

CLIENTS = range(4)
WHOLE = (slice(0, 8), slice(8, 10))
"""The tensors; in buckets of three the weight has a last one of two."""
THREES = (slice(0, 3), slice(3, 6), slice(6, 8), slice(8, 10))


def made(**hyper: Any) -> Method:
    return QSGD(Quadratic(), QSGD.Hyper(**hyper))


def sent(here: Setup) -> tuple[dict[tuple[int, int], np.ndarray], list[np.ndarray]]:
    """What every client sent by (round, client), and x before every round and at the end."""
    here, log = watched(here)
    _, run_states = play(here)
    messages = {key: flat(message["delta"].decode()) for key, message in log.up.items()}
    return messages, [start(here), *(flat(run_state.server["params"]) for run_state in run_states)]


@pytest.mark.parametrize(
    ("hyper", "buckets", "bits"),
    [
        # A norm a bucket; 8 + 2 entries of 1 + 3 bits.
        ({}, WHOLE, 2 * 32 + 32 + 8),
        ({"levels": 1, "bucket": 0, "lr_decay": 0.8}, WHOLE, 2 * 32 + 16 + 8),
        ({"levels": 3, "bucket": 3}, THREES, 4 * 32 + 24 + 8),
        ({"levels": 2, "bucket": 3, "coding": "elias"}, THREES, None),
    ],
    ids=str,
)
def test_every_entry_is_one_of_the_two_levels_around_it(
    hyper: dict[str, Any], buckets: tuple[slice, ...], bits: int | None
):
    here = setup(made(lr=0.2, **hyper), rounds=6)
    messages, path = sent(here)
    s, decay = hyper.get("levels", 7), hyper.get("lr_decay", 1.0)
    moved = 0
    for (round, k), message in messages.items():
        gradient = 0.2 * decay**round * points(here, k).gradient(path[round])
        for part in buckets:
            exact = s * np.abs(gradient[part]) / np.linalg.norm(gradient[part])
            levels = s * np.abs(message[part]) / np.linalg.norm(gradient[part])
            np.testing.assert_allclose(levels, np.round(levels), atol=1e-4)
            assert (np.abs(np.round(levels) - exact) < 1 + 1e-5).all()
            assert (message[part] * gradient[part] >= 0).all()
            moved += (np.round(levels) > exact).sum()
    assert moved
    records, _ = play(here)
    sizes = {row.uplink_bits for record in records for row in record.clients}
    assert sizes == {bits} if bits else len(sizes) > 1
    assert {row.downlink_bits for record in records for row in record.clients} == {320}


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_the_server_steps_along_the_mean(weighting: str):
    here = setup(made(lr=0.2, levels=2, weighting=weighting), rounds=5, clients={"per_round": 3})
    messages, path = sent(here)
    for round in range(5):
        chosen = [k for r, k in messages if r == round]
        weights = [TRAIN[k] if weighting == "samples" else 1 for k in chosen]
        mean = np.average([messages[round, k] for k in chosen], axis=0, weights=weights)
        np.testing.assert_allclose(path[round + 1], path[round] - mean, rtol=1e-5, atol=1e-6)


def test_the_mean_over_many_rounds_is_the_gradient():
    # So small a step that x stands still; the variance of one entry is at most (norm / s)^2 / 4.
    lr, rounds = 1e-9, 150
    here = setup(made(lr=lr, levels=2, bucket=0), rounds=rounds)
    messages, path = sent(here)
    for k in CLIENTS:
        gradient = points(here, k).gradient(path[0])
        mean = np.mean([messages[round, k] for round in range(rounds)], axis=0) / lr
        for part in WHOLE:
            deviation = np.linalg.norm(gradient[part]) / 4 / np.sqrt(rounds)
            assert (np.abs(mean[part] - gradient[part]) <= 5 * deviation).all()


def test_with_many_levels_it_is_gradient_descent():
    here = setup_of("qsgd", {"lr": 0.5, "levels": 2**15 - 1, "weighting": "samples"}, rounds=5)
    examples, x = here.dataset.train, initial(here)
    for _, run_state in played(here):
        # Weighted by their examples the clients' gradients make up that of all examples together.
        gradient = softmax_gradient(x, examples.inputs.astype(np.float64), examples.labels)
        x = {name: x[name] - 0.5 * gradient[name] for name in x}
        for name, value in doubles(run_state.server["params"]).items():
            np.testing.assert_allclose(value, x[name], atol=2e-4)

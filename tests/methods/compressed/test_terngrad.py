"""TernGrad: what clients send, what the server makes of it, and its mean over many rounds."""

from typing import Any

import numpy as np
import pytest

from rayfl.methods.base import Method
from rayfl.methods.compressed.terngrad import TernGrad
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from rayfl.testing.watching import watched
from tests.contracts.seams.closed_form import TENSORS, flat, points, start
from tests.contracts.seams.quadratic import TRAIN, Quadratic, setup

CLIENTS = range(4)


def sent(here: Setup) -> tuple[dict[tuple[int, int], np.ndarray], list[np.ndarray]]:
    """What every client sent by (round, client), and x before every round and at the end."""
    here, log = watched(here)
    _, run_states = play(here)
    messages = {key: flat(message["delta"].decode()) for key, message in log.up.items()}
    return messages, [start(here), *(flat(run_state.server["params"]) for run_state in run_states)]


def made(**hyper: Any) -> Method:
    return TernGrad(Quadratic(), TernGrad.Hyper(**hyper))


def magnitude(v: np.ndarray, clip: float) -> float:
    """m of one tensor: the largest entry, after clipping to c standard deviations."""
    return min(np.abs(v).max(), clip * v.std()) if clip else np.abs(v).max()


@pytest.mark.parametrize("clip", [0.0, 1.2])
def test_every_tensor_is_its_largest_entry_times_signs_and_zeros(clip: float):
    here = setup(made(lr=0.2, lr_decay=0.9, clip=clip), rounds=6)
    messages, path = sent(here)
    for (round, k), message in messages.items():
        gradient = 0.2 * 0.9**round * points(here, k).gradient(path[round])
        for part in TENSORS:
            m = magnitude(gradient[part], clip)
            kept = message[part] != 0
            np.testing.assert_allclose(message[part], kept * m * np.sign(gradient[part]), rtol=1e-5, atol=1e-7)
            # |g| = m is kept for certain.
            assert kept[np.abs(gradient[part]) > m * (1 - 1e-6)].all()
    kept = np.concatenate([message != 0 for message in messages.values()])
    assert 0.2 < kept.mean() < 0.9


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_the_server_steps_along_the_mean(weighting: str):
    here = setup(made(lr=0.2, weighting=weighting), rounds=5, clients={"per_round": 3})
    messages, path = sent(here)
    for round in range(5):
        chosen = [k for r, k in messages if r == round]
        weights = [TRAIN[k] if weighting == "samples" else 1 for k in chosen]
        mean = np.average([messages[round, k] for k in chosen], axis=0, weights=weights)
        np.testing.assert_allclose(path[round + 1], path[round] - mean, rtol=1e-5, atol=1e-6)
    # A float and 8 digits at five a byte for the weight; a float and 2 digits for the bias; a count.
    size = 32 + 16 + 32 + 8 + (64 if weighting == "samples" else 0)
    records, _ = play(here)
    assert {(row.uplink_bits, row.downlink_bits) for record in records for row in record.clients} == {(size, 320)}


def test_the_mean_over_many_rounds_is_the_gradient():
    # So small a step that x stands still: var = m |g| - g^2 for each entry.
    lr, rounds = 1e-9, 150
    here = setup(made(lr=lr), rounds=rounds)
    messages, path = sent(here)
    assert np.abs(path[-1] - path[0]).max() < 1e-5
    for k in CLIENTS:
        gradient = points(here, k).gradient(path[0])
        mean = np.mean([messages[round, k] for round in range(rounds)], axis=0) / lr
        m = np.concatenate([np.full(part.stop - part.start, np.abs(gradient[part]).max()) for part in TENSORS])
        deviation = np.sqrt(np.maximum(m * np.abs(gradient) - gradient**2, 0) / rounds)
        assert (np.abs(mean - gradient) <= 5 * deviation + 1e-4).all()
        assert (np.abs(mean - gradient) > 1e-3).any()

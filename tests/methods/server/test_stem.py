"""STEM against its steps in closed form."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rayfl import tree
from rayfl.methods.server.stem import STEM, STEMHyper
from rayfl.rounds.executor import InlineExecutor
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import batches, flat, points, start
from tests.contracts.seams.quadratic import Quadratic, setup
from tests.refusals import refused

CLIENTS = range(4)
HYPER = {"lr": 0.1, "steps": 3, "batch_size": 2, "start_batch_size": 3, "momentum": 0.3}


def step_sizes(hyper: Any, round: int, t: int) -> tuple[float, float]:
    """eta_t and a_{t+1}: eta_t = kappa / (w + sigma^2 t)^(1/3) and a = c eta_t^2, or constants of the round."""
    if hyper.schedule_offset is None:
        return hyper.lr * hyper.lr_decay ** (round - 1), hyper.momentum
    sigma_squared = 0.37
    w = hyper.schedule_offset * sigma_squared
    kappa, c = hyper.lr * w ** (1 / 3), hyper.momentum / hyper.lr**2
    eta = kappa / (w + sigma_squared * t) ** (1 / 3)
    return eta, c * eta**2


def followed(here: Any, averaged_point: bool = False) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """By Algorithm 1: after every exchange the mean point, the mean direction, and the workers' own points.

    `averaged_point`: the old gradient is taken at the mean point after an exchange, which is not the algorithm.
    """
    hyper = here.method.hyper
    x = np.tile(start(here), (4, 1))
    size = hyper.start_batch_size or None
    first = [batches(here, 0, k, "start", steps=1, batch_size=size)[0].gradient(x[k]) for k in CLIENTS]  # type: ignore[arg-type]
    d = np.tile(np.mean(first, axis=0), (4, 1))
    previous, seen = x.copy(), [(x[0].copy(), d[0].copy(), x.copy())]
    for round in range(1, here.rounds):
        for k in CLIENTS:
            drawn = batches(here, round, k, steps=hyper.steps, batch_size=hyper.batch_size or None)  # type: ignore[arg-type]
            for t, batch in enumerate(drawn, start=(round - 1) * hyper.steps + 1):
                eta, a = step_sizes(hyper, round, t)
                x[k] = x[k] - eta * d[k]
                d[k] = batch.gradient(x[k]) + (1 - a) * (d[k] - batch.gradient(previous[k]))
                previous[k] = x[k]
        own = x.copy()
        x[:], d[:] = x.mean(axis=0), d.mean(axis=0)
        if averaged_point:
            previous[:] = x
        seen.append((x[0].copy(), d[0].copy(), own))
    return seen


@pytest.mark.parametrize(
    "hyper",
    [
        {},
        {"momentum": 1.0},
        {"lr_decay": 0.7, "steps": 1},
        {"batch_size": 0, "start_batch_size": 0},
        {"schedule_offset": 2.0, "momentum": 0.9},
    ],
    ids=str,
)
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_follows_algorithm_1(hyper: dict[str, Any], engine: str):
    here = setup(STEM(Quadratic(), STEM.Hyper(**{**HYPER, **hyper})), rounds=6, engine=engine)
    executor = InlineExecutor(here)
    records, run_states = play(here, executor)
    for run_state, (x, d, own) in zip(run_states, followed(here), strict=True):
        np.testing.assert_allclose(flat(run_state.server["params"]), x, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(flat(run_state.server["direction"]), d, rtol=1e-4, atol=1e-5)
        for k in CLIENTS:
            state = tree.to_tensors(executor.get(run_state.states[k]))
            np.testing.assert_allclose(flat(state["point"]), own[k], rtol=1e-5, atol=1e-5)
    # Round 0: the point down, a gradient up. Then point and direction, 40 bytes each, both ways.
    bits = [(row.uplink_bits, row.downlink_bits) for record in records for row in record.clients]
    assert bits == [(320, 320)] * 4 + [(640, 640)] * 20


def tracking_error(here: Any, averaged_point: bool) -> float:
    """The largest entry of mean_k d_k - grad f_k(x_k) over all exchanges, in float64."""
    errors = []
    for _, d, own in followed(here, averaged_point):
        gradients = [points(here, k).gradient(own[k]) for k in CLIENTS]
        errors.append(np.abs(d - np.mean(gradients, axis=0)).max())
    return max(errors)


def test_without_noise_the_mean_direction_is_the_mean_gradient():
    here = setup(STEM(Quadratic(), STEM.Hyper(**{**HYPER, "batch_size": 0, "start_batch_size": 0})), rounds=6)
    # The error telescopes to zero with every worker's own point, and does not with the averaged one.
    assert tracking_error(here, averaged_point=False) < 1e-12
    assert tracking_error(here, averaged_point=True) > 1e-3
    executor = InlineExecutor(here)
    for run_state in play(here, executor)[1]:
        own = [flat(tree.to_tensors(executor.get(run_state.states[k]))["point"]) for k in CLIENTS]
        gradients = [points(here, k).gradient(own[k]) for k in CLIENTS]
        np.testing.assert_allclose(flat(run_state.server["direction"]), np.mean(gradients, axis=0), atol=2e-6)


def test_with_a_of_one_it_is_local_sgd():
    # d_t = g(x_t; batch t), one batch behind: x_2 = x_1 - eta d_1, then I steps on fresh gradients.
    here = setup(
        STEM(Quadratic(), STEM.Hyper(**{**HYPER, "momentum": 1.0, "steps": 1, "batch_size": 0, "start_batch_size": 0}))
    )
    x = start(here)
    for run_state in play(here)[1][1:]:
        x = x - 0.1 * np.mean([points(here, k).gradient(x) for k in CLIENTS], axis=0)
        np.testing.assert_allclose(flat(run_state.server["params"]), x, rtol=1e-5, atol=1e-6)


def test_the_schedules_of_the_paper_at_three_steps():
    # (1 + t / 9)^(-1/3) is 10^(-1/3) * 9^(1/3) at t = 1, 1/2 at t = 63 and 1/4 at t = 567: eta halves, a quarters.
    hyper = STEM.Hyper(lr=0.2, momentum=0.8, schedule_offset=9.0)
    shrunk = [float(hyper.shrunk(torch.tensor(t, dtype=torch.float64))) for t in (1, 63, 567)]
    assert shrunk == pytest.approx([(9 / 10) ** (1 / 3), 0.5, 0.25], rel=1e-6)


def test_a_cosine_takes_the_rounds_that_step():
    # Round 0 makes no step, so of 5 rounds 4 do: (1 + cos(pi r / 4)) / 2 for r = 0, 1, 2, 3.
    hyper = STEMHyper(lr=0.4, lr_schedule="cosine").for_num_rounds(5)
    method = STEM(Quadratic(), hyper)
    rates = [method.plan(round, 0.0).stages[0].lr for round in range(1, 5)]
    assert rates == pytest.approx([0.4, 0.2 + 0.2 * 0.5**0.5, 0.2, 0.2 - 0.2 * 0.5**0.5], rel=1e-12)


def test_two_schedules_are_refused():
    given: tuple[dict[str, Any], ...] = ({"lr_decay": 0.9}, {"lr_schedule": "cosine"}, {"lr_schedule": "constant"})
    for other in given:
        with refused(names=["schedule_offset=2.0", *other]):
            STEM.Hyper(schedule_offset=2.0, **other)


def test_reaches_the_minimiser_of_the_mean_loss():
    hyper = {"lr": 0.1, "steps": 1, "batch_size": 0, "start_batch_size": 0, "momentum": 0.3}
    here = setup(STEM(Quadratic(), STEM.Hyper(**hyper)), rounds=150)
    mine = [points(here, k) for k in CLIENTS]
    minimiser = np.mean([(each.a * each.c).mean(axis=0) for each in mine], axis=0)
    minimiser /= np.mean([each.hessian() for each in mine], axis=0)
    np.testing.assert_allclose(flat(play(here)[1][-1].server["params"]), minimiser, atol=1e-4)


def test_a_worker_that_missed_an_exchange_takes_the_averaged_point():
    # With a = 1 the old gradient has no weight; with a below 1 a stale point would show.
    here = setup(STEM(Quadratic(), STEM.Hyper(**HYPER)), rounds=6, clients={"per_round": 3})
    executor = InlineExecutor(here)
    _, run_states = play(here, executor)
    back = 0
    for round in range(1, 6):
        before = run_states[round - 1]
        eta, server = 0.1, before.server
        for k in here.population.sample_round(round).selected:
            x, d = flat(server["params"]), flat(server["direction"])
            stored = tree.to_tensors(executor.get(before.states[k])) if k in before.states else None
            last = -1 if stored is None else int(stored["round"])
            back += last != round - 1
            previous = flat(stored["point"]) if stored is not None and last == round - 1 else x
            for batch in batches(here, round, k, steps=3, batch_size=2):
                x = x - eta * d
                d, previous = batch.gradient(x) + 0.7 * (d - batch.gradient(previous)), x
            after = tree.to_tensors(executor.get(run_states[round].states[k]))
            np.testing.assert_allclose(flat(after["point"]), x, rtol=1e-4, atol=1e-5)
    assert back


def test_a_lost_start_is_made_up_for():
    # Nobody's first gradient arrives: the next round's first step takes the fresh gradient alone.
    lost = setup(STEM(Quadratic(), STEM.Hyper(**HYPER)), rounds=3, clients={"dropout_after_training": 1 - 1e-12})
    _, run_states = play(lost, rounds=1)
    assert not run_states[-1].server["started"]
    here = replace(lost, population=setup(STEM(Quadratic(), STEM.Hyper(**HYPER))).population)
    records, run_states = play(here, run_state=run_states[-1], rounds=2)
    assert records[0].row.downlink_bits == 4 * 320
    ends = []
    for k in CLIENTS:
        x, d, kept, previous = start(here), np.zeros(10), 0.0, start(here)
        for batch in batches(here, 1, k, steps=3, batch_size=2):
            x = x - 0.1 * d
            d, previous, kept = batch.gradient(x) + kept * (d - batch.gradient(previous)), x, 0.7
        ends.append(x)
    np.testing.assert_allclose(flat(run_states[-1].server["params"]), np.mean(ends, axis=0), rtol=1e-5, atol=1e-6)

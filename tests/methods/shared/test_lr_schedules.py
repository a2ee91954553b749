"""Learning rates by round against their closed forms, and what is refused."""

import math
from typing import Any

import numpy as np
import pytest

from rayfl import toml
from rayfl.choices.kinds import named
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.methods.base import Method
from rayfl.methods.masks.dispfl import DisPFLHyper
from rayfl.methods.shared.distributed_gradient import GradientStep
from rayfl.methods.shared.local_training import LearningRate
from rayfl.rounds.rounds import RunState
from tests.methods.reference import initial, played, setup_of, softmax_gradient
from tests.refusals import refused

# r = 0, 2, 4, 7 of R = 8: the cosine of 0, pi/4, pi/2 and 7 pi/8.
QUARTER, LAST = math.sqrt(0.5), math.cos(7 * math.pi / 8)
RATES = [
    ({"lr_schedule": "constant"}, [0.4] * 4),
    ({}, [0.4] * 4),
    ({"lr_schedule": "exponential", "lr_decay": 0.5}, [0.4, 0.1, 0.025, 0.4 / 128]),
    ({"lr_schedule": "cosine"}, [0.4, 0.2 * (1 + QUARTER), 0.2, 0.2 * (1 + LAST)]),
    ({"lr_schedule": "cosine-literal"}, [0.8, 0.4 * (1 + QUARTER), 0.4, 0.4 * (1 + LAST)]),
    ({"lr_schedule": "cosine", "lr_rounds": 16}, [0.4, 0.2 * (1 + math.cos(math.pi / 8)), 0.2 * (1 + QUARTER)]),
]


@pytest.mark.parametrize(("settings", "expected"), RATES, ids=str)
def test_rates_at_the_first_the_middle_and_the_last_round(settings: dict[str, Any], expected: list[float]):
    hyper = LearningRate(lr=0.4, **settings).for_num_rounds(8)
    assert [hyper.rate(round) for round in (0, 2, 4, 7)][: len(expected)] == pytest.approx(expected, rel=1e-12)
    assert all(hyper.rate(round) > 0 for round in range(8))


def test_the_length_is_filled_in_where_it_counts():
    assert LearningRate(lr_schedule="cosine").for_num_rounds(30).lr_rounds == 30
    assert LearningRate(lr_schedule="cosine-literal", lr_rounds=40).for_num_rounds(30).lr_rounds == 40
    assert LearningRate().for_num_rounds(30) == LearningRate()


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (
            {"lr_schedule": "cosine", "lr_decay": 0.9},
            ["lr_decay=0.9", "lr_schedule='cosine'"],
        ),
        (
            {"lr_schedule": "constant", "lr_decay": 0.9},
            ["lr_decay=0.9", "lr_schedule='constant'"],
        ),
        (
            {"lr_rounds": 5},
            ["lr_rounds=5", "lr_schedule='exponential'"],
        ),
        (
            {"lr_schedule": "linear"},
            ["lr_schedule='linear'", "constant", "exponential", "cosine-literal"],
        ),
    ],
)
def test_contradictions_get_one_sentence(settings: dict[str, Any], names: list[str]):
    with refused(names=names):
        LearningRate(**settings)


def test_a_cosine_that_does_not_last():
    with refused(names=["lr_rounds=5", "6 rounds"]):
        LearningRate(lr_schedule="cosine", lr_rounds=5).for_num_rounds(6)


def experiment(wrap: tuple[str, ...] = (), **method: Any) -> Experiment:
    tables: dict[str, Any] = {
        "rounds": 4,
        "data": {"name": "synthetic"},
        "partition": "natural",
        "clients": {"count": 30},
        "model": "logistic",
        "method": {"name": "fedavg", **method},
        "wrap": wrap,
    }
    return Experiment(**tables)


def test_an_experiment_gives_its_rounds_and_writes_down_what_the_user_wrote():
    described = experiment(lr=0.2, lr_schedule="cosine")
    here = prepare(described)
    rates = [here.plan(round).stages[0].lr for round in range(4)]
    assert rates == pytest.approx([0.1 * (1 + math.cos(math.pi * r / 4)) for r in range(4)], rel=1e-12)
    # A copy of the file with more rounds takes them all, so the length is not written into it.
    assert "lr_rounds" not in toml.dumps(described.as_dict())
    assert Experiment(**described.as_dict()) == described


def test_an_experiment_refuses_a_cosine_that_is_too_short():
    with refused(names=["lr_rounds=3", "4 rounds"]):
        experiment(lr_schedule="cosine", lr_rounds=3)


def test_elastic_around_a_method_keeps_its_schedule():
    here = prepare(experiment(lr=0.2, lr_schedule="cosine-literal", wrap=("elastic",)))
    assert [here.plan(round).stages[-1].lr for round in (0, 2)] == pytest.approx([0.4, 0.2], rel=1e-12)


@pytest.mark.parametrize("method", ["fedavg", "fedsgd"])
def test_training_takes_the_rates_of_the_cosine(method: str):
    """Full batches and one step: both methods descend along the mean gradient with lr (1 + cos(pi r / 3)) / 2."""
    work = {"steps": 1, "batch_size": 0} if method == "fedavg" else {}
    hyper = {"lr": 0.6, "lr_schedule": "cosine", "lr_rounds": 3, "weighting": "samples", **work}
    here = setup_of(method, hyper)
    x = initial(here)
    rows = np.concatenate([here.partition.train[client] for client in range(here.num_clients)])
    inputs, labels = here.dataset.train.inputs[rows].astype(np.float64), here.dataset.train.labels[rows]
    run_states: list[RunState] = [run_state for _, run_state in played(here)]
    for run_state, rate in zip(run_states, (0.6, 0.45, 0.15), strict=True):
        gradient = softmax_gradient(x, inputs, labels)
        x = {name: value - rate * gradient[name] for name, value in x.items()}
        for name, value in x.items():
            np.testing.assert_allclose(run_state.server["params"][name].numpy(), value, rtol=1e-5, atol=1e-6)


def test_every_method_with_a_decay_has_the_schedules():
    hypers = {name: method.Hyper for name, method in named(Method).items()}
    decaying = {name for name, hyper in hypers.items() if "lr_decay" in hyper.model_fields}
    assert {name for name in decaying if not issubclass(hypers[name], LearningRate)} == set()
    assert {"fedavg", "stem", "scaffold", "dispfl"} <= decaying
    assert issubclass(GradientStep, LearningRate)


def test_a_decay_that_a_method_has_by_default_is_no_contradiction():
    assert DisPFLHyper(lr_schedule="constant").model_dump()["lr_decay"] == 0.998
    with refused(names=["lr_decay=1.0", "lr_schedule='constant'"]):
        DisPFLHyper(lr_schedule="constant", lr_decay=1.0)

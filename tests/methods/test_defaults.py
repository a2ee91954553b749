"""Defaults learn on the demo's data in 30 rounds, also where a paper's values are meant for far longer runs."""

from typing import Any

import pytest

from rayfl.choices.kinds import find
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.methods.base import Method, PeerHalf
from rayfl.methods.personal.pfedme import PFedMe
from rayfl.testing.executors import play

LEARNED = 0.68
"""Own accuracy after 30 rounds. Nearly all other methods come to this or more; chance is 0.1."""


def own_accuracy(name: str) -> float:
    """Mean own/accuracy of a method with its default settings: 8x8 digits of 20 clients with unequal labels."""
    tables: dict[str, Any] = {
        "seed": 1,
        "rounds": 30,
        "data": "digits",
        "partition": {"name": "dirichlet-client", "alpha": 0.3},
        "clients": {"count": 20},
        "model": {"name": "mlp", "hidden": [64]},
        "method": name,
        "evaluation": {"every": 0, "pooled": False},
        "runtime": {"engine": "vmap", "stack_width": 20},
    }
    if (kind := find(Method, name)).gather and issubclass(kind, PeerHalf):
        tables["topology"] = "ring"
    return play(prepare(Experiment(**tables)))[0][-1].means["own/accuracy"]


# ind_mask has the settings of mcepl, and avr_weipru and par_weipru have those of ind_weipru.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["pfedme", "perfedavg", "dsgdprox", "lottery_dsgd", "mcepl", "ind_weipru"])
def test_the_defaults_learn_in_thirty_rounds(name: str):
    assert own_accuracy(name) > LEARNED


def test_theta_does_not_oscillate_by_default():
    hyper = PFedMe().hyper.model_dump()
    # One step multiplies the distance from the minimiser by 1 - personal_lr (lam + L), with L at least 0.
    assert 0 < 1 - hyper["personal_lr"] * hyper["lam"] < 1

"""What the tests of personal models share: a method on the contract tests' quadratics, and all clients' models."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rayfl import tree
from rayfl.choices.kinds import find
from rayfl.methods.base import Method
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.ledger import RoundRecord
from rayfl.rounds.rounds import RunState
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import Points, flat, points, start
from tests.contracts.seams.quadratic import Quadratic, setup

CLIENTS, DIM = range(4), 10
MODEL_BITS = 32 * DIM


def made(name: str, hyper: Mapping[str, Any], **options: Any) -> Setup:
    """The method on four clients' quadratics."""
    kind = find(Method, name)
    return setup(kind(Quadratic(), kind.Hyper(**hyper)), **options)


def personal(here: Setup, run_state: RunState, name: str = "params") -> np.ndarray:
    """A part of all clients' states, [4, 10]; of a client that was never there its first one."""
    executor, first = InlineExecutor(here), here.first_state
    states = [
        tree.to_tensors(executor.get(run_state.states[i])) if i in run_state.states else first(i) for i in CLIENTS
    ]
    return np.stack([flat(state[name]) for state in states])


def rounds_of(here: Setup) -> list[tuple[RoundRecord, np.ndarray, RunState]]:
    """By round the record, all clients' models, and the run's state."""
    return [(record, personal(here, state), state) for record, state in zip(*play(here), strict=True)]


def common(here: Setup) -> np.ndarray:
    """Every client's first model, [4, 10]."""
    return np.tile(start(here), (len(CLIENTS), 1))


def data(here: Setup) -> list[Points]:
    """All clients' train examples."""
    return [points(here, i) for i in CLIENTS]


def curvature(here: Setup) -> tuple[np.ndarray, np.ndarray]:
    """h and b of f_i(x) = h_i / 2 x^2 - b_i x + const, entry by entry, each [4, 10]."""
    mine = data(here)
    return np.stack([p.hessian() for p in mine]), np.stack([(p.a * p.c).mean(axis=0) for p in mine])

"""D-PSGD in float64 numpy, on the quadratics of the contract tests: graphs, weights, who is away, both orders."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rayfl import tree
from rayfl.choices.kinds import find
from rayfl.methods.base import Method
from rayfl.population.sampling import Participation
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.rounds import RunState
from rayfl.rounds.setup import Setup
from rayfl.topology.graphs import (
    FullyConnected,
    Grid,
    OnePeerExponential,
    RandomNeighbours,
    RandomRegular,
    Ring,
    Topology,
)
from tests.contracts.seams.closed_form import Points, batches, flat, start
from tests.contracts.seams.quadratic import Quadratic, setup
from tests.population.statuses import with_status

NUM_PEERS, DIM = 4, 10
GRAPHS = (
    Ring(),
    Ring(weights="metropolis"),
    Grid(rows=1),
    Grid(rows=1, weights="metropolis"),
    FullyConnected(),
    OnePeerExponential(),
    RandomNeighbours(degree=2),
    RandomRegular(degree=2, weights="metropolis"),
)
ABSENCES = ({}, {"dropout_before_download": 0.4}, {"dropout_before_download": 0.3, "dropout_after_training": 0.3})

Gradient = Callable[[np.ndarray, np.ndarray, Points], np.ndarray]
"""Of the point, of where the round began, and of a batch."""


def plain(x: np.ndarray, begun: np.ndarray, batch: Points) -> np.ndarray:
    return batch.gradient(x)


def made(name: str, hyper: Mapping[str, Any], **options: Any) -> Setup:
    options.setdefault("topology", Ring())
    kind = find(Method, name)
    return setup(kind(Quadratic(), kind.Hyper(**hyper)), **options)


def matrix(topology: Topology, seed: int, round: int, present: Sequence[int]) -> np.ndarray:
    """W [4, 4] of the peers that are present, entry by entry; the others keep their own model."""
    graph, weights = topology.receives(NUM_PEERS, seed, round), np.eye(NUM_PEERS)
    heard = {i: [j for j in present if graph[i, j]] for i in present}
    for i in present:
        for j in heard[i]:
            both = max(len(heard[i]), len(heard[j]))
            weights[i, j] = 1 / (1 + both) if topology.weights == "metropolis" else 1 / (1 + len(heard[i]))
        weights[i, i] = 1 - sum(weights[i, j] for j in heard[i])
    return weights


def absent(participation: Participation) -> tuple[set[int], set[int]]:
    """Peers without an exchange, and among them those whose round never was."""
    lost = set(with_status(participation, "dropped_after_training"))
    return lost | set(with_status(participation, "dropped_before_download")), lost


def followed(here: Setup, gradient: Gradient = plain, *, default_steps: int | None = None) -> list[np.ndarray]:
    """All models [4, 10] after every round."""
    hyper: Any = here.method.hyper
    assert here.topology is not None
    steps = hyper.steps or (default_steps if hyper.epochs is None else None)
    epochs = None if steps else hyper.epochs or 1
    x, seen = np.tile(start(here), (NUM_PEERS, 1)), []
    for round in range(here.rounds):
        away, lost = absent(here.population.sample_round(round, everyone=True))
        trained = x.copy()
        for i in set(range(NUM_PEERS)) - lost:
            for batch in batches(here, round, i, epochs=epochs, steps=steps, batch_size=hyper.batch_size or 100):
                trained[i] -= hyper.lr * hyper.lr_decay**round * gradient(trained[i], x[i], batch)
        weights = matrix(here.topology, here.seed, round, [i for i in range(NUM_PEERS) if i not in away])
        x = weights @ trained if hyper.order == "average_first" else weights @ x + (trained - x)
        seen.append(x)
    return seen


def models(here: Setup, run_state: RunState) -> np.ndarray:
    """All models [4, 10]; of a peer that never came, the first one."""
    states = {client: tree.to_tensors(state) for client, state in run_state.states.items()}
    return np.array([flat(states[i]["params"]) if i in states else start(here) for i in range(NUM_PEERS)])


def world_of(x: np.ndarray, here: Setup) -> RunState:
    """The world before round 0, with a model [10] of its own for every peer."""
    trees = [{"params": {"weight": row[:8].reshape(2, 4), "bias": row[8:]}} for row in x.astype(np.float32)]
    return RunState(states={i: InlineExecutor(here).put(state) for i, state in enumerate(trees)})

"""What the tests of compressed gossip share, in float64 numpy: compressors of a quadratic's parameters, local training,
and the states of peers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from rayfl.compress.base import Compressor
from rayfl.compress.dense import Dense
from rayfl.compress.sparse import TopK
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.rounds import RunState
from rayfl.rounds.setup import Setup
from rayfl.topology.graphs import Grid, Topology
from rayfl.tree import to_tensors
from tests.contracts.seams.closed_form import TENSORS, batches, flat
from tests.methods.convex import RATIO, RandK, draws, rand_k
from tests.methods.plain_peers import NUM_PEERS, matrix

LINE = Grid(rows=1, weights="metropolis")
Encoded = Callable[[np.ndarray, np.random.Generator], np.ndarray]


class Uplink(NamedTuple):
    """A compressor, its twin in numpy with the factor that makes it a contraction, and the delta of that."""

    uplink: Compressor
    encoded: Encoded
    delta: float


def top_k(x: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """TopK(0.3) of a quadratic's parameters [10]: the 3 largest of 8 entries, and the larger of 2."""
    sent = np.zeros_like(x)
    for part, kept in zip(TENSORS, (3, 1), strict=True):
        largest = part.start + np.argsort(-np.abs(x[part]))[:kept]
        sent[largest] = x[largest]
    return sent


UPLINKS = {
    "dense": Uplink(Dense(), lambda x, generator: x, 1.0),
    "topk": Uplink(TopK(keep_ratio=RATIO), top_k, RATIO),
    # omega = 1 / 0.3 - 1, and 1 / (1 + omega) = 0.3.
    "randk": Uplink(RandK(), lambda x, generator: RATIO * rand_k(x, generator), RATIO),
}


def generators(here: Setup, round: int) -> list[np.random.Generator]:
    """The generators from which the peers' compressors draw in a round."""
    return [draws(here, round, client) for client in range(NUM_PEERS)]


def each(encoded: Encoded, x: np.ndarray, generators: list[np.random.Generator]) -> np.ndarray:
    """C of every row of x [4, 10]."""
    return np.array([encoded(row, one) for row, one in zip(x, generators, strict=True)])


def trained(here: Setup, round: int, x: np.ndarray, clients: range | set[int] = range(NUM_PEERS)) -> np.ndarray:
    """All models [4, 10] after the local training of these clients."""
    hyper, x = here.method.hyper, x.copy()
    assert hasattr(hyper, "epochs")
    epochs: Any = None if hyper.steps else hyper.epochs or 1  # type: ignore[attr-defined]
    for i in clients:
        for batch in batches(here, round, i, epochs=epochs, steps=hyper.steps, batch_size=hyper.batch_size or 100):  # type: ignore[attr-defined]
            x[i] -= hyper.lr * hyper.lr_decay**round * batch.gradient(x[i])  # type: ignore[attr-defined]
    return x


def mixing(topology: Topology) -> np.ndarray:
    """W [4, 4] with all peers present."""
    return matrix(topology, 3, 0, range(NUM_PEERS))


def of_states(here: Setup, run_state: RunState, *path: str) -> np.ndarray:
    """One tree of every peer's state, float64 [4, 10]; `path` are the names that lead to it."""
    found = []
    for i in range(NUM_PEERS):
        one: Any = to_tensors(InlineExecutor(here).get(run_state.states[i]))
        for name in path:
            one = one[name]
        found.append(flat(one))
    return np.array(found)


def world(here: Setup, x: np.ndarray, **others: Any) -> RunState:
    """The world before round 0, with a model [10] for every peer and other trees of the state from `others`, whose
    entries are names, tables of names, or rows [4, 10]."""

    def tree_of(rows: Any, i: int) -> Any:
        if isinstance(rows, dict):
            return {name: tree_of(one, i) for name, one in rows.items()}
        row = rows[i].astype(np.float32)
        return {"weight": row[:8].reshape(2, 4), "bias": row[8:]}

    executor = InlineExecutor(here)
    states = {"params": x, **others}
    return RunState(states={i: executor.put(tree_of(states, i)) for i in range(NUM_PEERS)})

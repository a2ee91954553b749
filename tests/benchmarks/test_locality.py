"""The bench of locality: its two ways differ in the actors that calls go to, and in nothing else."""

from collections import deque
from typing import Any

import pytest

from actors import ray_executor
from actors.client import Joined
from actors.pool import ActorPool
from benchmarks import locality
from rayfl.experiment.prepare import prepare
from rayfl.rounds.executor import Job
from rayfl.rounds.worker_jobs import EvaluateJob


def idle(kind: type[locality.ToStates], nodes: str) -> locality.ToStates:
    """An executor whose actors, one on each node, have nothing to do. No Ray is asked."""
    executor = kind.__new__(kind)
    # Any: what stands for an actor.
    actors: list[Any] = [f"actor on {node}" for node in nodes]
    executor.pool = ActorPool.__new__(ActorPool)
    executor.pool.idle = deque(actors)
    executor.pool.ready = {actor: Joined(0, node, "", {}) for actor, node in zip(actors, nodes, strict=True)}
    return executor


@pytest.mark.parametrize(
    ("kind", "expected", "moved"),
    [
        (locality.ToStates, [(1, "a"), (0, "b"), (2, "c")], 20),
        (locality.InOrder, [(0, "a"), (1, "b"), (2, "c")], 200),
    ],
)
def test_calls_go_home_or_in_order(kind, expected, moved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_executor, "bytes_by_node", lambda jobs: [{"b": 90, "a": 10}, {"a": 100, "d": 10}, {}])
    sizes = {"first b": 90, "first a": 10, "second a": 100, "second d": 10}
    places = {name: {"node_ids": [name[-1]], "object_size": size} for name, size in sizes.items()}
    monkeypatch.setattr(locality, "get_local_object_locations", lambda refs: places)
    executor = idle(kind, "abc")
    inputs = [("first b", "first a"), ("second a", "second d"), (None,)]
    pending = executor._pending(None, [Job(EvaluateJob((client,)), inputs[client]) for client in range(3)])
    pairs = [executor._next_pair(pending.waiting) for _ in range(3)]
    found = [(index, executor.pool.ready[actor].node) for index, actor in pairs]
    assert found == expected and not pending.waiting and not executor.pool.idle
    assert executor.moved_bytes == moved


def test_on_one_node_nobody_looks_where_inputs_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_executor, "bytes_by_node", lambda jobs: pytest.fail("asked for nothing"))
    monkeypatch.setattr(locality, "get_local_object_locations", lambda refs: {})
    executor = idle(locality.ToStates, "a")
    assert executor._pending(None, [Job(EvaluateJob((0,)))]).waiting.homeless


def test_the_experiment_has_states_that_lie_on_nodes() -> None:
    setup = prepare(locality.experiment(8, 4, 2, 1000))
    assert setup.stateful and 4 * sum(array.size for array in setup.initial_arrays.values()) > 100 * 1024
    assert locality.loopback_bytes() >= 0

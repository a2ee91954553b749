"""Client actors without a coordinator: for benchmarks and for tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import ray

from actors.placement import place
from actors.ray_executor import RayExecutor
from actors.session import session
from rayfl.experiment.runtime import Runtime
from rayfl.rounds.setup import Setup

Executor = TypeVar("Executor", bound=RayExecutor)


@contextmanager
def client_actors(setup: Setup, runtime: Runtime, kind: type[Executor] = RayExecutor) -> Iterator[Executor]:
    """Context manager: client actors that this process uses itself, on the Ray of this process or a new one."""
    with session(runtime):
        pool = kind(ray.put(setup), place(runtime, most_calls=setup.most_actors))
        try:
            yield pool
        finally:
            pool.close()

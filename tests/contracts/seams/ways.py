"""The ways in which every seam is tried."""

from collections.abc import Callable
from dataclasses import dataclass

from rayfl.executor import Executor, InlineExecutor
from rayfl.setup import Setup
from tests.contracts.executors import Shuffled


@dataclass(frozen=True)
class Way:
    """An engine and where the jobs run."""

    engine: str
    executor: Callable[[Setup], Executor]


WAYS = {
    "loop": Way("loop", InlineExecutor),
    "vmap": Way("vmap", InlineExecutor),
    "three-workers": Way("loop", Shuffled),
}

"""The ways in which every seam is tried."""

from collections.abc import Callable
from dataclasses import dataclass

from rayfl.rounds.executor import Executor
from rayfl.rounds.setup import Setup


@dataclass(frozen=True)
class Way:
    """An engine, and what makes the executor of a setup."""

    engine: str
    executor: Callable[[Setup], Executor]

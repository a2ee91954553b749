"""World: what outlives a round, and how calls read it and write it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rayfl import tree
from rayfl.rounds.executor import Executor, Ref
from rayfl.rounds.setup import Setup
from rayfl.tree import State

LARGE_MODEL = 2_000_000
"""Parameters beyond which a partial sum costs more than waiting for the slower of unequal calls."""


@dataclass(frozen=True)
class RunState:
    """What outlives a round: the next round's number, the server's state, and references to states and links."""

    round: int = 0
    server: State = field(default_factory=dict)
    states: Mapping[int, Ref] = field(default_factory=dict)
    server_memories: Mapping[int, Ref] = field(default_factory=dict)


def input_refs(
    setup: Setup, run_state: RunState, clients: Sequence[int], has_server_memory: bool = True
) -> tuple[Ref, ...]:
    """For each client its state and its link, where the setup has such; None before the first round."""
    refs: list[Ref] = []
    for client in clients:
        refs += [run_state.states.get(client)] if setup.stateful else []
        refs += [run_state.server_memories.get(client)] if setup.has_server_memory and has_server_memory else []
    return tuple(refs)


def store_outputs(
    setup: Setup, client: int, outputs: Iterator[Ref], states: dict[int, Ref], server_memories: dict[int, Ref]
) -> None:
    """Take a client's new state and link from a call's outputs."""
    if setup.stateful:
        states[client] = next(outputs)
    if setup.has_server_memory:
        server_memories[client] = next(outputs)


def calls_per_wave(setup: Setup, executor: Executor) -> int:
    """Calls a wave: two a worker, to even out unequal clients; one where what a call returns is large."""
    return executor.num_workers * (1 if tree.num_entries(setup.initial) > LARGE_MODEL else 2)


def parts(clients: Sequence[int], wanted: int) -> list[tuple[int, ...]]:
    """The clients in order, cut into at most `wanted` runs of nearly equal length."""
    if not len(clients):
        return []
    return [tuple(part.tolist()) for part in np.array_split(np.asarray(clients), min(wanted, len(clients)))]

"""Compares runs with each other, bit for bit or up to a tolerance: records, and everything that outlives a round."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from rayfl.compress.base import Packet
from rayfl.rounds.executor import Executor
from rayfl.rounds.ledger import RoundRecord
from rayfl.rounds.run_state import Air, RunState
from rayfl.untyped import Anything


def rows(records: Sequence[RoundRecord]) -> list[tuple[Anything, ...]]:
    """Everything recorded but the wall clock."""
    return [(replace(record.row, wall_s=0.0), record.clients, record.metrics) for record in records]


def contents(executor: Executor, run_state: RunState) -> dict[str, np.ndarray]:
    """Every array that outlives a round, by its place: the states of the server and of the selection, the flights under
    way, and the states and memories of clients."""
    arrays = leaves("server", run_state.server) | leaves("selection", run_state.selection)
    arrays |= leaves("air", run_state.air.to_arrays()) if run_state.air != Air() else {}
    for version, ref in run_state.air.versions.items():
        arrays |= leaves(f"version {version}", executor.get(ref))
    for kind, refs in (("state", run_state.states), ("server memory", run_state.server_memories)):
        for client, ref in sorted(refs.items()):
            arrays |= leaves(f"{kind} {client}", executor.get(ref))
    return arrays


def leaves(place: str, value: Anything) -> dict[str, np.ndarray]:
    """All arrays below `value`."""
    if isinstance(value, Mapping):
        return {name: leaf for key, part in value.items() for name, leaf in leaves(f"{place}/{key}", part).items()}
    if isinstance(value, Packet):
        return leaves(place, value.parts)
    array = value.detach().numpy() if isinstance(value, Tensor) else getattr(value, "bits", value)
    if isinstance(array, np.ndarray):
        return {place: array}
    assert not isinstance(value, Tensor) and hasattr(value, "open"), (
        f"{place} holds a {type(value).__name__}, which no checkpoint can keep"
    )
    return leaves(place, value.open())


def assert_same_bits(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> None:
    """Both have the same arrays, with the same types, shapes and bits."""
    assert list(a) == list(b)
    for place, array in a.items():
        assert (array.dtype, array.shape, array.tobytes()) == (b[place].dtype, b[place].shape, b[place].tobytes()), (
            place
        )


def assert_close(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], tolerance: float) -> None:
    """Every array agrees to `tolerance` of its largest entry."""
    assert list(a) == list(b)
    for place, array in a.items():
        size = max(np.abs(array).max(initial=0.0), 1e-3)
        np.testing.assert_allclose(b[place], array, rtol=0, atol=tolerance * size, err_msg=place)

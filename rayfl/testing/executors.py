"""The ways in which the contract tests run an experiment, and the comparison of its runs, bit for bit or up to a
tolerance: of records, and of everything that outlives a round."""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from rayfl.compress.base import Packet
from rayfl.gather import Handle
from rayfl.methods.base import Capabilities
from rayfl.rounds.executor import Executor, InlineExecutor, InlinePacket, Job, JobResult, Ref
from rayfl.rounds.ledger import RoundRecord
from rayfl.rounds.rounds import simulate
from rayfl.rounds.run_state import Air, RunState
from rayfl.rounds.setup import Setup
from rayfl.topology.mixing import FITTING
from rayfl.untyped import Anything, Value


class Shuffled(InlineExecutor):
    """Three workers that do their jobs in a random order, and get all values as bytes with read-only arrays."""

    num_workers = 3

    def __init__(self, setup: Setup) -> None:
        super().__init__(pickle.loads(pickle.dumps(setup)))  # noqa: S301 - our own bytes
        self.order = np.random.default_rng(0)

    def put(self, value: Anything) -> Ref:
        return frozen(value)

    def get(self, ref: Ref) -> Anything:
        return thawed(ref)

    def handle(self, ref: Ref) -> Handle:
        packet = thawed(ref)
        assert isinstance(packet, Packet)
        return InlinePacket(packet)

    def run(self, shared: Ref, jobs: Sequence[Job]) -> list[JobResult]:
        done: dict[int, JobResult] = {}
        for index in self.order.permutation(len(jobs)).tolist():
            job = thawed(frozen(jobs[index].work))
            inputs = tuple(None if ref is None else thawed(ref) for ref in jobs[index].inputs)
            (result,) = super().run(thawed(shared), [Job(job, inputs)])
            assert len(result.outputs) == jobs[index].num_outputs
            done[index] = JobResult(thawed(frozen(result.result)), [frozen(output) for output in result.outputs])
        return [done[index] for index in range(len(jobs))]


Frozen = tuple[bytes, list[bytes]]


def frozen(value: Anything) -> Frozen:
    """The value as bytes, with large arrays out of band, as Ray stores them."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return data, [buffer.raw().tobytes() for buffer in buffers]


def thawed(ref: Frozen) -> Anything:
    """The value, its arrays read-only."""
    return pickle.loads(ref[0], buffers=ref[1])  # noqa: S301 - our own bytes


def play(
    setup: Setup, executor: Executor | None = None, run_state: RunState | None = None, rounds: int | None = None
) -> tuple[list[RoundRecord], list[RunState]]:
    """The records, and the run state after each round."""
    kept: list[tuple[RoundRecord, RunState]] = []
    simulate(setup, executor or InlineExecutor(setup), lambda *both: kept.append(both), run_state, rounds)
    return [record for record, _ in kept], [run_state for _, run_state in kept]


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
    arrays |= leaves("clocks", run_state.clocks.to_arrays()) if run_state.clocks.peers else {}
    kinds = {"state": run_state.states, "server memory": run_state.server_memories, **run_state.clocks.objects()}
    for kind, refs in kinds.items():
        for client, ref in sorted(refs.items()):
            arrays |= leaves(f"{kind} {client}", executor.get(ref))
    return arrays


def leaves(place: str, value: Anything) -> dict[str, np.ndarray]:
    """All arrays below `value`."""
    if isinstance(value, Mapping):
        return {name: leaf for key, part in value.items() for name, leaf in leaves(f"{place}/{key}", part).items()}
    if isinstance(value, Packet):
        return leaves(place, value.parts)
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else getattr(value, "bits", value)
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


def fitting_graph(can: Capabilities) -> dict[str, Value]:
    """A `[topology]` table that gives a method what it needs, whoever is absent."""
    weights = FITTING[can.needs_weights]
    ring = {"name": "ring"} if weights == "uniform" else {"name": "ring", "weights": weights}
    return {"name": "grid", "rows": 1} if can.needs_tree else ring

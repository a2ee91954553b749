"""The ways in which the contract tests run an experiment, so that they can be compared bit for bit."""

import pickle
from collections.abc import Sequence

import numpy as np

from rayfl.compress.base import Packet
from rayfl.gather import Handle
from rayfl.rounds.executor import Executor, InlineExecutor, InlinePacket, Job, JobResult, Ref
from rayfl.rounds.ledger import RoundRecord
from rayfl.rounds.rounds import RunState, simulate
from rayfl.rounds.setup import Setup
from rayfl.untyped import Anything


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

"""Partial sums merged by calls on actors: the bits of one process, also where an actor dies over a merge."""

import os
import signal

import pytest

from actors.ray_executor import PendingCalls
from benchmarks.client_actors import client_actors
from rayfl.experiment.prepare import prepare
from rayfl.experiment.runtime import Runtime
from rayfl.rounds import aggregation
from rayfl.rounds.executor import InlineExecutor
from rayfl.testing.executors import assert_same_bits, contents, play, rows
from tests.actors.toys import experiment


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("deaths", [0, 3])
def test_merges_by_actors_that_die_give_the_bits_of_this_process(deaths: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregation, "FEW_BYTES", 0)
    setup = prepare(experiment(rounds=2))
    alone = InlineExecutor(setup)
    records, run_states = play(setup, alone)
    merges: list[int] = []
    with client_actors(setup, Runtime(actors=3, num_cpus=0.1)) as executor:
        send = executor._send

        def send_and_kill(pending: PendingCalls) -> None:
            send(pending)
            if pending.wave.kind == "merge":
                merges.append(len(merges))
                if len(merges) <= deaths:
                    os.kill(executor.pool.ready[[*pending.sent.values()][-1].actor].pid, signal.SIGKILL)

        monkeypatch.setattr(executor, "_send", send_and_kill)
        others, other_states = play(setup, executor)
        assert rows(records) == rows(others)
        assert_same_bits(contents(alone, run_states[-1]), contents(executor, other_states[-1]))
    assert len(merges) > 2 * deaths

"""What a worker does for large models."""

import resource
import sys

import pytest

from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.rounds import worker
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.rounds import simulate


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc gives the memory of holes back")
def test_the_memory_of_one_huge_model_is_given_back_before_the_next_client(monkeypatch: pytest.MonkeyPatch):
    # A model of 5 MB has 1,300 pages of 4 kB; a client touches them anew if the allocator has given them back.
    chosen = Experiment(
        name="huge",
        rounds=3,
        data="digits",
        partition="iid",
        clients={"count": 6},
        model={"name": "mlp", "hidden": [1100, 1100]},
        method={"name": "fedavg", "steps": 1, "batch_size": 1},
        evaluation={"every": 0, "pooled": False, "own": False},
    )
    setup = prepare(chosen)

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        simulate(setup, InlineExecutor(setup), lambda record, run_state: None)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults()
    kept = faults()
    monkeypatch.setattr(worker, "HUGE_BYTES", 0)
    given_back = faults()
    assert given_back > kept + 10 * 1300

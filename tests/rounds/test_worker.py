"""What a worker does for large models."""

import resource
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.methods.base import Context, Finished, State
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.shared.local_training import LocalCarry
from rayfl.rounds import worker
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.rounds import simulate
from tests.actors.toys import experiment

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc gives the memory of holes back")
def test_the_memory_of_one_huge_model_is_given_back_before_the_next_client(monkeypatch: pytest.MonkeyPatch):
    # A model of 5 MB has 1,300 pages of 4 kB; a client touches them anew if the allocator has given them back, of which
    # some lie beside memory in use and stay. With huge pages everywhere there are 512 times fewer.
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
    pages = 2 if HUGE_PAGES.exists() and "[always]" in HUGE_PAGES.read_text() else 1300
    assert given_back > kept + 2 * pages


class Remembered(FedAvg):
    """Remembers, without keeping them alive, the tensors that clients have trained."""

    def finish(self, state: State, carry: LocalCarry, ctx: Context) -> Finished:
        trained.extend(weakref.ref(tensor) for tensor in carry["params"].values())
        return super().finish(state, carry, ctx)


trained: list[weakref.ref[Tensor]] = []


def test_memory_is_given_back_when_nothing_holds_the_client_before(monkeypatch: pytest.MonkeyPatch):
    trained.clear()
    setup = prepare(experiment("fedavg", rounds=1, clients={"count": 4}))
    setup = replace(setup, method=Remembered(setup.method.task, setup.method.hyper))
    times: list[int] = []

    def trim() -> None:
        times.append(len(trained))
        assert not any(one() is not None for one in trained)

    monkeypatch.setattr(worker, "HUGE_BYTES", 0)
    monkeypatch.setattr(worker, "trim", trim)
    simulate(setup, InlineExecutor(setup), lambda record, run_state: None)
    assert times == sorted(set(times)) and len(times) == 4

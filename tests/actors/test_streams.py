"""What a call leaves behind goes to the object store piece by piece; an error on the way is an error of the call."""

from dataclasses import replace

import pytest

from actors.ray_executor import RayExecutor
from benchmarks.client_actors import client_actors
from rayfl.errors import ClientError
from rayfl.experiment.prepare import prepare
from rayfl.experiment.runtime import Runtime
from rayfl.gather import Aggregate
from rayfl.methods.base import Context
from rayfl.methods.peers.dpsgd import DPSGD, DPSGDState
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.mix import MixJob
from rayfl.rounds.setup import Setup
from rayfl.rounds.worker import Worker
from rayfl.rounds.worker_jobs import RoundInputs
from tests.actors.toys import assert_same_bits, experiment, played
from tests.refusals import refused


class Selfish(DPSGD):
    """Peer 7 refuses to mix in round 1; all others note that they did."""

    mixed: tuple[int, ...] = ()

    def mix(self, state: DPSGDState, received: dict[str, Aggregate], ctx: Context) -> DPSGDState:
        if (ctx.round, ctx.traits.id) == (1, 7):
            raise ArithmeticError("no")
        self.mixed += (ctx.traits.id,)
        return super().mix(state, received, ctx)


def peers(kind: type[DPSGD] = DPSGD) -> Setup:
    setup = prepare(experiment("dpsgd", clients={"count": 10}, topology={"name": "random", "degree": 3}))
    return replace(setup, method=kind(setup.method.task, setup.method.hyper))


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("actors", [1, 3])
def test_streamed_states_are_those_of_one_process(actors: int) -> None:
    setup = peers()
    records, run_state = played(setup, InlineExecutor(setup))
    with client_actors(setup, Runtime(actors=actors)) as executor:
        others, other = played(setup, executor)
    assert others == records
    assert_same_bits(run_state, other)


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_an_error_after_the_first_states_fails_the_call_and_keeps_the_actor() -> None:
    setup = peers(Selfish)
    with client_actors(setup, Runtime(actors=1)) as executor:
        assert isinstance(executor, RayExecutor)
        (pid,) = executor.pids
        line = Selfish.mix.__code__.co_firstlineno + 2
        facts = ["round 1", "client 7", "Selfish.mix", f"test_streams.py, line {line}", "ArithmeticError: no"]
        with refused(names=facts, error=ClientError):
            played(setup, executor)
        assert list(executor.pids) == [pid]


def test_a_state_is_made_when_it_is_asked_for() -> None:
    setup = peers(Selfish)
    worker = Worker(setup)
    first = {"params": {name: tensor.numpy() for name, tensor in setup.initial.items()}}
    rows = {client: {} for client in range(3)}
    _, states = worker.do(MixJob(rows, ()), RoundInputs(round=0, plan=setup.plan(0)), [first] * 3)
    stream = iter(states)
    for count in range(3):
        assert isinstance(worker.method, Selfish) and len(worker.method.mixed) == count
        next(stream)

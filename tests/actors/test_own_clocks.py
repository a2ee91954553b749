"""Peers on their own clocks on Ray's actors, two of which are killed: the bits of one process."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayfl.experiment.prepare import prepare
from rayfl.methods.base import Carry, Context, Message, State
from rayfl.methods.peers.adpsgd import ADPSGD
from rayfl.methods.peers.dpsgd import DPSGD, DPSGDCarry, DPSGDState
from rayfl.rounds.executor import InlineExecutor
from rayfl.run_directory.play_run import Listener, RunOutput, play_run
from tests.actors.toys import assert_same_run, experiment, play_on_ray

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


def fatal(self: Any, ctx: Context) -> None:
    """Kill the process that begins the first training of peer 1 or 4 after two rounds."""
    mark = self.marks / str(ctx.traits.id)
    if ctx.round >= 2 and ctx.traits.id in (1, 4) and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class FatalDPSGD(DPSGD):
    """D-PSGD whose processes are killed."""

    capabilities = DPSGD.capabilities.but(takes_stale=True)

    def begin(self, state: DPSGDState, received: Message, ctx: Context) -> DPSGDCarry:
        fatal(self, ctx)
        return super().begin(state, received, ctx)


class FatalADPSGD(ADPSGD):
    """AD-PSGD whose processes are killed."""

    capabilities = ADPSGD.capabilities.but(takes_stale=True)

    def begin(self, state: State, received: Message, ctx: Context) -> Carry:
        fatal(self, ctx)
        return super().begin(state, received, ctx)


@pytest.mark.parametrize(("name", "kind", "partners"), [("dpsgd", FatalDPSGD, None), ("adpsgd", FatalADPSGD, 1)])
def test_killed_actors_leave_the_bits_of_one_process(name: str, kind: type, partners: int | None, tmp_path: Path):
    clients = {"count": 8, "examples_per_s": {"median": 300.0, "sigma": 1.0}, "uplink_mbps": 0.5}
    schedule = {"name": "gossip", "partners": partners, "latency_s": 0.05}
    chosen = experiment(name, rounds=5, clients=clients, schedule=schedule, topology="ring", runtime={"actors": 2})
    setup = prepare(chosen)
    method = kind(setup.method.task, setup.method.hyper)
    method.marks = tmp_path / "marks"
    for folder in ("marks", "ray", "inline"):
        (tmp_path / folder).mkdir()
    assert play_on_ray(chosen, replace(setup, method=method), tmp_path / "ray", Listener())
    assert [*method.marks.iterdir()]
    play_run(setup, InlineExecutor(setup), RunOutput(tmp_path / "inline"))
    assert_same_run(tmp_path / "ray", tmp_path / "inline")

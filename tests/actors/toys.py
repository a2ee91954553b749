"""A small experiment that every test here plays, methods that go wrong on purpose, and what may not differ."""

import os
import signal
import time
import weakref
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors import driver, session
from actors.placement import place
from rayfl import tree
from rayfl.compress.base import Message
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.methods.base import Carry, Context
from rayfl.methods.server.fedavg import FedAvg
from rayfl.rounds.executor import Executor
from rayfl.rounds.ledger import RoundRecord
from rayfl.rounds.rounds import RunState, simulate
from rayfl.rounds.setup import Setup
from rayfl.run_directory.play_run import Listener, RunOutput
from rayfl.run_directory.record import read_run
from rayfl.tree import State


def experiment(method: str = "fedavg", /, **changes: Any) -> Experiment:
    """10 clients of unequal size on digits, 8 of them a round, some of whom vanish; 4 rounds of an MLP."""
    settings: dict[str, Any] = {
        "name": method,
        "rounds": 4,
        "data": "digits",
        "partition": {"name": "dirichlet-client", "alpha": 0.3},
        "clients": {"count": 10, "per_round": 8, "dropout_after_training": 0.1},
        "model": {"name": "mlp", "hidden": [32]},
        "method": {"name": method, "lr": 0.1, "batch_size": 16},
        # A tracker shows the experiment, which a run directory without a driver lacks.
        "output": {"track": []},
    }
    if method == "local":
        settings["clients"] = {"count": 10}
    return Experiment(**{**settings, **changes})


def play_on_ray(
    experiment: Experiment, setup: Setup, directory: Path, listener: Listener, resumed: bool = False
) -> bool:
    """`driver.play_on_ray` in a session of its own, or in the one that there is."""
    with session.session(experiment.runtime):
        placement = place(experiment.runtime, most_calls=setup.most_actors)
        given = experiment.output
        output = RunOutput(directory, given.save_models, given.track, experiment.checkpoint, resumed)
        held = [copy(setup)]
        handed_over = weakref.ref(held[0])
        played = driver.play_on_ray(held.pop, placement, None, output, listener)
        assert handed_over() is None, "the driver keeps a setup that the object store has"
        return played


def with_method(kind: type[FedAvg], **attributes: Any) -> Setup:
    """The experiment's setup with one of the methods below in place of FedAvg."""
    setup = prepare(experiment())
    method = kind(setup.method.task, setup.method.hyper)
    for name, value in attributes.items():
        setattr(method, name, value)
    return replace(setup, method=method)


class Failing(FedAvg):
    """Clients 3 and above divide by zero in round 2, client 3 once the file `after` is there."""

    after: Path | None = None

    def begin(self, state: State, received: Message, ctx: Context) -> Carry:
        if ctx.round == 2 and ctx.traits.id >= 3:
            while ctx.traits.id == 3 and self.after and not self.after.exists():
                time.sleep(0.01)
            raise ZeroDivisionError(f"client {ctx.traits.id} divides by zero")
        return super().begin(state, received, ctx)


class Fatal(FedAvg):
    """The process that works on client 1 in round 1 is killed, until the file `killed` says that it was."""

    killed: Path | None = None

    def begin(self, state: State, received: Message, ctx: Context) -> Carry:
        if ctx.round == 1 and ctx.traits.id == 1 and not (self.killed and self.killed.exists()):
            if self.killed:
                self.killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().begin(state, received, ctx)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What rayfl has logged in this test."""
    return [record.getMessage() for record in caplog.records if record.name == "rayfl"]


def played(setup: Setup, executor: Executor) -> tuple[list[RoundRecord], RunState]:
    """All rounds: the records without their wall time, and the world with values in place of references."""
    records: list[RoundRecord] = []
    run_state = simulate(setup, executor, lambda record, run_state: records.append(timeless(record)))
    memories = {
        kind: {client: executor.get(ref) for client, ref in refs.items()} for kind, refs in held(run_state).items()
    }
    return records, replace(run_state, **memories)


def held(run_state: RunState) -> dict[str, Any]:
    """The references that a world holds."""
    return {"states": run_state.states, "server_memories": run_state.server_memories}


def timeless(record: RoundRecord) -> RoundRecord:
    """The record without the one value that may differ."""
    return replace(record, row=replace(record.row, wall_s=0.0))


def assert_same_bits(a: RunState, b: RunState) -> None:
    """Server state, client states and links hold the same bytes."""
    assert set(a.states) == set(b.states) and set(a.server_memories) == set(b.server_memories)
    assert_same_state(a.server, b.server)
    for client in a.states:
        assert_same_state(tree.to_tensors(a.states[client]), tree.to_tensors(b.states[client]))
    for client in a.server_memories:
        assert_same_state(tree.to_tensors(a.server_memories[client]), tree.to_tensors(b.server_memories[client]))


def assert_same_state(a: State, b: State) -> None:
    flat_a, flat_b = tree.flatten(a), tree.flatten(b)
    assert list(flat_a) == list(flat_b)
    for name, tensor in flat_a.items():
        assert isinstance(tensor, torch.Tensor)
        assert tensor.numpy().tobytes() == flat_b[name].numpy().tobytes(), name


def assert_same_run(a: Path, b: Path) -> None:
    """Two run directories hold the same records (but for wall_s) and the same model files."""
    runs = [read_run(write_experiment(directory)) for directory in (a, b)]
    assert runs[0].rounds.num_rows > 0 and runs[0].finished and runs[1].finished
    for name in ("rounds", "clients", "metrics"):
        tables = [getattr(run, name) for run in runs]
        columns = [column for column in tables[0].column_names if column != "wall_s"]
        for column in columns:
            values = [np.asarray(table[column].to_pylist(), dtype=object) for table in tables]
            assert values[0].tolist() == values[1].tolist(), f"{name}.{column}"
    files = [{path.name: path.read_bytes() for path in (each / "models").iterdir()} for each in (a, b)]
    assert files[0] and files[0] == files[1]


def write_experiment(directory: Path) -> Path:
    """Make a directory that `play` filled readable: jobs write these two files beforehand."""
    for name in ("experiment.json", "platform.json"):
        (directory / name).write_text("{}", encoding="utf-8")
    return directory

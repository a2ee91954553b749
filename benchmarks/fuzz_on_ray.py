"""A random experiment on client actors, some of which are killed with the coordinator: the bits of the calm run."""

import os
import random
import signal
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from actors import session
from actors.driver import play_on_ray
from actors.placement import place
from benchmarks.fuzz_experiments import Tables
from benchmarks.fuzz_plays import Difference, Played
from benchmarks.run_bits import difference
from benchmarks.victims import ACTOR, COORDINATOR, processes
from rayfl.determinism.platform import describe
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.experiment.runtime import Runtime
from rayfl.rounds.ledger import RoundRow
from rayfl.run_directory.description import Description
from rayfl.run_directory.play_run import Listener, RunOutput
from rayfl.run_directory.run_folder import create_run_directory

ACTORS = (1, 2, 3)
STRIKES = 2
"""Processes that are killed in each run, if it lasts."""


def one_ray() -> AbstractContextManager[None]:
    """Context manager: a Ray of this process for all runs in the block, or the cluster of RAY_ADDRESS."""
    return session.session(Runtime(actors=max(ACTORS), num_cpus=0.5, object_store_memory_mb=200))


def struck(run: Played, directory: Path) -> tuple[Difference | None, int]:
    """Play on 1 to 3 actors and kill processes at the ends of random rounds.

    Returns what differs from the calm run, and the number of processes killed.
    """
    chance = random.Random(f"strikes {run.tables['seed']}")
    actors, rounds = ACTORS[int(chance.random() * len(ACTORS))], run.tables["rounds"]
    # A run ends soon after its last round, and then there is nobody to kill.
    left = sorted(int(chance.random() * (rounds - 1)) for _ in range(STRIKES))
    killed = 0

    def strike(row: RoundRow, means: Mapping[str, float]) -> None:
        nonlocal killed
        while left and row.round >= left[0]:
            left.pop(0)
            kind = COORDINATOR if chance.random() < 0.5 else ACTOR
            victims = [victim for victim in processes([os.getpid()]) if victim.kind == kind]
            killed += bool(victims) and victims[int(chance.random() * len(victims))].strike(signal.SIGKILL)

    name = f"{actors} actors, struck"
    try:
        _play(run.tables, directory, actors, Listener(strike))
    except Exception as error:  # noqa: BLE001 (the calm run had none)
        return Difference(name, f"{type(error).__name__}: {error}"), killed
    words = difference(run.directory, directory)
    return (Difference(name, words) if words else None), killed


def _play(tables: Tables, directory: Path, actors: int, listener: Listener) -> None:
    """Play an experiment on actors. Errors: those of `play_on_ray`."""
    runtime = {**tables["runtime"], "executor": "ray", "actors": actors, "num_cpus": 0.5}
    experiment = Experiment(**{**tables, "runtime": runtime})
    setup = prepare(experiment)
    create_run_directory(directory)
    Description(experiment.as_dict()).write(directory, describe(1))
    placement = place(experiment.runtime, most_calls=setup.most_actors)
    output = RunOutput(directory, experiment.output.save_models, experiment.output.track, experiment.checkpoint)
    play_on_ray(lambda: setup, placement, None, output, listener)

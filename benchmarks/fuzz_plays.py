"""The ways in which a random experiment is played in this process, all of which must give the bits of the calm one."""

import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.fuzz_experiments import Tables
from benchmarks.run_bits import difference
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.rounds.executor import InlineExecutor
from rayfl.run_directory.play_run import Listener, RunOutput, Stopped, play_run
from rayfl.testing.executors import Shuffled

KILLS = 2
"""How often a run is killed."""


class Killed(BaseException):
    """The process would be gone now. No code of a run handles it."""


class Difference(NamedTuple):
    """A way of playing that gave other bits, and the first thing that differs."""

    play: str
    words: str


class Played(NamedTuple):
    """A run that was played to its end: its tables, its directory, and how many clients were trained or evaluated."""

    tables: Tables
    directory: Path
    steps: int


class TwoWorkers(Shuffled):
    """Two workers in place of three."""

    num_workers = 2


def calm(tables: Tables, home: Path) -> Played:
    """Play from start to end."""
    directory = home / "calm"
    shutil.rmtree(directory, ignore_errors=True)
    return Played(tables, directory, play(tables, directory))


def play(
    tables: Tables,
    directory: Path,
    executor: type[InlineExecutor] | None = None,
    *,
    resumed: bool = False,
    stops: bool = False,
    kill_at: int | None = None,
) -> int:
    """Play an experiment into a directory, as a new process would; returns how many clients were trained or evaluated.

    resumed: go on from the last checkpoint. stops: stop after the next round, by Stopped. kill_at: the number of
    clients after which Killed is raised; what the directory holds at that moment is then in DIRECTORY.killed.
    """
    directory.mkdir(exist_ok=True)
    experiment = Experiment(**tables)
    setup, done = prepare(experiment), 0

    # Any: what the executor tells of its progress.
    def on_wave(wave: Any) -> None:
        nonlocal done
        done += 1
        if done == kill_at:
            # A process that is killed writes nothing more, as its closing of files after an exception would.
            shutil.copytree(directory, directory.with_suffix(".killed"))
            raise Killed

    play_run(
        setup,
        InlineExecutor(setup, on_wave) if executor is None else executor(setup),
        RunOutput(directory, checkpoints=experiment.checkpoint, resumed=resumed),
        Listener(stopping=lambda: stops),
    )
    return done


def stopped(run: Played, directory: Path) -> None:
    """Stop after every round, and resume."""
    for number in range(run.tables["rounds"]):
        try:
            play(run.tables, directory, resumed=number > 0, stops=True)
        except Stopped:
            continue


def killed(run: Played, directory: Path) -> None:
    """Kill the process at random moments of the rounds, and resume what is on the disk then."""
    chance, resumed = random.Random(f"kills {run.tables['seed']}"), False
    for _ in range(KILLS):
        try:
            play(run.tables, directory, resumed=resumed, kill_at=1 + int(chance.random() * run.steps))
            return
        except Killed:
            shutil.rmtree(directory)
            directory.with_suffix(".killed").rename(directory)
            resumed = True
    play(run.tables, directory, resumed=True)


def other_every(run: Played, directory: Path) -> None:
    """Evaluate in other rounds, and save no checkpoint but the last."""
    every = run.tables["evaluation"]["every"]
    evaluation = {**run.tables["evaluation"], "every": 2 if every == 1 else 1}
    play({**run.tables, "evaluation": evaluation, "checkpoint": {"every": run.tables["rounds"]}}, directory)


def on_two(run: Played, directory: Path) -> None:
    """Play on two workers, which get everything as bytes and do their jobs in any order."""
    play(run.tables, directory, TwoWorkers)


def on_three(run: Played, directory: Path) -> None:
    """Play on three such workers."""
    play(run.tables, directory, Shuffled)


Play = Callable[[Played, Path], None]
"""A way of playing again what was played calmly, into a directory."""
PLAYS: Mapping[str, Play] = {
    "stopped": stopped,
    "killed": killed,
    "other every": other_every,
    "2 workers": on_two,
    "3 workers": on_three,
}


def differing(run: Played, name: str, again: Play, home: Path) -> Difference | None:
    """Play in one way and compare with the calm run. An error is a difference."""
    directory = home / name.replace(" ", "-")
    shutil.rmtree(directory, ignore_errors=True)
    try:
        again(run, directory)
    except Exception as error:  # noqa: BLE001 (the calm run had none)
        return Difference(name, f"{type(error).__name__}: {error}")
    words = difference(run.directory, directory, same_evaluations=name != "other every")
    return Difference(name, words) if words else None

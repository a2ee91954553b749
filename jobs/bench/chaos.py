"""`rayfl bench --chaos`: one experiment undisturbed, and again through every kind of loss; the bits must be the same.

It starts a Ray cluster of its own on this machine: a head without cores, on which driver and coordinator live, and two
nodes of one core. Nothing that belongs to another Ray is touched.
"""

import os
import queue
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.table import Table

from actors import session
from actors.faults import Cluster, add_node, kill_one, remove_node, small_cluster
from jobs.console import print_table
from rayfl.determinism.platform import describe
from rayfl.experiment.experiment import Experiment, to_toml
from rayfl.experiment.prepare import prepare
from rayfl.rounds.ledger import RoundRow
from rayfl.run_directory.record import create_run_directory, describe_run, read_run

METHODS = ("fedavg", "fedpse", "dispfl")
KILLS_A_ROUND = 4
"""A run ends, as it should, when the same call loses its actor ten times."""


@dataclass
class Story:
    """The course of a run: the number of kills, and the rounds that were played."""

    kills: int = 0
    rounds: list[int] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def repeated(self) -> int:
        """Rounds that were played more than once, each time but the first counted."""
        return len(self.rounds) - len(set(self.rounds))

    @property
    def seconds_a_round(self) -> float:
        """Mean seconds a round, from the end of the first round to that of the last."""
        return (self.moments[-1] - self.moments[0]) / max(1, len(self.moments) - 1)


@dataclass(frozen=True)
class Stage:
    """A cluster, an experiment, and how many kills a run must survive."""

    cluster: Cluster
    experiment: Experiment
    kills: int
    seed: int

    def play_or_resume(
        self, directory: Path, story: Story, after_round: Callable[[int], None] = lambda round: None
    ) -> None:
        """Play into `directory`, or go on with what lies there."""
        resumed = directory.exists()
        setup = prepare(self.experiment)
        if not resumed:
            create_run_directory(directory)
            describe_run(directory, self.experiment.as_dict(), describe(1), to_toml(self.experiment))

        def take_down(row: RoundRow, means: Mapping[str, float]) -> None:
            story.rounds.append(row.round)
            story.moments.append(time.monotonic())
            after_round(row.round)

        begun = time.monotonic()
        try:
            session.play_on_ray(self.experiment, setup, directory, take_down, resumed=resumed)
        finally:
            story.seconds += time.monotonic() - begun


def bench(methods: Sequence[str], kills: int, seed: int, rounds: int = 30) -> int:
    """Every scenario with every method; prints a table and returns an exit code: 1 where a bit differs."""
    table = Table("method", "scenario", "kills", "rounds repeated", "seconds lost a kill", "bits different")
    failed = False
    with tempfile.TemporaryDirectory(prefix="chaos") as scratch, small_cluster() as cluster:
        for method in methods:
            home = Path(scratch) / method
            stage = Stage(cluster, experiment(method, home, rounds), kills, seed)
            calm = Story()
            stage.play_or_resume(home / "undisturbed", calm)
            for name, scenario in SCENARIOS.items():
                print(f"{method}: {name}", flush=True)
                story = scenario(stage, home / name.replace(" ", "-"), calm)
                different = bits_different(home / "undisturbed", home / name.replace(" ", "-"))
                wanted = kills if scenario is kill_actors else 1
                failed |= different > 0 or story.kills < wanted
                lost = (story.seconds - calm.seconds) / max(1, story.kills)
                cells = (str(story.kills), str(story.repeated), f"{lost:.2f}", str(different))
                table.add_row(method, name, *cells)
    print_table(table)
    print(f"{len(methods)} methods, {len(SCENARIOS)} scenarios each: {'NOT ALL ARE EQUAL' if failed else 'all equal'}")
    return int(failed)


def experiment(method: str, directory: Path, rounds: int) -> Experiment:
    """20 unequal clients on digits, some of whom vanish; a checkpoint every 4 rounds."""
    peers = {"topology": "ring"} if method in ("dispfl", "dpsgd") else {}
    per_round = {} if peers else {"per_round": 10, "dropout_after_training": 0.1}
    settings: dict[str, Any] = {
        "name": method,
        "rounds": rounds,
        "data": "digits",
        "partition": {"name": "dirichlet-client", "alpha": 0.5},
        "clients": {"count": 20, **per_round},
        "model": {"name": "mlp", "hidden": [64]},
        "method": {"name": method, "lr": 0.05, "epochs": 10, "batch_size": 16},
        "runtime": {"actors": 2, "num_cpus": 1},
        "checkpoint": {"every": 4},
        "output": {"directory": str(directory), "report": False},
        **peers,
    }
    return Experiment(**settings)


def kill_actors(stage: Stage, directory: Path, calm: Story) -> Story:
    """SIGKILL for a client actor at work, each at a random moment of a random round."""
    story, chance = Story(), random.Random(stage.seed)
    # The last third is there for those that had to wait for an actor to kill.
    moments = Counter(chance.choices(range(2 * stage.experiment.rounds // 3), k=stage.kills))
    wanted: queue.Queue[bool] = queue.Queue()
    struck: Counter[int] = Counter()
    over = threading.Event()

    def ask(round: int) -> None:
        for _ in range(moments.pop(round, 0)):
            wanted.put(True)

    def kill() -> None:
        while wanted.get():
            time.sleep(chance.uniform(0, calm.seconds_a_round))
            while not over.is_set():
                round = len(story.rounds)
                if struck[round] < KILLS_A_ROUND and kill_one("ClientActor.call", chance):
                    story.kills += 1
                    struck[round] += 1
                    break
                time.sleep(0.02)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    try:
        stage.play_or_resume(directory, story, ask)
    finally:
        over.set()
        wanted.put(False)
        killer.join()
    return story


def lose_nodes(stage: Stage, directory: Path, calm: Story) -> Story:
    """A node is taken away, with the states that lie on it, and another one joins."""
    chance = random.Random(stage.seed)

    def exchange() -> int:
        remove_node(stage.cluster, chance)
        add_node(stage.cluster)
        return 1

    return _strike(stage, directory, chance.sample(range(2, stage.experiment.rounds - 2), 2), exchange)


def kill_coordinators(stage: Stage, directory: Path, calm: Story) -> Story:
    """SIGKILL for the coordinator, three times in a run."""
    chance = random.Random(stage.seed)
    moments = chance.sample(range(1, stage.experiment.rounds - 1), 3)
    return _strike(stage, directory, moments, lambda: kill_one("Coordinator", chance))


def _strike(stage: Stage, directory: Path, moments: list[int], kill: Callable[[], int]) -> Story:
    """Play, and `kill` once after each of the rounds `moments`; it returns how many it killed."""
    story = Story()

    def after_round(round: int) -> None:
        if round in moments:
            moments.remove(round)
            story.kills += kill()

    stage.play_or_resume(directory, story, after_round)
    return story


def stop_often(stage: Stage, directory: Path, calm: Story) -> Story:
    """The driver gives up after every third round, and the run is resumed."""
    story = Story()
    asked: list[int] = []

    def stop(round: int) -> None:
        # Once a play: the second signal would not wait for the round.
        if not asked and len(story.rounds) % 3 == 0 and round < stage.experiment.rounds - 1:
            asked.append(round)
            story.kills += 1
            os.kill(os.getpid(), signal.SIGINT)

    while not directory.exists() or not read_run(directory).finished:
        asked.clear()
        stage.play_or_resume(directory, story, stop)
    return story


Scenario = Callable[[Stage, Path, Story], Story]
SCENARIOS: Mapping[str, Scenario] = {
    "actors killed": kill_actors,
    "nodes lost": lose_nodes,
    "coordinator killed": kill_coordinators,
    "stopped and resumed": stop_often,
}


def bits_different(a: Path, b: Path) -> int:
    """Bits in which two runs differ: their records, but for the wall clock, and their models."""
    runs = [read_run(directory) for directory in (a, b)]
    total = 0
    for name in ("rounds", "clients", "metrics"):
        one, other = (getattr(run, name) for run in runs)
        for column in (column for column in one.column_names if column != "wall_s"):
            total += _difference(_bytes(one[column]), _bytes(other[column]))
    files = sorted({path.name for run in runs for path in (run.directory / "models").glob("*")})
    for name in files:
        pair = [run.directory / "models" / name for run in runs]
        total += _difference(*(path.read_bytes() if path.exists() else b"" for path in pair))
    return total + (0 if files and len(runs[0].rounds) else 1)


def _bytes(column: pa.ChunkedArray) -> bytes:
    return repr(column.to_pylist()).encode() if pa.types.is_dictionary(column.type) else column.to_numpy().tobytes()


def _difference(a: bytes, b: bytes) -> int:
    shorter = min(len(a), len(b))
    mixed = np.frombuffer(a[:shorter], np.uint8) ^ np.frombuffer(b[:shorter], np.uint8)
    return int(np.unpackbits(mixed).sum()) + 8 * abs(len(a) - len(b))

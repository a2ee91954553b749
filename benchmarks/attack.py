"""Attack one run: strike processes of a real `rayfl run` at random moments, and resume the run after each end.

The moments are uniform over a driver's expected life, from its start on; many may fall into one round. A strike that
finds no victim is tried again at another moment of the rest.
"""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from actors.errors import TRIES
from benchmarks.local_cluster import Nodes
from benchmarks.victims import ACTOR, COORDINATOR, DRIVER, GCS, RAYLET, Victim, pick, processes
from rayfl.run_directory import disk
from rayfl.run_directory.record import read_run

_ROUND_LINE = re.compile(r"\d+/\d+ rounds ")
"""The beginning of a round's line."""
LIMIT_S = 400.0
"""Seconds after which a driver counts as hanging."""
LOOK_S = 0.1
"""Seconds between looks for a victim."""


@dataclass(frozen=True)
class Calm:
    """An undisturbed run: its directory, the seconds of its driver, and the seconds of its rounds among them."""

    directory: Path
    seconds: float
    rounds_s: float
    rounds: int

    def left_s(self, directory: Path) -> float:
        """The expected seconds of a driver that starts or resumes the run in `directory`."""
        done = max(disk.checkpoints(directory), default=0)
        return self.seconds - self.rounds_s * done / self.rounds


@dataclass(frozen=True)
class Attack:
    """The strikes on one run, in their order. `settings`: overrides that change no bit; `pause_s`: seconds for which a
    process is stopped."""

    method: str
    name: str
    strikes: tuple[str, ...]
    seed: str
    settings: tuple[str, ...] = ()
    pause_s: float = 30.0


@dataclass
class Story:
    """The events of an attack. `lost`: why the run was lost; "" if it was not."""

    kills: int = 0
    rounds: list[int] = field(default_factory=list)
    seconds: float = 0.0
    lost: str = ""

    @property
    def repeated(self) -> int:
        """How many times rounds were played again."""
        return len(self.rounds) - len(set(self.rounds))


class Driver:
    """A `rayfl` process, whose output is read while it runs."""

    def __init__(self, *arguments: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        self.began_s = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jobs.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.output = self.errors = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        self.output, self.errors = self.process.communicate()

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for its end. Return False if it still runs."""
        try:
            self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return False
        # Do not wait long for other processes that still hold the pipes.
        self._reader.join(10.0)
        return True

    def end(self) -> None:
        """Kill the process if it still runs."""
        self.process.kill()
        self.wait(LIMIT_S)

    @property
    def rounds(self) -> list[int]:
        """The rounds that it reported, including those that it played again."""
        return [int(line.split("/")[0]) for line in self.output.splitlines() if _ROUND_LINE.match(line)]


@dataclass
class Run:
    """One run under attack: what its drivers share, and what strikes need. `seen`: its processes so far."""

    attack: Attack
    file: Path
    directory: Path
    calm: Calm
    chance: random.Random
    nodes: Nodes | None
    seen: set[Victim] = field(default_factory=set)
    story: Story = field(default_factory=Story)
    unstruck: int = 0

    def play(self, left: list[str]) -> None:
        """Play the run to its end, or until it is lost; remove the strikes that were made from `left`."""
        begun = time.monotonic()
        try:
            while not self.story.lost and not self._finished_by_a_driver(left):
                pass
        finally:
            self.story.seconds = time.monotonic() - begun
            # Kill what a killed driver left, and what is still stopped, but not the nodes' own processes.
            kept = {victim.pid for victim in processes(self.nodes.roots())} if self.nodes else set()
            for victim in self.seen:
                if victim.pid not in kept:
                    victim.strike(signal.SIGKILL)

    def _finished_by_a_driver(self, left: list[str]) -> bool:
        """Strike one driver until a strike ends it or it ends. Return True if the run is finished."""
        life_s, driver, done = self.calm.left_s(self.directory), Driver(*self._arguments()), list[str]()
        waiting, before = [(self.chance.uniform(0, life_s), strike) for strike in of_one_life(left)], self.story.kills
        try:
            while waiting and not (done and done[-1] in ENDINGS):
                moment, strike = waiting.pop(waiting.index(min(waiting)))
                if driver.wait(driver.began_s + moment - time.monotonic()):
                    break
                if struck := STRIKES[strike](self, driver):
                    self.story.kills += struck
                    left.remove(strike)
                    done.append(strike)
                else:
                    rest_s = self.chance.uniform(0, self.calm.left_s(self.directory))
                    waiting.append((time.monotonic() - driver.began_s + rest_s, strike))
                if time.monotonic() > driver.began_s + LIMIT_S:
                    break
            if not driver.wait(LIMIT_S):
                self.story.lost = f"it hangs after {', '.join(done) or 'no strike'}"
        finally:
            self.processes(driver)
            driver.end()
        self.story.rounds += driver.rounds
        self.unstruck += not done
        kills = self.story.kills - before
        self.story.lost = self.story.lost or fault(driver, self.directory, done, kills, self.unstruck)
        # A driver may be killed after its run is over.
        begun = (self.directory / "experiment.json").exists()
        return driver.process.returncode == 0 or (begun and read_run(self.directory).finished)

    def _arguments(self) -> list[str]:
        """A user's arguments: `run`, or `resume` if there is a run; `--overwrite` if it only began."""
        settings = [*self.attack.settings, *([f"runtime.address={self.nodes.address}"] if self.nodes else [])]
        if (self.directory / "experiment.json").exists():
            return ["resume", str(self.directory), *settings]
        again = ["--overwrite"] if self.directory.exists() else []
        return ["run", str(self.file), *settings, "--output", str(self.directory), *again]

    def processes(self, driver: Driver) -> list[Victim]:
        """The processes of the run; on nodes, also those of the nodes."""
        victims = processes([driver.process.pid, *(self.nodes.roots() if self.nodes else ())])
        self.seen.update(victims)
        return victims

    def signal(self, driver: Driver, kind: str, number: signal.Signals, least: int = 1) -> list[Victim]:
        """Send a signal to one process of a kind, or to `least` or more at once; to none if there are less."""
        most = least if least == 1 else self.chance.randint(least, 2 * least)
        victims = pick(self.processes(driver), kind, self.chance, most)
        return [victim for victim in victims if victim.strike(number)] if len(victims) >= least else []

    def kill(self, driver: Driver, kind: str, least: int = 1) -> int:
        """Kill one process of a kind, or `least` or more at once. Return their number."""
        return len(self.signal(driver, kind, signal.SIGKILL, least))

    def stop(self, driver: Driver, kind: str) -> int:
        """Stop one process of a kind, and continue it after the pause."""
        stopped = self.signal(driver, kind, signal.SIGSTOP)
        for victim in stopped:
            timer = threading.Timer(self.attack.pause_s, victim.strike, (signal.SIGCONT,))
            timer.daemon = True
            timer.start()
        return len(stopped)

    def fill_disk(self, driver: Driver) -> int:
        """Let no file that the coordinator writes grow beyond a random size until the driver ends.

        To a process this looks like a full disk, and it needs no disk and no privileges. During the rounds the
        coordinator writes the run directory.
        """
        sizes = [path.stat().st_size for path in (self.directory / "records").glob("*.arrows")]
        limit, struck = self.chance.randint(0, max(sizes, default=0)), set[Victim]()
        while not driver.wait(LOOK_S) and time.monotonic() < driver.began_s + LIMIT_S:
            these = {victim for victim in self.processes(driver) if victim.kind == COORDINATOR}
            struck |= {victim for victim in these - struck if victim.limit_files(limit)}
        return int(bool(struck))

    def lose_node(self, driver: Driver) -> int:
        """Kill a node with the states on it, and have another one join."""
        assert self.nodes is not None, "nodes are lost on a cluster"
        return self.nodes.exchange(self.chance)


STRIKES: Mapping[str, Callable[[Run, Driver], int]] = {
    "actor": lambda run, driver: run.kill(driver, ACTOR),
    "actors": lambda run, driver: run.kill(driver, ACTOR, least=2),
    "coordinator": lambda run, driver: run.kill(driver, COORDINATOR),
    "node": Run.lose_node,
    "gcs": lambda run, driver: run.kill(driver, GCS),
    "raylet": lambda run, driver: run.kill(driver, RAYLET),
    "driver": lambda run, driver: run.kill(driver, DRIVER),
    "stopped actor": lambda run, driver: run.stop(driver, ACTOR),
    "stopped coordinator": lambda run, driver: run.stop(driver, COORDINATOR),
    "full disk": Run.fill_disk,
}
"""The strikes by name; each returns the number of processes, nodes or disks that it struck."""
ENDINGS = ("driver", "gcs", "raylet", "full disk")
"""Strikes after which a driver must end."""


def play(attack: Attack, file: Path, home: Path, calm: Calm, nodes: Nodes | None = None) -> list[Run]:
    """Attack the experiment in `file` until all strikes are made; if a run ends before, in up to three runs."""
    chance, left = random.Random(attack.seed), list(attack.strikes)
    runs: list[Run] = []
    while left and len(runs) < 3 and not (runs and runs[-1].story.lost):
        run = Run(attack, file, home / f"run-{len(runs) + 1}", calm, chance, nodes)
        runs.append(run)
        run.play(left)
        # The machine may have been busier during the undisturbed run.
        calm = replace(calm, seconds=min(calm.seconds, max(run.story.seconds, calm.rounds_s)))
    return runs


def of_one_life(left: Sequence[str]) -> list[str]:
    """The strikes that the next driver may get: of those that end it, only one."""
    endings = [strike for strike in left if strike in ENDINGS]
    return [strike for strike in left if strike not in ENDINGS] + endings[:1]


def fault(driver: Driver, directory: Path, done: Sequence[str], kills: int, unstruck: int) -> str:
    """Why a driver's end after the strikes `done` is a fault; "" if the run is finished or can be resumed.

    `kills`: the number of processes struck. Many may fall into one start, and after enough in a row a run gives up by
    design (`actors.errors.TRIES`). `unstruck`: how many drivers of the run ended before any strike. Two may,
    because a busy machine may be too slow to start a Ray.
    """
    code, errors = driver.process.returncode, driver.errors.strip()
    ended = f"after {', '.join(done) or 'no strike'} its driver ended with code {code}"
    if code == 0:
        whole = not errors and read_run(directory).finished
        return "" if whole else f"{ended}: {errors or 'the run is not finished'}"
    last = done[-1] if done else ""
    if code == -signal.SIGKILL and last == "driver":
        return ""
    by_nature = last in ENDINGS or kills >= TRIES["coordinator"] or (not done and unstruck <= 2)
    if code == 1 and by_nature and re.fullmatch(r"rayfl: .+", errors):
        resumable = (directory / "experiment.json").exists()
        return "" if f"rayfl resume {directory}" in errors or not resumable else f"{ended}, without a way on: {errors}"
    return f"{ended}: {errors or driver.output[-2000:]}"

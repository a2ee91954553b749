"""The benchmark `chaos`: kill processes of runs at random moments, resume the runs, and compare the bits.

Each run is a real `rayfl run` with a Ray of its own, or on a cluster that is started for it. Nothing that belongs to
another Ray is touched.
"""

import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from actors.errors import ClusterError
from benchmarks.attack import Attack, Calm, Driver, Run, play
from benchmarks.figures import Column, Figures, Results
from benchmarks.local_cluster import Nodes, own_cluster
from benchmarks.run_bits import held
from benchmarks.victims import DRIVER, processes
from jobs.display import print_table
from rayfl import toml
from rayfl.choices.kinds import find, named
from rayfl.errors import RayflError
from rayfl.experiment.experiment import Experiment
from rayfl.methods.base import Method, PeerHalf
from rayfl.run_directory import disk
from rayfl.run_directory.record import read_run
from rayfl.schedules.base import Schedule
from rayfl.testing.executors import fitting_graph

METHODS = ("fedpse", "fedavg", "dispfl", "scaffold", "buffered fedavg", "buffered fedpse", "gossip dpsgd")
ON_NODES, STOPPED = "node", "stopped"
IN_TURN = ("gcs", "raylet", "full disk")
ALWAYS: Mapping[str, tuple[str, ...]] = {
    "actors and coordinator": ("actor",) * 10 + ("actors",) * 4 + ("coordinator",) * 4
}
BY_TURNS: tuple[Mapping[str, tuple[str, ...]], ...] = (
    {"driver, Ray, full disk": ("actor", "driver", "actors", "in turn", "actor")},
    {ON_NODES: ("node",) * 2, STOPPED: ("stopped actor", "stopped coordinator")},
)
"""The strikes of each kind on one method's run, for 25 kills per method. Every method gets those of `ALWAYS`. The two
kinds of `BY_TURNS` cost new Rays or minutes: each method gets one of them, and with the next seed the other one. "in
turn" stands for one of `IN_TURN`: the next one with every method and every seed."""
AT_ONCE = 3
"""Runs under attack at the same time, without those that are stopped or need nodes."""


class Row(NamedTuple):
    """A line of the table: one kind of strikes on one method."""

    method: str
    kind: str
    kills: int
    runs_lost: int
    rounds_repeated: int
    seconds_lost_a_kill: float
    bits_different: int


COLUMNS = (
    Column("method", "method"),
    Column("kind", "kind"),
    Column("kills", "kills"),
    Column("runs_lost", "runs lost"),
    Column("rounds_repeated", "rounds repeated"),
    Column("seconds_lost_a_kill", "seconds lost a kill", "{:.2f}"),
    Column("bits_different", "bits different"),
)


def bench_chaos(methods: Sequence[str], kills: int, seed: int, results: Results) -> int:
    """Strike runs in all ways; print a table and the number of differing bits; write `results`.

    Return an exit code: 1 if a bit differs, a run was lost, or fewer than `kills` kills were done. Raise RayflError
    before the first strike for an unknown method, for `kills` below 1, and if `results` cannot be written.
    """
    for name in methods:
        find(Method, scheduled(name)[1])
    if kills < 1:
        raise RayflError(f"--kills {kills} is not allowed; it must be a whole number of at least 1")
    results.require()
    begun, methods = time.monotonic(), list(dict.fromkeys(methods or METHODS))
    rows = play_all({method: experiment(method) for method in methods}, plan(methods, kills, seed))
    rows.sort(key=lambda row: methods.index(row.method))
    figures = Figures("rows", COLUMNS)
    for row in rows:
        figures.add(*row)
    print_table(figures.table())
    total = {name: sum(row._asdict()[name] for row in rows) for name in ("kills", "runs_lost", "bits_different")}
    results.write(figures, seed=seed, seconds=round(time.monotonic() - begun, 1), **total)
    if total["kills"] < kills:
        print(f"only {total['kills']} of {kills} kills were done: the runs ended before")
    print(f"kills: {total['kills']}, runs lost: {total['runs_lost']}, seconds: {time.monotonic() - begun:.0f}")
    print(f"bits different: {total['bits_different']}")
    return int(total["kills"] < kills or total["runs_lost"] > 0 or total["bits_different"] > 0)


def plan(methods: Sequence[str], kills: int, seed: int) -> list[Attack]:
    """Choose attacks that make at least `kills` kills. The longest come first."""
    share = kills / (25 * len(methods))
    attacks: list[Attack] = []
    for number, method in enumerate(methods):
        chance = random.Random(f"{seed} {method}")
        for kind, strikes in {**BY_TURNS[(number + seed) % len(BY_TURNS)], **ALWAYS}.items():
            # With the timeout a call is sent again before a stopped actor continues; without it the run waits.
            settings = chance.choice([(), ("runtime.call_timeout_s=10",)]) if kind == STOPPED else ()
            times = len(strikes) if kind == STOPPED else math.ceil(len(strikes) * share)
            wanted = [strikes[place * len(strikes) // times] for place in range(times)]
            chance.shuffle(wanted)
            in_turn = IN_TURN[(number + seed) % len(IN_TURN)]
            named = tuple(in_turn if strike == "in turn" else strike for strike in wanted)
            attacks.append(Attack(method, kind, named, f"{seed} {method} {kind}", settings))
    return sorted(attacks, key=lambda attack: attack.name in ALWAYS)


def play_all(experiments: Mapping[str, Experiment], attacks: Sequence[Attack]) -> list[Row]:
    """Play every experiment undisturbed, then all attacks, some at a time. Return a row per attack, in their order."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos")))
        # A method's name may contain a path, as in my_methods.py:Mine.
        homes = {method: scratch / str(number) for number, method in enumerate(experiments)}
        files = {method: home.with_suffix(".toml") for method, home in homes.items()}
        for method, each in experiments.items():
            files[method].write_text(toml.dumps(each.as_dict()), encoding="utf-8")
        # The nodes come first, because Ray starts none if the machine is too busy.
        on_nodes = [attack for attack in attacks if attack.name == ON_NODES]
        nodes = stack.enter_context(own_cluster()) if on_nodes else None
        pool, patient = (stack.enter_context(ThreadPoolExecutor(count)) for count in (AT_ONCE, 1))
        stack.enter_context(_ended_early(pool, patient))
        played = pool.map(lambda method: undisturbed(files[method], homes[method] / "undisturbed"), files)
        calm = dict(zip(files, played, strict=True))

        def attacked(attack: Attack, calm: Calm, nodes: Nodes | None = None) -> Row:
            begun, home = time.monotonic(), homes[attack.method] / attack.name.replace(" ", "-")
            row = evaluated(attack, play(attack, files[attack.method], home, calm, nodes))
            took = f"{time.monotonic() - begun:.0f} s"
            print(f"{attack.method}, {attack.name}: {row.kills} kills, {took}", file=sys.stderr, flush=True)
            return row

        rows: dict[Attack, Future[Row] | Row] = {}
        for attack in (attack for attack in attacks if attack.name != ON_NODES):
            lane = patient if attack.name == STOPPED else pool
            rows[attack] = lane.submit(attacked, attack, calm[attack.method])
        for attack in on_nodes:
            assert nodes is not None
            place = homes[attack.method] / "undisturbed on nodes"
            there = undisturbed(files[attack.method], place, f"runtime.address={nodes.address}")
            rows[attack] = attacked(attack, there, nodes)
        chosen = (rows[attack] for attack in attacks)
        return [row.result() if isinstance(row, Future) else row for row in chosen]


@contextmanager
def _ended_early(*pools: ThreadPoolExecutor) -> Iterator[None]:
    """Context manager: after an error or an interrupt in the block, start no further attack and kill all drivers."""
    try:
        yield
    except BaseException:
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for victim in processes([os.getpid()]):
            if victim.kind == DRIVER and victim.pid != os.getpid():
                victim.strike(signal.SIGKILL)
        raise


def undisturbed(file: Path, directory: Path, *settings: str) -> Calm:
    """Play an experiment without attacks. Raise ClusterError if it fails."""
    directory.parent.mkdir(exist_ok=True)
    driver = Driver("run", str(file), *settings, "--output", str(directory))
    driver.process.wait()
    seconds = time.monotonic() - driver.began_s
    driver.wait(0.0)
    if driver.process.returncode:
        raise ClusterError(f"an undisturbed run failed: {driver.errors or driver.output}")
    run = read_run(directory)
    return Calm(directory, seconds, float(run.rounds["wall_s"].to_numpy().sum()), len(run.rounds))


def evaluated(attack: Attack, runs: Sequence[Run]) -> Row:
    """The row of an attack. Print to stderr why a run was lost."""
    for run in runs:
        if run.story.lost:
            print(f"{attack.method}, {attack.name}: {run.directory.name} is lost: {run.story.lost}", file=sys.stderr)
    kills = sum(run.story.kills for run in runs)
    return Row(
        attack.method,
        attack.name,
        kills,
        sum(bool(run.story.lost) for run in runs),
        sum(run.story.repeated for run in runs),
        sum(run.story.seconds - run.calm.seconds for run in runs) / max(1, kills),
        sum(bits_different(run.calm.directory, run.directory) for run in runs if not run.story.lost),
    )


def scheduled(name: str) -> tuple[str, str]:
    """The schedule and the method that a name stands for: "buffered fedavg" or "fedavg"."""
    schedule, _, method = name.partition(" ")
    return (schedule, method) if schedule in named(Schedule) else ("synchronous", name)


def experiment(name: str, rounds: int = 80) -> Experiment:
    """Unequal clients on digits, some of which vanish; a checkpoint every 4 rounds. FedAvg's uplink has feedback.

    With a schedule ("buffered fedavg") clients of several versions are under way at every checkpoint.
    """
    schedule, method = scheduled(name)
    kind = find(Method, method)
    of_kind: dict[str, Any] = {"clients": {"count": 20, "per_round": 10, "dropout_after_training": 0.1}}
    exchanges = bool(kind.gather)
    can = kind.capabilities
    if issubclass(kind, PeerHalf):
        of_kind = {"clients": {"count": 10}, **({"topology": fitting_graph(can)} if exchanges else {})}
    if schedule != "synchronous":
        of_kind["schedule"] = {"name": schedule, **({"buffer": 4} if schedule == "buffered" else {})}
        of_kind["clients"]["examples_per_s"] = {"median": 200.0, "sigma": 1.0}
    if method == "fedavg":
        of_kind["uplink"] = {"name": "feedback", "inner": {"name": "topk", "keep_ratio": 0.1}}
    settings: dict[str, Any] = {
        "name": "chaos",
        "rounds": rounds,
        "data": "digits",
        "partition": {"name": "dirichlet-client", "alpha": 0.5},
        "model": {"name": "mlp", "hidden": [32]},
        "method": {"name": method, "lr": 0.05, "epochs": 1, "batch_size": 32},
        "evaluation": {"every": 4},
        "runtime": {"actors": 2, "num_cpus": 0.5, "object_store_memory_mb": 100},
        "checkpoint": {"every": 4},
        "output": {"report": False},
        **of_kind,
    }
    return Experiment(**settings)


def bits_different(a: Path, b: Path) -> int:
    """The number of bits in which two runs differ: in records without the wall clock, models and last states."""
    runs = [read_run(directory) for directory in (a, b)]
    total = 0
    for name in ("rounds", "clients", "metrics"):
        table, other_table = (getattr(run, name) for run in runs)
        for column in (column for column in table.column_names if column != "wall_s"):
            total += _difference(_bytes(table[column]), _bytes(other_table[column]))
    # One of the runs may lack its last checkpoint, if its disk was full at that moment.
    saved = [max(disk.checkpoints(directory), default=-1) for directory in (a, b)]
    if saved[0] == saved[1] == len(runs[0].rounds):
        places = [directory / "checkpoints" / f"{saved[0]:08d}" for directory in (a, b)]
        checkpoints = [{name: array.tobytes() for name, array in held(place).items()} for place in places]
        total += sum(
            _difference(*(checkpoint.get(name, b"") for checkpoint in checkpoints))
            for name in {*checkpoints[0], *checkpoints[1]}
        )
    for name in sorted({path.name for run in (a, b) for path in (run / "models").glob("*.safetensors")}):
        files = [run / "models" / name for run in (a, b)]
        total += _difference(*(path.read_bytes() if path.exists() else b"" for path in files))
    return total + (0 if any((a / "models").glob("*")) and len(runs[0].rounds) else 1)


def _bytes(column: pa.ChunkedArray) -> bytes:
    return repr(column.to_pylist()).encode() if pa.types.is_dictionary(column.type) else column.to_numpy().tobytes()


def _difference(a: bytes, b: bytes) -> int:
    shorter = min(len(a), len(b))
    mixed = np.frombuffer(a[:shorter], np.uint8) ^ np.frombuffer(b[:shorter], np.uint8)
    return int(np.unpackbits(mixed).sum()) + 8 * abs(len(a) - len(b))

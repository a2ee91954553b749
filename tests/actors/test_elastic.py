"""Nodes that join and leave: they are used, made up for and waited for, and no bit depends on them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors import pool
from actors.placement import Node, Placement
from actors.pool import RayExecutor
from rayfl.experiment.prepare import prepare
from rayfl.rounds.executor import InlineExecutor
from rayfl.run_directory.play_run import play_run
from tests.actors.toys import assert_same_run, experiment

CHANGING = """
from rayfl.determinism.process import prepare_process
prepare_process()
import json, logging, sys, time
from pathlib import Path
from ray.exceptions import ObjectLostError
from actors import faults, pool, session
from actors.errors import LostObjects
from rayfl.experiment.prepare import prepare
from rayfl.run_directory.checkpoint import Checkpoints
from rayfl.run_directory.play_run import play_run
from tests.actors.test_elastic import changing
import ray

pool.GROWTH_S = 0.0
seen, pending, said = {}, {1: "grow", 4: "shrink", 7: "grow"}, []
with faults.own_cluster(1) as nodes:
    chosen = changing(runtime={"address": nodes.address, "actors": 3})
    setup = prepare(chosen)
    with session.session(chosen.runtime):
        placement = session.placed(chosen.runtime, setup)
        executor = pool.RayExecutor(ray.put(setup), placement)
        added = []

        def until(count):
            deadline = time.monotonic() + 120
            while len(executor.pids) < count and time.monotonic() < deadline:
                executor._grow()
                time.sleep(0.1)

        def on_round(record):
            seen[record.row.round] = len(executor.pids)
            match pending.pop(record.row.round, None):
                case "grow":
                    while len(added) < (1 if record.row.round == 1 else 2):
                        added.append(nodes.add())
                    until(1 + len(added))
                case "shrink":
                    nodes.remove(added.pop())

        resumed = False
        while True:
            try:
                every = Checkpoints(every=1)
                play_run(setup, executor, Path(sys.argv[1]), on_round, checkpoints=every, resumed=resumed)
                break
            except (LostObjects, ObjectLostError) as error:
                resumed = True
        executor.close()
print(json.dumps([placement.notices, seen]))
"""


def changing(**given: Any) -> Any:
    """Scaffold, whose clients' states are large enough to lie on the nodes (0.15 MB): 10 rounds."""
    return experiment("scaffold", rounds=10, model={"name": "mlp", "hidden": [500]}, **given)


def output(program: str, *arguments: str) -> Any:
    """What a program prints as JSON, in a process of its own, whose main thread starts Ray."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_cluster_that_grows_shrinks_and_grows_gives_the_same_bits(tmp_path: Path) -> None:
    notices, seen = output(CHANGING, str(tmp_path / "changing"))
    assert [notice.partition(" (")[0] for notice in notices] == ["the cluster has room for 1 of 3 client actors"]
    ready = {int(round): count for round, count in seen.items()}
    # Three were asked for. A node joins after round 1, is lost after round 4, and two join after round 7.
    assert [ready[round] for round in (0, 1, 2, 4, 8, 9)] == [1, 1, 2, 2, 3, 3]
    assert ready[7] == 1, "the lost node's actor waits for room, and holds nobody up"
    setup = prepare(changing())
    play_run(setup, InlineExecutor(setup), tmp_path / "still", lambda record: None)
    assert_same_run(tmp_path / "changing", tmp_path / "still")


class Unstarted(RayExecutor):
    """Asks Ray for nothing: notes how many actors it would start."""

    def __init__(self, placement: Placement) -> None:
        self.placement, self.started = placement, list[int]()
        self.pids, self._starting, self._odd_nodes, self._next_look = {}, {}, set[str](), 0.0

    def _start(self, count: int = 1) -> None:
        self.started.append(count)
        self.pids |= {object(): 0 for _ in range(count)}


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        (Placement(2, 1.0, 0.0), []),
        # As many as a round can use, or as many as have room.
        (Placement(2, 1.0, 0.0, most=3), [2, 1]),
        (Placement(2, 1.0, 0.0, most=100), [2, 2, 4]),
        # A number was asked for at once, and what was lost since was started again by whoever lost it.
        (Placement(9, 1.0, 0.0, most=9), [9]),
        (Placement(2, 1.0, 0.0, most=100, labels={"zone": "west"}), [2]),
    ],
)
def test_a_pool_grows_with_its_cluster(placement: Placement, expected: list[int], monkeypatch: Any) -> None:
    clusters = [[Node("a", cores, 0.0, {}, "1"), Node("b", 2.0, 0.0, {}, "2")] for cores in (0.0, 2.0, 6.0, 2.0)]
    monkeypatch.setattr(pool, "GROWTH_S", 0.0)
    executor = Unstarted(placement)
    for cluster in clusters:
        monkeypatch.setattr(pool, "nodes", lambda cluster=cluster: cluster)
        executor._grow()
    assert executor.started == expected


def test_nodes_are_looked_for_once_in_a_while(monkeypatch: Any) -> None:
    looks: list[int] = []
    monkeypatch.setattr(pool, "nodes", lambda: looks.append(1) or [])
    executor = Unstarted(Placement(1, 1.0, 0.0, most=9))
    for _ in range(100):
        executor._grow()
    assert len(looks) == 1

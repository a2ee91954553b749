"""Nodes that join and leave: they are used, made up for and waited for, and no bit depends on them."""

import json
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from actors import pool
from actors.client import Joined
from actors.placement import Node, Placement
from actors.pool import LeavingNodes
from rayfl.experiment.prepare import prepare
from rayfl.rounds.executor import InlineExecutor
from rayfl.run_directory.play_run import RunOutput, play_run
from tests.actors.toys import assert_same_run, experiment
from tests.refusals import check_sentence

CHANGING = """
from rayfl.determinism.process import prepare_process
prepare_process()
import json, logging, sys, time
from pathlib import Path
from ray.exceptions import ObjectLostError
from actors import pool, session
from actors.errors import LostObjects
from actors.placement import place
from actors.ray_executor import RayExecutor
from benchmarks.local_cluster import own_cluster
from rayfl.experiment.prepare import prepare
from rayfl.run_directory.checkpoint import Checkpoints
from rayfl.run_directory.play_run import Listener, RunOutput, play_run
from tests.actors.test_elastic import changing
import ray

pool.GROWTH_S = 0.0
seen, pending, said = {}, {1: "grow", 4: "shrink", 7: "grow"}, []
with own_cluster(1) as nodes:
    chosen = changing(runtime={"address": nodes.address, "actors": 3})
    setup = prepare(chosen)
    with session.session(chosen.runtime):
        placement = place(chosen.runtime, most_calls=setup.most_actors)
        executor = RayExecutor(ray.put(setup), placement)
        added = []

        def until(count):
            deadline = time.monotonic() + 120
            while len(executor.pids) < count and time.monotonic() < deadline:
                executor.pool.grow()
                time.sleep(0.1)

        def on_round(row, means):
            seen[row.round] = len(executor.pids)
            match pending.pop(row.round, None):
                case "grow":
                    while len(added) < (1 if row.round == 1 else 2):
                        added.append(nodes.add())
                    until(1 + len(added))
                case "shrink":
                    nodes.remove(added.pop())

        resumed = False
        while True:
            try:
                every = Checkpoints(every=1)
                output = RunOutput(Path(sys.argv[1]), checkpoints=every, resumed=resumed)
                play_run(setup, executor, output, Listener(on_round))
                break
            except (LostObjects, ObjectLostError) as error:
                resumed = True
        executor.close()
print(json.dumps([placement.notices, seen]))
"""


def changing(**given: Any) -> Any:
    """Scaffold, whose clients' states are large enough to lie on the nodes (0.15 MB): 10 rounds."""
    return experiment("scaffold", **{"rounds": 10, "model": {"name": "mlp", "hidden": [500]}, **given})


def output(program: str, *arguments: str) -> Any:
    """What a program prints as JSON, in a process of its own, whose main thread starts Ray."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_cluster_that_grows_shrinks_and_grows_gives_the_same_bits(tmp_path: Path) -> None:
    notices, seen = output(CHANGING, str(tmp_path / "changing"))
    (notice,) = notices
    check_sentence(notice, ["1 of 3"])
    ready = {int(round): count for round, count in seen.items()}
    # Three were asked for. A node joins after round 1, is lost after round 4, and two join after round 7.
    assert [ready[round] for round in (0, 1, 2, 4, 8, 9)] == [1, 1, 2, 2, 3, 3]
    assert ready[7] == 1, "the lost node's actor waits for room, and holds nobody up"
    setup = prepare(changing())
    play_run(setup, InlineExecutor(setup), RunOutput(tmp_path / "still"))
    assert_same_run(tmp_path / "changing", tmp_path / "still")


CHOSEN = """
from rayfl.determinism.process import prepare_process
prepare_process()
import json, threading, time
from collections import Counter
from actors import session
from actors.errors import ClusterError
from actors.placement import Placement, place
from actors.ray_executor import RayExecutor
from benchmarks.local_cluster import own_cluster
from rayfl.errors import RayflError
from rayfl.experiment.runtime import Runtime
from rayfl.experiment.prepare import prepare
from tests.actors.toys import experiment
from ray._private.worker import global_worker
from ray.autoscaler.v2.sdk import get_cluster_resource_state
import ray

found = {}


def where(pool):
    try:
        return [joined.node for joined in pool.pool.ready.values()]
    finally:
        pool.close()
        # A node is free when its actors have ended: until then a pool that packs goes elsewhere.
        deadline = time.monotonic() + 60
        while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"] and time.monotonic() < deadline:
            time.sleep(0.1)


def demand():
    # What Ray's autoscaler reads: resources, how many such requests wait, labels that are asked for.
    state = get_cluster_resource_state(global_worker.gcs_client)
    return [
        [
            dict(each.request.resources_bundle),
            each.count,
            [label.label_key for one in each.request.label_selectors for label in one.label_constraints],
        ]
        for each in state.pending_resource_requests
    ]


def reached(wanted):
    # Ray's nodes report what waits every now and then.
    deadline = time.monotonic() + 60
    while (asked := demand()) != wanted and time.monotonic() < deadline:
        time.sleep(0.1)
    return asked


with own_cluster(0) as nodes:
    setup = prepare(experiment())
    runtime = Runtime(address=nodes.address, actors=2, wait_for_room_s=300.0, labels={"zone": "!west"})
    with session.session(runtime):
        reference = ray.put(setup)
        waiting = place(runtime, most_calls=setup.most_actors)
        found["notices"] = waiting.notices
        try:
            RayExecutor(reference, Placement(1, 1.0, 0.0, start_timeout_s=2.0, most=1))
        except ClusterError as error:
            found["too late"] = str(error)
        found["given up"] = reached([])
        pools = []
        opening = threading.Thread(target=lambda: pools.append(RayExecutor(reference, waiting)))
        opening.start()
        found["demand"] = reached([[{"CPU": 1.0}, 2, ["zone"]]])
        west = [nodes.add({"zone": "west"}), nodes.add({"zone": "west"})]
        found["west alone"] = opening.is_alive()
        plain = nodes.add()
        opening.join()
        found["first"] = where(pools[0]) == [plain]

        def pool_on(**given):
            chosen = Runtime(address=nodes.address, **given)
            return where(RayExecutor(reference, place(chosen, most_calls=setup.most_actors)))

        found["labels"] = sorted(pool_on(actors="all", labels={"zone": "west"})) == sorted(west)
        found["spread"] = sorted(Counter(pool_on(actors=6, num_cpus=0.25)).values())
        for labels in ({"zone": "east"}, {"rack": "7"}):
            try:
                pool_on(labels=labels)
            except RayflError as error:
                found[next(iter(labels))] = str(error)
        equipped = nodes.add(num_gpus=1)
        found["quarters"] = pool_on(actors="all", num_cpus=0.25, num_gpus=0.25) == [equipped] * 4
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_nodes_are_waited_for_and_chosen() -> None:
    found = output(CHOSEN)
    (notice,) = found["notices"]
    check_sentence(notice, ["runtime.wait_for_room_s=300", "2 actors", "num_cpus=1", "num_gpus=0", "zone=!west"])
    check_sentence(found["too late"], ["0 of 1", "num_cpus=1", "num_gpus=0", "runtime.start_timeout_s=2"])
    assert found["given up"] == [], "nothing waits for what was given up"
    wanted = [[{"CPU": 1.0}, 2, ["zone"]]]
    assert found["demand"] == wanted, "both actors are asked for, with their labels: an autoscaler acts on it"
    assert found["west alone"], "nodes with the wrong label are of no use"
    assert found["first"] and found["labels"]
    # A node holds four of these.
    assert found["spread"] == [2, 2, 2]
    assert found["quarters"], "four actors share the one GPU"
    check_sentence(found["zone"], ["runtime.labels", "zone='east'", "nodes have zone=west"])
    check_sentence(found["rack"], ["runtime.labels", "rack='7'", "zone=west"])


class Unstarted(pool.ActorPool):
    """Asks Ray for nothing: notes how many actors it would start."""

    def __init__(self, placement: Placement) -> None:
        self.placement, self.started = placement, list[int]()
        self.ready, self.idle, self._starting, self._odd_nodes, self._next_look = {}, deque(), {}, set[str](), 0.0
        self.leaving = LeavingNodes(looks=False)

    def start(self, count: int = 1) -> None:
        self.started.append(count)
        self.ready |= {object(): Joined(0, "", "", {}) for _ in range(count)}


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
        monkeypatch.setattr(pool, "living_nodes", lambda cluster=cluster: cluster)
        executor.grow()
    assert executor.started == expected


def test_nodes_are_looked_for_once_in_a_while(monkeypatch: Any) -> None:
    looks: list[int] = []
    monkeypatch.setattr(pool, "living_nodes", lambda: looks.append(1) or [])
    executor = Unstarted(Placement(1, 1.0, 0.0, most=9))
    for _ in range(100):
        executor.grow()
    assert len(looks) == 1

"""Nodes that are announced to end are left in time, and a run that finds no room waits for it and says so."""

import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray

from actors import pool
from actors.errors import ClusterError
from actors.placement import Placement
from actors.ray_executor import RayExecutor
from rayfl.experiment.prepare import prepare
from rayfl.rounds.executor import InlineExecutor, Job
from rayfl.rounds.worker_jobs import EvaluateJob, RoundInputs
from rayfl.run_directory.play_run import RunOutput, Stopped, play_run
from tests.actors.test_elastic import changing
from tests.actors.toys import assert_same_run, experiment, logged
from tests.refusals import check_sentence, refused


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_an_announced_node_is_left_and_room_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    setup, said = prepare(experiment()), "waiting for room"
    monkeypatch.setattr(pool, "LINE_S", 0.5)
    executor = RayExecutor(
        ray.put(setup),
        Placement(2, 1.0, 0.0, wait_for_room_s=math.inf, most=2),
        stopping=lambda: any(said in sentence for sentence in logged(caplog)),
    )
    try:
        (node,) = {joined.node for joined in executor.pool.ready.values()}
        shared, jobs = executor.put(RoundInputs(0, setup.plan(0))), [Job(EvaluateJob(()))]
        assert executor.run(shared, jobs)[0].result == ()
        # A run of which one actor has room, and which need not wait for the other one for ever.
        with pytest.raises(Stopped):
            RayExecutor(
                ray.put(setup),
                Placement(2, 2.0, 0.0, 100.0, wait_for_room_s=math.inf, most=2),
                stopping=lambda: any("runtime.start_timeout_s=100" in sentence for sentence in logged(caplog)),
            )
        check_sentence(logged(caplog)[-1], [said, "1 of num_cpus=2", "free"])
        caplog.clear()
        # Ray's own answer: this cluster has no second node.
        ends = {node: int(1000 * (time.time() + 100))}
        monkeypatch.setattr("ray._private.state.state.get_draining_nodes", lambda: ends)
        executor.pool.leaving.next_look = 0.0
        with pytest.raises(Stopped):
            executor.run(shared, jobs)
        assert not executor.pids and not executor.pool._room()
        announced, waiting = logged(caplog)
        check_sentence(announced, [node[:8], "checkpoint"])
        assert re.search(r"in (99|100) s\b", announced)
        check_sentence(waiting, ["2 of num_cpus=1", "num_gpus=0", "4 CPUs and 1 GPUs", "free"])
        executor.pool.close()
        with refused(names=["0 of 1", "num_cpus=8", "runtime.wait_for_room_s=0.5"], error=ClusterError):
            RayExecutor(ray.put(setup), Placement(1, 8.0, 0.0, wait_for_room_s=0.5, most=1))
    finally:
        executor.close()


def test_announcements_are_looked_for_once_a_second_and_never_on_a_ray_of_our_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []
    monkeypatch.setattr("ray._private.state.state.get_draining_nodes", lambda: looks.append(1) or {})
    joined, own = pool.LeavingNodes(True), pool.LeavingNodes(False)
    for _ in range(100):
        joined.look({})
        own.look({})
    assert len(looks) == 1 and own.next_look == math.inf


DRAINED = """
from rayfl.determinism.process import prepare_process
prepare_process()
import json, logging, sys, threading, time
from pathlib import Path
from actors import driver, errors, session
from actors.placement import place
from benchmarks.local_cluster import own_cluster
from rayfl.experiment.prepare import prepare
from rayfl.run_directory.play_run import Listener, RunOutput
from tests.actors.test_elastic import changing
import ray
from ray.core.generated import autoscaler_pb2

lines, rounds, ended, NOTICE_S = [], [], [], 4
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("rayfl").addHandler(handler)
with own_cluster(4) as nodes:
    chosen = changing(runtime={"address": nodes.address, "actors": 4}, rounds=120, checkpoint={"every": 0})
    setup = prepare(chosen)
    gcs = ray._raylet.GcsClient(address=nodes.address)

    def take_away():
        taken = [node["NodeID"] for node in ray.nodes() if node["Resources"].get("CPU")][:2]
        preempted = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        for node in taken:
            assert gcs.drain_node(node, preempted, "spot", int(1000 * (time.time() + NOTICE_S)))[0]
        time.sleep(NOTICE_S)
        for node in taken:
            nodes.remove(node)
        ended.append(len(rounds))

    taking = threading.Thread(target=take_away)

    def on_round(row, means):
        rounds.append(row.round)
        if row.round == 2:
            taking.start()

    with session.session(chosen.runtime):
        placement = place(chosen.runtime, most_calls=setup.most_actors)
        output = RunOutput(Path(sys.argv[1]), chosen.output.save_models, chosen.output.track, chosen.checkpoint)
        assert driver.play_on_ray(lambda: setup, placement, None, output, Listener(on_round))
    taking.join()
print(json.dumps([lines, rounds, ended]))
"""


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_two_nodes_that_are_taken_away_at_once_cost_no_round(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DRAINED, str(tmp_path / "taken")]
    (tmp_path / "taken").mkdir()
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines, rounds, (ended,) = json.loads(done.stdout.splitlines()[-1])
    assert 3 <= ended < 120 and rounds == list(range(120)), "no round is played again"
    announced = [line for line in lines if "will end" in line]
    assert len(announced) == 2
    for line in announced:
        assert re.search(r"127\.0\.0\.1 \(\w{8}\) will end in [2-4] s\b", line)
    assert not any("try" in line.split() for line in lines)
    setup = prepare(changing(rounds=120))
    play_run(setup, InlineExecutor(setup), RunOutput(tmp_path / "still"))
    assert_same_run(tmp_path / "taken", tmp_path / "still")

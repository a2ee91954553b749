"""`python -m benchmarks scale --nodes`: what comes to the coordinator is counted, and a small cluster is one."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import nodes
from benchmarks.figures import Results
from benchmarks.nodes import Measuring, experiment, pickled_bytes, play
from rayfl.experiment.prepare import prepare
from rayfl.rounds.executor import InlineExecutor, Job
from rayfl.run_directory.record import read_run
from tests.benchmarks.commands import benchmark
from tests.refusals import line_with, refused


def test_bytes_are_those_of_the_arrays_and_what_is_around_them():
    array = np.arange(1000, dtype=np.float32)
    assert 4000 < pickled_bytes(array) < 4300 and 8000 < pickled_bytes([array, array + 1]) < 8600
    assert pickled_bytes(None) < 20


def test_every_call_and_what_it_brings_is_counted():
    chosen = experiment(1, participants=6, rounds=3, executor="inline")
    measuring = Measuring(InlineExecutor(prepare(chosen)))
    ref = measuring.put({"w": np.zeros(100, np.float32)})
    before = measuring.fetched_bytes
    assert list(measuring.get(ref)) == ["w"] and measuring.fetched_bytes - before > 400
    assert measuring.run(ref, list[Job]()) == [] and measuring.calls == 0


def test_a_round_is_measured_by_its_means(tmp_path: Path):
    chosen = experiment(1, participants=6, rounds=nodes.WARMUP + 2, executor="inline")
    found = play(chosen, InlineExecutor(prepare(chosen)), tmp_path / "run")
    assert len(read_run(tmp_path / "run").rounds) == nodes.WARMUP + 2
    # 64 x 10 + 10 numbers of digits; their sum comes to the coordinator once a round at least.
    assert found["parameters"] == 650 and found["fetched_bytes"] > 4 * 650
    assert found["calls"] >= 1 and 0 < found["waited_s"] < found["elapsed_s"] and found["coordinator_cpu_s"] >= 0


def test_what_a_call_costs_is_told_from_what_a_round_costs():
    # 2 ms a call and 50 ms besides.
    rows = [{"calls": calls, "cpu_s": 0.05 + 0.002 * calls} for calls in (16.0, 32.0, 128.0)]
    assert nodes.by_calls(rows, "cpu_s") == pytest.approx((0.002, 0.05))


def test_the_table_and_the_file_say_what_a_call_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def played(module: str, *given: str) -> tuple[str, int]:
        actors = int(given[1])
        row = {column.key: 1.0 for column in nodes.COLUMNS if column.key not in ("actors", "peak_bytes")}
        changes = {"calls": 2 * actors, "coordinator_cpu_s": 0.004 * actors, "fetched_bytes": 1e5 + 6000 * actors}
        return json.dumps({**row, **changes, "parameters": 650}), 10**9

    monkeypatch.setattr(nodes, "run_watched", played)
    file = tmp_path / "nodes.json"
    nodes.bench_nodes(4, (8, 16), 100, Results("scale", file))
    line_with(capsys.readouterr().out, ["2.00 ms of CPU", "3.0 kB"])
    found = json.loads(file.read_text())
    assert found["call_cpu_s"] == pytest.approx(0.002) and found["rest_bytes"] == pytest.approx(1e5)
    nodes.bench_nodes(4, (8,), 100, Results("scale", file))
    assert " ms of CPU" not in capsys.readouterr().out and "call_cpu_s" not in json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.ray
def test_actors_on_simulated_nodes_play_the_rounds():
    # A process of its own starts the cluster.
    output, peak_bytes = nodes.run_watched("benchmarks.nodes", "2", "2", "8", "2")
    found = json.loads(output)
    assert found["median_s"] > 0 and found["actors_cpu_s"] >= 0 and found["ray_cpu_s"] >= 0
    assert found["calls"] >= 2 and found["fetched_bytes"] > 4 * 650 and peak_bytes > 2 * 10**8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", 0], "--nodes 0"),
        (["--nodes", 2, "--actors", 8, "--actors", 0], "--actors 0"),
        (["--nodes", 2, "--participants", 0], "--participants 0"),
        (["--nodes", 2, "--participants", 10**6], "clients"),
        (["--nodes", 2, "--actors", 10**9], "200.0 PB"),
        (["--actors", 8], "--nodes"),
        (["--participants", 8], "--nodes"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    refused(benchmark("scale", *arguments), names=[words])

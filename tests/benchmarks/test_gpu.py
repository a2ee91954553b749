"""`python -m benchmarks gpu`: its tables from processes that are played here, and every program of it on the CPU."""

import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from actors.errors import ClusterError
from benchmarks import gpu, gpu_program
from benchmarks.figures import Results
from benchmarks.gpu import Run, bench_gpu, run
from benchmarks.gpu_program import CODECS, GPU_WORKLOADS, MODELS, Task, Watched, experiment, watching
from benchmarks.peers.work import Work
from benchmarks.rounds import Measured
from rayfl.experiment.prepare import prepare
from tests.refusals import line_with, refused

FOUND: dict[str, dict[str, Any]] = {
    "bare": {"seconds": [0.4, 0.2, 0.3], "peak_bytes": 10**9, "busy": 0.5, "joules": 60.0},
    "rayfl": {
        "seconds": [0.1, 0.1, 0.1],
        "peak_bytes": 2 * 10**9,
        "busy": 0.9,
        "joules": 30.0,
        "width": 64,
        "rule_width": 64,
    },
    "codec": {"seconds": [0.002, 0.004, 0.003], "decoding": [0.001, 0.001, 0.002], "same_bytes": True},
}


class Played:
    """Processes that are not started; keeps what they were asked for. `slow`: the number of a step without an end."""

    def __init__(self, digest: str = "same", slow: int | None = None) -> None:
        self.asked: list[Sequence[Task]] = []
        self.digest = digest
        self.slow = slow

    def __call__(self, steps: Sequence[Sequence[Task]], limit_s: float) -> Iterator[list[dict[str, Any]] | None]:
        for tasks in steps:
            self.asked.append(tasks)
            yield None if len(self.asked) - 1 == self.slow else [self.figures(task) for task in tasks]

    def figures(self, task: Task) -> dict[str, Any]:
        found = {**vars(task), **FOUND[task.program], "digest": "same" if task.workers == 1 else self.digest}
        if task.engine == "loop":
            return {**found, "seconds": [0.3], "width": 1}
        return {**found, "seconds": [1.0 * task.part] if task.part > 1 else found["seconds"]}


def bench(results: Path, names: Sequence[str], run: Run, **given: Any) -> tuple[int, str, dict[str, Any]]:
    shown = io.StringIO()
    with redirect_stdout(shown):
        code = bench_gpu(names, Results("gpu", results), device="cpu", run=run, **given)
    return code, shown.getvalue(), json.loads(results.read_text())


def test_a_workload_is_compared_with_the_bare_loop_and_with_itself(tmp_path: Path):
    played = Played()
    code, shown, found = bench(tmp_path / "found.json", ["W1"], played)
    assert code == 0
    assert [[(task.program, task.part, task.workers, task.seed) for task in tasks] for tasks in played.asked] == [
        [("bare", 1, 1, 1)],
        *([("rayfl", 1, workers, 1)] for workers in (1, 1, 2, 4)),
        [("rayfl", 2, 1, 1), ("rayfl", 2, 1, 2)],
        [("rayfl", 4, 1, seed) for seed in (1, 2, 3, 4)],
    ]
    rows = {row["program"]: row for row in found["workloads"]}
    assert list(rows) == ["bare loop", "rayfl, 1 process", "rayfl, 2 processes", "rayfl, 4 processes"]
    # Medians 0.3 and 0.1; of several processes the slowest's; memory added up; 30 J in three rounds.
    assert [row["median_s"] for row in rows.values()] == [0.3, 0.1, 2.0, 4.0]
    assert [row["speed"] for row in rows.values()] == pytest.approx([1.0, 3.0, 0.15, 0.075])
    assert [row["peak_bytes"] / 1e9 for row in rows.values()] == [1, 2, 4, 8]
    assert (rows["rayfl, 1 process"]["joules_a_round"], rows["bare loop"]["joules_a_round"]) == (10.0, 20.0)
    assert found["same_bits"] == {"W1": True} and (found["device"], found["scale"]) == ("cpu", 1.0)
    line_with(shown, ["W1", "same bits", "(1, 2, 4) workers"])
    line_with(shown, ["cpu", "GPU"])


def test_rows_are_told_and_written_as_they_come_and_one_that_takes_too_long_is_left_out(tmp_path: Path):
    played, results = Played(slow=5), Results("gpu", tmp_path / "found.json")
    written = list[int]()

    def watched(steps: Sequence[Sequence[Task]], limit_s: float) -> Iterator[list[dict[str, Any]] | None]:
        assert limit_s == 7.0
        for together in played(steps, limit_s):
            yield together
            written.append(len(json.loads(results.path.read_text())["workloads"]) if results.path.exists() else 0)

    shown = io.StringIO()
    with redirect_stdout(shown):
        assert bench_gpu(["W1"], results, device="cpu", run=watched, limit_s=7.0) == 0
    # After the bare loop, the first run, three that only compare bits, two processes and four.
    assert written == [1, 2, 2, 2, 2, 2, 3]
    assert json.loads(results.path.read_text())["left_out"] == ["W1, rayfl, 2 processes"]
    line_with(shown.getvalue(), ["W1, rayfl, 2 processes", "left out", "7 s"])


def test_a_process_does_one_task_after_another_and_is_replaced_if_one_takes_too_long():
    quick, slow = Task("codec", "topk", rounds=1, entries=1000), Task("codec", "topk", rounds=10**9, entries=10**5)
    first, second, third, last = run([[quick], [quick], [slow], [quick, quick]], 20.0)
    assert first and second and last and third is None
    assert [len(together) for together in (first, second, last)] == [1, 1, 2]


@pytest.mark.parametrize("name", ["W3", "R18"])
def test_pfl_research_is_asked_for_the_same_work_on_the_same_device(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With the data, clients and rounds that the others have; its network is known for W1 to W3."""
    asked: list[tuple[str, ...]] = []

    def peer(program: str, *arguments: str, scratch: Path, python: str) -> Measured:
        asked.append((program, *arguments[1:], python))
        work, mine = Work.read(Path(arguments[0])), experiment(Task("rayfl", name, rounds=2, scale=0.01))
        assert (work.num_clients, work.plan.rounds, work.plan.per_round) == (100, mine.rounds, 10)
        assert len(work.labels) == len(prepare(mine).dataset.train.labels)
        assert (scratch / "benchmarks" / "peers" / "pfl_research.py").is_file()
        return Measured((0.6, 0.5, 0.7), "0.6", 10**9)

    monkeypatch.setattr(gpu, "rival", peer)
    monkeypatch.setattr(gpu, "installed", lambda pythons: {"pfl_research": pythons[0]})
    code, _, found = bench(tmp_path / "found.json", [name], Played(), python="there/python", rounds=2, scale=0.01)
    rows = {row["program"]: row for row in found["workloads"]}
    assert code == 0 and asked == ([("pfl_research", "cpu", "there/python")] if name == "W3" else [])
    assert ("pfl-research 0.6" in rows) == (name == "W3")
    if name == "W3":
        # The bare loop takes 0.3.
        row = rows["pfl-research 0.6"]
        assert (row["median_s"], row["speed"], row["peak_bytes"]) == (0.6, pytest.approx(0.5), 10**9)


def test_what_was_measured_is_kept_where_pfl_research_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def peer(*arguments: str, **given: object) -> Measured:
        raise ClusterError("it ended with exit code 1")

    monkeypatch.setattr(gpu, "rival", peer)
    monkeypatch.setattr(gpu, "installed", lambda pythons: {"pfl_research": pythons[0]})
    with refused(names=["pfl-research", "W3", "exit code 1"], error=ClusterError):
        bench(tmp_path / "found.json", ["W3", "sign"], Played(), python="there/python", rounds=2, scale=0.01)
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["workloads"]) == 4 and found["codecs"][0]["compressor"] == "sign"


def test_other_bits_are_an_exit_code(tmp_path: Path):
    code, shown, found = bench(tmp_path / "found.json", ["W3"], Played("another"))
    assert (code, found["same_bits"]) == (1, {"W3": False})
    line_with(shown, ["W3", "OTHER BITS"])


def test_an_architecture_is_measured_both_ways_and_top_k_in_milliseconds(tmp_path: Path):
    played = Played()
    code, shown, found = bench(tmp_path / "found.json", ["mlp", "topk"], played, scale=0.5)
    assert (code, found["workloads"], found["same_bits"]) == (0, [], {})
    assert [task.engine for (task,) in played.asked] == ["loop", "vmap", "auto"]
    assert (played.asked[-1][0].program, played.asked[-1][0].workload) == ("codec", "topk")
    (row,) = found["models"]
    assert (row["loop_s"], row["vmap_s"], row["speed"]) == (0.3, 0.1, pytest.approx(3.0))
    assert (row["width"], row["rule"]) == (64, "stacks of 64")
    line_with(shown, ["64 clients", "64 images"])
    assert found["codecs"] == [
        {
            "compressor": "topk",
            "entries": 5_500_000,
            "milliseconds": pytest.approx(3.0),
            "decode_milliseconds": pytest.approx(1.0),
            "same_bytes": True,
        }
    ]


def test_other_bytes_are_an_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(FOUND["codec"], "same_bytes", False)
    assert bench(tmp_path / "found.json", ["sign"], Played())[0] == 1


def in_turn(steps: Sequence[Sequence[Task]], limit_s: float) -> Iterator[list[dict[str, Any]]]:
    """The programs one after another in this process, which need not load torch for each."""
    yield from ([gpu_program.PROGRAMS[task.program](task) for task in tasks] for tasks in steps)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_small_bench_runs_whole(engine: Literal["loop", "vmap"], tmp_path: Path):
    """A workload with its bare loop and its bits, an architecture and every compressor."""
    names = ["W2", "logistic", *CODECS]
    code, shown, found = bench(tmp_path / "found.json", names, in_turn, engine=engine, rounds=1, scale=0.002)
    assert (code, found["same_bits"]) == (0, {"W2": True})
    assert found["workloads"][0]["program"] == "bare loop"
    assert {row["width"] for row in found["workloads"][1:2]} == {1 if engine == "loop" else 10}
    assert all(row["median_s"] > 0 for row in found["workloads"])
    assert [row["model"] for row in found["models"]] == ["logistic"]
    assert {row["compressor"]: row["same_bytes"] for row in found["codecs"]} == dict.fromkeys(CODECS, True)
    line_with(shown, ["W2", "same bits"])


def test_processes_are_started_and_asked(tmp_path: Path):
    code, _, found = bench(tmp_path / "found.json", ["topk"], run, rounds=2, scale=0.001)
    assert code == 0 and found["codecs"][0]["entries"] == 11_000
    assert found["codecs"][0]["milliseconds"] > found["codecs"][0]["decode_milliseconds"] > 0


def test_a_process_that_fails_is_named():
    with refused(names=["codec nothing", "exit code 1"], error=RuntimeError):
        [*run([[Task("codec", "nothing", entries=10)]], 60.0)]


@pytest.mark.parametrize(
    ("names", "given", "facts"),
    [
        (["W9"], {}, ["'W9'", "did you mean"]),
        (["W1"], {"precision": "tf32"}, ["--precision tf32", "'cpu'", "fp32", "bf16"]),
        (["W1"], {"rounds": 0}, ["--rounds 0", "at least 1"]),
        (["W1"], {"scale": 2.0}, ["--scale 2", "(0, 1]"]),
        (["W1"], {"python": sys.executable}, [f"--peers-python {sys.executable}", "pfl-research", "pip install"]),
        (["W1"], {"python": "p", "precision": "bf16"}, ["--peers-python", "--precision fp32", "bf16"]),
        (["W1"], {"device": "cuda"}, ["--device cuda", "GPU", "--device cpu"]),
    ],
)
def test_what_cannot_be_measured_is_refused_first(
    names: list[str], given: dict[str, Any], facts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    played = Played()
    with refused(names=facts):
        bench_gpu(names, Results("gpu", tmp_path / "found.json"), **{"device": "cpu", "run": played, **given})
    assert played.asked == [] and not (tmp_path / "found.json").exists()


def test_workloads_have_their_sizes():
    """50 of 1000 clients take part; of four processes each has a fourth of them. Nine tenths are for training."""
    whole, fourth = (experiment(Task("rayfl", "W1", part=part)) for part in (1, 4))
    assert (whole.clients.count, whole.clients.per_round, fourth.clients.per_round) == (1000, 50, 12)
    colour = experiment(Task("rayfl", "R18", rounds=2))
    assert (colour.model.name, colour.rounds, colour.runtime.executor) == ("resnet18", 3, "inline")
    assert set(GPU_WORKLOADS) == {"W1", "W2", "W3", "R18"}
    for name in MODELS:
        assert experiment(Task("rayfl", name)).model.name == name


@pytest.mark.parametrize(
    "task",
    [
        Task("rayfl", "W3", rounds=1, scale=0.01),
        Task("bare", "W1", rounds=1, scale=0.05),
        Task("rayfl", "mlp", engine="vmap", precision="bf16", rounds=1, scale=0.1),
        Task("codec", "topk", rounds=2, entries=5000),
    ],
    ids=lambda task: f"{task.program}-{task.workload}",
)
def test_every_program_runs_on_the_cpu(task: Task, capsys: pytest.CaptureFixture[str]):
    gpu_program.main(json.dumps([vars(task)]))
    found = json.loads(capsys.readouterr().out)
    assert len(found["seconds"]) == task.rounds and min(found["seconds"]) > 0
    assert found["peak_bytes"] > 10**7 and (found["busy"], found["joules"]) == (None, None)
    if task.program == "rayfl":
        assert found["width"] == (16 if task.engine == "vmap" else 1) and len(found["digest"]) == 64


def test_what_nvidia_smi_says_is_read():
    """One line has no power. Ten seconds at 300 W are 3 kJ."""
    watched = Watched()
    watched.read("80, 300.5\n40, [N/A]\n60, 299.5\n")
    assert watched.figures(10.0) == {"busy": pytest.approx(0.6), "joules": pytest.approx(3000.0)}
    assert Watched().figures(10.0) == {"busy": None, "joules": None}


def test_nvidia_smi_is_asked_on_a_gpu_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\ntouch asked\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with watching("cpu"):
        pass
    assert not Path("asked").exists()
    with watching("cuda") as watched:
        while not Path("asked").exists():
            os.sched_yield()
    assert watched.busy_percent == []

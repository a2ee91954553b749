"""`rayfl bench gpu`: its tables from processes that are played here, and every program of it on the CPU."""

import io
import json
import os
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.bench import gpu_program
from jobs.bench.figures import Results
from jobs.bench.gpu import bench_gpu
from jobs.bench.gpu_program import GPU_WORKLOADS, MODELS, Task, Watched, experiment, watching
from rayfl.settings import SettingsError

FOUND: dict[str, dict[str, Any]] = {
    "bare": {"seconds": [0.4, 0.2, 0.3], "peak_bytes": 10**9, "busy": 0.5, "joules": 60.0},
    "rayfl": {"seconds": [0.1, 0.1, 0.1], "peak_bytes": 2 * 10**9, "busy": 0.9, "joules": 30.0, "width": 64},
    "topk": {"seconds": [0.002, 0.004, 0.003], "peak_bytes": 0, "busy": None, "joules": None},
}


class Played:
    """Processes that are not started; keeps what they were asked for."""

    def __init__(self, digest: str = "same") -> None:
        self.asked: list[Sequence[Task]] = []
        self.digest = digest

    def __call__(self, tasks: Sequence[Task]) -> list[dict[str, Any]]:
        self.asked.append(tasks)
        return [self.figures(task) for task in tasks]

    def figures(self, task: Task) -> dict[str, Any]:
        found = {**vars(task), **FOUND[task.program], "digest": "same" if task.workers == 1 else self.digest}
        if task.engine == "loop":
            return {**found, "seconds": [0.3], "width": 1}
        return {**found, "seconds": [1.0 * task.part] if task.part > 1 else found["seconds"]}


def bench(results: Path, names: Sequence[str], run: Played, **given: Any) -> tuple[int, str, dict[str, Any]]:
    shown = io.StringIO()
    with redirect_stdout(shown):
        code = bench_gpu(names, Results("gpu", results), device="cpu", run=run, **given)
    return code, shown.getvalue(), json.loads(results.read_text())


def test_a_workload_is_compared_with_the_bare_loop_and_with_itself(tmp_path: Path):
    run = Played()
    code, shown, found = bench(tmp_path / "found.json", ["W1"], run)
    assert code == 0
    assert [[(task.program, task.part, task.workers, task.seed) for task in tasks] for tasks in run.asked] == [
        [("bare", 1, 1, 1)],
        [("rayfl", 1, 1, 1)],
        [("rayfl", 2, 1, 1), ("rayfl", 2, 1, 2)],
        [("rayfl", 4, 1, seed) for seed in (1, 2, 3, 4)],
        *([("rayfl", 1, workers, 1)] for workers in (1, 2, 4)),
    ]
    rows = {row["program"]: row for row in found["workloads"]}
    assert list(rows) == ["rayfl, 1 process", "rayfl, 2 processes", "rayfl, 4 processes", "bare loop"]
    # Medians 0.3 and 0.1; of several processes the slowest's; memory added up; 30 J in three rounds.
    assert [row["median_s"] for row in rows.values()] == [0.1, 2.0, 4.0, 0.3]
    assert [row["speed"] for row in rows.values()] == pytest.approx([3.0, 0.15, 0.075, 1.0])
    assert [row["peak_bytes"] / 1e9 for row in rows.values()] == [2, 4, 8, 1]
    assert (rows["rayfl, 1 process"]["joules_a_round"], rows["bare loop"]["joules_a_round"]) == (10.0, 20.0)
    assert found["same_bits"] == {"W1": True} and (found["device"], found["scale"]) == ("cpu", 1.0)
    assert "W1: the same bits twice, and for (1, 2, 4) workers" in shown
    assert "of which no figure is one of a GPU" in shown


def test_other_bits_are_an_exit_code(tmp_path: Path):
    code, shown, found = bench(tmp_path / "found.json", ["W3"], Played("another"))
    assert (code, found["same_bits"]) == (1, {"W3": False})
    assert "W3: OTHER BITS twice" in shown


def test_an_architecture_is_measured_both_ways_and_top_k_in_milliseconds(tmp_path: Path):
    run = Played()
    code, shown, found = bench(tmp_path / "found.json", ["mlp", "topk"], run, scale=0.5)
    assert (code, found["workloads"], found["same_bits"]) == (0, [], {})
    assert [task.engine for (task,) in run.asked] == ["loop", "vmap", "auto", "auto"]
    (row,) = found["models"]
    assert (row["loop_s"], row["vmap_s"], row["speed"]) == (0.3, 0.1, pytest.approx(3.0))
    assert (row["width"], row["rule"]) == (64, "stacks of 64")
    assert found["top_k"] == {"entries": 5_500_000, "milliseconds": pytest.approx(3.0)}
    assert "top-k 10 % of 5,500,000 numbers: 3.0 ms" in shown


@pytest.mark.parametrize(
    ("names", "given", "sentence"),
    [
        (["W9"], {}, "unknown workload 'W9': did you mean "),
        (["W1"], {"precision": "tf32"}, "--precision tf32 is for GPUs, and the device is 'cpu'; give fp32 or bf16"),
        (["W1"], {"rounds": 0}, "--rounds 0 is not allowed; it must be a whole number of at least 1"),
        (["W1"], {"scale": 2.0}, "--scale 2 is outside (0, 1]"),
        (["W1"], {"device": "cuda"}, "--device cuda needs a GPU, and torch sees none here; give --device cpu"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(
    names: list[str], given: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = Played()
    with pytest.raises(SettingsError) as caught:
        bench_gpu(names, Results("gpu", tmp_path / "found.json"), **{"device": "cpu", "run": run, **given})
    assert str(caught.value).startswith(sentence)
    assert run.asked == [] and not (tmp_path / "found.json").exists()


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
        Task("topk", rounds=2, entries=5000),
    ],
    ids=lambda task: f"{task.program}-{task.workload}",
)
def test_every_program_runs_on_the_cpu(task: Task, capsys: pytest.CaptureFixture[str]):
    gpu_program.main(json.dumps(vars(task)))
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

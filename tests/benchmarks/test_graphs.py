"""`python -m benchmarks graphs`: rows of processes that are played here, and its programs on the CPU."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from benchmarks import graphs, graphs_program
from benchmarks.figures import Results
from benchmarks.graphs_program import FASHION, GraphTask
from tests.refusals import refused


class PlayedProcess:
    """A process that is not started. `slow`, `wrong`: a task that never ends, and one with other bits."""

    asked: list[GraphTask]
    slow, wrong = "", ""

    def __init__(self, tasks: Sequence[GraphTask], module: str) -> None:
        self.tasks = [*tasks]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def figures(self, task: GraphTask, limit_s: float) -> dict[str, Any] | None:
        assert task == self.tasks.pop(0)
        self.asked.append(task)
        if task.workload == self.slow:
            return None
        digest = "other" if task.graphs and task.workload == self.wrong else "same"
        seconds = [0.3 if task.program == "bare" else 0.1]
        return {
            "seconds": seconds,
            "digest": digest,
            "same": task.workload != self.wrong,
            "reasons": {},
            "peak_bytes": 1,
        }


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> type[PlayedProcess]:
    played = type("Played", (PlayedProcess,), {"asked": []})
    monkeypatch.setattr(graphs, "Process", played)
    return played


def bench(path: Path, *groups: str, **given: Any) -> tuple[int, dict[str, Any]]:
    code = graphs.bench_graphs(groups, Results("graphs", path), device="cpu", **given)
    return code, json.loads(path.read_text())


def test_what_is_known_is_not_measured_again_and_what_was_late_is(process: type[PlayedProcess], tmp_path: Path):
    process.slow = "vgg11"
    code, found = bench(tmp_path / "found.json", "models", "W1")
    assert code == 0 and found["left_out"] == [f"vgg11 {way}" for way in ("bare", "rayfl", "rayfl, graphs")]
    # The most important first, whatever the order of the arguments.
    assert process.asked[0].workload == "W1" and found["rows"]["W1 rayfl, graphs"]["seconds"] == [0.1]
    known = len(process.asked)
    process.slow = ""
    code, found = bench(tmp_path / "found.json", "models", "W1")
    assert [task.workload for task in process.asked[known:]] == ["vgg11"] * 3 and not found["left_out"]


def test_other_bits_and_no_time_are_told(
    process: type[PlayedProcess], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    process.wrong = "fedavg"
    assert bench(tmp_path / "methods.json", "methods")[0] == 1
    assert "bits fedavg has other bits" in capsys.readouterr().out
    process.wrong = "W1"
    assert bench(tmp_path / "w1.json", "W1")[0] == 1
    assert "W1 rayfl, graphs has other bits" in capsys.readouterr().out
    code, found = bench(tmp_path / "late.json", "W3", budget_s=0.0)
    assert code == 0 and not found["rows"] and "W3 bare" in found["left_out"]


def test_an_unknown_group_is_refused(tmp_path: Path):
    with refused(names=["methos", "methods"]):
        bench(tmp_path / "found.json", "methos")


@pytest.mark.parametrize(
    "task",
    [
        GraphTask("method", "fedprox", part=8),
        GraphTask("rayfl", "W1", rounds=1, scale=0.01, graphs=True),
        *(GraphTask("rayfl", FASHION, rounds=1, scale=0.01, graphs=True, method=name) for name in ("fedpse", "dispfl")),
    ],
    ids=lambda task: f"{task.program}-{task.workload}-{task.method}",
)
def test_every_program_runs_on_the_cpu(task: GraphTask, capsys: pytest.CaptureFixture[str]):
    graphs_program.main(json.dumps([vars(task)]))
    found = json.loads(capsys.readouterr().out)
    assert "error" not in found and min(found["seconds"]) > 0
    assert found.get("same", True) and not found["reasons"]


def test_a_task_that_fails_leaves_the_others(capsys: pytest.CaptureFixture[str]):
    graphs_program.main(
        json.dumps([vars(GraphTask("method", "nothing")), vars(GraphTask("codec", "topk", entries=99))])
    )
    failed, done = map(json.loads, capsys.readouterr().out.splitlines())
    assert "nothing" in failed["error"] and done["same_bytes"]

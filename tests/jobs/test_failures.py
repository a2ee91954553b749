"""What a command says of an exception."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from actors.errors import ClusterError
from jobs import failures, python_api
from rayfl.errors import RayflError
from rayfl.run_directory.record import read_run
from tests.jobs.commands import rayfl
from tests.refusals import check_sentence, line_with


def of(raising) -> tuple[str, int]:
    try:
        raising()
    except Exception as error:  # noqa: BLE001
        return failures.sentence_and_code(error)
    raise AssertionError("nothing was raised")


def raise_(error: Exception):
    raise error


def test_mistakes_and_failures_keep_their_words():
    assert of(lambda: raise_(RayflError("rounds=0 is too few"))) == ("rounds=0 is too few", 2)
    assert of(lambda: raise_(RayflError("key 'a\nb\x1b'"))) == (r"key 'a\nb\x1b'", 2)
    sentence, code = of(lambda: raise_(ClusterError("Ray is gone")))
    assert "Ray is gone" in sentence and code == 1
    sentence, code = of(lambda: Path("/proc/none/x").write_text(""))
    check_sentence(sentence, ["/proc/none/x", os.strerror(errno.ENOENT).lower()])
    assert code == 2


@pytest.mark.parametrize(
    ("raising", "words"),
    [
        (lambda: np.repeat([1], -1), "ValueError: "),
        (lambda: int("x"), "ValueError: invalid literal for int()"),
        (lambda: json.loads("{"), "JSONDecodeError: Expecting"),
        (lambda: int("9" * 5000), "ValueError: Exceeds the limit"),
        (lambda: raise_(RecursionError("too\ndeep")), "RecursionError: too deep"),
        (lambda: 2.0**5000, "OverflowError: "),
        (lambda: raise_(RuntimeError("")), "RuntimeError"),
    ],
)
def test_what_nobody_expected_is_one_sentence_that_names_the_variable(raising, words):
    sentence, code = of(raising)
    assert code == 1, "a ValueError that is not ours is a bug like any other"
    check_sentence(sentence, [words, "RAYFL_TRACEBACK=1"])
    assert "RuntimeError:" not in sentence


def test_memory_that_ran_out_is_named():
    for raising in (lambda: np.empty(2**60, np.uint8), lambda: raise_(RuntimeError("can't allocate memory: you"))):
        sentence, code = of(raising)
        check_sentence(sentence, ["this machine", "memory"])
        assert code == 1 and "RAYFL_TRACEBACK" not in sentence


def test_no_command_shows_a_traceback_unless_it_is_asked_for(tmp_path, monkeypatch):
    file = tmp_path / "a.toml"
    file.write_text(
        'rounds = 1\ndata = "mine.py:Mine"\npartition = "iid"\nmodel = "mlp"\nclients = {count = 2}\n'
        'method = {name = "fedavg", lr = 0.1}\n'
    )
    (tmp_path / "mine.py").write_text(
        "from rayfl.data.datasets import Source\n\n\nclass Mine(Source):\n    def load(self):\n        {}['nothing']\n"
    )
    quiet = rayfl("run", file, "--inline")
    assert quiet.exit_code == 1
    facts = ["Mine.load", "mine.py:6", "KeyError: 'nothing'", "RAYFL_TRACEBACK=1"]
    check_sentence(quiet.stderr.removesuffix("\n"), facts)
    monkeypatch.setenv(failures.TRACEBACK, "1")
    shown = rayfl("run", file, "--inline").stderr
    assert "Traceback (most recent call last)" in shown and "RAYFL_TRACEBACK" not in shown


MINE = """
from rayfl.data.datasets import Source
from rayfl.errors import RayflError


class Mine(Source):
    size: int

    def load(self):
        if self.size:
            raise ValueError("no such shape")
        raise RayflError("=0 examples are too few", key=("data", "size"))
"""


@pytest.mark.parametrize(
    ("size", "code", "facts"),
    [(1, 1, ["Mine.load", "mine.py", "ValueError: no such shape"]), (0, 2, ["data.size=0 examples are too few"])],
)
def test_an_error_of_a_plug_in_names_it_and_its_refusal_is_a_sentence(
    tmp_path: Path, size: int, code: int, facts: list[str]
):
    (tmp_path / "mine.py").write_text(MINE)
    file = tmp_path / "a.toml"
    file.write_text(
        f'rounds = 1\ndata = {{name = "mine.py:Mine", size = {size}}}\npartition = "iid"\nmodel = "mlp"\n'
        'clients = {count = 2}\nmethod = "fedavg"\n'
    )
    result = rayfl("run", file, "--inline", "--output", tmp_path / "run")
    assert result.exit_code == code
    check_sentence(result.stderr.removesuffix("\n"), facts)


LATE = """
from rayfl.methods.server.fedavg import FedAvg


class Late(FedAvg):
    def server_update(self, server, received, delivered, ctx):
        if ctx.round == 2:
            raise ValueError("mine is wrong")
        return super().server_update(server, received, delivered, ctx)
"""
LATE_FACTS = ["round 2", "Late.server_update", "late.py, line 8", "ValueError: mine is wrong"]


def write_late(folder: Path) -> Path:
    (folder / "late.py").write_text(LATE)
    file = folder / "a.toml"
    file.write_text(
        'rounds = 4\ndata = "digits"\npartition = "iid"\nmodel = "logistic"\nclients = {count = 2}\n'
        'method = {name = "late.py:Late", lr = 0.1}\ncheckpoint = {every = 1}\n'
    )
    return file


def test_an_error_of_ones_own_method_is_no_mistake_and_the_run_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = rayfl("run", write_late(tmp_path), "--inline", "--output", tmp_path / "r")
    facts = [*LATE_FACTS, f"rayfl resume {tmp_path / 'r'}", "RAYFL_TRACEBACK=1"]
    assert result.exit_code == 1
    check_sentence(result.stderr.splitlines()[-1], facts)
    assert len(read_run(tmp_path / "r").rounds) == 2
    again = rayfl("resume", tmp_path / "r", "runtime.executor=inline")
    assert again.exit_code == 1 and again.stderr.count("rayfl resume") == 1
    line_with(again.stderr, facts)
    monkeypatch.setenv(failures.TRACEBACK, "1")
    shown = rayfl("resume", tmp_path / "r", "runtime.executor=inline").stderr
    assert 'raise ValueError("mine is wrong")' in shown and "RAYFL_TRACEBACK" not in shown


def test_a_sweep_keeps_the_run_whose_method_failed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ("--inline", "--dir", tmp_path / "s", "sweep.seed=[1, 2]")
    result = rayfl("sweep", write_late(tmp_path), *arguments)
    assert result.exit_code == 1
    kept = sorted(path.parent for path in (tmp_path / "s").glob("*/experiment.json"))
    assert [len(read_run(path).rounds) for path in kept] == [2, 2]
    for path in kept:
        line_with(result.stderr, [*LATE_FACTS, f"rayfl resume {path}"])


EXITING = {
    "the file": "import sys\n\nsys.exit(0)",
    "data": "class Mine(Source):\n    def load(self):\n        sys.exit(0)",
    "model": "class Mine(torch.nn.Linear):\n    def __init__(self):\n        sys.exit(0)",
    "forward": "class Mine(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(8, 10)\n\n"
    "    def forward(self, inputs):\n        return self.training and sys.exit(0) or super().forward(inputs[:, 0, 0])",
    "work": "class Mine(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(8, 10)\n\n"
    "    def forward(self, x):\n        return len(x) > 2 and sys.exit(0) or super().forward(x[:, 0, 0])",
    "hook": "class Mine(FedAvg):\n    def finish(self, state, carry, ctx):\n        sys.exit(0)",
    "server": "class Mine(FedAvg):\n    def server_update(self, *arguments):\n        raise GeneratorExit",
    "unchecked": "class Mine(Ditto):\n    def final_model(self, state, server):\n        sys.exit(0)",
}
"""Plug-ins that end the process, by the part that does."""


@pytest.mark.parametrize("part", EXITING)
def test_a_plug_in_that_ends_the_process_is_an_error_of_its_own(part: str, tmp_path: Path):
    imports = "import sys\nimport torch\nfrom rayfl.data.datasets import Source\n"
    imports += "from rayfl.methods.personal.ditto import Ditto\nfrom rayfl.methods.server.fedavg import FedAvg\n"
    (tmp_path / "mine.py").write_text(f"{imports}{EXITING[part]}\n")
    names = {"data": "digits", "model": "logistic", "method": "fedavg"}
    names[{"data": "data", "model": "model", "forward": "model", "work": "model"}.get(part, "method")] = "mine.py:Mine"
    (tmp_path / "a.toml").write_text(
        "".join(f"{table} = {name!r}\n" for table, name in names.items())
        + "rounds = 1\npartition = 'iid'\nclients = {count = 2}\n"
    )
    result = rayfl("run", tmp_path / "a.toml", "--inline", "--output", tmp_path / "run")
    assert result.exit_code == (2 if part in ("the file", "model", "forward") else 1), result.output
    ended = "GeneratorExit" if part == "server" else "SystemExit: 0"
    assert ended in result.stderr and len(result.stderr.splitlines()) == 1, result.stderr
    assert {"model": "Mine", "forward": "Mine", "work": "client 0"}.get(part, "mine.py") in result.stderr, result.stderr
    with pytest.raises((RayflError, RuntimeError)):
        load_and_run(tmp_path / "a.toml", tmp_path / "again")


def load_and_run(file: Path, directory: Path) -> None:
    """Run an experiment from Python, which no SystemExit may end."""
    python_api.run(file, "runtime.executor=inline", directory=directory, progress=False)

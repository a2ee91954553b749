"""Mistakes that once ended in a traceback: in Python one RayflError, on the command line one sentence."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rayfl
from rayfl.errors import ClientError, ExitError, HookError, MethodError, RayflError
from tests.refusals import refused

LONG = "x" * 300
BASE: dict[str, Any] = {
    "data": "digits",
    "partition": "iid",
    "model": "logistic",
    "clients": {"count": 3},
    "method": {"name": "fedavg", "lr": 0.1},
    "rounds": 1,
    "runtime": {"executor": "inline"},
    "output": {"report": False},
    "progress": False,
}
PLUGIN = """
from pydantic import field_validator
from rayfl.data.datasets import Source
from rayfl.gather import WeightedMean
from rayfl.methods.server.fedavg import FedAvg


class Own(BaseException):
    pass


def fail():
    raise ERROR


class Gathering(FedAvg):
    class Rule(WeightedMean):
        def add(self, *arguments):
            fail()

    gather = {"delta": Rule()}


class Init(FedAvg):
    def __init__(self, *arguments):
        fail()


class Checked(FedAvg):
    class Hyper(FedAvg.Hyper):
        @field_validator("lr")
        @classmethod
        def check(cls, value):
            fail()


class Late(FedAvg):
    class Hyper(FedAvg.Hyper):
        def model_post_init(self, context):
            fail()


class Update(FedAvg):
    def server_update(self, *arguments):
        fail()


class Cut(FedAvg):
    def server_update(self, *arguments):
        state, metrics = super().server_update(*arguments)
        return {**state, "params": {name: tensor[:1] for name, tensor in state["params"].items()}}, metrics


class Data(Source):
    def load(self):
        fail()
"""
LINE = 1 + PLUGIN.splitlines().index("    raise ERROR")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("call", [rayfl.load, rayfl.resume, rayfl.run, rayfl.sweep])
@pytest.mark.parametrize(("given", "fact"), [(5, "5"), ([1], "[1]"), (b"runs", "b'runs'"), (LONG, "255")])
def test_what_is_no_place_is_refused(call: Callable[[Any], object], given: Any, fact: str):
    with refused(names=[fact]):
        call(given)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"directory": 5}, ["directory=5"]),
        ({"directory": "a\0b"}, ["directory", "null character"]),
        ({"directory": LONG}, ["directory", "255"]),
        ({"on_round": 5}, ["on_round=5"]),
    ],
)
def test_arguments_of_wrong_kinds_are_refused(arguments: dict[str, Any], names: list[str]):
    with refused(names=names):
        rayfl.run(**BASE, **arguments)
    assert not Path("runs").exists()


def test_overrides_are_texts_and_parallel_is_a_number():
    with refused(names=["7", "override"]):
        rayfl.run("demo", 7)  # pyright: ignore[reportArgumentType]
    with refused(names=["parallel 'x'"]):
        rayfl.sweep(**BASE, sweep={"seed": [1]}, parallel="x")  # pyright: ignore[reportArgumentType]


def test_a_deleted_working_directory_is_named(folder: Path):
    gone = folder / "gone"
    gone.mkdir()
    program = f"import os, sys; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); from jobs.cli import main; main()"
    command = [sys.executable, "-c", program, "run", "demo", "--inline"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": ROOT})
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "current directory was deleted" in done.stderr
    gone.mkdir()
    program = f"import os, rayfl; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); rayfl.run"
    env = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=env)
    assert "RayflError: the current directory was deleted" in done.stderr
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    with refused(names=["current directory"]):
        rayfl.run(**BASE)
    with refused(names=["current directory"]):
        rayfl.load("runs")


ROOT = str(Path(__file__).parents[2])


@pytest.mark.parametrize("error", ["KeyError('k')", "GeneratorExit()", "Own('x')"])
@pytest.mark.parametrize("name", ["Gathering", "Init", "Checked", "Late", "Update", "Data"])
def test_an_error_of_a_plug_in_names_its_file_and_line(folder: Path, name: str, error: str):
    path = folder / "plug.py"
    path.write_text(PLUGIN.replace("ERROR", error))
    where = {"data": f"{path}:Data"} if name == "Data" else {"method": {"name": f"{path}:{name}", "lr": 0.1}}
    kinds = (RayflError, HookError, ClientError, MethodError)
    with pytest.raises(kinds) as caught:
        rayfl.run(**{**BASE, **where})
    assert not isinstance(caught.value, ExitError)
    text = str(caught.value)
    assert f"plug.py:{LINE}" in text or f"plug.py, line {LINE}" in text, text
    assert error.partition("(")[0] in text, text


def test_a_server_update_of_another_shape_is_that_methods_error(folder: Path):
    (folder / "plug.py").write_text(PLUGIN)
    with refused(names=["Cut.server_update", "plug.py", "1.weight", "[1, 64]", "[10, 64]"], error=MethodError):
        rayfl.run(**{**BASE, "method": {"name": f"{folder}/plug.py:Cut", "lr": 0.1}})

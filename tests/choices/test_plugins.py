"""Code from outside the package is found by its name, kept with the run, and refused in one sentence."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from actors import driver
from jobs.single import run
from rayfl.choices import plugins
from rayfl.choices.kinds import find, known, make, reference, resolve
from rayfl.compress.base import Compressor
from rayfl.compress.sparse import TopK
from rayfl.data.datasets import Source
from rayfl.experiment.experiment import read
from rayfl.methods.base import Method
from rayfl.methods.server.fedavg import FedAvg
from rayfl.metrics.base import Metric
from rayfl.models.base import Architecture
from rayfl.run_directory.record import read_run
from tests.actors.toys import assert_same_run
from tests.choices.conftest import EXPERIMENT, METHOD
from tests.jobs.commands import rayfl
from tests.refusals import line_with, refused

ROOT = Path(__file__).resolve().parents[2]


def test_a_file_is_run_once_and_found_again_by_its_path(home: Path) -> None:
    found = find(Method, f"{home}/mine.py:Halved")
    assert issubclass(found, FedAvg) and found.name == "Halved"
    assert find(Method, f"{home}/mine.py:Halved") is found
    assert reference(found) == f"{home}/mine.py:Halved"
    assert "Halved" not in known(Method)
    (home / "copy.py").write_text(METHOD)
    assert find(Method, f"{home}/copy.py:Halved") is found, "a copy is the same module"
    (home / "mine.py").write_text(METHOD + "\n# changed\n")
    assert find(Method, f"{home}/mine.py:Halved") is not found


def test_other_processes_get_the_source_before_what_is_made_of_it(home: Path) -> None:
    found = find(Method, f"{home}/mine.py:Halved")
    sent = home / "sent"
    sent.write_bytes(pickle.dumps({"files": plugins.loaded_files(), "method": found}))
    (home / "mine.py").unlink()
    program = f"import pickle; print(pickle.load(open({str(sent)!r}, 'rb'))['method'].paper)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "None et al., 2026\n", done.stderr


def test_an_importable_module(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "some_package").mkdir()
    (home / "some_package" / "parts.py").write_text(METHOD)
    monkeypatch.syspath_prepend(home)
    found = find(Method, "some_package.parts:Halved")
    assert found.paper == "None et al., 2026" and reference(found) == "some_package.parts:Halved"
    assert find(Method, found) is found, "a class from Python is what it is"


def entry(monkeypatch: pytest.MonkeyPatch, home: Path, *lines: tuple[str, str, str]) -> None:
    """Install packages (package, plugin, value) for this test."""
    for package, plugin, value in lines:
        about = home / f"{package}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[{plugins.GROUP}]\n{plugin} = {value}\n")
    monkeypatch.syspath_prepend(home)
    plugins.installed.cache_clear()


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch):
    yield
    monkeypatch.undo()
    plugins.installed.cache_clear()


def test_an_installed_package(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "installed_parts.py").write_text(METHOD)
    entry(monkeypatch, home, ("halves", "halved", "installed_parts:Halved"))
    found = find(Method, "halved")
    assert found.__name__ == "Halved" and reference(found) == "halved"
    assert known(Method)["halved"] is found and "halved" not in known(Compressor)
    assert "halved" in rayfl("methods").output and "the half" in rayfl("methods", "halved").output
    with refused(names=["halve", "halved"]):
        find(Method, "halve")
    with refused(names=["Halved", "rayfl.data"]):
        find(Source, "halved")


def test_a_metric_of_an_installed_package(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "installed_metrics.py").write_text((ROOT / "jobs" / "examples" / "my_metrics.py").read_text())
    entry(monkeypatch, home, ("briers", "brier", "installed_metrics:Brier"))
    metric = resolve(Metric, "brier")
    assert (type(metric).__name__, metric.to_table()["name"]) == ("Brier", "brier")
    assert "brier" in rayfl("metrics").output and "temperature" in rayfl("metrics", "brier").output


def test_a_name_of_ours_stays_ours(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "twin_parts.py").write_text(METHOD)
    lines = ("third", "fedavg", "twin_parts:Halved"), ("other", "broken", "twin_parts:NoSuchClass")
    entry(monkeypatch, home, *lines)
    assert find(Method, "fedavg").__module__.startswith("rayfl.")
    assert known(Method)["fedavg"] is find(Method, "fedavg")
    assert "broken" not in known(Method), "what cannot be loaded hides nothing else"


def test_hyper_parameters_of_a_file_are_listed(home: Path) -> None:
    listed = rayfl("methods", "mine/mine.py:Halved")
    assert listed.exit_code == 0 and "None et al., 2026" in listed.output and "the half" in listed.output


@pytest.mark.parametrize(
    ("name", "source", "names"),
    [
        ("else/where.py:Halved", METHOD, ["mine/else/where.py", "Python"]),
        ("mine2.py:Halved", METHOD, ["mine/mine2.py", "'mine.py'"]),
        ("mine.py:Halved", "x = 1\nx = = 2\n", ["mine/mine.py", "line 2", "Python"]),
        (
            "mine.py:Halved",
            "def f():\n    return 1 / 0\n\nf()\n",
            ["mine/mine.py:2", "ZeroDivisionError"],
        ),
        (
            "mine.py:Halved",
            "\nimport not_there_at_all\n",
            ["mine/mine.py:2", "ModuleNotFoundError", "not_there_at_all"],
        ),
        ("mine.py:Halve", METHOD, ["mine/mine.py", "Halve", "Halved"]),
        ("mine.py", METHOD, ["mine.py:Class"]),
        (
            "mine.py:NoMethod",
            METHOD,
            ["mine/mine.py:17", "NoMethod", "rayfl.methods.base.Method"],
        ),
        ("mine.py:function", METHOD, ["mine/mine.py:21", "function"]),
        (
            "mine.py:TopK",
            "from rayfl.compress.sparse import TopK\n",
            ["TopK", "sparse.py", "method"],
        ),
        (
            "mine.py:Half",
            "from rayfl.methods.base import Method\n\nclass Half(Method):\n    pass\n",
            ["mine/mine.py:3", "Half"],
        ),
        ("no_such_package.parts:Halved", METHOD, ["no_such_package", "module"]),
        # A folder with __init__.py that is not installed: the way on is one of its files, or pip.
        ("package:Halved", METHOD, ["package:Halved", "install", "package/__init__.py:Halved"]),
        ("package.part:Halved", METHOD, ["package.part:Halved", "install", "package/part.py:Halved"]),
        ("../package/part.py:Halved", METHOD, ["package/part.py:1", "install", "PACKAGE.MODULE:CLASS"]),
    ],
)
def test_what_is_no_plugin_is_refused_before_anything_starts(
    home: Path, name: str, source: str, names: list[str]
) -> None:
    (home / "mine.py").write_text(source)
    (home / "own.toml").write_text(EXPERIMENT.replace("mine.py:Halved", name))
    Path("package").mkdir()
    Path("package/__init__.py").touch()
    Path("package/part.py").write_text(f"from package.other import X\n{METHOD}")
    refused(rayfl("run", "mine/own.toml"), names=names)
    assert not Path("runs").exists()


def test_a_list_and_a_table_of_a_third_party_keep_their_types(home: Path) -> None:
    fields = "widths: list[int] = [1, 2]\n        names: dict[str, float] = {}\n        half: float ="
    (home / "mine.py").write_text(METHOD.replace("half: float =", fields))
    given = {"name": "mine/mine.py:Halved", "widths": [3], "names": {"a": 0.5}}
    hyper = find(Method, given["name"]).Hyper(widths=given["widths"], names=given["names"])
    assert (hyper.widths, hyper.names) == ([3], {"a": 0.5})
    refused(rayfl("run", "mine/own.toml", "method.widths=[3, 'x']"), names=["method.widths=[3, 'x']", "whole numbers"])
    refused(rayfl("run", "mine/own.toml", "method.names={a='x'}"), names=["method.names", "table of numbers"])


def test_unknown_options_are_refused_with_the_nearest(home: Path) -> None:
    refused(rayfl("run", "mine/own.toml", "method.halff=1.0"), names=["method.halff", "'half'"])


def test_a_name_of_ours_is_not_given_twice(home: Path) -> None:
    (home / "mine.py").write_text(
        "from rayfl.compress.sparse import TopK\n\n"
        "class Mine(TopK):\n    name = 'dense'\n\nclass Other(TopK):\n    pass\n"
    )
    with refused(names=["mine.py:3", "Mine", "dense"]):
        find(Compressor, "mine/mine.py:Mine")
    made = make(Compressor, {"name": "mine/mine.py:Other", "keep_ratio": 0.5})
    assert isinstance(made, TopK) and made.name == "Other"
    assert made.to_table() == {
        "name": "mine/mine.py:Other",
        "keep_ratio": 0.5,
        **{key: value for key, value in TopK().model_dump().items() if key != "keep_ratio"},
    }


def test_a_run_keeps_the_file_and_is_resumed_from_its_copy(home: Path) -> None:
    for output, rounds in (("long", 4), ("short", 2)):
        result = rayfl("run", "mine/own.toml", "--inline", "--rounds", rounds, "--output", output)
        assert result.exit_code == 0, result.output
    (copy,) = Path("short/files").glob("plugin-*/*")
    assert copy.read_text() == METHOD and copy.name == "mine.py"
    line_with(Path("short/report.html").read_text(), ["Halved", "digits"])
    (home / "mine.py").write_text(METHOD.replace("0.5", "0.25"))
    result = rayfl("resume", "short", "--rounds", 3)
    assert result.exit_code == 0, result.output
    changed = ["method.name", Path("short").absolute(), "files/plugin-"]
    refused(rayfl("resume", "short", "--rounds", 4, "method.name=mine/mine.py:Halved"), names=changed)
    copy.write_text(METHOD + "\n")
    refused(rayfl("resume", "short", "--rounds", 4), names=changed)
    copy.write_text(METHOD)
    assert rayfl("resume", "short", "--rounds", 4).exit_code == 0
    assert_same_run(Path("long"), Path("short"))


def test_a_sweep_over_methods_of_ones_own(home: Path) -> None:
    (home / "own.toml").write_text(EXPERIMENT + '[sweep]\nmethod = [{name = "mine.py:Halved", half = 0.5}, "fedavg"]\n')
    result = rayfl("sweep", "mine/own.toml", "--inline", "--dir", "swept")
    assert result.exit_code == 0, result.output
    assert {path.name for path in Path("swept").iterdir() if path.is_dir()} == {
        "Halved-half=0.5",
        "fedavg",
    }
    again = rayfl("sweep", "mine/own.toml", "--inline", "--dir", "swept")
    assert again.exit_code == 0 and "skipped" in again.output


def test_a_model_is_no_method_and_says_so() -> None:
    with refused(names=["Logistic", "dense.py", "method"]):
        find(Method, make(Architecture, {"name": "logistic"}).__class__)


COMPRESSOR = '''
from collections.abc import Mapping
from dataclasses import dataclass

from rayfl.compress.base import Compressor, Packet, Shapes
from rayfl.compress.dense import Dense
from twice import again


class Doubled(Compressor):
    """Dense, and every entry a second time."""

    def encode(self, x, memory, generator):
        packet, memory = Dense().encode(x, memory, generator)
        parts = dict(packet.parts)
        return Packet({**parts, **{again(name): part for name, part in parts.items()}}, packet.codec), memory
'''


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_actors_run_what_they_have_never_seen(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "packing.py").write_text(COMPRESSOR)
    (home / "twice.py").write_text("def again(name):\n    return f'{name} again'\n")
    (home / "nets.py").write_text(
        "from torch import nn\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    overrides = ["uplink=mine/packing.py:Doubled", "model=mine/nets.py:net", "output.report=false"]
    here = run(read(home / "own.toml", [*overrides, "runtime.executor=inline"]), Path("here"))
    play = driver.play_on_ray

    def alone(*arguments, **options):
        """By now the files are kept, and neither the user's nor the kept ones are there for an actor."""
        for path in (*home.glob("*.py"), *Path("there/files").glob("*/*")):
            path.unlink()
        return play(*arguments, **options)

    monkeypatch.setattr("actors.driver.play_on_ray", alone)
    there = run(read(home / "own.toml", [*overrides, "runtime.actors=2"]), Path("there"))
    assert read_run(there).finished
    assert_same_run(here, there)

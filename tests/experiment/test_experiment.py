"""Experiments: read from TOML, overridden, refused with one sentence, written back."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rayfl import toml
from rayfl.choices.kinds import Choice, named
from rayfl.experiment.experiment import Experiment, read
from rayfl.experiment.identity import determining_settings
from rayfl.methods.base import Method
from rayfl.settings import KINDS, Settings, describe
from tests.refusals import refused

BASE: dict[str, Any] = {
    "rounds": 5,
    "data": "digits",
    "partition": {"name": "lambda-ratio", "ratio": 1.0},
    "clients": {"count": 20},
    "model": "mlp",
    "method": {"name": "fedpse"},
}


def experiment_of(given: dict[str, Any]) -> Experiment:
    """The base experiment with some of its tables replaced."""
    values: dict[str, Any] = {**BASE, **given}
    return Experiment(**values)


EXPERIMENTS: list[dict[str, Any]] = [
    {},
    {"name": "a.b-c_1", "seed": 2**62, "method": {"name": "fedpse", "keep_ratio": 0.25, "batch_size": 0, "steps": 3}},
    {"method": "local", "data": {"name": "fashion-mnist", "root": "/data/fashion mnist"}, "model": "convnet2"},
    {"method": "dpsgd", "topology": {"name": "erdos-renyi", "p": 0.25}},
    {
        "method": {"name": "fedavg", "weighting": "uniform", "lr": 1e-05, "clip_norm": 3},
        "uplink": {"name": "feedback", "inner": {"name": "topk", "scope": "model"}},
        "downlink": {"name": "dense", "dtype": "bf16"},
        "model": {"name": "mlp", "hidden": []},
        "clients": {
            "count": 4,
            "per_round": 2,
            "retention_ratio": [0.25, 1],
            "examples_per_s": {"median": 100, "sigma": 0.5},
            "uplink_mbps": {"low": 1, "high": 2.5},
        },
        "data": {"name": "synthetic", "shape": [1, 16, 16], "samples_per_group": 10},
        "partition": {"name": "natural"},
        "runtime": {
            "executor": "inline",
            "stack_width": 2,
            "device": "cpu",
            "actors": "all",
            "labels": {"ray.io/market-type": "!in(spot, other)", "zone": "west"},
        },
        "splits": {"validation_ratio": 0.2},
        "evaluation": {"every": 0, "own": False},
        "output": {"directory": 'C:\\runs "x"'},
    },
]


@pytest.mark.parametrize("given", EXPERIMENTS)
def test_json_and_toml_bring_back_the_same_experiment(given: dict[str, Any], tmp_path: Path):
    experiment = experiment_of(given)
    assert Experiment(**json.loads(json.dumps(experiment.as_dict()))) == experiment
    assert Experiment(**experiment.as_dict()) == experiment
    assert Experiment(**tomllib.loads(toml.dumps(experiment.as_dict()))) == experiment
    (tmp_path / "again.toml").write_text(toml.dumps(experiment.as_dict()), encoding="utf-8")
    assert read(tmp_path / "again.toml") == experiment
    assert experiment_of({**given, "seed": 3}) != experiment


def test_python_objects_and_tables_are_the_same():
    short = experiment_of({})
    parts = {name: getattr(short, name) for name in type(short).model_fields}
    assert Experiment(**parts) == short
    assert experiment_of({"data": {"name": "digits"}, "model": {"name": "mlp"}, "method": "fedpse"}) == short


@pytest.mark.parametrize("runtime", [{"labels": {"zone": "west"}}, {"actors": "all"}])
def test_where_actors_run_decides_no_number(runtime: dict[str, Any]):
    plain, placed = (determining_settings(experiment_of(given).as_dict()) for given in ({}, {"runtime": runtime}))
    assert plain == placed


def every_kind() -> list[type[BaseModel]]:
    """All tables that an experiment can have."""
    kinds = [kind for room in Choice.__subclasses__() for kind in named(room).values()]
    kinds += [method.Hyper for method in named(Method).values()]
    tables = [field.annotation for field in Experiment.model_fields.values()]
    return [*kinds, *(table for table in tables if isinstance(table, type) and issubclass(table, Settings))]


@pytest.mark.parametrize("kind", every_kind(), ids=lambda kind: kind.__name__)
def test_every_setting_can_be_written_and_described(kind: type[BaseModel]):
    for name, field in kind.model_fields.items():
        assert "of type" not in describe(field.annotation, field.metadata), f"{name}: add its kind to {list(KINDS)}"
        # None is left out of TOML, so it must be what a setting is when it is left out.
        if "be left out" in describe(field.annotation, field.metadata):
            assert field.default is None, name


FILE = """
rounds = 5
model = "mlp"
data = "digits"
partition = {name = "lambda-ratio", ratio = 1.0}
[clients]
count = 20
[method]
name = "fedpse"
keep_ratio = 0.2
"""


def written(tmp_path: Path, text: str = FILE, name: str = "demo.toml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_is_an_experiment_named_after_it(tmp_path: Path):
    experiment = read(written(tmp_path))
    assert experiment == experiment_of({"name": "demo", "method": {"name": "fedpse", "keep_ratio": 0.2}})
    assert read(written(tmp_path, name="my första run.toml")).name == "my-f-rsta-run"
    assert read(written(tmp_path, name="._-.toml")).name == "experiment"
    assert read(written(tmp_path, 'name = "mine"\n' + FILE)).name == "mine"


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("rounds=7", "rounds", 7),
        ("method.keep_ratio=0.5", "method.hyper.keep_ratio", 0.5),
        ("method.lr = 1e-3", "method.hyper.lr", 0.001),
        ("method=local", "method.name", "local"),
        ("model.hidden=[3, 4]", "model.hidden", (3, 4)),
        ('output.directory="a b"', "output.directory", "a b"),
        ("output.directory=a b", "output.directory", "a b"),
        ("output.directory=2026-01-02", "output.directory", "2026-01-02"),
        ("output.directory=x=y", "output.directory", "x=y"),
        ("output.report=false", "output.report", False),
        ("clients.examples_per_s={median = 3, sigma = 1}", "clients.examples_per_s.median", 3.0),
        ("topology.name=ring", "topology.name", "ring"),
    ],
)
def test_overrides(override: str, path: str, value: Any, tmp_path: Path):
    peers = ["method=dpsgd"] if "topology" in override else []
    experiment: Any = read(written(tmp_path), [*peers, override])
    for part in path.split("."):
        experiment = getattr(experiment, part)
    assert experiment == value


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["method.mu=0.9", "method=fedprox"],
         ["method=fedprox", "method.mu=0.9"]),
        (["method.optimizer.lr=1", "rounds=2", 'method.optimizer="sgd"'],
         ["method.optimizer=\"sgd\"", "method.optimizer.lr=1"]),
    ],
)  # fmt: skip
def test_no_override_is_dropped_by_a_later_one(overrides: list[str], names: list[str], tmp_path: Path):
    with refused(names=names):
        read(written(tmp_path), overrides)
    assert read(written(tmp_path), ["method=fedprox", "method.mu=0.9"]).as_dict()["method"]["mu"] == 0.9


def test_later_overrides_win(tmp_path: Path):
    assert read(written(tmp_path), ["rounds=7", "rounds=8"]).rounds == 8


@pytest.mark.parametrize("override", ["rounds", "=3", "", ".=3", "method.=3", "method..lr=3"])
def test_what_is_no_override(override: str, tmp_path: Path):
    with refused(names=[override, "key=value", "method.lr=0.1"]):
        read(written(tmp_path), [override])


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("rounds.x=3", ["rounds.x=3", "5"]),
        ("method.keep_rato=3", ["method.keep_rato", "keep_ratio"]),
        ("mehtod.lr=3", ["mehtod", "method"]),
        ("rounds=seven", ["rounds='seven'", "at least 1"]),
        ("output.report=True", ["output.report='True'", "true or false"]),
        ("rounds=1\nseed=2", ["rounds='1\\nseed=2'", "at least 1"]),
    ],
)
def test_an_override_that_does_not_fit(override: str, names: list[str], tmp_path: Path):
    with refused(names=names):
        read(written(tmp_path), [override])


def test_a_file_that_is_not_there(tmp_path: Path):
    with refused(names=["TOML", "experiment"]):
        read(tmp_path / "demo.toml")
    there = written(tmp_path)
    with refused(names=[f"{tmp_path / 'dmeo.toml'}", f"did you mean '{there.name}'"]):
        read(tmp_path / "dmeo.toml")


def test_files_that_cannot_be_read(tmp_path: Path):
    with refused(names=[tmp_path, "directory", "TOML"]):
        read(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with refused(names=["binary.toml", "UTF-8"]):
        read(tmp_path / "binary.toml")
    with refused(names=["demo.toml", "TOML", "line 1", "10"]):
        read(written(tmp_path, "rounds = \n"))
    with refused(names=["missing", "rounds"]):
        read(written(tmp_path, ""))

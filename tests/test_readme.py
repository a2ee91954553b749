"""What the README shows is what there is: the method's source, the experiment files, the commands, the names."""

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from click.testing import CliRunner

import rayfl
from jobs.cli import main
from rayfl.choices import named
from rayfl.compress.base import Compressor
from rayfl.data.datasets import Source
from rayfl.experiment.experiment import Experiment
from rayfl.methods.base import Method
from rayfl.models import Architecture
from rayfl.report.results import Cost

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_method_shown_is_the_whole_file():
    assert (ROOT / "rayfl" / "methods" / "fedavg.py").read_text(encoding="utf-8") in blocks("python")


def test_the_experiment_shown_is_valid():
    (shown,) = blocks("toml")
    experiment = Experiment(**tomllib.loads(shown))
    assert experiment.method.name == "fedpse" and experiment.clients.count == 10


def test_the_program_shown_runs_an_experiment(monkeypatch: pytest.MonkeyPatch):
    (shown,) = [block for block in blocks("python") if "rayfl.run(" in block]
    given: dict[str, Any] = {}
    drawn: list[Any] = []
    results = SimpleNamespace(plot=lambda *arguments, **options: drawn.append((*arguments, options)))
    monkeypatch.setattr(rayfl, "run", lambda **settings: given.update(settings) or results)
    exec(shown, {})
    assert Experiment(**given).clients.per_round == 10
    assert drawn == [("own/accuracy", {"against": "total_megabytes"})] and "total_megabytes" in get_args(Cost)


def test_the_commented_settings_of_the_experiment_are_valid_too():
    (shown,) = blocks("toml")
    optional = re.sub(r"^# (?=[\[a-z])", "", shown, flags=re.MULTILINE)
    table: dict[str, Any] = tomllib.loads(optional) | {"method": {"name": "fedavg"}}
    experiment = Experiment(**table)
    assert experiment.clients.per_round == 5 and experiment.runtime.actors == 4 and experiment.uplink.name == "feedback"


def test_every_method_compressor_dataset_and_model_is_named():
    for names in (named(Method), *map(named, (Compressor, Source, Architecture))):
        assert [name for name in names if f"`{name}`" not in README] == []


def test_the_commands_shown_exist():
    commands = set(re.findall(r"^\| `rayfl (\w+)", README, flags=re.MULTILINE))
    commands |= {"models", "datasets", "partitions", "compressors", "topologies"}
    assert commands == set(main.commands)


def test_the_mistake_shown_gets_the_sentence_shown():
    command, sentence = re.findall(r"\$ rayfl (run .*)\n(rayfl: .*)\n", README)[0]
    arguments = [str(ROOT / word) if word.endswith(".toml") else word for word in command.split()]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and result.stderr.strip() == sentence


def test_nothing_is_left_to_be_filled_in():
    assert re.findall(r"\b[A-Z]+_(?:TABLE|OUTPUT|SOURCE)\b", README) == []

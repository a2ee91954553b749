"""What comes with rayfl: experiments that are found by name from anywhere, and a commented file to begin with."""

import re
from pathlib import Path

import pytest

from jobs.shipped_experiments import FOLDER, TEMPLATE, first_comment_sentence, names
from rayfl.experiment.experiment import read
from rayfl.experiment.sweep import read_sweep
from rayfl.run_directory.record import read_run
from tests.jobs.commands import rayfl
from tests.refusals import line_with, refused


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_demo_runs_by_its_name_from_anywhere():
    result = rayfl("run", "demo", "--inline", "rounds=1", "clients.count=2", "output.report=false")
    assert result.exit_code == 0, result.output
    line_with(result.output, ["directory", Path("runs/demo").absolute()])
    assert read_run(Path("runs/demo")).experiment["name"] == "demo"


def test_a_file_goes_before_the_name_of_an_experiment_of_ours():
    Path("demo").write_text((FOLDER / "demo.toml").read_text().replace('name = "demo"', 'name = "mine"'))
    assert rayfl("run", "demo", "--inline", "rounds=1", "clients.count=2", "output.report=false").exit_code == 0
    assert Path("runs/mine").is_dir() and not Path("runs/demo").exists()


def test_an_unknown_name_is_answered_with_the_nearest():
    refused(rayfl("run", "demoo"), names=["no file demoo", "'demo'"])
    Path("my_experiment.toml").write_text("")
    refused(rayfl("data", "my_experiment"), names=["my_experiment", "'my_experiment.toml'"])
    refused(rayfl("run", "demo.toml"), names=["demo.toml", "does not exist"])
    refused(rayfl("run", "here/demo"), names=["here/demo", "does not exist"])


def test_examples_lists_every_experiment_with_its_first_sentence():
    result = rayfl("examples")
    assert result.exit_code == 0 and [name for name in names() if f" {name} " not in result.output] == []
    for name in names():
        assert first_comment_sentence((FOLDER / f"{name}.toml").read_text()), name


def test_init_writes_a_file_that_runs_and_replaces_nothing():
    result = rayfl("init")
    path = Path("experiment.toml")
    assert result.exit_code == 0
    line_with(result.output, [f"rayfl run {path}"])
    assert read(path).name == "experiment"
    path.write_text("mine")
    for place, why in ((path, "File exists"), ("nowhere/mine.toml", "No such file or directory")):
        again = rayfl("init", place)
        assert again.exit_code == 2 and f"'{place}': {why}" in again.stderr
    assert path.read_text() == "mine"


def test_every_setting_of_the_template_that_is_commented_out_is_valid(tmp_path):
    text = TEMPLATE.read_text(encoding="utf-8")
    used, num_used = re.subn(r"^# (?=\[?[\w.]+( = |\]))", "", text, flags=re.MULTILINE)
    assert num_used == 44
    path = tmp_path / "all.toml"
    path.write_text(used)
    combinations = read_sweep(path)
    assert combinations is not None and len(combinations) == 6
    assert combinations[0].experiment.runtime.actors == 4 and combinations[0].experiment.uplink.name == "topk"

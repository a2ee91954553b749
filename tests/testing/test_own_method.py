"""A stranger's method under our contract: a sound one passes, a careless one fails where it is careless."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.refusals import mentions

ROOT = Path(__file__).resolve().parents[2]
CARELESS = """
from rayfl import tree
from rayfl.methods.server.fedavg import FedAvg


class Careless(FedAvg):
    paper = "None"

    def step(self, carry, batch, *, stage):
        next(iter(carry["params"].values())).data.add_(0.01)
        return super().step(carry, batch, stage=stage)
"""
COUNTING = """
from typing import ClassVar

from rayfl import tree
from rayfl.wrappers.base import MessageWrapper

calls = []


class Counting(MessageWrapper):
    def client(self, trees, state, received, ctx):
        calls.append(1)
        return {name: tree.scale(one, 1 / len(calls)) for name, one in trees.items()}, state, {}


class Total(MessageWrapper):
    total: ClassVar[int] = 0

    def client(self, trees, state, received, ctx):
        Total.total += 1
        return {name: tree.scale(one, 1 / Total.total) for name, one in trees.items()}, state, {}
"""
WHOLE = """
rounds = 1
data = "digits"
partition = "iid"
clients = {count = 6, per_round = 3}
model = "logistic"
method = {name = "fedavg", lr = 0.1}
"""


def contract(given: str, folder: Path, *options: str, option: str = "--method") -> subprocess.CompletedProcess[str]:
    """`pytest --pyargs rayfl.testing --method METHOD` in a folder outside of ours."""
    command = [sys.executable, "-m", "pytest", "-p", "rayfl.testing.options", "-p", "no:cacheprovider", "--pyargs"]
    return subprocess.run(
        [*command, "rayfl.testing", option, given, "-q", *options],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.mark.slow
def test_the_example_keeps_the_contract(tmp_path: Path) -> None:
    (tmp_path / "my_methods.py").write_text((ROOT / "jobs" / "examples" / "my_methods.py").read_text())
    done = contract("my_methods.py:FullLength", tmp_path, "--set", "momentum=0.5")
    assert done.returncode == 0 and "9 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_a_careless_method_fails_and_a_missing_one_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CARELESS)
    done = contract("mine.py:Careless", tmp_path, "-k", "modifies")
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout + done.stderr
    done = contract("mine.py:Carefull", tmp_path)
    assert done.returncode != 0
    shown = (done.stdout + done.stderr).splitlines()
    assert any(all(mentions(line, name) for name in ("mine.py", "'Carefull'", "'Careless'")) for line in shown), shown


@pytest.mark.slow
def test_the_quantile_keeps_the_contract_of_tasks(tmp_path: Path) -> None:
    for name in ("my_tasks.py", "task.toml"):
        (tmp_path / name).write_text((ROOT / "jobs" / "examples" / name).read_text())
    done = contract("task.toml", tmp_path, option="--experiment")
    assert done.returncode == 0 and "10 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_a_task_whose_examples_depend_on_each_other_fails(tmp_path: Path) -> None:
    source = (ROOT / "jobs" / "examples" / "my_tasks.py").read_text()
    careless = source.replace(
        "return losses, torch.ones_like(losses)", "return losses - losses.mean(), torch.ones_like(losses)"
    )
    assert careless != source
    (tmp_path / "my_tasks.py").write_text(careless)
    (tmp_path / "task.toml").write_text((ROOT / "jobs" / "examples" / "task.toml").read_text())
    done = contract("task.toml", tmp_path, "-k", "one_by_one", option="--experiment")
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_a_metric_that_depends_on_its_batches_fails_and_brier_keeps_the_contract(tmp_path: Path) -> None:
    source = (ROOT / "jobs" / "examples" / "my_metrics.py").read_text()
    (tmp_path / "my_metrics.py").write_text(source)
    careless = source.replace("(probabilities - answers)", "(probabilities - answers + len(outputs))")
    assert careless != source
    (tmp_path / "careless.py").write_text(careless)
    done = contract("my_metrics.py:Brier", tmp_path, "--set", "temperature=2.0", option="--metric")
    assert done.returncode == 0 and "12 passed" in done.stdout, done.stdout + done.stderr
    done = contract("careless.py:Brier", tmp_path, "-k", "any_split", option="--metric")
    assert done.returncode == 1 and "3 failed" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_a_schedule_and_a_selection_keep_the_contract_and_a_careless_wrapper_does_not(tmp_path: Path) -> None:
    for name in ("number_or_time.py", "fastest_first.py"):
        (tmp_path / name).write_text((ROOT / "jobs" / "examples" / name).read_text())
    (tmp_path / "mine.py").write_text(COUNTING)
    rules = 'schedule = "number_or_time.py:NumberOrTime"\nselection = "fastest_first.py:FastestFirst"'
    for rule, code, *facts in (
        (rules, 0, "3 passed"),
        ('wrap = ["mine.py:Counting"]', 1, "2 failed", "2 workers", "mine.py: calls"),
        ('wrap = ["mine.py:Total"]', 1, "2 failed", "2 workers", "Total.total"),
    ):
        (tmp_path / "mine.toml").write_text(f"{WHOLE}{rule}\n")
        done = contract("mine.toml", tmp_path, option="--experiment")
        assert done.returncode == code and all(one in done.stdout for one in facts), done.stdout + done.stderr

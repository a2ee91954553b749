"""An assert is for our own bugs: a check of what a user gives also holds under `python -O`, which drops asserts."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(
    path for room in ("rayfl", "actors", "jobs") for path in (ROOT / room).rglob("*.py") if "testing" not in path.parts
)


def asks(test: ast.expr) -> bool:
    """Whether an assert compares, or asks for a type, and does not call something that may refuse."""
    if isinstance(test, ast.BoolOp):
        return all(map(asks, test.values))
    if isinstance(test, ast.Call):
        return isinstance(test.func, ast.Name) and test.func.id == "isinstance"
    return isinstance(test, ast.Compare)


def test_asserts_compare_and_refuse_nothing():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert) and not asks(node.test)
    ]
    assert found == []


def test_it_finds_what_it_looks_for():
    for line, expected in (
        ("assert self.made", False),
        ("assert check(x)", False),
        ("assert a or not b", False),
        ("assert x is not None", True),
        ("assert isinstance(x, int) and x > 1", True),
    ):
        (node,) = ast.parse(line).body
        assert isinstance(node, ast.Assert) and asks(node.test) is expected


START = """
import torch
from rayfl import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.methods.base import Capabilities, Method
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.peers.dpsgd import DPSGD
from rayfl.methods.compressed.fedscr import FedSCR
from rayfl.methods.shared.local_training import LocalWork
from rayfl.metrics.base import Metric
from rayfl.errors import MethodError
from rayfl.testing.executors import play

assert False, "python -O drops this line"


def made(method, **options):
    tables = {"data": "digits", "partition": "iid", "clients": {"count": 2}, "model": "logistic", "rounds": 1}
    return prepare(Experiment(method=method, **{**tables, **options}))


"""

MISTAKES = {
    "threshold=3.0": "FedSCR.Hyper(threshold=3.0)",
    "MulticlassNothing": """
made(FedAvg(), evaluation={"metrics": {"name": "torchmetrics", "metric": "classification.MulticlassNothing"}})
""",
    "init_client": """
class Forgetful(FedAvg):
    def finish(self, state, carry, ctx):
        return self.finished({"own": torch.zeros(1)}, {"delta": self.delta(carry)}, carry, ctx)

play(made(Forgetful()))
""",
    "weighting": """
class Careless(FedAvg):
    hyper: LocalWork

play(made(Careless()))
""",
    "personalized": """
class Nobody(DPSGD):
    capabilities = Capabilities(personalized=False, evaluated_from_mean=False, evaluated_after_training=False)
    eval_begin = Method.eval_begin

    def eval_stages(self, round_number):
        return (self.hyper.stage(round_number, "tuning"),)

play(made(Nobody(), topology="ring"))
""",
}


@pytest.mark.parametrize("fact", MISTAKES)
def test_a_mistake_is_refused_without_asserts_too(fact: str, tmp_path: Path):
    # Without an import: torchmetrics imports torchvision, which this build of torch may refuse.
    if fact == "MulticlassNothing" and importlib.util.find_spec("torchmetrics") is None:
        pytest.skip("torchmetrics is not installed")
    script = tmp_path / "mistake.py"
    script.write_text(START + MISTAKES[fact])
    done = subprocess.run(
        [sys.executable, "-O", script], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and fact in last, done.stderr
    assert last.startswith(("rayfl.errors.RayflError: ", "rayfl.errors.")), last

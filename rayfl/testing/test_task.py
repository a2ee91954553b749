"""The contract of the task of the experiment that --experiment names; see rayfl/testing/task_contract.py."""

from pathlib import Path
from typing import Any

import pytest

from rayfl.experiment.experiment import make_experiment, read
from rayfl.experiment.prepare import prepare
from rayfl.rounds.setup import Setup
from rayfl.testing import task_contract


# Any: tables of an experiment.
def _setup(request: pytest.FixtureRequest, **tables: Any) -> Setup:
    name = request.config.getoption("--experiment")
    if not name:
        pytest.skip("name an experiment of the task: --experiment my_task.toml")
    return prepare(make_experiment({**read(Path(name)).as_dict(), "rounds": 2, **tables}))


def test_examples_are_judged_one_by_one(request: pytest.FixtureRequest) -> None:
    task_contract.examples_are_judged_one_by_one(_setup(request))


@pytest.mark.parametrize("method", task_contract.METHODS)
def test_a_method_trains_on_it(request: pytest.FixtureRequest, method: str) -> None:
    task_contract.a_method_trains_on_it(
        lambda engine: _setup(request, runtime={"engine": engine}, **task_contract.tables(method))
    )

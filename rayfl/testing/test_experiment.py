"""The contracts of the experiment that --experiment names: of its task (rayfl/testing/task_contract.py), and of the
rest, such as a schedule, a selection or wrappers: their results do not depend on how the run is executed."""

from pathlib import Path

import pytest

from rayfl.experiment.experiment import Experiment, read
from rayfl.experiment.prepare import prepare
from rayfl.rounds.setup import Setup
from rayfl.testing import contracts, task_contract
from rayfl.testing.conftest import NUM_CLIENTS
from rayfl.testing.contracts import Make
from rayfl.testing.executors import play
from rayfl.testing.watching import watched
from rayfl.untyped import Value


@pytest.fixture
def experiment(request: pytest.FixtureRequest) -> Make:
    """Makes setups of the experiment with some of its tables replaced; its clients stay the same."""
    name = request.config.getoption("--experiment")
    if not name:
        pytest.skip("name an experiment: --experiment my_task.toml")

    def made(**tables: Value) -> Setup:
        # A contract chooses numbers of clients for experiments of its own.
        kept = {key: table for key, table in tables.items() if key != "clients"}
        return prepare(Experiment(**{**read(Path(name)).as_dict(), "rounds": 2, **kept}))

    return made


def test_several_workers_give_the_bits_of_one(experiment: Make) -> None:
    contracts.several_workers_give_the_bits_of_one(experiment(rounds=3))


def test_a_run_goes_on_from_its_checkpoint(experiment: Make, tmp_path: Path) -> None:
    contracts.a_run_goes_on_from_its_checkpoint(experiment, NUM_CLIENTS, tmp_path)


def test_no_hook_modifies_what_it_was_given(experiment: Make) -> None:
    here, log = watched(experiment())
    play(here)
    assert log.modified == []


@pytest.fixture
def with_task(request: pytest.FixtureRequest, experiment: Make) -> Make:
    """`experiment`, if it names its task."""
    if read(Path(str(request.config.getoption("--experiment")))).task is None:
        pytest.skip("the experiment names no task")
    return experiment


def test_examples_are_judged_one_by_one(with_task: Make) -> None:
    task_contract.examples_are_judged_one_by_one(with_task())


@pytest.mark.parametrize("method", task_contract.METHODS)
def test_a_method_trains_on_it(with_task: Make, method: str) -> None:
    tables = task_contract.tables(method)
    task_contract.a_method_trains_on_it(lambda engine: with_task(runtime={"engine": engine}, **tables))

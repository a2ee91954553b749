"""Fixtures of the contract: the method that --method names, setups of it, and a default run."""

import pytest

from rayfl.choices.kinds import find
from rayfl.determinism.process import prepare_process
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.experiment.table import override
from rayfl.methods.base import Method, PeerHalf, RayflError
from rayfl.rounds.setup import Setup
from rayfl.testing.contracts import Make, Played
from rayfl.testing.executors import fitting_graph, play
from rayfl.untyped import Value

NUM_CLIENTS = 6

prepare_process()


@pytest.fixture(scope="session")
def method(request: pytest.FixtureRequest) -> type[Method]:
    """The class that --method names. A usage error if there is none."""
    name = request.config.getoption("--method")
    if not name and (request.config.getoption("--experiment") or request.config.getoption("--metric")):
        pytest.skip("no --method is named")
    if not name:
        raise pytest.UsageError("name a method: pytest --pyargs rayfl.testing --method my_methods.py:FullLength")
    try:
        return find(Method, name)
    except RayflError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.fixture(scope="session")
def make(method: type[Method], request: pytest.FixtureRequest) -> Make:
    """Setups of the method: six unequal clients on digits, a small network, three rounds."""
    hyper: dict[str, Value] = {}
    for setting in request.config.getoption("--set", []) or []:
        override(hyper, setting)

    def made(engine: str = "loop", **options: Value) -> Setup:
        tables: dict[str, Value] = {
            "rounds": 3,
            "seed": 5,
            "data": "digits",
            "partition": {"name": "dirichlet-class", "alpha": 1.0},
            "model": {"name": "mlp", "hidden": [12]},
            "method": {"name": method, **hyper},
            "runtime": {"engine": engine},
            **options,
        }
        tables["clients"] = {"count": NUM_CLIENTS, **options.get("clients", {})}
        if issubclass(method, PeerHalf) and method.gather:
            tables.setdefault("topology", fitting_graph(method.capabilities))
        if method.capabilities.in_pairs:
            tables.setdefault("schedule", {"name": "gossip", "partners": 1})
        return prepare(Experiment(**tables))

    return made


@pytest.fixture(scope="session")
def played(make: Make) -> Played:
    """A default run: its records and the state after each round."""
    return play(make())

"""The contracts of the method that --method names (rayfl/testing/contracts.py), of the experiment that --experiment
names, and of the metric that --metric names (rayfl/testing/metric_contract.py).

Of an experiment: of its task (rayfl/testing/contracts.py), and of the rest, such as a schedule, a selection or
wrappers: their results do not depend on how the run is executed.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from torch import Tensor

from rayfl.choices.kinds import find, resolve
from rayfl.determinism.process import prepare_process
from rayfl.experiment.experiment import Experiment, read
from rayfl.experiment.prepare import prepare
from rayfl.experiment.table import override
from rayfl.methods.base import Method, PeerHalf, RayflError
from rayfl.metrics.base import Metric
from rayfl.rounds.setup import Setup
from rayfl.testing import contracts, metric_contract
from rayfl.testing.contracts import Make, Played
from rayfl.testing.executors import fitting_graph, play, rows
from rayfl.testing.watching import watched
from rayfl.untyped import Anything, Value

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


HOLDS: Mapping[str, Callable[[Make, Played, Path], Anything]] = {
    "loop_and_vmap_agree": lambda make, played, _: contracts.loop_and_vmap_agree(make(), make(engine="vmap"), played),
    "several_workers_give_the_bits_of_one": lambda make, played, _: contracts.several_workers_give_the_bits_of_one(
        make(), played
    ),
    "a_run_goes_on_from_its_checkpoint": lambda make, _, folder: contracts.a_run_goes_on_from_its_checkpoint(
        make, NUM_CLIENTS, folder
    ),
    "no_hook_modifies_what_it_was_given": lambda make, played, _: contracts.no_hook_modifies_what_it_was_given(
        make(), played
    ),
    "the_bill_is_the_size_of_the_buffers": lambda make, *_: contracts.the_bill_is_the_size_of_the_buffers(
        make, NUM_CLIENTS
    ),
    "unseen_clients_are_evaluated_and_leave_no_trace": lambda make, *_: (
        contracts.unseen_clients_are_evaluated_and_leave_no_trace(make)
    ),
}


@pytest.mark.parametrize("name", HOLDS)
def test_it_keeps_the_contract(make: Make, played: Played, tmp_path: Path, name: str) -> None:
    HOLDS[name](make, played, tmp_path)


def test_it_names_its_paper_and_describes_its_hyper_parameters(method: type[Method]) -> None:
    assert method.paper, "set `paper`, which `rayfl methods` shows"
    assert [name for name, field in method.Hyper.model_fields.items() if not field.description] == []


def test_twice_the_same(make: Make, played: Played) -> None:
    assert rows(play(make())[0]) == rows(played[0])


@pytest.mark.parametrize("order", ["joint", "local-first"])
def test_parts_stay_with_their_clients(method: type[Method], make: Make, tmp_path: Path, order: str) -> None:
    if not method.capabilities.keeps_parts or not method.gather:
        pytest.skip("the method does not say keeps_parts=True")
    parts = {"personal": ["head"], "order": order, "buffers": "average"}
    contracts.parts_stay_with_their_clients(make, parts, NUM_CLIENTS, tmp_path)


def test_bits_fall_under_a_compressor(method: type[Method], make: Make) -> None:
    if method.capabilities.own_compression or getattr(make().method, "has_link_messages", False):
        pytest.skip("the method fixes its own compressors, or sends each neighbour a message of its own")
    contracts.bits_fall_under_a_compressor(make)


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


def test_examples_are_evaluated_one_by_one(with_task: Make) -> None:
    contracts.examples_are_evaluated_one_by_one(with_task())


@pytest.mark.parametrize("method", contracts.TASK_METHODS)
def test_a_method_trains_on_it(with_task: Make, method: str) -> None:
    contracts.a_method_trains_on_it(
        lambda engine: with_task(runtime={"engine": engine}, **contracts.task_tables(method))
    )


EvaluatedMetric = tuple[Metric, Tensor, Tensor]


@pytest.fixture(params=(0, 1, 2))
def evaluated(request: pytest.FixtureRequest) -> EvaluatedMetric:
    """The metric, with outputs and targets that it evaluates."""
    name = request.config.getoption("--metric")
    if not name:
        pytest.skip("name a metric: --metric my_metrics.py:Brier")
    table: dict[str, object] = {"name": name}
    for setting in request.config.getoption("--set") or []:
        override(table, setting)
    metric = resolve(Metric, table)
    outputs, targets = metric_contract.examples(metric.takes_targets[0], request.param)
    return metric.for_data(metric_contract.task_for(targets), targets), outputs, targets


@pytest.mark.parametrize("holds", metric_contract.CONTRACT, ids=lambda holds: holds.__name__)
def test_a_metric_keeps_the_contract(evaluated: EvaluatedMetric, holds: metric_contract.Holds) -> None:
    holds(*evaluated)

"""The contract of the metric that --metric names; see rayfl/testing/metric_contract.py."""

import pytest
from torch import Tensor

from rayfl.choices.kinds import resolve
from rayfl.experiment.table import override
from rayfl.metrics.base import Metric
from rayfl.testing import metric_contract as contract

Judged = tuple[Metric, Tensor, Tensor]


@pytest.fixture(params=(0, 1, 2))
def judged(request: pytest.FixtureRequest) -> Judged:
    """The metric, with outputs and targets that it evaluates."""
    name = request.config.getoption("--metric")
    if not name:
        pytest.skip("name a metric: --metric my_metrics.py:Brier")
    table: dict[str, object] = {"name": name}
    for one in request.config.getoption("--set") or []:
        override(table, one)
    metric = resolve(Metric, table)
    outputs, targets = contract.examples(metric.judges[0], request.param)
    return metric.for_data(contract.task_for(targets), targets), outputs, targets


@pytest.mark.parametrize("holds", contract.CONTRACT, ids=lambda holds: holds.__name__)
def test_it(judged: Judged, holds: contract.Holds) -> None:
    holds(*judged)

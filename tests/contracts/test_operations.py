"""How many operations a GPU is given for each client of a stack outside its steps, counted on a pretended one.

A step is one sequence of operations for the whole stack, whatever its width. So what a wider stack has more is what its
clients cost one by one. Views are not counted: nothing is started on a GPU for them.
"""

from dataclasses import replace

import pytest

from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.testing.executors import play
from tests.contracts.test_on_device import MadeUp
from tests.pretended_gpu import PretendedGpu

MOST = 40
ROUNDS = 2
"""In the second one clients have states, and get what they missed."""


def operations(method: str, model: str, width: int) -> PretendedGpu:
    """A run whose clients are one stack."""
    experiment = Experiment(
        seed=1,
        rounds=ROUNDS,
        data={"name": "synthetic", "shape": [3, 8, 8], "num_groups": width, "samples_per_group": 4},
        model={"name": model},
        partition={"name": "natural"},
        method={"name": method, "batch_size": 4},
        clients={"count": width},
        runtime={"executor": "inline", "engine": "vmap", "stack_width": width},
        evaluation={"every": 0, "own": False, "pooled": False},
    )
    setup = prepare(experiment)
    setup = replace(setup, method=setup.method.with_task(MadeUp(setup.method.task)), device_name="cuda:0")
    with PretendedGpu() as gpu:
        play(setup)
    return gpu


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedpse", "ditto"])
def test_a_client_costs_a_gpu_few_operations_outside_its_steps(method: str):
    """However many tensors a model has: here 59."""
    few, many = (len(operations(method, "resnet20", width).launched) for width in (2, 4))
    assert 0 < (many - few) / (2 * ROUNDS) <= MOST

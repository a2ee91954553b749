"""How many operations a GPU is given for each client of a stack outside its steps, counted on a pretended one.

A step is one sequence of operations for the whole stack, whatever its width. So what a wider stack has more is what its
clients cost one by one. Views are not counted: nothing is started on a GPU for them.
"""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.methods.base import Carry
from rayfl.rounds import engines
from rayfl.testing.executors import play
from tests.contracts.test_on_device import MadeUp
from tests.pretended_gpu import PretendedGpu

MOST = 40
ROUNDS = 2
"""In the second one clients have states, and get what they missed."""


MOST_OF_A_STACK = 100
"""Of a method with hooks for whole stacks, whatever the number of clients."""


def operations(method: str, model: str, width: int) -> list[str]:
    """What a GPU is given outside the steps of a run whose clients are one stack."""
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
    in_steps: list[str] = []
    run_stage = engines.run_stage

    # Any: what `run_stage` takes.
    def apart(*arguments: Any) -> Carry:
        before = len(gpu.launched)
        carry = run_stage(*arguments)
        in_steps.extend(gpu.launched[before:])
        del gpu.launched[before:]
        return carry

    with PretendedGpu() as gpu, patch.object(engines, "run_stage", apart):
        play(setup)
    assert in_steps
    return gpu.launched


@pytest.mark.parametrize("method", ["fedpse"])
def test_a_client_costs_a_gpu_few_operations_outside_its_steps(method: str):
    """However many tensors a model has: here 59."""
    few, many = (len(operations(method, "resnet20", width)) for width in (2, 4))
    assert 0 < (many - few) / (2 * ROUNDS) <= MOST


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "scaffold", "ditto"])
def test_a_whole_stack_costs_a_gpu_few_operations_outside_its_steps(method: str):
    few, many = (len(operations(method, "resnet20", width)) / ROUNDS for width in (2, 16))
    assert 0 < few < many <= MOST_OF_A_STACK
    # Eight times the clients are three levels more of the summation tree.
    assert many - few <= 3 * 4

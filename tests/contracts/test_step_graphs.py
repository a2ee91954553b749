"""Steps that are captured and replayed leave what steps leave that run as they are, to the bit, for every method. The
graphs are played on a CPU (benchmarks/played_graphs.py)."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.played_graphs import CpuRecorder
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from rayfl.rounds.step_graphs import StepGraphs
from rayfl.testing.executors import assert_same_bits, contents, play, rows
from tests.contracts.every_method import CASES, Case, on_digits

ENGINES = pytest.mark.parametrize("engine", ["loop", "vmap"])
ALWAYS = ("fedavg", "fedpse", "ditto", "perfedavg", "heterofl", "dispfl", "fedpac", "seam Elastic")
"""Played in every test run: whole stacks, masks, widths, peers, several stages and batches a step, a wrapper."""
NOT_CAPTURED = {("fjord", "loop"): "_local_scalar_dense"}
"""Methods whose steps a graph cannot repeat, and the operator that is the reason."""
RARE = ("l2gd", "lag_ps")
"""Methods of which hardly a step comes again within three rounds."""
CALLED = [pytest.param(case, marks=[] if case.name in ALWAYS else pytest.mark.slow, id=case.name) for case in CASES]


# Any: what a run leaves.
def left_by(setup: Setup, num_workers: int) -> tuple[Any, Any]:
    executor = InlineExecutor(setup)
    executor.num_workers = num_workers
    records, run_states = play(setup, executor)
    return rows(records), contents(executor, run_states[-1])


def captured(setup: Setup, num_workers: int = 1) -> StepGraphs:
    """The graphs of a run, which leaves what the run without them leaves."""
    wanted, bits = left_by(setup, num_workers)
    there = replace(setup)
    graphs = vars(there)["step_graphs"] = StepGraphs(CpuRecorder(), setup.device, steps_before=1)
    records, found = left_by(there, num_workers)
    assert records == wanted
    assert_same_bits(found, bits)
    return graphs


@ENGINES
@pytest.mark.parametrize("case", CALLED)
def test_captured_steps_give_the_bits_of_steps(case: Case, engine: str):
    setup = case.make(engine=engine)
    graphs = captured(setup)
    operator = NOT_CAPTURED.get((case.name, engine))
    assert all(operator and operator in reason for reason in graphs.reasons.values()), graphs.reasons
    assert graphs.num_replays > 0 or operator or case.name in RARE or not setup.plan(0).stages


FAULTS = {"per_round": 5, "dropout_after_download": 0.2, "dropout_after_training": 0.2, "work": "capacity"}


@pytest.mark.parametrize(
    ("name", "method"),
    [
        # Each round has another learning rate, and each client another number of steps, of which the last is smaller.
        ("fedavg", {"lr_decay": 0.5, "batch_size": 20, "epochs": 2}),
        ("scaffold", {"lr_schedule": "cosine", "batch_size": 20}),
        ("fedprox", {"optimizer": "adamw", "weight_decay": 0.1, "lr": 0.01, "batch_size": 20}),
        ("fedavg_ft", {"momentum": 0.9, "clip_norm": 1.0, "batch_size": 20}),
    ],
)
@pytest.mark.parametrize(("width", "num_workers"), [(1, 1), (3, 1), (4, 2)])
def test_dropped_clients_changing_rates_and_widths(name: str, method: dict[str, Any], width: int, num_workers: int):
    engine = "loop" if width == 1 else "vmap"
    clients = {**FAULTS, "examples_per_s": {"low": 10, "high": 1000}}
    setup = on_digits(name)(engine=engine, stack_width=width, clients=clients, method={"name": name, **method})
    graphs = captured(setup, num_workers)
    assert graphs.num_replays > 10 and not graphs.reasons


@pytest.mark.parametrize("schedule", [{"name": "buffered", "buffer": 2}, {"name": "asynchronous"}])
@ENGINES
def test_flights(schedule: dict[str, Any], engine: str):
    clients = {"examples_per_s": {"low": 10, "high": 1000}, "per_round": 4}
    assert captured(on_digits("fedavg")(engine=engine, schedule=schedule, clients=clients)).num_replays > 10


@ENGINES
def test_cropped_images(engine: str):
    data = {"name": "synthetic", "shape": [3, 8, 8], "augment": True, "num_groups": 6, "samples_per_group": 20}
    model = {"name": "mlp", "hidden": [8]}
    setup = on_digits("fedavg")(
        engine=engine, data=data, model=model, partition="natural", method={"name": "fedavg", "batch_size": 4}
    )
    assert captured(setup).num_replays > 10

"""The benchmark `outside`: the processor time of a round outside its steps, for each client of a stack.

All clients of a round are one stack of a logistic model under vmap, in this process; nothing is evaluated. What is left
without the steps is drawing batches, hooks, messages, sums, the server's update and the records.
"""

import gc
import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any
from unittest.mock import patch

from benchmarks.figures import Column, Figures, Results
from jobs.display import print_table
from rayfl.determinism.process import prepare_process
from rayfl.experiment.experiment import Experiment

METHODS = ("fedavg", "fedprox", "scaffold", "ditto")
WARM_UP = 3


def bench_outside(methods: Sequence[str], clients: int, rounds: int, results: Results) -> None:
    """Measure each method over `rounds` rounds, print a table and write `results`.

    Raise RayflError for a method that cannot run in stacks, and if `results` cannot be written.
    """
    results.require()
    prepare_process()
    figures = Figures(
        "outside",
        [
            Column("method", "method"),
            Column("median_ms", "ms a client, median", "{:.3f}"),
            Column("least_ms", "least", "{:.3f}"),
            Column("steps_ms", "steps: ms a client", "{:.3f}"),
        ],
        title=f"processor time outside the steps, {clients} clients in a stack",
    )
    for method in methods or METHODS:
        outside, steps = zip(*seconds_of_rounds(method, clients, rounds), strict=True)
        figures.add(method, *(1e3 * value / clients for value in (median(outside), min(outside), median(steps))))
    print_table(figures.table())
    results.write(figures)


def seconds_of_rounds(method: str, clients: int, rounds: int) -> list[tuple[float, float]]:
    """Of each round but the first ones: the process's seconds outside the steps, and in them."""
    from rayfl.experiment.prepare import prepare
    from rayfl.rounds import engines
    from rayfl.rounds.executor import InlineExecutor
    from rayfl.rounds.rounds import simulate

    setup = prepare(experiment(method, clients, rounds + WARM_UP + 1))
    in_steps, run_stage = [0.0], engines.run_stage
    moments: list[tuple[float, float]] = []

    # Any: what `run_stage` takes and returns.
    def timed(*arguments: Any) -> Any:
        begun = time.process_time()
        carry = run_stage(*arguments)
        in_steps[0] += time.process_time() - begun
        return carry

    gc.collect()
    with patch.object(engines, "run_stage", timed):
        simulate(setup, InlineExecutor(setup), lambda *_: moments.append((time.process_time(), in_steps[0])))
    spans = [(end[0] - begin[0], end[1] - begin[1]) for begin, end in pairwise(moments)]
    return [(span - steps, steps) for span, steps in spans[WARM_UP:]]


def experiment(method: str, clients: int, rounds: int) -> Experiment:
    """Clients of twelve examples each, one batch an epoch."""
    return Experiment(
        rounds=rounds,
        data={"name": "synthetic", "shape": [1, 8, 8], "num_groups": clients, "samples_per_group": 12},
        partition={"name": "natural"},
        clients={"count": clients},
        model={"name": "logistic"},
        method={"name": method, "batch_size": 16},
        evaluation={"every": 0, "pooled": False, "own": False},
        runtime={"executor": "inline", "engine": "vmap", "stack_width": clients},
    )

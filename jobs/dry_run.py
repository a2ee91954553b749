"""`rayfl run --dry-run`: predicts a run's steps, bytes, time and memory, without Ray and without writing a file.

The rounds are simulated in this process, with all random draws, messages and bills, but only one client is trained: the
change of its model is applied to the models of all others, whose steps are counted. After LONGEST_S seconds the rest is
extrapolated from the rounds so far.
"""

import resource
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import cached_property
from statistics import median
from typing import Any

import psutil
from rich.filesize import decimal
from torch import Tensor
from torch.utils._pytree import tree_map

from jobs import display, reporting
from rayfl import tree
from rayfl.compress.dense import Dense
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.methods.base import Carry, Method, Work
from rayfl.report import comparison, wording
from rayfl.rounds import engines, executor, ledger, rounds
from rayfl.rounds.setup import Setup
from rayfl.run_directory.play_run import Stopped

FLOPS = "flops/training"
LONGEST_S = 30.0
"""Seconds after which no further round is simulated."""


class DryEngine:
    """Trains one client for each shape of carries. example_s: seconds per example; spent_s: seconds of all training."""

    def __init__(self, engine: engines.Engine, width: int) -> None:
        self.engine = engine
        self.width = width
        self.example_s = 0.0
        self.spent_s = 0.0
        self.known: dict[Hashable, tuple[Carry, Carry]] = {}

    def __call__(
        self, method: Method, tasks: Sequence[engines.LocalTask], width: int = 1
    ) -> Iterator[tuple[Carry, dict[str, Work]]]:
        """See `engines.Engine`."""
        for task in tasks:
            carry = task.begin()
            work = {stage.name: task.planned(stage) for stage in task.stages}
            key = engines.shape_of(carry), *work
            # It trains twice, because the first time is slower. A stack of one client takes as long as a full one.
            for _ in range(0 if key in self.known else 2):
                begun = time.perf_counter()
                ((trained, _),) = self.engine(method, [task], self.width)
                taken = time.perf_counter() - begun
                self.spent_s += taken
                self.example_s = (
                    taken / self.width / max(1, sum(stage_work.num_examples for stage_work in work.values()))
                )
                self.known[key] = task.begin(), trained
            before, after = self.known[key]
            is_alike = engines.shape_of(before) == engines.shape_of(after)
            yield tree_map(_moved, carry, before, after) if is_alike else after, work


# Any: leaves of a carry.
def _moved(leaf: Any, before: Any, after: Any) -> Any:
    """A leaf of a carry, changed as training changed that of another client."""
    return leaf + (after - before) if isinstance(leaf, Tensor) and leaf.is_floating_point() else after


class DrySetup(Setup):
    """A setup whose clients are not trained, except for one, and that is evaluated in round 0 alone."""

    @cached_property
    def engine(self) -> DryEngine:
        """The setup's engine inside a `DryEngine`."""
        return DryEngine(super().engine, self.work_width)

    def evaluated(self, round_number: int) -> bool:
        """Whether it is round 0."""
        return round_number == 0

    @property
    def has_fixed_sizes(self) -> bool:
        """Whether the sizes of messages do not depend on their values."""
        method = self.method
        is_dense = isinstance(self.uplink, Dense) and isinstance(self.downlink, Dense)
        can = method.capabilities
        free = can.own_compression or can.may_be_silent or type(method).has_work is not Method.has_work
        return is_dense and can.hands_over_trees and not free


def foresee(experiment: Experiment, shown: display.Display) -> None:
    """Print the predicted steps, bytes, time and memory of a run."""
    shown.stage("playing the rounds without training")
    plain = replace(prepare(experiment), stop=None)
    setup = DrySetup(**{field.name: getattr(plain, field.name) for field in fields(Setup)})
    sums = Counter[str]()
    walls = list[float]()
    begun = time.monotonic()
    driver = psutil.Process().memory_info().rss

    def add(record: ledger.RoundRecord, run_state: rounds.RunState) -> None:
        walls.append(record.row.wall_s)
        sums.update(vars(record.row))
        for client in record.clients:
            sums.update(steps=client.num_steps, examples=client.num_samples)
        sums["flops"] += sum(
            int(metric.value or 0) for metric in record.metrics if metric.name == FLOPS and metric.client is not None
        )
        sums["states"] = sum(map(tree.num_bytes, (*run_state.states.values(), *run_state.server_memories.values())))
        if time.monotonic() - begun > LONGEST_S:
            raise Stopped

    with suppress(Stopped):
        rounds.simulate(setup, executor.InlineExecutor(setup), add)
    scale = setup.rounds / len(walls)
    round_s = median(walls[1:] or walls)
    given = 1 if experiment.runtime.executor == "inline" else experiment.runtime.actors
    actors = min(setup.most_actors, given if isinstance(given, int) else psutil.cpu_count() or 1)
    evaluations_s = sum(map(plain.evaluated, range(setup.rounds))) * max(0.0, walls[0] - setup.engine.spent_s - round_s)
    real_s = (scale * sums["examples"] * setup.engine.example_s + evaluations_s) / actors + setup.rounds * round_s
    models = tree.num_bytes(setup.initial_arrays) * (
        3 + (sums["selected"] / len(walls) if setup.keeps_messages else actors)
    )
    data = sum(
        array.nbytes for part in (setup.dataset.train, setup.dataset.test) for array in (part.inputs, part.labels)
    )
    counted = "exact" if scale == 1 else f"estimate from {wording.counted(len(walls), 'round')}"
    sized = counted if setup.has_fixed_sizes or scale > 1 else "estimate: the sizes of messages depend on their values"
    rows = [
        ["steps of all clients", f"{scale * sums['steps']:,.0f}", counted],
        ["bytes up", f"{scale * sums['uplink_bits'] / 8:,.0f}", sized],
        ["bytes down", f"{scale * sums['downlink_bits'] / 8:,.0f}", sized],
        ["operations of the training", f"{scale * sums['flops']:.4g}" if sums["flops"] else "not counted", sized],
        ["simulated time", wording.seconds(scale * sums["simulated_s"]), sized],
        ["real time of the rounds", wording.seconds(real_s), f"estimate for {actors} actors, from one trained client"],
        ["memory of the driver", decimal(driver), "as in this process before the rounds; Ray needs more"],
        [
            "memory of an actor",
            decimal(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss),
            "at most: this process, server and object store too",
        ],
        [
            "object store",
            decimal(int(data + sums["states"] + models)),
            "estimate: data, clients' states, models, messages",
        ],
    ]
    shown.close()
    most = "at most " if experiment.stop else ""
    title = f"{experiment.name}: {most}{wording.counted(setup.rounds, 'round')}; nothing was written"
    display.print_table(reporting.rich_table(title, comparison.TextTable(["what", "value", "how"], rows)))

"""`--dry-run`: predicts the steps, bytes, time and memory of a run or a sweep, without Ray and without writing a file.

The rounds are simulated in this process, with all random draws, messages and bills, but only one client is trained: the
change of its model is applied to the models of all others, whose steps are counted. After LONGEST_S seconds, of which
the runs of a sweep have a share each, the rest is extrapolated from the rounds so far.
"""

import resource
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

import psutil
import torch
from rich.filesize import decimal
from torch import Tensor
from torch.utils._pytree import tree_map

from jobs import display, reporting
from rayfl import tree
from rayfl.compress.dense import Dense
from rayfl.errors import RayflError
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.identity import determining_settings
from rayfl.experiment.prepare import prepare
from rayfl.experiment.sweep import Combination
from rayfl.methods.base import Carry, Method, Work
from rayfl.report import wording
from rayfl.report.page_tables import TextTable
from rayfl.rounds import engines, executor, ledger, rounds
from rayfl.rounds.setup import Setup
from rayfl.run_directory.play_run import Stopped

FLOPS = "flops/training"
LONGEST_S = 30.0
"""Seconds after which no further round is simulated."""


@dataclass
class DryEngine:
    """Trains one client for each shape of carries. example_s: seconds per example; spent_s: seconds of all training."""

    engine: engines.Engine
    width: int
    example_s: float = 0.0
    spent_s: float = 0.0
    known: dict[Hashable, tuple[Carry, Carry]] = field(default_factory=dict)

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
        is_dense = isinstance(self.uplink, Dense) and isinstance(self.downlink, Dense)
        can = self.method.capabilities
        free = can.own_compression or can.may_be_silent or type(self.method).has_work is not Method.has_work
        return is_dense and can.hands_over_trees and not free


_SUMMED = ("num_rounds", "steps", "uplink_bytes", "downlink_bytes", "simulated_s", "real_s")
"""The totals that a sweep adds up."""


class Forecast(NamedTuple):
    """What a run will take, extrapolated from `simulated` of its rounds.

    totals: those of `_SUMMED`, and flops. is_sized: whether the sizes of messages do not depend on their values.
    device_name: cpu in place of a GPU that is not there. memory: bytes of the driver, of an actor and of the object
    store.
    """

    totals: Mapping[str, float]
    simulated: int
    is_sized: bool
    actors: int
    device_name: str
    memory: Mapping[str, int]


def forecast(experiment: Experiment, runs: int = 1) -> Forecast:
    """Play the rounds of one of `runs` runs without training."""
    plain = replace(prepare(experiment), stop=None)
    if plain.device_name == "cuda" and not torch.cuda.is_available():
        plain = replace(plain, device_name="cpu")
    setup = DrySetup(**{known.name: getattr(plain, known.name) for known in fields(Setup)})
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
        if time.monotonic() - begun > LONGEST_S / runs:
            raise Stopped

    with suppress(Stopped):
        rounds.simulate(setup, executor.InlineExecutor(setup), add)
    scale = setup.rounds / len(walls)
    round_s = median(walls[1:] or walls)
    given = 1 if experiment.runtime.executor == "inline" else experiment.runtime.actors
    actors = min(setup.most_actors, given if isinstance(given, int) else psutil.cpu_count() or 1)
    evaluations_s = sum(map(plain.evaluated, range(setup.rounds))) * max(0.0, walls[0] - setup.engine.spent_s - round_s)
    models = tree.num_bytes(setup.initial_arrays) * (
        3 + (sums["selected"] / len(walls) if setup.keeps_messages else actors)
    )
    data = sum(
        array.nbytes for part in (setup.dataset.train, setup.dataset.test) for array in (part.inputs, part.labels)
    )
    totals = {
        "num_rounds": setup.rounds,
        "steps": scale * sums["steps"],
        "uplink_bytes": scale * sums["uplink_bits"] / 8,
        "downlink_bytes": scale * sums["downlink_bits"] / 8,
        "flops": scale * sums["flops"],
        "simulated_s": scale * sums["simulated_s"],
        "real_s": (scale * sums["examples"] * setup.engine.example_s + evaluations_s) / actors + setup.rounds * round_s,
    }
    memory = {
        "driver": driver,
        "actor": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "store": int(data + sums["states"] + models),
    }
    return Forecast(totals, len(walls), setup.has_fixed_sizes, actors, plain.device_name, memory)


def foresee(experiment: Experiment, shown: display.Display) -> None:
    """Print the predicted steps, bytes, time and memory of a run."""
    shown.stage("playing the rounds without training")
    seen = forecast(experiment)
    totals = seen.totals
    is_whole = seen.simulated == totals["num_rounds"]
    counted = "exact" if is_whole else f"estimate from {wording.counted(seen.simulated, 'round')}"
    sized = counted if seen.is_sized or not is_whole else "estimate: the sizes of messages depend on their values"
    rows = [
        ["steps of all clients", f"{totals['steps']:,.0f}", counted],
        ["bytes up", f"{totals['uplink_bytes']:,.0f}", sized],
        ["bytes down", f"{totals['downlink_bytes']:,.0f}", sized],
        ["operations of the training", f"{totals['flops']:.4g}" if totals["flops"] else "not counted", sized],
        ["simulated time", wording.seconds(totals["simulated_s"]), sized],
        [
            "real time of the rounds",
            wording.seconds(totals["real_s"]),
            f"estimate for {wording.counted(seen.actors, 'actor')}, from one client, trained on {seen.device_name}",
        ],
        [
            "memory of the driver",
            decimal(seen.memory["driver"]),
            "as in this process before the rounds; Ray needs more",
        ],
        ["memory of an actor", decimal(seen.memory["actor"]), "at most: this process, server and object store too"],
        ["object store", decimal(seen.memory["store"]), "estimate: data, clients' states, models, messages"],
    ]
    shown.close()
    most = "at most " if experiment.stop else ""
    title = f"{experiment.name}: {most}{wording.counted(experiment.rounds, 'round')}; nothing was written"
    display.print_table(reporting.rich_table(TextTable(["what", "value", "how"], rows, title=title)))


def foresee_all(combinations: Sequence[Combination], shown: display.Display) -> None:
    """Print the predicted rounds, steps, bytes and time of a sweep's runs, and their totals.

    Of runs that differ in their seeds, the first is simulated and stands for all.
    """
    alike: dict[str, list[Combination]] = {}
    for combination in combinations:
        settings = determining_settings(combination.experiment.as_dict())
        alike.setdefault(repr(sorted(settings.items())), []).append(combination)
    totals, rows = Counter[str](), []
    for number, (first, *others) in enumerate(alike.values(), 1):
        shown.stage(f"playing the rounds without training: {first.title} ({number} of {len(alike)})")
        try:
            seen = forecast(first.experiment, len(alike))
        except RayflError:
            if not first.experiment.report.list_refused:
                raise
            rows.append([first.title, "refused", *[""] * len(_SUMMED)])
            continue
        count = 1 + len(others)
        sums = {name: count * seen.totals[name] for name in _SUMMED} | {"runs": count}
        totals.update(sums)
        most = "at most " if first.experiment.stop else ""
        rows.append(
            [first.title + f" and {wording.counted(len(others), 'more seed')}" * bool(others), *_cells(sums, most)]
        )
    shown.close()
    title = f"{wording.counted(len(combinations), 'run')}, one after another; nothing was written"
    heads = ["runs", "number", "rounds", "steps", "bytes up", "bytes down", "simulated time", "real time"]
    table = TextTable(heads, [*rows, ["all", *_cells(totals, "")]], title=title)
    display.print_table(reporting.rich_table(table), 150)
    display.say(
        "Numbers of bytes are estimates where the sizes of messages depend on their values, and real times always."
    )


def _cells(sums: Mapping[str, float], most: str) -> list[str]:
    """The cells of a row about some runs; most: a word before the number of rounds."""
    counts = [f"{sums[name]:,.0f}" for name in ("num_rounds", "steps", "uplink_bytes", "downlink_bytes")]
    times = [wording.seconds(sums[name]) for name in ("simulated_s", "real_s")]
    return [f"{sums['runs']:g}", most + counts[0], *counts[1:], *times]

"""The benchmark `scale --clients`: a million clients, or thousands of peers, in one process without Ray.

`python -m benchmarks.many_clients DATA.npz FOLDER TABLE.json` plays one run of a model of 10 numbers and prints as JSON
the seconds, and the processor seconds, from the start of the process to the end of its first round, and those of each
further round.
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

STARTED = time.perf_counter()

from rayfl.determinism.process import prepare_process  # noqa: E402

prepare_process()

import numpy as np  # noqa: E402

from benchmarks.figures import Column, Figures, Results  # noqa: E402
from benchmarks.memory import run_watched  # noqa: E402
from jobs.console import Audience  # noqa: E402
from jobs.display import Display, print_table  # noqa: E402
from jobs.single import run  # noqa: E402
from rayfl.errors import RayflError  # noqa: E402
from rayfl.experiment.experiment import Experiment  # noqa: E402
from rayfl.rounds.ledger import RoundRow  # noqa: E402

ROUNDS, TESTED, DEGREE = 3, 10_000, 10


# Any: tables of an experiment.
def runs(clients: int, participants: int) -> dict[str, dict[str, Any]]:
    """The tables of each run by what it is."""
    local = {"lr": 0.1, "epochs": 1, "batch_size": 2}
    many = {"clients": {"count": clients, "per_round": participants}, "method": {"name": "fedavg", **local}}
    peers = {"clients": {"count": participants}, "method": {"name": "dpsgd", **local}}
    graph = {"name": "random", "degree": min(DEGREE, participants - 1)}
    sample = {"clients": min(1000, participants)}
    return {
        "fedavg": {**many, "evaluation": {"own": False}},
        "fedavg in stacks": {
            **many,
            "evaluation": {"own": False},
            "runtime": {"executor": "inline", "engine": "vmap", "stack_width": 500},
        },
        "fedavg, own splits of an example": {**many, "evaluation": sample},
        f"dpsgd, peers of degree {DEGREE}": {**peers, "topology": graph, "evaluation": sample},
    }


def bench_many_clients(clients: int, participants: int, results: Results) -> None:
    """Measure the runs, print a table and write `results`. Raise RayflError if they do not fit each other."""
    if not 2 <= participants <= clients:
        raise RayflError(f"--participants={participants} must be from 2 to --clients={clients}")
    results.require()
    columns = (
        Column("run", "run"),
        Column("clients", "clients", "{:,}"),
        Column("participants", "a round", "{:,}"),
        Column("first_s", "seconds to the end of the first round", "{:.1f}"),
        Column("first_cpu_s", "processor seconds", "{:.1f}"),
        Column("median_s", "seconds a round", "{:.2f}"),
        Column("median_cpu_s", "processor seconds", "{:.2f}"),
        Column("peak_bytes", "peak memory, MB", lambda size: f"{size / 1e6:,.0f}"),
    )
    caption = "A linear model of 10 numbers, two examples a client, in one process; seconds a round without the first."
    figures = Figures("many_clients", columns, "Many clients without Ray", caption)
    with tempfile.TemporaryDirectory(prefix="many") as scratch:
        for name, tables in runs(clients, participants).items():
            data, file = Path(scratch) / "data.npz", Path(scratch) / "table.json"
            count = tables["clients"]["count"]
            write_data(data, count)
            file.write_text(json.dumps(tables), encoding="utf-8")
            print(f"{name} ...", file=sys.stderr, flush=True)
            line, peak = run_watched("benchmarks.many_clients", str(data), str(Path(scratch) / name), str(file))
            wall, cpu = json.loads(line)
            figures.add(name, count, participants, wall[0], cpu[0], median(wall[1:]), median(cpu[1:]), peak)
    print_table(figures.table())
    results.write(figures)


def write_data(path: Path, clients: int) -> None:
    """Two examples a client of a linear rule over four numbers."""
    draws, rule = np.random.default_rng(0), np.array([1, -1, 0.5, 0], np.float32)
    inputs, tested = (draws.standard_normal((number, 4), dtype=np.float32) for number in (2 * clients, TESTED))
    labels, answers = ((inputs_of_split @ rule > 0).astype(np.int64) for inputs_of_split in (inputs, tested))
    np.savez(path, inputs=inputs, labels=labels, test_inputs=tested, test_labels=answers)


def main(data: str, directory: str, file: str) -> None:
    """Play one run and print the seconds of its rounds, of the first from the start of the process."""
    ends = [(STARTED, 0.0)]

    def ended(row: RoundRow, means: Mapping[str, float]) -> None:
        ends.append((time.perf_counter(), time.process_time()))

    tables: dict[str, Any] = {
        "name": "many",
        "rounds": ROUNDS,
        "data": {"name": "arrays", "path": data},
        "partition": "iid",
        "model": "logistic",
        "runtime": {"executor": "inline"},
        "output": {"report": False, "save_models": False},
        **json.loads(Path(file).read_text(encoding="utf-8")),
    }
    run(Experiment(**tables), Path(directory), audience=Audience(ended, display=Display(hidden=True)))
    print(json.dumps([[after - before for before, after in pairwise(clock)] for clock in zip(*ends, strict=True)]))


if __name__ == "__main__":
    main(*sys.argv[1:])

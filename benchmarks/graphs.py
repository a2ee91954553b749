"""The benchmark `graphs`: whether CUDA graphs and a server on the GPU keep the bits, and how fast a GPU then is.

It takes at most ten minutes on one card: each row has a limit, is printed and written as soon as it is known, and is
not measured again if the JSON file of an earlier, unfinished run of the same device has it.

A machine without a network needs torch, torchvision, Ray, the packages that rayfl imports, this checkout, and for the
group `fashion` the four files of Fashion-MNIST (`--root`). A row whose package is missing fails, and others go on. In
place of one run, several that name some GROUPS each may use the same JSON file.
"""

import json
import math
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from actors.errors import ClusterError
from benchmarks.figures import Column, Figures, Results
from benchmarks.gpu import CODEC_ENTRIES, PEER, Process, described, found_device
from benchmarks.gpu_program import CODECS, GPU_WORKLOADS, MODELS
from benchmarks.graphs_program import FASHION, GraphTask, experiment
from benchmarks.rounds import files_of, installed, lend, rival
from jobs.display import print_table
from rayfl.choices.kinds import named
from rayfl.errors import RayflError, did_you_mean
from rayfl.experiment.prepare import prepare
from rayfl.methods.base import Method

MODULE = "benchmarks.graphs_program"
SHARDS = 8
"""Processes that compare the bits of methods at the same time."""
GROUPS = ("methods", "W1", "W3", "ray", "W2", "R18", FASHION, "models", "codecs", "peer")
"""Rows, the most important first."""
ROUNDS: Mapping[str, int] = {"W1": 10, "W3": 20, "W2": 3, "R18": 2, "models": 3, "ray": 8}
"""Measured rounds."""
FASHION_ROUNDS: Mapping[str, int] = {"fedavg": 3, "fedpse": 3, "dispfl": 1}
"""Measured rounds on Fashion-MNIST; all hundred peers of Dis-PFL train in each."""
WANTED: Mapping[str, float] = {"W1": 0.05, "W2": 0.06, "W3": 1.0, "R18": 1.0}
"""Seconds a round with graphs, as a share of the bare loop's."""

COLUMNS = (
    Column("row", "row"),
    Column("median_s", "seconds a round", "{:.4f}"),
    Column("first_s", "first round", "{:.2f}"),
    Column("share", "of the bare loop", "{:.3f}"),
    Column("peak_gb", "memory, GB", "{:.2f}"),
    Column("replays", "replays", "{}"),
    Column("note", "", "{}"),
)


@dataclass(frozen=True)
class Row:
    """A task under its name. `same_as`: the row whose digest it must have."""

    name: str
    task: GraphTask
    same_as: str = ""


@dataclass
class Proof:
    """What is known, and what is left of the time. `figures`: by the name of their row."""

    results: Results
    device: str
    budget_s: float
    limit_s: float
    # Any: whatever JSON holds.
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)

    def remaining_s(self) -> float:
        """Seconds until the end of the budget."""
        return self.budget_s - (time.monotonic() - self.begun)

    # Any: whatever JSON holds.
    def keep(self, row: Row, figures: dict[str, Any] | None) -> None:
        """Print a row, and write all; None: it took too long."""
        if figures is None:
            self.left_out.append(row.name)
            print(f"  {row.name}: left out, it took too long", flush=True)
        else:
            self.figures[row.name] = figures
            print(f"  {row.name}: {self.words(row, figures)}", flush=True)
        self.results.save(
            device=self.device, described=described(self.device), rows=self.figures, left_out=self.left_out
        )

    # Any: whatever JSON holds.
    def words(self, row: Row, figures: Mapping[str, Any]) -> str:
        """Figures as a line."""
        if "error" in figures:
            return f"FAILED, {figures['error']}"
        shown = [f"{statistics.median(figures['seconds']):.4f} s"]
        if "first_s" in figures:
            shown.append(f"first {figures['first_s']:.2f} s")
        if figures.get("peak_bytes"):
            shown.append(f"{figures['peak_bytes'] / 1e9:.2f} GB")
        if "replays" in figures:
            shown.append(f"{figures['replays']} replays")
        shown += [f"{stage}: {why}" for stage, why in figures.get("reasons", {}).items()]
        if row.task.program == "method":
            shown.append("the same bits" if figures["same"] else "OTHER BITS")
        other = self.figures.get(row.same_as, {}).get("digest")
        if other is not None:
            shown.append(f"{'the bits' if other == figures['digest'] else 'OTHER BITS than those'} of {row.same_as!r}")
        return ", ".join(shown)

    def run(self, rows: Sequence[Row], shards: int = 1) -> None:
        """Measure rows in turn in one process, or in several at once; those that are known are not measured again."""
        rows = [row for row in rows if "error" in self.figures.get(row.name, {"error": ""})]
        ended: queue.SimpleQueue[tuple[Row, dict[str, Any] | None] | None] = queue.SimpleQueue()

        def work(part: Sequence[Row]) -> None:
            for pair in self._in_turn(part):
                ended.put(pair)
            ended.put(None)

        parts = [part for part in (rows[shard::shards] for shard in range(shards)) if part]
        for part in parts:
            threading.Thread(target=work, args=(part,), daemon=True).start()
        for _ in parts:
            for pair in iter(ended.get, None):
                self.keep(*pair)

    def _in_turn(self, rows: Sequence[Row]) -> Iterator[tuple[Row, dict[str, Any] | None]]:
        """A row that takes too long, or whose process ends, ends the process; another one does the rest."""
        while rows:
            with Process([row.task for row in rows], MODULE) as process:
                for row in rows:
                    rows = rows[1:]
                    limit_s = min(self.limit_s, self.remaining_s())
                    try:
                        figures = process.figures(row.task, limit_s) if limit_s > 0 else None
                    except RuntimeError as error:
                        yield row, {"error": str(error)}
                        break
                    yield row, figures
                    if figures is None:
                        break

    def peer_row(self, name: str, python: str) -> None:
        """Measure pfl-research on a workload."""
        row = Row(f"{name} pfl-research", GraphTask("peer", name, device=self.device))
        if row.name in self.figures or self.remaining_s() < self.limit_s / 2:
            return
        try:
            with tempfile.TemporaryDirectory(prefix="graphs") as scratch:
                work = Path(scratch, "work")
                work.mkdir()
                task = GraphTask("rayfl", name, device=self.device, rounds=ROUNDS[name])
                files_of(GPU_WORKLOADS[name], prepare(experiment(task))).write(work)
                lend(Path(scratch))
                peer = rival(PEER, str(work), self.device, scratch=Path(scratch), python=python)
            self.keep(row, {"seconds": [*peer.seconds], "peak_bytes": peer.peak_bytes})
        except ClusterError as error:
            self.keep(row, {"error": str(error)})


def rows_of(group: str, base: GraphTask) -> list[Row]:
    """The rows of a group but `peer`."""
    graphs = replace(base, graphs=True)
    if group == "methods":
        return [
            Row(f"bits {name}", replace(base, program="method", workload=name, part=SHARDS)) for name in named(Method)
        ]
    if group == "codecs":
        entries = max(1000, round(CODEC_ENTRIES * base.scale))
        return [Row(f"codec {name}", replace(base, program="codec", workload=name, entries=entries)) for name in CODECS]
    if group == FASHION:
        return [
            Row(f"{FASHION} {method}", replace(graphs, workload=FASHION, method=method, rounds=base.rounds or rounds))
            for method, rounds in FASHION_ROUNDS.items()
        ]
    if group == "ray":
        base = replace(base, program="ray", rounds=base.rounds or ROUNDS[group])
        inline = "command, inline"
        return [
            Row(inline, base),
            Row(f"{inline}, graphs", replace(base, graphs=True), inline),
            Row(f"{inline}, server on the device", replace(base, graphs=True, server_on_device=True), inline),
            *(
                Row(
                    f"Ray, {actors} actor{'s' * (actors > 1)}, graphs",
                    replace(base, graphs=True, actors=actors),
                    inline,
                )
                for actors in (1, 4, 2)
            ),
            Row("Ray, 1 actor", replace(base, actors=1), inline),
        ]
    rounds = base.rounds or ROUNDS.get(group, ROUNDS["models"])
    names = [*MODELS] if group == "models" else [group]
    return [row for name in names for row in _beside_bare(name, replace(base, workload=name, rounds=rounds))]


def _beside_bare(name: str, base: GraphTask) -> list[Row]:
    """A workload or an architecture beside the bare loop: without graphs, with them, and in the other ways."""
    graphs, plain = replace(base, graphs=True), f"{name} rayfl"
    rows = [
        Row(f"{name} bare", replace(base, program="bare")),
        Row(plain, base),
        Row(f"{plain}, graphs", graphs, plain),
    ]
    if name not in GPU_WORKLOADS:
        return rows
    server = replace(graphs, server_on_device=True)
    rows.append(Row(f"{plain}, graphs, server on the device", server, plain))
    if name != "R18":
        rows += [Row(f"{plain}, graphs, {n} workers", replace(graphs, workers=n), plain) for n in (2, 4)]
        alone = f"{plain}, one by one"
        rows += [
            Row(alone, replace(base, engine="loop")),
            Row(f"{alone}, graphs", replace(graphs, engine="loop"), alone),
        ]
    return rows


def bench_graphs(
    groups: Sequence[str],
    results: Results,
    *,
    device: str = "auto",
    scale: float = 1.0,
    rounds: int | None = None,
    root: str | None = None,
    python: str | None = None,
    limit_s: float = 60.0,
    budget_s: float = 570.0,
) -> int:
    """Measure GROUPS (by default all), print a table and write `results` after every row.

    `root`: the folder of Fashion-MNIST, by default that of Debian's package; `python`: one with pfl-research.
    `limit_s`: seconds for a row; `budget_s`: for all. What does not fit is left out and named: run it again with the
    same file. Return an exit code: 1 if bits differ or a row failed.
    """
    for group in groups:
        if group not in GROUPS:
            raise RayflError(f"unknown group {group!r}: {did_you_mean(group, GROUPS)}")
    device = found_device(device)
    results.require()
    proof = Proof(results, device, budget_s, limit_s)
    if results.path.exists():
        known = json.loads(results.path.read_text())
        if known.get("described") == described(device):
            proof.figures |= known["rows"]
    print(f"device: {described(device)}; {budget_s:g} s in all, {len(proof.figures)} rows known", flush=True)
    base = GraphTask("rayfl", device=device, scale=scale, rounds=rounds, root=root)
    chosen = [group for group in GROUPS if group in (groups or GROUPS)]
    rows: dict[str, Row] = {}
    for group in chosen:
        of_group = [] if group == "peer" else rows_of(group, base)
        rows |= {row.name: row for row in of_group}
        print(f"{group}, {proof.remaining_s():.0f} s left", flush=True)
        proof.run(of_group, SHARDS if group == "methods" else 1)
        if group == "peer" and PEER in installed([python or sys.executable]):
            for name in ("W1", "W3"):
                proof.peer_row(name, python or sys.executable)
    return report(proof, rows)


def report(proof: Proof, rows: Mapping[str, Row]) -> int:
    """Print the table and what was wanted; return the exit code."""
    table, wrong = Figures("table", COLUMNS), list[str]()
    medians = {name: statistics.median(x["seconds"]) for name, x in proof.figures.items() if "error" not in x}
    for name, figures in proof.figures.items():
        if "error" in figures:
            wrong.append(f"{name} failed")
            continue
        other = proof.figures.get(rows[name].same_as if name in rows else "", {})
        differs = figures.get("same") is False or other.get("digest", figures.get("digest")) != figures.get("digest")
        wrong += [f"{name} has other bits"] * differs
        bare = medians.get(f"{name.split()[0]} bare", math.nan)
        share = None if math.isnan(bare) else medians[name] / bare
        peak = figures["peak_bytes"] / 1e9 if figures.get("peak_bytes") else None
        note = "; ".join(f"{stage}: {why}" for stage, why in figures.get("reasons", {}).items())
        if not name.startswith("bits ") or note:
            table.add(name, medians[name], figures.get("first_s"), share, peak, figures.get("replays"), note)
    print_table(table.table())
    methods = [
        figures for name, figures in proof.figures.items() if name.startswith("bits ") and "error" not in figures
    ]
    if methods:
        same, all_captured = (sum(map(test, methods)) for test in (lambda x: x["same"], lambda x: not x["reasons"]))
        print(f"methods with the same bits: {same} of {len(methods)}; all stages captured: {all_captured}")
    for name, most in WANTED.items():
        pair = [medians.get(f"{name} {way}") for way in ("rayfl, graphs", "bare")]
        if pair[0] is not None and pair[1] is not None:
            print(f"{name}: {pair[0] / pair[1]:.3f} of the bare loop, wanted {most:g}")
    for sentence in (*wrong, *(f"{name} was left out" for name in proof.left_out)):
        print(sentence)
    print(f"figures: {proof.results.path}")
    return 1 if wrong else 0

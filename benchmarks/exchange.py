"""The benchmark `exchange`: the time, object store and memory of one exchange among peers without training.

`python -m benchmarks.exchange GRAPH PEERS PARAMETERS` runs it on two actors of one thread each and prints figures as
JSON. The peers are Dis-PFL's at density 0.5: each has a model and a mask, and a message of the values that it keeps.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.client_actors import client_actors
from benchmarks.figures import Column, Figures, Results, gigabytes
from benchmarks.memory import descendants, run_watched
from jobs.display import print_table
from rayfl import tree
from rayfl.compress.base import Message, message_bits
from rayfl.compress.sparse import sparse_packet
from rayfl.errors import RayflError
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.experiment.runtime import Runtime
from rayfl.limits import memory
from rayfl.population.client import ClientStatus
from rayfl.rounds.executor import Executor, Job, JobResult, Ref
from rayfl.rounds.ledger import Ledger
from rayfl.rounds.peer_exchange import mix
from rayfl.rounds.resources import Use
from rayfl.rounds.rounds import RunState
from rayfl.rounds.run_state import CurrentRound
from rayfl.rounds.setup import Setup
from rayfl.rounds.worker_jobs import ClientResult, RoundInputs
from rayfl.tree import State

ACTORS = 2
GRAPHS = {
    "fully-connected": {"name": "fully-connected"},
    "random-10": {"name": "random", "degree": 10},
}
DENSITY = 0.5


class Counting:
    """An executor that counts calls, and the messages and bytes that they read from the object store."""

    def __init__(self, inner: Executor) -> None:
        self.inner, self.num_workers = inner, inner.num_workers
        self.sizes: dict[Ref, int] = {}
        self.calls = self.messages_read = self.read_bytes = 0

    def settings_read(self) -> frozenset[tuple[str, str]] | None:
        return self.inner.settings_read()

    def used(self) -> list[Use]:
        return self.inner.used()

    def put(self, value: Any, size: int = 0) -> Ref:
        ref = self.inner.put(value)
        self.sizes[ref] = size
        return ref

    def put_all(self, values: Iterable[Any]) -> list[Ref]:
        return [self.put(value) for value in values]

    def get(self, ref: Ref) -> Any:
        return self.inner.get(ref)

    def handle(self, ref: Ref) -> Any:
        return self.inner.handle(ref)

    def run(self, shared: Ref, jobs: Sequence[Job]) -> list[JobResult]:
        done = self.inner.run(shared, jobs)
        self.calls += len(jobs)
        self.messages_read += sum(len(job.work.senders) for job in jobs)
        self.read_bytes += sum(self.sizes[ref] for job in jobs for ref in job.inputs)
        return done


def figures(graph: str, peers: int, parameters: int) -> dict[str, float]:
    """Play one exchange and measure it."""
    setup = prepare(experiment(graph, peers, parameters))
    size = tree.num_entries(setup.initial)
    # Room for messages and two states per peer, old and new; Ray begins to spill to disk at 80 %.
    store = int(1.4 * peers * size * (2 * (4 + 1 / 8) + 4 * DENSITY + 1 / 8)) + 200_000_000
    runtime = Runtime(actors=ACTORS, num_cpus=1, object_store_memory_mb=store // 10**6)
    with client_actors(setup, runtime) as pool:
        executor = Counting(pool)
        states, messages, ledger = filled(setup, executor)
        inputs = RoundInputs(round=0, plan=setup.plan(0))
        current = CurrentRound(setup, executor, RunState(states=states), inputs, ledger)
        begun, worked = time.perf_counter(), cpu_seconds(os.getpid())
        mix(current, messages)
        seconds, worked = time.perf_counter() - begun, cpu_seconds(os.getpid()) - worked
        written = sum(tree.num_bytes(executor.get(ref)) for ref in current.run_state.states.values())
    return {
        "seconds": seconds,
        "cpu_seconds": worked,
        "parameters": size,
        "calls": executor.calls,
        "messages_opened": executor.messages_read,
        "read_bytes": executor.read_bytes,
        "written_bytes": written,
        "before_bytes": sum(executor.sizes.values()),
    }


def cpu_seconds(pid: int) -> float:
    """Processor time so far of `pid` and all living processes below it."""
    total = 0
    for each in descendants(pid):
        with suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def experiment(graph: str, peers: int, parameters: int) -> Experiment:
    """Dis-PFL on digits, with a network of two hidden layers and about `parameters` parameters."""
    # 64 h + h + h h + h + 10 h + 10 parameters with h units in each layer.
    hidden = max(1, round(-38 + math.sqrt(38**2 + parameters)))
    # Any: tables of an experiment.
    tables: dict[str, Any] = {
        "name": "exchange",
        "rounds": 1,
        "data": "digits",
        "partition": "iid",
        "clients": {"count": peers},
        "model": {"name": "mlp", "hidden": [hidden, hidden]},
        "method": {"name": "dispfl", "density": DENSITY, "regrow": "random"},
        "topology": GRAPHS[graph],
    }
    return Experiment(**tables)


def filled(setup: Setup, executor: Counting) -> tuple[dict[int, Ref], dict[int, Ref], Ledger]:
    """Put every peer's state and message after training into the object store; return both and a ledger."""
    ledger = Ledger(setup.population.sample_round(0, everyone=True))
    draw, states, messages = np.random.default_rng(0), {}, {}
    for client in range(setup.num_clients):
        state, message = peer(setup, client, draw)
        stored = tree.to_arrays(state)
        states[client] = executor.put(stored, tree.num_bytes(stored))
        bits = message_bits(message)
        messages[client] = executor.put(message, bits // 8)
        ledger.results[client] = ClientResult(client, ClientStatus.DELIVERED, message_bits=bits)
    return states, messages, ledger


def peer(setup: Setup, client: int, draw: np.random.Generator) -> tuple[State, Message]:
    """A peer's state and message: a mask that keeps half of the entries, and a multiple of the initial model."""
    mask = {}
    for name, tensor in setup.initial.items():
        bits = draw.integers(0, 256, -(-tensor.numel() // 8), dtype=np.uint8)
        mask[name] = tree.unpack_bits(bits, tuple(tensor.shape))
    params = {name: torch.where(mask[name], (1 + client) * tensor, 0.0) for name, tensor in setup.initial.items()}
    return {"params": params, "mask": mask}, {"weights": sparse_packet(params, mask)}


COLUMNS = (
    Column("graph", "graph"),
    Column("seconds", "seconds", "{:.1f}"),
    Column("cpu_seconds", "CPU seconds", "{:.1f}"),
    Column("calls", "calls", "{:,}"),
    Column("messages_opened", "messages opened", "{:,}"),
    Column("read_bytes", "read, GB", gigabytes),
    Column("written_bytes", "written, GB", gigabytes),
    Column("peak_bytes", "peak memory, GB", gigabytes),
)


def bench_exchange(peers: int, parameters: int, results: Results) -> None:
    """Measure an exchange on each of GRAPHS, in a process of its own; print a row each and write `results`.

    Raise RayflError, before anything is measured, for too few peers or parameters and if `results` cannot be written.
    """
    if peers < 11 or parameters < 1000:
        raise RayflError(
            f"--peers {peers} --entries {parameters} is too small; give at least 11 peers and 1000 entries"
        )
    # Each peer has a model, a mask and a message.
    memory.require(8 * peers * parameters, f"--peers {peers} --entries {parameters}", "give fewer")
    results.require()
    exchanges, size = Figures("exchanges", COLUMNS), 0
    for graph in GRAPHS:
        output, peak_bytes = run_watched("benchmarks.exchange", graph, str(peers), str(parameters))
        figures = {"graph": graph, "peak_bytes": peak_bytes, **json.loads(output)}
        size = figures["parameters"]
        exchanges.add(*(figures[column.key] for column in COLUMNS))
    print_table(exchanges.table())
    print(
        f"{peers} peers of {size:,} parameters at density {DENSITY}; {ACTORS} actors of one thread each; no training."
    )
    print("Read, written: in the object store, by all calls. Peak memory: all processes and the store together.")
    results.write(exchanges, peers=peers, parameters=size, density=DENSITY, actors=ACTORS)


if __name__ == "__main__":
    print(json.dumps(figures(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))), flush=True)

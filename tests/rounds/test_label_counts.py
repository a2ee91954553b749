"""What a client tells once is billed once: whoever drops out, in flights, after a resume, on any number of workers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayfl.experiment.prepare import prepare
from rayfl.methods.base import Capabilities, Context, Finished, Method, State
from rayfl.methods.peers.dpsgd import DPSGD
from rayfl.methods.server.fedavg import FedAvg
from rayfl.methods.server.feddisco import FedDisco
from rayfl.methods.shared.local_training import LocalCarry
from rayfl.population.client import ClientStatus
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from rayfl.run_directory import checkpoint
from rayfl.testing.executors import Shuffled, assert_same_bits, contents, play, rows
from rayfl.topology.graphs import FullyConnected
from tests.contracts.every_method import experiment
from tests.contracts.seams import quadratic
from tests.methods.reference import setup_of
from tests.refusals import refused

TOLD = 32 * 10
"""Ten classes of digits."""
FAULTS = {f"dropout_{when}": 0.2 for when in ("before_download", "after_download", "after_training")}
PRIVATE = {"name": "local-dp", "norm": 1.0, "noise_multiplier": 1.0}
SPEEDS = {"examples_per_s": {"median": 20.0, "sigma": 1.2}, "uplink_mbps": 0.002}


class Balanced(FedAvg):
    """A stranger's method: a client's weight is the number of its classes."""

    name = "balanced"
    capabilities = Capabilities(label_counts=True, takes_stale=True)

    def finish(self, state: State, carry: LocalCarry, ctx: Context) -> Finished:
        finished = super().finish(state, carry, ctx)
        assert sum(ctx.traits.label_counts) == ctx.traits.num_examples
        return replace(finished, weight=float(np.count_nonzero(ctx.traits.label_counts)))


def made(schedule: dict[str, Any] | str, method: type[Method] = Balanced, **clients: Any) -> Setup:
    here = prepare(experiment("fedavg", schedule=schedule, rounds=6, clients=clients, evaluation={"every": 0}))
    return replace(here, method=method(here.method.task, here.method.hyper))


@pytest.mark.parametrize(
    ("schedule", "clients"),
    [
        ("synchronous", {}),
        ("synchronous", {"per_round": 3, **FAULTS, "upload_loss": 0.2}),
        ("synchronous", {"per_round": 4, **SPEEDS, "take_first": 2}),
        ({"name": "buffered", "buffer": 2}, {"per_round": 3, **SPEEDS, **FAULTS}),
        ("asynchronous", {"per_round": 3, **SPEEDS}),
    ],
    ids=str,
)
def test_a_client_is_billed_once_when_it_is_first_reached(schedule: Any, clients: dict[str, Any], tmp_path: Path):
    here = made(schedule, **clients)
    records, run_states = play(here)
    plain = {row.client: row.uplink_bits for record in play(made(schedule, FedAvg))[0] for row in record.clients}
    message, told = plain[0], set[int]()
    for record in records:
        for row in record.clients:
            first = row.client not in told and row.status != ClientStatus.DROPPED_BEFORE_DOWNLOAD
            sent = row.uplink_bits - TOLD * first
            # A client that is cut off has sent a part of its message.
            assert 0 <= sent <= message and (sent == message or row.status != "delivered"), (record.row.round, row)
            told |= {row.client} if first else set()
    assert np.flatnonzero(run_states[-1].told["clients"].numpy()).tolist() == sorted(told)

    executor = InlineExecutor(here)
    checkpoint.save(tmp_path, run_states[1], executor)
    read_back = checkpoint.load(tmp_path, executor)
    assert rows(play(here, run_state=read_back)[0]) == rows(records[2:])
    several = Shuffled(here)
    others, other_states = play(here, several)
    assert rows(others) == rows(records)
    assert_same_bits(contents(executor, run_states[-1]), contents(several, other_states[-1]))


def test_telling_takes_its_time():
    # 96 bits of three classes, 672 of the model and 64 of the number of examples, at 1 kbit/s and no other time.
    clients = {"uplink_mbps": 0.001, "examples_per_s": 1e9, "downlink_mbps": 1e6}
    records, _ = play(setup_of(Balanced, {}, clients=clients, rounds=2))
    assert [record.row.simulated_s for record in records] == pytest.approx([0.096 + 0.736, 0.736], rel=1e-4)


class Peers(DPSGD):
    name = "peers"
    capabilities = Capabilities(label_counts=True)


@pytest.mark.parametrize(
    ("start", "names"),
    [
        (lambda: quadratic.setup(FedDisco), ["FedDisco", "label counts", "task 'classification'"]),
        (lambda: quadratic.setup(Peers, topology=FullyConnected()), ["Peers", "label counts", "no server"]),
        (lambda: prepare(experiment("feddisco", wrap=[PRIVATE])), ["wrap", "FedDisco", "label counts"]),
    ],
    ids=["no classes", "no server", "differential privacy"],
)
def test_refused_before_anything_starts(start: Callable[[], Setup], names: list[str]):
    refused(start, names=names)

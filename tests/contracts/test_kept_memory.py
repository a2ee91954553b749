"""A client that trains without an upload leaves its compressor's memory as it was: nothing unsent is forgotten."""

from dataclasses import replace
from typing import Any

from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.methods.base import Plan
from rayfl.methods.server.fedavg import FedAvg
from rayfl.rounds.client_round import UPLINK_MEMORY
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.rounds import first_run_state, play_round
from rayfl.tree import to_tensors


class EveryoneTrains(FedAvg):
    """FedAvg in which only the sampled ones upload, but all train."""

    def plan(self, round_number: int, coin: float) -> Plan:
        return Plan(stages=super().plan(round_number, coin).stages, trainers="all")


def test_only_what_was_sent_leaves_the_error_memory():
    table: dict[str, Any] = {
        "rounds": 1,
        "data": "digits",
        "partition": "iid",
        "clients": {"count": 4, "per_round": 1},
        "model": "logistic",
        "method": {"name": "fedavg", "lr": 0.1},
        "uplink": {"name": "feedback", "inner": {"name": "topk", "keep_ratio": 0.1}},
        "evaluation": {"own": False, "pooled": False},
    }
    setup = prepare(Experiment(**table))
    setup = replace(setup, method=EveryoneTrains(setup.method.task, EveryoneTrains.Hyper(lr=0.1)))
    executor = InlineExecutor(setup)
    run_state, record = play_round(setup, executor, first_run_state(setup))
    (sender,) = [row.client for row in record.clients if row.status == "delivered"]
    assert {row.client: row.uplink_bits > 0 for row in record.clients} == {c: c == sender for c in range(4)}
    for client in range(4):
        memory = to_tensors(executor.get(run_state.states[client])).get(UPLINK_MEMORY, {})
        assert (client == sender) == bool(memory)

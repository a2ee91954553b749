"""Flower's simulation on its Ray backend, two clients at a time: `python -m benchmarks.peers.flower WORK`."""

# Only environments that measure this simulator have its package.
# pyright: reportMissingImports=false

import os
import sys
import time
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

from benchmarks.peers.work import WORKERS, Tally, Work, size, train

PACKAGE = "flwr"
FOLDER = "RAYFL_BENCH_WORK"
"""The variable with the folder of the work, for Ray's processes."""
client = ClientApp()


@cache
def loaded() -> tuple[Work, nn.Sequential]:
    """The work and a network, loaded once per process."""
    torch.set_num_threads(1)
    work = Work.read(Path(os.environ[FOLDER]))
    return work, work.network()


@client.train()
def local_work(message: Message, context: Context) -> Message:
    """A client's training, which Flower calls."""
    work, network = loaded()
    number = int(context.node_config["partition-id"])
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    steps = work.batches(number)
    train(network, work, steps)
    done = {
        "num-examples": len(work.rows(number)),
        "seen": sum(len(rows) for rows in steps),
        "steps": len(steps),
    }
    content = RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": MetricRecord(done)})
    return Message(content=content, reply_to=message)


class Counting(FedAvg):
    """Flower's FedAvg, which tells `tally` the replies and the time of each round."""

    def __init__(self, tally: Tally, **settings: Any) -> None:
        super().__init__(**settings)
        self.tally, self.begun = tally, time.perf_counter()

    # Any: Flower's own signatures.
    def configure_train(self, server_round: int, *given: Any) -> Iterable[Message]:
        """The messages to the clients of a round."""
        if server_round == 1:
            self.begun = time.perf_counter()
        return super().configure_train(server_round, *given)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """The new model."""
        came = list(replies)
        found = super().aggregate_train(server_round, came)
        good = [reply.content["metrics"] for reply in came if not reply.has_error()]
        seen, steps = (int(sum(metrics[key] for metrics in good)) for key in ("seen", "steps"))
        self.tally.add(time.perf_counter() - self.begun, len(good), seen, steps)
        self.begun = time.perf_counter()
        return found


def main(folder: str) -> None:
    """Run the workload."""
    os.environ |= {FOLDER: folder, "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    work, network = loaded()
    plan, tally, server = work.plan, Tally(work), ServerApp()

    @server.main()
    def rounds(grid: Grid, context: Context) -> None:
        strategy = Counting(
            tally,
            fraction_train=plan.per_round / work.num_clients,
            fraction_evaluate=0.0,
            min_train_nodes=plan.per_round,
            min_available_nodes=work.num_clients,
        )
        strategy.start(grid=grid, initial_arrays=ArrayRecord(network.state_dict()), num_rounds=plan.rounds)

    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=work.num_clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": WORKERS, "include_dashboard": False, "log_to_driver": False},
        },
    )
    tally.report(version(PACKAGE), size(network))


if __name__ == "__main__":
    # Import the module by its name: Ray would send functions of `__main__` again with every call.
    from benchmarks.peers.flower import main as by_name

    by_name(sys.argv[1])

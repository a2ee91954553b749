"""BlazeFL with its own FedAvg in threads, the mode that it recommends: `python -m benchmarks.peers.blazefl WORK`."""

# Only environments that measure this simulator have its package.
# pyright: reportMissingImports=false

import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from blazefl.contrib import FedAvgBaseServerHandler, FedAvgThreadPoolClientTrainer
from torch import Tensor, nn

from benchmarks.peers.work import WORKERS, Tally, Work, size

PACKAGE = "blazefl"


class Loader:
    """The batches of a client's local work; notes the size of each batch that was asked for in `seen`."""

    def __init__(self, work: Work, client: int, seen: list[int]) -> None:
        self.work, self.client, self.seen, self.dataset = work, client, seen, work.rows(client)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        inputs, labels = self.work.tensors
        for rows in self.work.batches(self.client):
            # Threads share the list; appending to a list is atomic in Python.
            self.seen.append(len(rows))
            yield inputs[rows], labels[rows]


class Clients:
    """BlazeFL's dataset: one loader per client."""

    def __init__(self, work: Work) -> None:
        self.work, self.seen = work, list[int]()

    # Any: BlazeFL's own signature.
    def get_dataloader(self, type_: Any, cid: int, batch_size: int, generator: Any) -> Loader:
        """The batches of a client."""
        return Loader(self.work, cid, self.seen)


class Selector:
    """BlazeFL's selector of models, with one model."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def select_model(self, model_name: str) -> nn.Module:
        """A new network."""
        return self.work.network()


def main(folder: str) -> None:
    """Run the workload."""
    torch.set_num_threads(1)
    work = Work.read(Path(folder))
    plan, clients, tally = work.plan, Clients(work), Tally(work)
    # Any: objects for BlazeFL's protocols, some of which require more than it uses.
    shared: dict[str, Any] = {
        "model_selector": Selector(work),
        "model_name": plan.name,
        "dataset": clients,
        "num_clients": work.num_clients,
        "device": "cpu",
        "batch_size": plan.batch_size,
        "seed": 0,
    }
    server = FedAvgBaseServerHandler(**shared, global_round=plan.rounds, sample_ratio=plan.per_round / work.num_clients)
    # The loader has the batches of all epochs or steps.
    trainer = FedAvgThreadPoolClientTrainer(**shared, epochs=1, lr=plan.lr, num_parallels=WORKERS)
    for _ in range(plan.rounds):
        begun = time.perf_counter()
        trainer.local_process(server.downlink_package(), server.sample_clients())
        packages = trainer.uplink_package()
        for package in packages:
            server.load(package)
        tally.add(time.perf_counter() - begun, len(packages), sum(clients.seen), len(clients.seen))
        clients.seen.clear()
    tally.report(version(PACKAGE), size(server.model))


if __name__ == "__main__":
    main(sys.argv[1])

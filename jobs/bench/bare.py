"""A bare PyTorch loop of a workload: no simulator, parameters in place, one or several processes over shared memory.

`python -m jobs.bench.bare W1 2` runs it in two processes of one thread each and prints the round times as JSON.
"""

import json
import socket
import sys
import time

import torch
from torch import Tensor, nn, optim
from torch.multiprocessing.spawn import spawn

from jobs.bench.workloads import WORKLOADS
from rayfl.determinism.process import prepare_process
from rayfl.experiment.prepare import prepare
from rayfl.methods.shared.local_training import LocalTraining
from rayfl.models.base import laid_out
from rayfl.rounds.setup import Setup
from rayfl.task import Classification


class Bare:
    """One process of the loop: its share of each round's clients, and the sum of their models."""

    def __init__(self, name: str, rank: int, world: int) -> None:
        self.workload, self.rank, self.world = WORKLOADS[name], rank, world
        self.setup: Setup = prepare(self.workload.experiment())
        hyper = self.setup.method.hyper
        assert isinstance(hyper, LocalTraining)
        self.hyper = hyper
        data = self.setup.dataset
        task = self.setup.method.task
        assert isinstance(task, Classification)
        self.inputs = laid_out(data.prepare(data.train.inputs), task.memory_format)
        self.labels = torch.from_numpy(data.train.labels)
        self.net = task.build()
        self.parameters = list(self.net.parameters())

    def train(self, client: int, model: list[Tensor]) -> int:
        """Local training from the global model, in place; returns the number of samples."""
        rows = torch.from_numpy(self.setup.partition.train[client])
        with torch.no_grad():
            for own, received in zip(self.parameters, model, strict=True):
                own.copy_(received)
        optimizer = optim.SGD(self.parameters, lr=self.hyper.lr)
        order = rows[torch.randperm(len(rows))]
        size = self.hyper.batch_size or len(rows)
        starts = [start % len(rows) for start in range(0, max(len(rows), size * (self.hyper.steps or 0)), size)]
        for start in starts[: self.hyper.steps]:
            batch = order[start : start + size]
            optimizer.zero_grad()
            nn.functional.cross_entropy(self.net(self.inputs[batch]), self.labels[batch]).backward()
            optimizer.step()
        return len(rows)

    def share(self, round: int, model: list[Tensor], total: list[Tensor]) -> int:
        """This process's share of a round: writes its weighted sum of models into `total`, returns its samples."""
        for each in total:
            each.zero_()
        samples = 0
        for client in self.setup.population.sample_round(round).selected[self.rank :: self.world]:
            count = self.train(client, model)
            with torch.no_grad():
                for each, own in zip(total, self.parameters, strict=True):
                    each.add_(own, alpha=count)
            samples += count
        return samples


def run(rank: int, name: str, world: int, model: list[Tensor], totals: list[list[Tensor]], times: list[float]) -> None:
    """One process: all rounds. Rank 0 averages and keeps the times."""
    prepare_process()
    torch.set_num_threads(1 if world > 1 else 2)
    bare, samples = Bare(name, rank, world), torch.zeros(world)
    for round in range(bare.workload.warmup + bare.workload.rounds):
        begun = time.perf_counter()
        samples[rank] = bare.share(round, model, totals[rank])
        if world > 1:
            torch.distributed.all_reduce(samples)
        if rank == 0:
            with torch.no_grad():
                for each, *shares in zip(model, *totals, strict=True):
                    torch.div(sum(shares[1:], shares[0]), float(samples.sum()), out=each)
        if world > 1:
            torch.distributed.barrier()
            samples.zero_()
        times.append(time.perf_counter() - begun)


def process(rank: int, name: str, world: int, model: list[Tensor], totals: list[list[Tensor]], port: int) -> None:
    """Entry of one process; rank 0 prints."""
    if world > 1:
        torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    times: list[float] = []
    run(rank, name, world, model, totals, times)
    if rank == 0:
        print(json.dumps(times[WORKLOADS[name].warmup :]), flush=True)
    if world > 1:
        torch.distributed.destroy_process_group()


def main(name: str, world: int) -> None:
    """Run the loop in `world` processes."""
    setup = prepare(WORKLOADS[name].experiment())
    model = [tensor.clone().share_memory_() for tensor in setup.initial.values()]
    totals = [[torch.zeros_like(tensor).share_memory_() for tensor in model] for _ in range(world)]
    del setup
    if world == 1:
        process(0, name, 1, model, totals, 0)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(process, (name, world, model, totals, port), nprocs=world)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

"""A bare PyTorch loop: no simulator, parameters in place, one or several processes over shared memory.

`python -m benchmarks.peers.bare WORK PROCESSES MEMORY_FORMAT`: one process has two threads, several have one each. A
researcher would write such a loop. Environment variables decide its allocator and arithmetic.
"""

import socket
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from benchmarks.peers.work import WORKERS, Tally, Work, size, train


def laid_out(images: Tensor, memory_format: str) -> Tensor:
    """Images [examples, channels, height, width] in a memory format; also one channel gets the format's strides."""
    if memory_format == "contiguous":
        return images
    examples, channels, height, width = images.shape
    rows = images.permute(0, 2, 3, 1).reshape(examples, height * width * channels)
    return rows.view(examples, height, width, channels).permute(0, 3, 1, 2)


class Bare:
    """One process of the loop: its share of each round's clients, and the sum of their models."""

    def __init__(self, work: Work, rank: int, world: int) -> None:
        self.work, self.rank, self.world = work, rank, world
        self.net = work.network()
        self.parameters = list(self.net.parameters())

    def share(self, round_number: int, model: list[Tensor], total: list[Tensor]) -> list[int]:
        """Do this process's share of a round, and write its weighted sum of models into `total`.

        Return the numbers of its clients, of their examples, of the examples of their local work, and of its steps.
        """
        for each in total:
            each.zero_()
        counts = [0, 0, 0, 0]
        for client in self.work.selected[round_number].tolist()[self.rank :: self.world]:
            with torch.no_grad():
                for own, received in zip(self.parameters, model, strict=True):
                    own.copy_(received)
            steps, examples = self.work.batches(client), len(self.work.rows(client))
            train(self.net, self.work, steps)
            with torch.no_grad():
                for each, own in zip(total, self.parameters, strict=True):
                    each.add_(own, alpha=examples)
            done = (1, examples, sum(len(step) for step in steps), len(steps))
            counts = [count + more for count, more in zip(counts, done, strict=True)]
        return counts


def run(bare: Bare, model: list[Tensor], totals: list[list[Tensor]]) -> None:
    """Play all rounds in one process. Rank 0 averages, measures the times and reports."""
    tally = Tally(bare.work)
    for round_number in range(bare.work.plan.rounds):
        begun = time.perf_counter()
        counts = torch.tensor(bare.share(round_number, model, totals[bare.rank]))
        if bare.world > 1:
            torch.distributed.all_reduce(counts)
        clients, examples, examples, steps = counts.tolist()
        if bare.rank == 0:
            with torch.no_grad():
                for each, *shares in zip(model, *totals, strict=True):
                    torch.div(sum(shares[1:], shares[0]), examples, out=each)
        if bare.world > 1:
            torch.distributed.barrier()
        tally.add(time.perf_counter() - begun, clients, examples, steps)
    if bare.rank == 0:
        tally.report(torch.__version__, size(bare.net))


def process(
    rank: int, folder: str, world: int, memory_format: str, model: list[Tensor], totals: list[list[Tensor]], port: int
) -> None:
    """Entry of one process."""
    torch.set_num_threads(1 if world > 1 else WORKERS)
    if world > 1:
        torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    work = Work.read(Path(folder))
    work.tensors = laid_out(work.tensors[0], memory_format), work.tensors[1]
    run(Bare(work, rank, world), model, totals)
    if world > 1:
        torch.distributed.destroy_process_group()


def main(folder: str, world: int, memory_format: str) -> None:
    """Run the loop in `world` processes."""
    model = [tensor.detach().clone().share_memory_() for tensor in Work.read(Path(folder)).network().parameters()]
    totals = [[torch.zeros_like(tensor).share_memory_() for tensor in model] for _ in range(world)]
    if world == 1:
        process(0, folder, 1, memory_format, model, totals, 0)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(process, (folder, world, memory_format, model, totals, port), nprocs=world)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])

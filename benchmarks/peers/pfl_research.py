"""pfl-research, as its guide on fast distributed simulations says.

`python -m benchmarks.peers.pfl_research WORK` runs two processes of one thread each, which reduce their sums with
torch.distributed. With a second argument DEVICE it runs one process with all examples on the device. Users are weighted
by their examples.
"""

# Only environments that measure this simulator have its package.
# pyright: reportMissingImports=false

import os
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.work import WORKERS, Tally, Work, size

PACKAGE = "pfl"


class Network(nn.Module):
    """The network with the two functions that pfl requires of a model; counts the examples and steps of training."""

    def __init__(self, network: nn.Sequential) -> None:
        super().__init__()
        self.network, self.examples, self.steps = network, 0, 0

    def loss(self, inputs: Tensor, labels: Tensor, eval: bool = False) -> Tensor:
        """The loss of one step."""
        self.examples, self.steps = self.examples + len(labels), self.steps + 1
        return nn.functional.cross_entropy(self.network(inputs), labels)

    # Any: pfl's metrics.
    def metrics(self, inputs: Tensor, labels: Tensor, eval: bool = True) -> dict[str, Any]:
        """The loss, which pfl measures in rounds with an evaluation: only the first one, which does not count."""
        from pfl.metrics import Weighted

        with torch.no_grad():
            loss = nn.functional.cross_entropy(self.network(inputs), labels, reduction="sum").item()
        return {"loss": Weighted(loss, len(labels))}


def process(folder: str, device: str = "cpu", rank: int = 0, ports: str = "") -> None:
    """Run one of the processes, or the only one; the first one reports."""
    # pfl reads the environment when it is imported.
    if ports:
        os.environ["PFL_WORKER_RANK"] = str(rank)
        os.environ["PFL_WORKER_ADDRESSES"] = ",".join(f"127.0.0.1:{port}" for port in ports.split(","))
    os.environ["PFL_PYTORCH_DEVICE"] = device
    torch.set_num_threads(1)
    # The other simulators compute without TF32 too; torch switches it on for convolutions.
    torch.backends.cudnn.allow_tf32 = False
    work = Work.read(Path(folder))
    tally, network = Tally(work), Network(work.network())
    play(work, network, tally, device, is_alone=not ports)
    if rank == 0:
        peak_bytes = None if device == "cpu" else torch.cuda.max_memory_reserved()
        tally.report(version(PACKAGE), size(network), peak_bytes)


def play(work: Work, network: Network, tally: Tally, device: str, is_alone: bool) -> None:
    """Play all rounds with pfl's FedAvg, and add each to `tally`."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    plan, trained = work.plan, [0]
    inputs, labels = (tensor.to(device) for tensor in work.tensors)

    def user(client: int) -> Dataset:
        trained[0] += 1
        rows = work.rows(client)
        rows = rows[torch.randperm(len(rows))].to(device)
        return Dataset((inputs[rows], labels[rows]))

    # The users that rayfl draws, round after round.
    data = FederatedDataset(user, cycle(work.selected.ravel().tolist()).__next__)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=plan.rounds,
            evaluation_frequency=plan.rounds,
            train_cohort_size=plan.per_round,
            val_cohort_size=None,
        ),
        SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()]),
        PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0)),
        NNTrainHyperParams(
            local_batch_size=plan.batch_size,
            local_num_epochs=plan.epochs,
            local_learning_rate=plan.lr,
            local_num_steps=plan.steps,
        ),
        callbacks=[counter(network, tally, trained, is_alone)],
        send_metrics_to_platform=False,
    )


# Any: a callback of pfl, which is imported late.
def counter(network: Network, tally: Tally, trained: list[int], is_alone: bool) -> Any:
    """A callback that adds each round to `tally`: its seconds, and the sums over all processes."""
    from pfl.callback.base import TrainingProcessCallback
    from pfl.metrics import Metrics

    class Rounds(TrainingProcessCallback):
        """Counts the rounds."""

        def __init__(self) -> None:
            self.begun = time.perf_counter()

        # Any: pfl's own signature; its versions have different names for the round.
        def after_central_iteration(self, aggregate_metrics: Any, model: Any, **which: Any) -> tuple[bool, Metrics]:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            seconds = time.perf_counter() - self.begun
            counts = torch.tensor([trained[0], network.examples, network.steps])
            if not is_alone:
                torch.distributed.all_reduce(counts)
            tally.add(seconds, *counts.tolist())
            trained[0] = network.examples = network.steps = 0
            self.begun = time.perf_counter()
            return False, Metrics()

    return Rounds()


def main(folder: str) -> None:
    """Run the workload in two programs, because pfl does not support processes that multiprocessing starts."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(WORKERS)]
    ports = ",".join(str(each.getsockname()[1]) for each in sockets)
    for each in sockets:
        each.close()
    program = [sys.executable, "-m", "benchmarks.peers.pfl_research", folder, "cpu"]
    started = [subprocess.Popen([*program, str(rank), ports]) for rank in range(WORKERS)]
    sys.exit(max(abs(each.wait()) for each in started))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(sys.argv[1])
    elif len(sys.argv) == 3:
        process(sys.argv[1], sys.argv[2])
    else:
        process(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])

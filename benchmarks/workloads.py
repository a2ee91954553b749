"""The workloads: many small clients (also ten times as many), few large ones, and a large model with little work.

FedAvg on Fashion-MNIST, SGD with learning rate 0.05, one local epoch, Dirichlet(0.3) over labels.
"""

from dataclasses import dataclass, replace

from rayfl.experiment.experiment import Experiment

SMALL_CNN = {"name": "convnet2", "channels": [16, 32], "hidden": [512]}
LARGE_MLP = {"name": "mlp", "hidden": [2600, 3400]}


@dataclass(frozen=True)
class Workload:
    """One line of the benchmark. `warmup` rounds are not counted; every client is registered `copies` times."""

    name: str
    about: str
    clients: dict[str, int]
    model: dict[str, object]
    method: dict[str, object]
    rounds: int
    warmup: int = 2
    copies: int = 1

    def experiment(self, **runtime: object) -> Experiment:
        """The workload as an experiment without evaluation."""
        table = {
            "name": self.name.lower(),
            "rounds": self.warmup + self.rounds,
            "data": "fashion-mnist",
            "partition": {"name": "dirichlet-client", "alpha": 0.3},
            "clients": self.clients,
            "model": self.model,
            "method": {"name": "fedavg", "lr": 0.05, **self.method},
            "evaluation": {"every": 0, "pooled": False, "own": False},
            "runtime": runtime,
            "output": {"report": False, "save_models": False},
        }
        return Experiment(**table)


_W1 = Workload(
    "W1",
    "1000 clients of 60 examples, 50 a round, batch 32, small CNN",
    {"count": 1000, "per_round": 50},
    SMALL_CNN,
    {"epochs": 1, "batch_size": 32},
    rounds=30,
)
WORKLOADS = {
    workload.name: workload
    for workload in (
        _W1,
        Workload(
            "W2",
            "10 clients of 6000 examples, all a round, batch 32, small CNN",
            {"count": 10},
            SMALL_CNN,
            {"epochs": 1, "batch_size": 32},
            rounds=5,
            warmup=1,
        ),
        Workload(
            "W3",
            "100 clients, 10 a round, MLP of 10.9 million parameters, one step on 8 examples",
            {"count": 100, "per_round": 10},
            LARGE_MLP,
            {"steps": 1, "batch_size": 8},
            rounds=30,
        ),
        replace(
            _W1,
            name="W1x10",
            about="W1 with 10,000 registered clients of 60 examples (every client of W1 ten times), 50 a round",
            copies=10,
        ),
    )
}

"""A workload as files that programs without rayfl can read, and a check that a program did exactly this work.

WORK is a folder: `work.json` with the fields of `Plan`, and arrays beside it. All programs map the same arrays into
memory, so none has its own copy of the data.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

WORKERS = 2
"""The number of clients that train at a time, with one thread each."""


@dataclass(frozen=True)
class Plan:
    """The work to do: FedAvg with plain SGD.

    `channels`: those of 5x5 convolutions with max pooling; () for a network of linear layers. Each of `per_round`
    clients trains for `epochs` or `steps`. The first `warmup` of the `rounds` are not measured.
    """

    name: str
    channels: tuple[int, ...]
    hidden: tuple[int, ...]
    num_parameters: int
    memory_format: str
    lr: float
    batch_size: int
    epochs: int | None
    steps: int | None
    per_round: int
    rounds: int
    warmup: int


@dataclass
class Work:
    """A plan with its data.

    `inputs`: float32 [examples, 1, height, width]; `labels`: int64 [examples]. Client i has the rows
    `indices[offsets[i]:offsets[i + 1]]`. `selected`: int64 [rounds, per_round], the clients that rayfl draws.
    """

    plan: Plan
    inputs: np.ndarray
    labels: np.ndarray
    indices: np.ndarray
    offsets: np.ndarray
    selected: np.ndarray

    def write(self, folder: Path) -> None:
        """Write all files into a folder."""
        (folder / "work.json").write_text(json.dumps(asdict(self.plan)), encoding="utf-8")
        for each in fields(self)[1:]:
            np.save(folder / f"{each.name}.npy", getattr(self, each.name))

    @classmethod
    def read(cls, folder: Path) -> "Work":
        """Read what `write` wrote; all processes share the pages of the arrays."""
        # Any: what JSON holds.
        table: dict[str, Any] = json.loads((folder / "work.json").read_text(encoding="utf-8"))
        plan = Plan(**{**table, "channels": tuple(table["channels"]), "hidden": tuple(table["hidden"])})
        arrays = {each.name: np.load(folder / f"{each.name}.npy", mmap_mode="c") for each in fields(cls)[1:]}
        return cls(plan, **arrays)

    @property
    def num_clients(self) -> int:
        """The number of registered clients."""
        return len(self.offsets) - 1

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels of all examples."""
        return torch.from_numpy(self.inputs), torch.from_numpy(self.labels)

    def rows(self, client: int) -> Tensor:
        """The examples of a client, int64."""
        return torch.from_numpy(self.indices[self.offsets[client] : self.offsets[client + 1]].astype(np.int64))

    def batches(self, client: int, generator: torch.Generator | None = None) -> list[Tensor]:
        """The rows of each step of a client's local work, shuffled anew for every epoch."""
        plan, rows, found = self.plan, self.rows(client), list[Tensor]()
        while len(found) < (plan.steps or self.steps(client)):
            found += rows[torch.randperm(len(rows), generator=generator)].split(plan.batch_size)
        return found[: plan.steps]

    def steps(self, client: int) -> int:
        """The steps of a client's local work."""
        size = int(self.offsets[client + 1] - self.offsets[client])
        return self.plan.steps or (self.plan.epochs or 1) * -(-size // self.plan.batch_size)

    def examples(self, client: int) -> int:
        """The number of examples in a client's local work; every epoch counts."""
        size = int(self.offsets[client + 1] - self.offsets[client])
        if self.plan.steps:
            whole, rest = divmod(self.plan.steps, -(-size // self.plan.batch_size))
            return whole * size + min(size, rest * self.plan.batch_size)
        return (self.plan.epochs or 1) * size

    def network(self) -> nn.Sequential:
        """A new network."""
        _, channels, *sides = self.inputs.shape
        layers: list[nn.Module] = []
        for width in self.plan.channels:
            layers += [nn.Conv2d(channels, width, 5), nn.ReLU(), nn.MaxPool2d(2)]
            channels, sides = width, [(side - 4) // 2 for side in sides]
        widths = [channels * sides[0] * sides[1], *self.plan.hidden]
        layers.append(nn.Flatten())
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


@dataclass
class Tally:
    """The work that a program did in each round: seconds, clients, and the examples and steps of their local work."""

    work: Work
    seconds: list[float] = field(default_factory=list)
    clients: list[int] = field(default_factory=list)
    examples: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def add(self, seconds: float, clients: int, examples: int, steps: int) -> None:
        """Count a round."""
        self.seconds.append(seconds)
        self.clients.append(clients)
        self.examples.append(examples)
        self.steps.append(steps)

    def report(self, version: str, num_parameters: int, peak_bytes: int | None = None) -> None:
        """Print the measured rounds' seconds and the program's version as JSON.

        `peak_bytes`: the memory that it reserved on a GPU. Raise SystemExit if the program did other work.
        """
        if wrong := self.differences(num_parameters):
            sys.exit(f"not the work of {self.work.plan.name}: {', '.join(wrong)}")
        # Any: what JSON holds.
        found: dict[str, Any] = {"seconds": self.seconds[self.work.plan.warmup :], "version": version}
        if peak_bytes is not None:
            found["peak_bytes"] = peak_bytes
        print(json.dumps(found), flush=True)

    def differences(self, num_parameters: int) -> list[str]:
        """How the work differs from the plan, in words. A program may draw other clients if all clients are alike."""
        plan, rounds = self.work.plan, self.work.selected.tolist()
        expected: Mapping[str, Sequence[int]] = {
            "clients": [plan.per_round] * plan.rounds,
            "examples": [sum(map(self.work.examples, clients)) for clients in rounds],
            "steps": [sum(map(self.work.steps, clients)) for clients in rounds],
            "parameters": [plan.num_parameters],
        }
        done = {
            "clients": self.clients,
            "examples": self.examples,
            "steps": self.steps,
            "parameters": [num_parameters],
        }
        return [
            f"{len(done[name])} rounds with {sorted(set(done[name]))} {name}, and not {len(wanted)} with "
            f"{sorted(set(wanted))}"
            for name, wanted in expected.items()
            if done[name] != list(wanted)
        ]


def size(network: nn.Module) -> int:
    """The number of a network's parameters."""
    return sum(parameter.numel() for parameter in network.parameters())


def train(network: nn.Module, work: Work, steps: Sequence[Tensor]) -> None:
    """Train as a researcher would write it: SGD on the rows of each step."""
    inputs, labels = work.tensors
    optimizer = torch.optim.SGD(network.parameters(), lr=work.plan.lr)
    for rows in steps:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs[rows]), labels[rows]).backward()
        optimizer.step()

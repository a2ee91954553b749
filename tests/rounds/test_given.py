"""A hook that writes to what clients share ends the run, in a sentence that names its class and what was changed."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rayfl.errors import MethodError
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.methods.base import Method, PeerHalf
from rayfl.methods.compressed.fedpse import FedPSE
from rayfl.methods.peers.dpsgd import DPSGD
from rayfl.methods.personal.ditto import Ditto
from rayfl.methods.server.fedavg import FedAvg
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from rayfl.testing.contracts import several_workers_give_the_bits_of_one
from rayfl.testing.executors import Shuffled, play
from tests.refusals import mentions, refused


# Any: tables of an experiment.
def made(method: type[Method] = FedAvg, **tables: Any) -> Setup:
    data = {"name": "synthetic", "samples_per_group": 12, "num_groups": 10, "num_classes": 4, "dim": 8}
    given = {"lr": 0.1, "batch_size": 8, **({"keep_ratio": 0.5} if issubclass(method, FedPSE) else {})}
    graph = {"topology": "fully-connected"} if issubclass(method, PeerHalf) else {}
    whole = {"rounds": 2, "data": data, "partition": "iid", "clients": {"count": 5}, "model": "logistic", **graph}
    return prepare(Experiment(**{**whole, "method": {"name": method, **given}, **tables}))


def write(nested: Any) -> None:
    """Write to all tensors of numbers."""
    for part in nested.values() if isinstance(nested, dict) else [nested]:
        if isinstance(part, dict):
            write(part)
        elif isinstance(part, Tensor) and part.is_floating_point():
            part.add_(1.0)


class Beginning(FedAvg):
    def begin(self, state: Any, received: Any, ctx: Any) -> Any:
        write(received["model"].decode())
        return super().begin(state, received, ctx)


class Finishing(FedAvg):
    def finish(self, state: Any, carry: Any, ctx: Any) -> Any:
        write(ctx.initial)
        return super().finish(state, carry, ctx)


class Stepping(FedAvg):
    """Its carry begins with the tensors of the broadcast."""

    def step(self, carry: Any, batch: Any, *, stage: Any) -> Any:
        carry["params"]["1.weight"].mul_(0.5)
        return super().step(carry, batch, stage=stage)


class Updating(FedAvg):
    def update(self, server: Any, received: Any, ctx: Any) -> Any:
        write(server)
        return server


class Keeping(Ditto):
    def begin(self, state: Any, received: Any, ctx: Any) -> Any:
        write(state if ctx.round else {})
        return super().begin(state, received, ctx)


class Replying(FedPSE):
    def reply(self, server: Any, server_memory: Any, ctx: Any) -> Any:
        write(server)
        return super().reply(server, server_memory, ctx)


class Mixing(DPSGD):
    def mix(self, state: Any, gathered: Any, ctx: Any) -> Any:
        write(next(iter(gathered.values())).result)
        return super().mix(state, gathered, ctx)


@pytest.mark.parametrize("executor", [InlineExecutor, Shuffled], ids=["one worker", "three workers"])
@pytest.mark.parametrize(
    ("method", "what"),
    [
        (Beginning, "the message 'model'"),
        (Finishing, "ctx.initial"),
        (Stepping, "the message 'model'"),
        (Updating, "the server's state"),
        # The first state has the tensors of ctx.initial.
        (Keeping, "the state of client"),
        (Replying, "the server's state"),
        (Mixing, "what arrived as"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_write_ends_the_run(method: type[Method], what: str, executor: type[InlineExecutor]):
    setup = made(method)
    with pytest.raises(MethodError) as caught:
        play(setup, executor(setup))
    assert all(mentions(str(caught.value), one) for one in ("round", method.__name__, "in place", "x.clone()"))
    assert what in str(caught.value)


class Clamping(nn.Module):
    """Its pass writes to its weights, which are the broadcast's tensors before the first step."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(input_shape[0], num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.head.weight.clamp_(-0.05, 0.05)
        return self.head(inputs)


def test_a_model_that_writes_to_its_weights_is_refused():
    with refused(names=["Clamping", "head.weight"]):
        made(model=Clamping)


class Noting(FedAvg):
    """Keeps a running number in the method's object."""

    def finish(self, state: Any, carry: Any, ctx: Any) -> Any:
        finished = super().finish(state, carry, ctx)
        self.seen = getattr(self, "seen", 0) + 1
        return replace(finished, metrics={"seen": float(self.seen)})


class Seeded(FedAvg):
    """Draws from a generator of its own class, which every process has for itself."""

    draws = random.Random(0)

    def finish(self, state: Any, carry: Any, ctx: Any) -> Any:
        return replace(super().finish(state, carry, ctx), metrics={"drawn": self.draws.random()})


@pytest.mark.parametrize(("method", "name"), [(Noting, "Noting().seen"), (Seeded, "Seeded.draws")])
def test_the_contract_names_what_a_method_keeps(method: type[Method], name: str):
    with pytest.raises(pytest.fail.Exception) as caught:
        several_workers_give_the_bits_of_one(made(method))
    assert name in str(caught.value) and "2 workers" in str(caught.value)


def test_the_contract_passes_a_sound_method_from_elsewhere():
    several_workers_give_the_bits_of_one(made(Plain))


class Plain(FedAvg):
    """As FedAvg; what it keeps follows from its settings."""

    table = {0.1: "small"}

    def finish(self, state: Any, carry: Any, ctx: Any) -> Any:
        self.table.setdefault(self.hyper.lr, "small")
        return super().finish(state, carry, ctx)

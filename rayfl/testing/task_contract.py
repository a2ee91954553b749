"""The contract of every task: its own functions, and runs of six methods."""

from collections.abc import Callable, Mapping

import torch

from rayfl.choices.kinds import find
from rayfl.methods.base import Batch, Method, PeerHalf
from rayfl.rounds.setup import Setup
from rayfl.task import NetworkTask
from rayfl.testing import contracts
from rayfl.untyped import Table, Value

METHODS: Mapping[str, Table] = {
    "fedavg": {},
    "fedavgm": {"momentum": 0.5},
    "ditto": {},
    "fedpse": {"keep_ratio": 0.3},
    "dpsgd": {},
    "dispfl": {"density": 0.5},
}
"""Plain averaging, momentum on both sides, personal models, a compressed exchange, peers, and masks among peers."""
_MOST = 8


def tables(method: str, **options: Value) -> dict[str, Value]:
    """The tables of an experiment in which a method trains, one of `METHODS` with their settings."""
    kind: type[Method] = find(Method, method)
    settings = {"lr": 0.1, "batch_size": 16, **METHODS.get(method, {}), **options}
    graph = {"topology": "ring"} if kind.gather and issubclass(kind, PeerHalf) else {}
    return {"method": {"name": method, **settings}, **graph}


def examples_are_evaluated_one_by_one(setup: Setup) -> None:
    """An example's loss, count and score do not depend on the others in its batch, and padding adds nothing."""
    task = setup.method.task
    assert isinstance(task, NetworkTask)
    samples = setup.data(0).all("train")
    batch = Batch(samples.inputs[:_MOST], samples.labels[:_MOST])
    outputs = task.evaluated(setup.initial, batch).detach()
    sums, counts = task.task.loss(outputs, batch.labels)
    scores = task.task.score(outputs, batch.labels)
    assert bool(((scores >= 0) & (scores <= 1)).all() and (counts >= 0).all() and torch.isfinite(sums).all())
    for row in range(len(outputs)):
        span = slice(row, row + 1)
        alone = (*task.task.loss(outputs[span], batch.labels[span]), task.task.score(outputs[span], batch.labels[span]))
        torch.testing.assert_close(alone, (sums[span], counts[span], scores[span]), rtol=1e-5, atol=1e-6)
    weights = (torch.arange(len(outputs)) % 2).float()
    kept = weights > 0
    torch.testing.assert_close(
        task.task.mean_loss(outputs, batch.labels, weights),
        task.task.mean_loss(outputs[kept], batch.labels[kept]),
        rtol=1e-5,
        atol=1e-6,
    )


def a_method_trains_on_it(make: Callable[[str], Setup]) -> None:
    """Both engines agree, and three workers give the bits of one. `make`: a setup for an engine, "loop" or "vmap"."""
    here = make("loop")
    if here.method.task.vmappable:
        contracts.loop_and_vmap_agree(here, make("vmap"))
    contracts.several_workers_give_the_bits_of_one(here)

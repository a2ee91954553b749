"""FedPer, FedRep, LG-FedAvg, FedBABU and FedBN by their settings files: who keeps, trains and sends what."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rayfl.experiment.experiment import Experiment, read
from rayfl.experiment.prepare import prepare
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import contents, play
from rayfl.testing.watching import watched
from tests.refusals import refused

EXAMPLES = Path(__file__).resolve().parents[3] / "jobs" / "examples"
HEAD = {"3.weight", "3.bias"}
BODY = {"1.weight", "1.bias"}
SHARED: Mapping[str, int] = {
    "fedper": 64 * 64 + 64,
    "fedrep": 64 * 64 + 64,
    "lg_fedavg": 64 * 10 + 10,
    "fedbabu": 64 * 64 + 64,
    # A stem and two blocks of two convolutions, 3x3 each, of two filters; and the head.
    "fedbn": 9 * (2 + 2 * 2 * 2 * 2) + 2 * 10 + 10,
}
"""Parameters that are sent; the networks have layers of 64 x 64 and 64 x 10 numbers, and FedBN's is made narrow."""
every_file = pytest.mark.parametrize("name", SHARED)


def example(name: str, *overrides: str) -> Setup:
    """The experiment of a settings file with four clients and two rounds, each client on a few steps."""
    narrow = ["model.width=2"] if name == "fedbn" else []
    return prepare(read(EXAMPLES / f"{name}.toml", ["rounds=2", "clients.count=4", *narrow, *overrides]))


def kept_by(setup: Setup, name: str) -> set[str]:
    """The parameters that the paper's clients keep for themselves, by name."""
    if name != "fedbn":
        return BODY if name == "lg_fedavg" else HEAD
    network = getattr(setup.method.task, "network").module  # noqa: B009
    norms = [place for place, layer in network.named_modules() if isinstance(layer, nn.BatchNorm2d)]
    assert len(norms) == 5
    return {f"{place}.{part}" for place in norms for part in ("weight", "bias", "running_mean", "running_var")}


def kept(states: Mapping[str, np.ndarray], client: int) -> dict[str, np.ndarray]:
    """What a client keeps, by name."""
    prefix = f"state {client}/kept parts/"
    return {place.removeprefix(prefix): array for place, array in states.items() if place.startswith(prefix)}


def after(setup: Setup, round: int) -> dict[str, np.ndarray]:
    """All that outlives a round."""
    return contents(InlineExecutor(setup), play(setup)[1][round])


@every_file
def test_only_the_shared_part_is_sent_and_billed(name: str):
    setup, log = watched(example(name))
    records, run_states = play(setup)
    # The number of examples goes along in 64 bits.
    bits = {(row.downlink_bits, row.uplink_bits) for record in records for row in record.clients}
    assert bits == {(32 * SHARED[name], 32 * SHARED[name] + 64)}
    messages = [*log.up.values(), *log.broadcasts.values()]
    sent = {entry for message in messages for packet in message.values() for entry in packet.support()}
    own = kept_by(setup, name)
    assert log.up and len(sent - {"num_examples"}) > 1 and sent.isdisjoint(own)
    found = contents(InlineExecutor(setup), run_states[-1])
    assert not any(place.startswith("server/") and place.removeprefix("server/params/") in own for place in found)
    if name == "fedbabu":
        assert not any(place.startswith("state") for place in found)
    else:
        assert own <= kept(found, 0).keys()


@pytest.mark.parametrize("name", [name for name in SHARED if name != "fedbabu"])
def test_own_parts_of_two_clients_never_meet(name: str):
    """Another client's labels change nothing of mine in round 0; in round 1 they do, by the shared part alone."""
    setup = example(name)
    labels = setup.dataset.train.labels.copy()
    labels[setup.partition.train[1]] = (labels[setup.partition.train[1]] + 1) % 10
    other = replace(setup, dataset=replace(setup.dataset, train=replace(setup.dataset.train, labels=labels)))
    for round in (0, 1):
        mine, theirs = (kept(after(one, round), 0) for one in (setup, other))
        assert mine.keys() == theirs.keys() and len(mine) > 1
        same = all(np.array_equal(array, theirs[place]) for place, array in mine.items())
        assert same == (round == 0)
    first = {place: tensor.numpy() for place, tensor in setup.first_model.items()}
    assert any(not np.array_equal(array, first[place]) for place, array in mine.items())


def test_the_head_of_fedbabu_is_the_first_one_to_the_bit():
    setup = example("fedbabu", "rounds=4")
    model = setup.server_half.model(play(setup)[1][-1].server)
    assert model.keys() == setup.first_model.keys() == HEAD | BODY
    assert all(torch.equal(model[name], setup.first_model[name]) for name in HEAD)
    assert not any(torch.equal(model[name], setup.first_model[name]) for name in BODY)
    (stage,) = setup.method.eval_stages(0)
    assert stage.epochs == 5


def test_fedrep_trains_the_head_for_ten_epochs_before_the_body():
    setup = example("fedrep")
    head, body = setup.plan(0).stages
    assert (head.epochs, body.epochs, body.name) == (10, 1, "train")
    (record, _), sizes = play(setup)[0], setup.partition.train.sizes
    assert [row.num_samples for row in record.clients] == [11 * size for size in sizes[:4]]


class Spare(nn.Module):
    """A network with a parameter on which its output does not depend."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), 5), nn.Tanh())
        self.head, self.spare = nn.Linear(5, num_classes), nn.Parameter(torch.ones(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs)) + 0 * self.spare.sum()


METHOD = {"name": "fedavg", "lr": 0.2, "momentum": 0.5, "batch_size": 64}


def made(**tables: Any) -> Setup:
    settings = {
        "rounds": 3,
        "data": "digits",
        "partition": {"name": "dirichlet-class", "alpha": 1.0},
        "clients": {"count": 3},
        "model": Spare,
        "method": METHOD,
    }
    return prepare(Experiment(**{**settings, **tables}))


def test_clients_that_keep_all_that_matters_train_alone():
    setup, alone = made(parts={"personal": ["*", "!spare"]}), made(method={**METHOD, "name": "local"})
    found, expected = after(setup, -1), after(alone, -1)
    for client in range(3):
        own = kept(found, client)
        assert len(own) == 4
        for name, array in own.items():
            assert np.array_equal(array, expected[f"state {client}/params/{name}"])
    with refused(names=["parts.personal", "'*'", "all", "'local'"]):
        made(parts={"personal": ["*"]})


def test_clients_that_keep_nothing_are_the_hosts():
    plain, shared = after(made(), -1), after(made(parts={"personal": []}), -1)
    assert plain.keys() == shared.keys() and all(np.array_equal(array, shared[place]) for place, array in plain.items())

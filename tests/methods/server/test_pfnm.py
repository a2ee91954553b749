"""PFNM: what it uploads, what it merges, and what it refuses."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rayfl import tree
from rayfl.determinism.seeding import NOBODY
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.methods.server.pfnm import PFNM, Prior, layers, merge
from rayfl.models.dense import MLP
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.rounds import first_run_state, play_round
from tests.bound_tasks import classification
from tests.methods.reference import SIZES, played, setup_of, vectors
from tests.refusals import refused

P = (6 * 8 + 8) + (8 * 5 + 5) + (5 * 3 + 3)
"""Parameters of the network with 8 and 5 hidden neurons."""


def setup(hyper: dict[str, Any], hidden: tuple[int, ...] = (8, 5), **options: Any):
    return setup_of("pfnm", {"lr": 0.1, "batch_size": 4, **hyper}, build=MLP(hidden=hidden).builder((6,), 3), **options)


def personal(here, run_state) -> list[dict[str, torch.Tensor]]:
    executor = InlineExecutor(here)
    return [tree.to_tensors(executor.get(ref))["params"] for _, ref in sorted(run_state.states.items())]


@pytest.mark.parametrize(
    "hyper",
    [{"epochs": 2}, {"independent_start": True, "gamma": 5.0, "estimate": "posterior", "sigma": 0.5}],
    ids=str,
)
def test_the_server_holds_what_the_matching_gives(hyper: dict[str, Any]):
    here = setup(hyper, rounds=2)
    settings = here.method.hyper.model_dump()
    prior = Prior(settings["sigma"], settings["sigma0"], settings["gamma"], settings["prior_bias"])
    for round, (record, run_state) in enumerate(played(here)):
        networks = [layers(own) for own in personal(here, run_state)]
        generator = here.context(round, here.plan(round), NOBODY, "server").generator
        expected = merge(networks, prior, 5, settings["estimate"] == "posterior", generator)
        for (weight, bias), (w, b) in zip(layers(run_state.server["params"]), expected, strict=True):
            np.testing.assert_allclose(weight, w, rtol=1e-6, atol=1e-7)
            np.testing.assert_allclose(bias, b, rtol=1e-6, atol=1e-7)
        assert record.means["pfnm/hidden_neurons"] == sum(len(bias) for _, bias in expected[:-1]) >= 13
        assert {(row.uplink_bits, row.downlink_bits) for row in record.clients} == {(32 * P, 0)}
        # The merged network is evaluated though it is wider than the clients' ones.
        if round == 1:
            assert 0 <= record.means["pooled/accuracy"] <= 1


def test_clients_train_on_from_where_they_are():
    here = setup({"lr": 0.2}, rounds=2)
    (_, first), (_, second) = played(here)
    alone = setup_of("local", {"lr": 0.2, "batch_size": 4}, build=MLP(hidden=(8, 5)).builder((6,), 3), rounds=2)
    for run_state, (_, other) in zip((first, second), played(alone), strict=True):
        for own, same in zip(personal(here, run_state), personal(alone, other), strict=True):
            assert all(torch.equal(own[name], same[name]) for name in own)


def test_permuted_copies_of_one_network_merge_into_it():
    # Clients whose step is too small to be seen hold the initial network, each with its neurons in another order.
    here = setup({"lr": 1e-30}, rounds=1)
    executor = InlineExecutor(here)
    run_state = first_run_state(here)
    original, draw = here.initial, np.random.default_rng(0)
    states = {}
    for client in range(len(SIZES)):
        a, b = torch.from_numpy(draw.permutation(8)), torch.from_numpy(draw.permutation(5))
        p = {name: value.clone() for name, value in original.items()}
        p |= {"1.weight": p["1.weight"][a], "1.bias": p["1.bias"][a]}
        p |= {"3.weight": p["3.weight"][b][:, a], "3.bias": p["3.bias"][b], "5.weight": p["5.weight"][:, b]}
        states[client] = tree.to_arrays({"params": p})
    run_state, record = play_round(here, executor, replace(run_state, states=states))
    assert {m.name: m.value for m in record.metrics if m.client is None}["pfnm/hidden_neurons"] == 13
    inputs = torch.from_numpy(vectors().train.inputs)
    batch = type("B", (), {"inputs": inputs})
    task = here.method.task
    merged, before = (task.outputs(params, batch) for params in (run_state.server["params"], original))  # type: ignore[arg-type]
    torch.testing.assert_close(merged, before, rtol=1e-5, atol=1e-6)


def test_independent_starts_differ_and_common_ones_do_not():
    for independent in (True, False):
        here = setup({"independent_start": independent})
        starts = [here.first_state(client)["params"] for client in range(len(SIZES))]
        assert all(torch.equal(start["1.weight"], starts[0]["1.weight"]) for start in starts) != independent


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 3)),
        lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)),
        lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)),
        lambda: nn.Sequential(nn.Linear(6, 4, bias=False), nn.ReLU(), nn.Linear(4, 3)),
        lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU()),
    ],
)
def test_other_networks_are_refused(build):
    with refused(names=["pfnm", "ReLU", "fully connected", "model"]):
        PFNM(classification(build))


def test_it_learns_digits_in_one_round():
    experiment = Experiment(
        rounds=1, data="digits", partition="iid", clients={"count": 5}, model={"name": "mlp", "hidden": [40]},  # type: ignore[arg-type]
        method={"name": "pfnm", "epochs": 40, "lr": 0.1, "independent_start": True},  # type: ignore[arg-type]
    )  # fmt: skip
    ((record, _),) = played(prepare(experiment))
    assert record.means["pooled/accuracy"] > 0.8

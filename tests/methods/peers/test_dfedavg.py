"""DFedAvgM and DFedSAM against their equations."""

from typing import Any

import numpy as np
import pytest
import torch

from rayfl.data.batches import Batch
from rayfl.experiment.prepare import prepare
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import assert_same_bits, contents, play
from rayfl.topology.graphs import FullyConnected, Grid, RandomRegular, Ring, Topology
from tests.contracts.every_method import experiment
from tests.contracts.seams.closed_form import Points, batches, points, start
from tests.methods.plain_peers import ABSENCES, DIM, NUM_PEERS, absent, made, matrix, models, world_of
from tests.refusals import refused


def gradient(here: Setup, x: np.ndarray, batch: Points) -> np.ndarray:
    rho = getattr(here.method.hyper, "rho", 0.0)
    plain = batch.gradient(x)
    norm = np.sqrt((plain**2).sum())
    return batch.gradient(x + rho * plain / norm) if norm else plain


def followed(here: Setup) -> list[np.ndarray]:
    """All models [4, 10] after every round, by heavy-ball steps along SAM's gradient, and Q exchanges."""
    hyper: Any = here.method.hyper
    assert here.topology is not None
    x, seen = np.tile(start(here), (NUM_PEERS, 1)), []
    for round in range(here.rounds):
        away, lost = absent(here.population.sample_round(round, everyone=True))
        y = x.copy()
        for i in set(range(NUM_PEERS)) - lost:
            before = y[i]
            mine = batches(here, round, i, epochs=hyper.epochs, steps=hyper.steps, batch_size=hyper.batch_size)
            for batch in mine:
                step = -hyper.rate(round) * gradient(here, y[i], batch) + hyper.momentum * (y[i] - before)
                before, y[i] = y[i].copy(), y[i] + step
        weights = matrix(here.topology, here.seed, round, [i for i in range(NUM_PEERS) if i not in away])
        if getattr(hyper, "exchange", "model") == "printed":
            x = x + weights @ (y - x)
        else:
            x = np.linalg.matrix_power(weights, getattr(hyper, "exchanges", 1)) @ y
        seen.append(x)
    return seen


CHANGING = RandomRegular(degree=2, weights="metropolis")


@pytest.mark.parametrize("clients", ABSENCES[::2], ids=str)
@pytest.mark.parametrize(
    ("name", "hyper", "topology"),
    [
        ("dfedavgm", {"epochs": 2}, Ring()),
        ("dfedavgm", {"steps": 3, "momentum": 0.5, "exchange": "printed"}, CHANGING),
        ("dfedsam", {"epochs": 1, "rho": 0.5, "lr_decay": 0.9}, CHANGING),
        ("dfedsam", {"steps": 3, "momentum": 0.5, "exchanges": 3}, Grid(rows=1, weights="metropolis")),
    ],
    ids=str,
)
def test_follows_its_equations(name: str, hyper: dict[str, Any], topology: Topology, clients: dict[str, Any]):
    here = made(name, {"lr": 0.05, "batch_size": 2, **hyper}, rounds=5, topology=topology, clients=clients)
    for run_state, x in zip(play(here)[1], followed(here), strict=True):
        np.testing.assert_allclose(models(here, run_state), x, rtol=1e-6, atol=1e-6)


def test_dfedavgm_is_dpsgd_with_momentum_and_dfedsam_without_rho_is_dpsgd():
    for name, hyper in (("dfedavgm", {}), ("dfedsam", {"rho": 0.0, "momentum": 0.9})):
        ours, plain = (
            prepare(experiment(kind, method={"name": kind, "lr": 0.05, "batch_size": 60, **given}))
            for kind, given in ((name, hyper), ("dpsgd", {"momentum": 0.9}))
        )
        ended = [contents(InlineExecutor(here), play(here)[1][-1]) for here in (ours, plain)]
        assert_same_bits(*ended)


def test_as_printed_every_peer_ends_at_its_own_minimiser():
    hyper = {"lr": 0.2, "batch_size": 0, "steps": 1, "momentum": 0.0, "exchange": "printed"}
    here = made("dfedavgm", hyper, rounds=150, topology=FullyConnected())
    apart = np.arange(4.0)[:, None] * np.ones(DIM)
    # With W = J the differences between peers stay as they are, for ever.
    x = models(here, play(here, run_state=world_of(apart, here))[1][-1])
    np.testing.assert_allclose(x - x.mean(axis=0), apart - 1.5, atol=1e-4)
    # W has the eigenvalues 1, 0.6, 0.6 and 0.2.
    here = made("dfedavgm", hyper, rounds=220, topology=Ring(weights="laplacian", epsilon=0.2))
    own = [(points(here, i).a * points(here, i).c).mean(axis=0) / points(here, i).hessian() for i in range(NUM_PEERS)]
    np.testing.assert_allclose(models(here, play(here)[1][-1]), own, atol=1e-3)


def test_a_sam_step_by_hand():
    # f = y^2, y = 3: g = 6, perturbed at 3.5, g' = 7, so y = 3 - 0.1 * 7 = 2.3; here for one example of a = 2, c = 0.
    here = made("dfedsam", {"rho": 0.5, "lr": 0.1, "steps": 1, "batch_size": 0}, rounds=1, topology=Ring())
    params = here.initial

    inputs = torch.zeros(1, 2, DIM)
    inputs[0, 1, 0] = 2.0
    x = {name: torch.zeros_like(tensor) for name, tensor in params.items()}
    x["weight"][0, 0] = 3.0
    method = here.method
    ctx = here.context(0, here.plan(0), 0, "client")
    (stage,) = here.plan(0).stages
    carry = method.begin({"params": x}, {}, ctx)
    stepped = method.step(carry, Batch(inputs, torch.zeros(1)), stage=stage)["params"]["weight"]
    assert stepped[0, 0].item() == pytest.approx(2.3)
    # Where the gradient is 0, the point stays.
    carry = method.begin({"params": {name: torch.zeros_like(tensor) for name, tensor in params.items()}}, {}, ctx)
    assert not method.step(carry, Batch(inputs, torch.zeros(1)), stage=stage)["params"]["weight"].any()


def test_every_exchange_and_every_gradient_is_billed():
    one, three = (
        made("dfedsam", {"exchanges": q, "steps": 2}, rounds=1, topology=Grid(rows=1, weights="metropolis"))
        for q in (1, 3)
    )
    (first,), (second,) = play(one)[0], play(three)[0]
    assert [row.uplink_bits for row in first.clients] == [32 * DIM * links for links in (1, 2, 2, 1)]
    assert [row.uplink_bits for row in second.clients] == [3 * row.uplink_bits for row in first.clients]
    assert [row.downlink_bits for row in second.clients] == [3 * row.downlink_bits for row in first.clients]
    assert second.row.simulated_s > first.row.simulated_s
    assert one.method.gradients_per_example(one.plan(0).stages[0], one.context(0, one.plan(0), 0, "client")) == 2


@pytest.mark.parametrize(
    ("name", "options", "names"),
    [
        ("dfedsam", {"exchanges": 2, "uplink": "topk"}, ["uplink='topk'", "DFedSAM", "2 per round"]),
        ("dfedsam", {"order": "lian"}, ["method.order", "DFedSAM"]),
        ("dfedavgm", {"exchange": "printed", "density": 0.5}, ["method.density", "printed"]),
    ],
)
def test_what_it_cannot_use_is_refused(name: str, options: dict[str, Any], names: list[str]):
    others = {"uplink": options.pop("uplink")} if "uplink" in options else {}
    with refused(names=names):
        prepare(experiment(name, method={"name": name, **options}, **others))

"""FedDBE in plain torch: the round that fixes the common mean, the shifts, and the personal model as a bias."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from rayfl.tree import Tree
from tests.methods.averaging import ABSENCES, ENGINES
from tests.methods.reference import SIZES, assert_close, batches
from tests.methods.representations import (
    WIDTH,
    assert_near,
    averaged,
    cross_entropy,
    doubled,
    examples,
    leaves,
    representation,
    small,
    stepped,
    stored,
)
from tests.population.statuses import with_status

SHIFT, MEAN = "representation shift", "representation mean"


def expected(here: Setup) -> list[tuple[Tree, Tensor | None, dict[int, Tensor]]]:
    """x, the common mean if there is one, and all u_i after every round."""
    hyper = here.method.hyper.model_dump()
    x, common, path = doubled(here.initial), None, []
    shifts = {i: torch.zeros(WIDTH).double() for i in range(5)}
    for round in range(here.rounds):
        ends: dict[int, Tree] = {}
        running: dict[int, Tree] = {}
        for i in with_status(here.population.sample_round(round), "delivered"):
            y, u, zbar = leaves(x), leaves({"u": shifts[i]}), torch.zeros(WIDTH).double()
            for rows in batches(here, round, i):
                inputs, labels = examples(here, rows)
                z = representation(y, inputs)
                zbar = (1 - hyper["mu"]) * zbar.detach() + hyper["mu"] * z.mean(0)
                loss = cross_entropy(y, z + u["u"], labels)
                if common is not None:
                    loss = loss + hyper["kappa"] / WIDTH * (0.5 * (zbar - common) ** 2).sum()
                gradient = torch.autograd.grad(loss, [u["u"]], retain_graph=True)[0]
                y = stepped(y, loss, hyper["lr"])
                u = {"u": u["u"] - (0 if common is None else hyper["lr"]) * gradient}
            ends[i], running[i] = y, {"zbar": zbar}
            shifts = {**shifts, i: u["u"].detach()}
        if common is not None:
            x = averaged(here, x, ends)
        elif ends:
            common = averaged(here, {"zbar": torch.zeros(WIDTH).double()}, running)["zbar"]
        path.append((x, common, shifts))
    return path


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize(
    "hyper", [{"kappa": 5.0, "epochs": 2}, {"kappa": 2.0, "mu": 0.3, "weighting": "uniform"}], ids=str
)
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_its_equations(engine: str, hyper: dict[str, Any], clients: dict[str, Any]):
    here = small("feddbe", hyper, engine, clients=clients)
    records, run_states = play(here)
    path = expected(here)
    for run_state, (x, common, shifts) in zip(run_states, path, strict=True):
        assert_near(run_state.server["params"], x)
        assert bool(run_state.server["known"]) == (common is not None)
        if common is not None:
            assert_close(run_state.server["common"], common.detach())
        for client, u in shifts.items():
            assert_close(stored(here, run_state, client)["params"][SHIFT], u, tolerance=3e-6)
    # FedAvg's bytes, and D numbers: up once in place of a model, down in every later round.
    first = next(round for round, (_, common, _) in enumerate(path) if common is not None)
    count, size = 64 * (hyper.get("weighting") != "uniform"), 32 * 53
    up = [{r.uplink_bits for r in record.clients if r.status == "delivered"} for record in records]
    assert up[first] == {32 * WIDTH + count} and all(bits <= {size + count} for bits in up[first + 1 :])
    down = {r.downlink_bits for r in records[-1].clients if r.status == "delivered"}
    assert down <= {size + 32 * WIDTH}
    x, _, shifts = path[-1]
    test = here.dataset.test
    for client, u in shifts.items():
        rows = here.partition.test[client]
        z = representation(x, torch.from_numpy(test.inputs[rows]).double()) + u
        loss = cross_entropy(x, z, torch.from_numpy(test.labels[rows])).item()
        found = [m.value for m in records[-1].metrics if (m.client, m.name) == (client, "own/loss")]
        assert found == pytest.approx([loss], rel=1e-4)


def test_the_gradient_of_the_shift_is_that_of_a_bias_through_the_head():
    """One full-batch step after the first round: u = -lr sum over the batch of H^T (softmax - onehot) / n."""
    here = small("feddbe", {"steps": 1, "batch_size": 0, "kappa": 0.0}, sizes=SIZES)
    before, after = play(here, rounds=2)[1]
    x = doubled(before.server["params"])
    for client in range(5):
        inputs, labels = examples(here, here.partition.train[client])
        outputs = representation(x, inputs) @ x["3.weight"].T + x["3.bias"]
        slopes = outputs.softmax(1) - functional.one_hot(labels, outputs.shape[1])
        u = -here.method.hyper.model_dump()["lr"] * (slopes @ x["3.weight"]).mean(0)
        np.testing.assert_allclose(stored(here, after, client)["params"][SHIFT], u, rtol=1e-4, atol=1e-6)

"""FedPHP: both transfers in plain torch in float64, the growing inheritance, and its two ends."""

from typing import Any

import numpy as np
import pytest
import torch

from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from rayfl.tree import Tree
from tests.methods.averaging import ABSENCES, ENGINES
from tests.methods.reference import SIZES, batches
from tests.methods.representations import (
    assert_near,
    cross_entropy,
    doubled,
    examples,
    leaves,
    representation,
    small,
    state_of,
    stepped,
)
from tests.population.statuses import with_status


def transfer(y: Tree, personal: Tree, inputs: torch.Tensor, hyper: dict[str, Any]) -> torch.Tensor:
    """R by its definition: means of kernels over pairs, or a cross-entropy."""
    ours, theirs = representation(y, inputs), representation(personal, inputs).detach()
    if hyper["transfer"] == "kd":
        logits = [z @ p["3.weight"].T + p["3.bias"] for z, p in ((ours, y), (theirs, personal))]
        teacher = (logits[1] / hyper["temperature"]).softmax(1)
        return -(teacher * logits[0].log_softmax(1)).sum(1).mean()
    points = torch.cat([ours, theirs])
    count = len(points)
    apart = [((points[i] - points[j]) ** 2).sum() for i in range(count) for j in range(count) if i != j]
    mean = torch.stack(apart).mean().detach()

    def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        squares = ((a[:, None] - b[None]) ** 2).sum(2)
        return torch.stack([(-squares / (mean * 2.0**power)).exp() for power in range(-2, 3)]).sum(0).mean()

    return kernel(ours, ours) + kernel(theirs, theirs) - 2 * kernel(ours, theirs)


def expected(here: Setup) -> list[tuple[Tree, dict[int, Tree]]]:
    """x and all p_i after every round."""
    hyper = here.method.hyper.model_dump()
    x, personal, path = doubled(here.initial), dict.fromkeys(range(5), doubled(here.initial)), []
    counts = dict.fromkeys(range(5), 0)
    per_round = here.context(0, here.plan(0), 0, "client").num_selected
    for round in range(here.rounds):
        ends: dict[int, Tree] = {}
        for i in with_status(here.population.sample_round(round), "delivered"):
            y = leaves(x)
            for rows in batches(here, round, i):
                inputs, labels = examples(here, rows)
                term = transfer(y, personal[i], inputs, hyper)
                loss = (1 - hyper["lam"]) * cross_entropy(y, representation(y, inputs), labels) + hyper["lam"] * term
                y = stepped(y, loss, hyper["lr"])
            ends[i] = y
            mu = hyper["mu"] * min(1, counts[i] / max(1, int(per_round / 5 * here.rounds + 1e-9)))
            inherited = {name: mu * p + (1 - mu) * y[name].detach() for name, p in personal[i].items()}
            personal, counts[i] = personal | {i: inherited}, counts[i] + 1
        if ends:
            weights = {i: 1.0 if hyper["weighting"] == "uniform" else SIZES[i] for i in ends}
            total = sum(weights.values())
            x = {n: torch.stack([weights[i] / total * ends[i][n].detach() for i in ends]).sum(0) for n in x}
        path.append((x, personal))
    return path


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize(
    "hyper",
    [
        {"lam": 0.2, "lr": 0.05},
        {"transfer": "kd", "lam": 0.6, "temperature": 2.0, "mu": 0.5, "weighting": "uniform", "epochs": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_its_equations(engine: str, hyper: dict[str, Any], clients: dict[str, Any]):
    here = small("fedphp", hyper, engine, clients=clients)
    for run_state, (x, personal) in zip(play(here)[1], expected(here), strict=True):
        # The discrepancy is a small difference of kernels, so that rounding is a larger part of its gradient.
        tolerance = 1e-6 if hyper.get("transfer") == "kd" else 4e-6
        assert_near(run_state.server["params"], x, tolerance)
        for i in range(5):
            assert_near(state_of(here, run_state, i), personal[i], tolerance)


def test_one_example_alone_has_a_finite_discrepancy():
    """All representations of a batch of one are equal in round 0, so that the kernels' width is 0."""
    here = small("fedphp", {"lam": 0.5, "batch_size": 1})
    server = play(here)[1][-1].server["params"]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in server.values())


def test_without_transfer_it_is_fedavg_and_without_inheritance_the_local_model():
    here, plain = small("fedphp", {"lam": 0.0, "mu": 0.0}), small("fedavg", {})
    for ours, theirs in zip(play(here)[1], play(plain)[1], strict=True):
        for name, tensor in theirs.server["params"].items():
            np.testing.assert_allclose(ours.server["params"][name], tensor, atol=1e-6)

"""GPFL in plain torch modules: the valve, the conditions, the embeddings, and what is evaluated."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rayfl.data.datasets import Examples
from rayfl.determinism.seeding import NOBODY, FirstDraws
from rayfl.methods.personal.gpfl import condition_of
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from rayfl.tree import Tree, to_arrays
from tests.contracts.every_method import on_digits
from tests.methods.averaging import ABSENCES, ENGINES
from tests.methods.reference import NUM_CLASSES, batches, vectors
from tests.methods.representations import (
    HEAD,
    WIDTH,
    assert_near,
    averaged,
    doubled,
    examples,
    lacking_classes,
    leaves,
    representation,
    small,
    stepped,
    stored,
)
from tests.population.statuses import with_status
from tests.refusals import refused

GAMMA, BETA, CLASSES = "conditional valve gamma", "conditional valve beta", "class embeddings"


def made(hyper: dict[str, Any], engine: str = "loop", **options: Any) -> Setup:
    """Client 1 has class 0 alone, client 3 none of class 2. Parameters of round 0 with the valve and the embeddings."""
    here = small("gpfl", hyper, engine, dataset=lacking_classes(), **options)
    params = here.method.init_params(here.initial, FirstDraws(here.seed, NOBODY))
    return replace(here, initial_arrays=to_arrays(params))


def valve(params: Tree, z: Tensor, q: Tensor) -> Tensor:
    """relu((gamma(q) + 1) o z + beta(q)), with branches as torch's modules."""
    branches = []
    for name in (GAMMA, BETA):
        layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.LayerNorm(WIDTH)).double()
        given = {"0.weight": f"{name}.weight", "0.bias": f"{name}.bias"}
        given |= {"2.weight": f"{name} norm.weight", "2.bias": f"{name} norm.bias"}
        branches.append(torch.func.functional_call(layers, {key: params[value] for key, value in given.items()}, (q,)))
    gamma, beta = branches
    return ((gamma + 1) * z + beta).relu()


def shares(here: Setup, client: int) -> Tensor:
    labels = here.dataset.train.labels[here.partition.train[client]]
    return torch.from_numpy(np.bincount(labels, minlength=NUM_CLASSES) / len(labels))


def expected(here: Setup) -> list[tuple[Tree, dict[int, Tree]]]:
    """Body, valve and embeddings, and all heads after every round."""
    hyper, path, start = here.method.hyper.model_dump(), [], doubled(here.initial)
    x = {name: tensor for name, tensor in start.items() if name not in HEAD}
    heads = {i: {name: start[name] for name in HEAD} for i in range(5)}
    for round in range(here.rounds):
        ends: dict[int, Tree] = {}
        for i in with_status(here.population.sample_round(round), "delivered"):
            y, head = leaves(x), leaves(heads[i])
            g, q = x[CLASSES].mean(0), shares(here, i) @ x[CLASSES]
            for rows in batches(here, round, i):
                inputs, labels = examples(here, rows)
                z = representation(y, inputs)
                generic, outputs = valve(y, z, g), valve(y, z, q) @ head["3.weight"].T + head["3.bias"]
                cosines = functional.cosine_similarity(generic[:, None], y[CLASSES][None], dim=2)
                distance = torch.linalg.matrix_norm(generic - y[CLASSES].detach()[labels])
                loss = functional.cross_entropy(outputs, labels) + functional.cross_entropy(cosines, labels)
                loss = loss + hyper["lam"] * distance
                decayed = [name for name in y if name.startswith(("conditional", "class"))]
                loss = loss + hyper["mu"] / 2 * sum((y[name] ** 2).sum() for name in decayed)
                both = stepped({**y, **head}, loss, hyper["lr"])
                y, head = {n: both[n] for n in y}, {n: both[n] for n in head}
            ends[i], heads = y, {**heads, i: head}
        x = averaged(here, x, ends)
        path.append((x, heads))
    return path


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize("hyper", [{"epochs": 2, "lam": 0.3}, {"weighting": "uniform", "mu": 0.02}], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_its_equations(engine: str, hyper: dict[str, Any], clients: dict[str, Any]):
    here = made({"lr": 0.03, **hyper}, engine, clients=clients)
    records, run_states = play(here)
    path, met = expected(here), set[int]()
    for round, (record, run_state, (x, heads)) in enumerate(zip(records, run_states, path, strict=True)):
        met |= {*with_status(here.population.sample_round(round), "delivered")}
        # A layer norm of five numbers magnifies rounding.
        assert_near(run_state.server["params"], x, tolerance=2e-5)
        test = here.dataset.test
        for client, head in heads.items():
            assert_near(stored(here, run_state, client)["head"], head, tolerance=2e-5)
            rows = here.partition.test[client]
            pi = shares(here, client) if client in met else torch.full((NUM_CLASSES,), 1 / NUM_CLASSES).double()
            z = representation(x, torch.from_numpy(test.inputs[rows]).double())
            outputs = valve(x, z, pi @ x[CLASSES]) @ head["3.weight"].T + head["3.bias"]
            loss = functional.cross_entropy(outputs, torch.from_numpy(test.labels[rows])).item()
            found = [m.value for m in record.metrics if (m.client, m.name) == (client, "own/loss")]
            assert found == pytest.approx([loss], rel=1e-3)
    assert not any(m.name.startswith("own/accuracy") and m.value is None for m in records[-1].metrics)


def test_equal_shares_make_both_conditions_equal():
    embeddings = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    for counts in (torch.full((4,), 7.0), torch.zeros(4)):
        torch.testing.assert_close(condition_of(counts, embeddings), embeddings.mean(0))


def test_the_embedding_of_a_class_that_nobody_has_moves():
    dataset = vectors()
    dataset = replace(dataset, train=Examples(dataset.train.inputs, dataset.train.labels % 2))
    here = small("gpfl", {"mu": 0.0}, dataset=dataset)
    params = here.method.init_params(here.initial, FirstDraws(here.seed, NOBODY))
    here = replace(here, initial_arrays=to_arrays(params))
    after = play(here, rounds=1)[1][0].server["params"][CLASSES]
    assert (after[2] != params[CLASSES][2]).all()


def test_what_does_not_fit_is_refused():
    with refused(names=["GPFL", "last linear layer"]):
        on_digits("gpfl")(model="logistic")

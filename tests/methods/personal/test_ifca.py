"""IFCA on quadratics: k models in numpy, who chooses which, and what is evaluated, sent and refused."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rayfl import tree
from rayfl.data.datasets import Dataset
from rayfl.determinism.seeding import NOBODY, FirstDraws
from rayfl.methods.personal.ifca import of_cluster
from rayfl.rounds.evaluation_settings import Evaluation
from rayfl.rounds.rounds import RunState
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play, rows
from rayfl.tree import Tree
from tests.contracts.every_method import on_digits
from tests.contracts.seams.closed_form import flat, points
from tests.contracts.seams.quadratic import SHAPES
from tests.methods.averaging import ABSENCES, ENGINES, made, rate, share, train_batches
from tests.population.statuses import with_status
from tests.refusals import refused

HYPER = {"lr": 0.2, "lr_decay": 0.9, "batch_size": 2}


def clustered(hyper: dict[str, Any], **options: Any) -> Setup:
    """IFCA whose models begin as the experiment would draw them."""
    here = made("ifca", {**HYPER, **hyper}, **options)
    return replace(
        here, initial_arrays=tree.to_arrays(here.method.init_params(here.initial, FirstDraws(here.seed, NOBODY)))
    )


def models(params: Tree, num_clusters: int) -> np.ndarray:
    """All models, [k, 10]."""
    return np.stack([flat(of_cluster(params, cluster)) for cluster in range(num_clusters)])


def chosen(here: Setup, x: np.ndarray, client: int) -> int:
    return int(np.argmin([points(here, client).loss(one) for one in x]))


def expected(here: Setup, num_clusters: int) -> tuple[list[np.ndarray], list[dict[int, int]]]:
    """The models after every round, and the choices of those who delivered."""
    x, path, choices = models(here.initial, num_clusters), [], []
    by_all = here.method.hyper.model_dump()["averaging"] == "gradient"
    for round in range(here.rounds):
        here_now = with_status(here.population.sample_round(round), "delivered")
        choice = {client: chosen(here, x, client) for client in here_now}
        moved = x.copy()
        for cluster in set(choice.values()):
            ends, weights = [], []
            for client in (one for one in here_now if choice[one] == cluster):
                y = x[cluster]
                for batch in train_batches(here, round, client):
                    y = y - rate(here, round) * batch.gradient(y)
                ends.append(y)
                weights.append(share(here, client))
            whole = sum(share(here, client) for client in here_now) if by_all else sum(weights)
            moved[cluster] = x[cluster] - weights @ (x[cluster] - np.array(ends)) / whole
        x = moved
        path.append(x)
        choices.append(choice)
    return path, choices


def found(run_states: list[RunState], num_clusters: int) -> list[np.ndarray]:
    return [models(run_state.server["params"], num_clusters) for run_state in run_states]


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize(
    "hyper",
    [
        {"num_clusters": 3},
        {"num_clusters": 4, "weighting": "uniform", "epochs": 2},
        {"num_clusters": 3, "averaging": "gradient", "steps": 1, "batch_size": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_its_equations(engine: str, hyper: dict[str, Any], clients: dict[str, Any]):
    here, k = clustered(hyper, rounds=4, engine=engine, clients=clients), hyper["num_clusters"]
    records, run_states = play(here)
    path, choices = expected(here, k)
    np.testing.assert_allclose(found(run_states, k), path, rtol=1e-5, atol=5e-6)
    assert np.abs(path[-1] - path[0]).max() > 0.01
    for record, choice in zip(records, choices, strict=True):
        recorded = {one.client: one.value for one in record.metrics if one.name == "ifca/cluster"}
        assert {client: recorded[client] for client in choice} == choice
        # Down k models of 10 numbers; up one of them, 1 byte for the choice, and 8 for the number of examples.
        counted = 0 if hyper.get("weighting") else 64
        assert record.row.uplink_bits == (320 + 8 + counted) * len(choice)
        reached = [row for row in record.clients if row.status != "dropped_before_download"]
        assert {row.downlink_bits for row in reached} <= {320 * k}
    assert clients or len({cluster for choice in choices for cluster in choice.values()}) > 1


@pytest.mark.parametrize("engine", ENGINES)
def test_one_cluster_is_fedavg_to_the_bit(engine: str):
    clients = {"per_round": 3, "dropout_after_training": 0.2}
    one = clustered({"num_clusters": 1}, engine=engine, clients=clients)
    plain = made("fedavg", HYPER, engine=engine, clients=clients)
    (records, run_states), (others, other_states) = play(one), play(plain)
    for run_state, other in zip(run_states, other_states, strict=True):
        assert all(torch.equal(run_state.server["params"][name], other.server["params"][name]) for name in SHAPES)
    assert [(r.row.uplink_bits, r.row.downlink_bits) for r in records] == [
        (r.row.uplink_bits, r.row.downlink_bits) for r in others
    ]


def planted(here: Setup, a: float) -> Setup:
    """The clients' examples all lie at a in even clients and at -a in odd ones, with curvature 1."""
    inputs = np.ones_like(here.dataset.train.inputs)
    for client in range(4):
        for split in ("train", "validation", "heldout"):
            inputs[here.partition.split(split)[client], 0] = a * (-1) ** client
        inputs[here.partition.test[client], 0] = a * (-1) ** client
    examples = replace(here.dataset.train, inputs=inputs)
    return replace(here, dataset=Dataset("planted", train=examples, test=examples, num_classes=1, kind="vector"))


def begun(here: Setup, starts: list[float]) -> Setup:
    """The models begin with all entries at these numbers."""
    names = ["" if not j else f"cluster {j}/" for j in range(len(starts))]
    first = {
        f"{p}{name}": np.full(SHAPES[name], x, np.float32)
        for p, x in zip(names, starts, strict=True)
        for name in SHAPES
    }
    return replace(here, initial_arrays=first)


def test_two_planted_clusters_separate_in_one_round_and_equal_models_never():
    """A step of rate 1 on the whole split ends at its client's centre, so a model ends at its cluster's."""
    hyper = {"lr": 1.0, "lr_decay": 1.0, "batch_size": 0, "steps": 1}
    here = planted(clustered(hyper, rounds=2, evaluation=Evaluation(pooled=False)), 2.0)
    records, run_states = play(begun(here, [-0.1, 0.1]))
    for x in found(run_states, 2):
        np.testing.assert_allclose(x, np.array([[-2.0], [2.0]]) * np.ones(10), atol=1e-6)
    chosen_by = {one.client: one.value for one in records[0].metrics if one.name == "ifca/cluster"}
    assert [chosen_by[client] for client in range(4)] == [1, 0, 1, 0]
    assert records[1].means["own/loss"] == pytest.approx(0, abs=1e-9)
    # Of models that are equally good everybody takes the first; the other one stays.
    same, own_states = play(begun(here, [0.5, 0.5]))
    assert same[0].means["ifca/cluster"] == 0
    np.testing.assert_array_equal(models(own_states[0].server["params"], 2)[1], 0.5)


def test_a_model_whose_loss_is_not_a_number_is_chosen_last():
    """Weights of 1e30 make infinite logits, of which the cross-entropy is NaN."""
    here = on_digits("ifca")(rounds=1)
    first = {
        name: np.full_like(array, 1e30) if "cluster" not in name else array
        for name, array in here.initial_arrays.items()
    }
    [record], [run_state] = play(replace(here, initial_arrays=first))
    assert record.means["ifca/cluster"] == 1
    assert all(torch.isfinite(tensor).all() for tensor in of_cluster(run_state.server["params"], 1).values())


def test_permuted_models_permute_everything():
    here = clustered({"num_clusters": 3}, rounds=3)
    order = [2, 0, 1]
    swapped = {
        name if not j else f"cluster {j}/{name}": tensor.numpy()
        for j, old in enumerate(order)
        for name, tensor in of_cluster(here.initial, old).items()
    }
    there = replace(here, initial_arrays=swapped)
    (records, run_states), (others, other_states) = play(here), play(there)
    np.testing.assert_array_equal(found(other_states, 3), [x[order] for x in found(run_states, 3)])
    for record, other in zip(records, others, strict=True):
        mine, theirs = (
            [one.value for one in r.metrics if one.name == "ifca/cluster" and one.client is not None]
            for r in (record, other)
        )
        assert mine == [order[int(one or 0)] for one in theirs]


def test_a_client_is_evaluated_by_the_model_that_it_chooses_on_its_train_split():
    here = clustered({"num_clusters": 3}, rounds=3, evaluation=Evaluation(pooled=False), clients={"per_round": 2})
    records, run_states = play(here)
    x = models(run_states[-1].server["params"], 3)
    evaluated = {
        one.client: one.value for one in records[-1].metrics if one.name == "own/loss" and one.client is not None
    }
    losses = {client: points(here, client, "test").loss(x[chosen(here, x, client)]) for client in range(4)}
    assert evaluated == pytest.approx(losses, rel=1e-5)
    assert not any(one.name.startswith("pooled") for one in records[-1].metrics)


def test_the_models_begin_at_different_draws_of_the_same_seed():
    make = on_digits("ifca")
    first, again, other = (make(**options).initial for options in ({}, {}, {"seed": 6}))
    assert rows(play(make(rounds=1))[0]) == rows(play(make(rounds=1))[0])
    assert all(torch.equal(first[name], again[name]) for name in first)
    plain = of_cluster(first, 0)
    assert all(torch.equal(plain[name], tensor) for name, tensor in on_digits("fedavg")().initial.items())
    for own, drawn in ((first, of_cluster(first, 1)), (first, other)):
        assert not any(torch.equal(own[name], drawn[name]) for name in plain)


class Frozen(nn.Sequential):
    """A linear layer on fixed random features."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(math.prod(input_shape), 4), nn.Linear(4, num_classes))
        self[1].requires_grad_(False)


def test_constants_are_those_of_the_first_draw():
    one, plain = (on_digits(name)(model=Frozen) for name in ("ifca", "fedavg"))
    assert len(one.initial) == 2 * len(plain.initial) == 4
    for name, array in plain.method.task.constants.items():
        np.testing.assert_array_equal(one.method.task.constants[name], array)


def test_what_does_not_fit_is_refused(tmp_path: Path):
    make = on_digits("ifca")
    weights = {name: tensor.clone() for name, tensor in on_digits("fedavg")().initial.items()}
    save_file(weights, tmp_path / "start.safetensors")
    with refused(names=["ifca", "model.start"]):
        make(model={"name": "mlp", "hidden": [12], "start": str(tmp_path / "start.safetensors")})
    with refused(names=["local-dp", "IFCA", "whole message"]):
        make(wrap=[{"name": "local-dp"}])
    with refused(names=["method.num_clusters", "0"]):
        make(method={"name": "ifca", "num_clusters": 0})
    with refused(names=["schedule", "IFCA", "takes_stale"]):
        make(schedule="buffered")

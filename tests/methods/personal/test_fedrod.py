"""FedRoD: both heads in plain torch, and what the balanced softmax does to classes that a client lacks."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rayfl.data.datasets import Examples
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from rayfl.tree import Tree
from tests.contracts.every_method import on_digits
from tests.methods.averaging import ABSENCES, ENGINES
from tests.methods.reference import NUM_CLASSES, batches, vectors
from tests.methods.representations import (
    HEAD,
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


def made(hyper: dict[str, Any], engine: str = "loop", **options: Any) -> Setup:
    """Client 1 has class 0 alone, client 3 none of class 2."""
    return small("fedrod", hyper, engine, dataset=lacking_classes(), **options)


def balanced(here: Setup, client: int, logits: Tensor, labels: Tensor) -> Tensor:
    """-log of n_y e^{z_y} / sum_c n_c e^{z_c}, averaged."""
    numbers = np.bincount(here.dataset.train.labels[here.partition.train[client]], minlength=NUM_CLASSES)
    terms = torch.from_numpy(numbers) * logits.exp()
    return -(terms[torch.arange(len(labels)), labels] / terms.sum(1)).log().mean()


def expected(here: Setup) -> list[tuple[Tree, dict[int, Tree]]]:
    """x and all P after every round."""
    lr, heads, path = here.method.hyper.model_dump()["lr"], {}, []
    x = doubled(here.initial)
    heads = {i: {name: torch.zeros_like(x[name]) for name in HEAD} for i in range(5)}
    for round in range(here.rounds):
        ends: dict[int, Tree] = {}
        for i in with_status(here.population.sample_round(round), "delivered"):
            y, own = leaves(x), leaves(heads[i])
            for rows in batches(here, round, i):
                inputs, labels = examples(here, rows)
                features = representation(y, inputs)
                generic = features @ y["3.weight"].T + y["3.bias"]
                personal = features.detach() @ own["3.weight"].T + own["3.bias"]
                first = balanced(here, i, generic, labels)
                second = functional.cross_entropy(generic.detach() + personal, labels)
                y, own = stepped(y, first, lr), stepped(own, second, lr)
            ends[i], heads[i] = y, own
        x = averaged(here, x, ends)
        path.append((x, dict(heads)))
    return path


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize("hyper", [{"epochs": 2}, {"weighting": "uniform", "batch_size": 3}], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_its_equations(engine: str, hyper: dict[str, Any], clients: dict[str, Any]):
    here = made(hyper, engine, clients=clients)
    records, run_states = play(here)
    path = expected(here)
    for run_state, (x, heads) in zip(run_states, path, strict=True):
        assert_near(run_state.server["params"], x)
        for client, head in heads.items():
            assert_near(stored(here, run_state, client)["head"], head)
    x, heads = path[-1]
    test = here.dataset.test
    for client, head in heads.items():
        rows = here.partition.test[client]
        both = {**x, **{name: x[name] + head[name] for name in HEAD}}
        features = representation(both, torch.from_numpy(test.inputs[rows]).double())
        logits = features @ both["3.weight"].T + both["3.bias"]
        loss = functional.cross_entropy(logits, torch.from_numpy(test.labels[rows])).item()
        found = [m.value for m in records[-1].metrics if (m.client, m.name) == (client, "own/loss")]
        assert found == pytest.approx([loss], rel=1e-4)


def test_a_class_that_a_client_lacks_moves_no_row_of_g_to_the_bit():
    here, lacking = made({"batch_size": 3}, clients={"per_round": 1}, seed=3), {1: [1, 2], 3: [2]}
    before, seen = here.initial, 0
    for round, after in enumerate(play(here)[1]):
        (client,) = here.population.sample_round(round).selected
        for name in HEAD:
            moved = (after.server["params"][name] != before[name]).reshape(NUM_CLASSES, -1).any(1)
            # With one class alone, the first loss is 0.
            assert not moved[lacking.get(client, [])].any() and moved.any() == (client != 1)
        # The personal row of such a class moves.
        for row in lacking.get(client, []):
            seen += 1
            assert stored(here, after, client)["head"]["3.weight"][row].abs().max() > 0
        before = after.server["params"]
    assert seen == 3


def test_with_equal_counts_the_shared_part_is_fedavg():
    dataset = vectors((6,) * 5)
    labels = np.tile([0, 1, 2], 10)
    dataset = replace(dataset, train=Examples(dataset.train.inputs, labels))
    rod, plain = (play(small(name, {}, dataset=dataset, sizes=(6,) * 5))[1][-1] for name in ("fedrod", "fedavg"))
    assert_near(rod.server["params"], plain.server["params"])


def test_what_does_not_fit_is_refused():
    with refused(names=["FedRoD", "last linear layer"]):
        on_digits("fedrod")(model="logistic")

"""FedProto: prototypes and models in plain torch, exact bits, both ways of evaluation, and what it refuses."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rayfl.data.batches import Batch
from rayfl.data.datasets import Examples
from rayfl.gather import Aggregate, Sum
from rayfl.methods.personal.fedproto import FedProto
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from rayfl.tree import Tree
from tests.bound_tasks import classification
from tests.contracts.every_method import on_digits
from tests.contracts.seams.quadratic import setup as on_quadratics
from tests.contracts.test_tasks import made as made_on
from tests.methods.averaging import ABSENCES, ENGINES
from tests.methods.reference import NUM_CLASSES, batches, vectors
from tests.methods.representations import (
    WIDTH,
    Dropping,
    assert_near,
    cross_entropy,
    doubled,
    examples,
    lacking_classes,
    leaves,
    representation,
    small,
    state_of,
    stepped,
)
from tests.population.statuses import with_status
from tests.refusals import refused


def made(hyper: dict[str, Any], engine: str = "loop", **options: Any) -> Setup:
    """Clients 1 and 3 lack classes: one has class 0 alone, the other none of class 2."""
    return small("fedproto", hyper, engine, dataset=lacking_classes(), **options)


def of_client(here: Setup, client: int, model: Tree) -> dict[int, tuple[Tensor, int]]:
    """c_ij and the number of examples of each class that the client has."""
    inputs, labels = examples(here, here.partition.train[client])
    features = representation(model, inputs).detach()
    return {
        j: (features[labels == j].mean(0), int((labels == j).sum())) for j in range(NUM_CLASSES) if (labels == j).any()
    }


Round = tuple[dict[int, Tree], dict[int, Tensor], list[int], dict[int, int]]
"""All models, all C_j, the classes that came down, and the number of classes that each delivered."""


def expected(here: Setup) -> list[Round]:
    hyper = here.method.hyper.model_dump()
    models, prototypes, path = dict.fromkeys(range(5), doubled(here.initial)), dict[int, Tensor](), []
    for round in range(here.rounds):
        sent: dict[int, dict[int, tuple[Tensor, int]]] = {}
        down = list(prototypes)
        for i in with_status(here.population.sample_round(round), "delivered"):
            y = leaves(models[i])
            for rows in batches(here, round, i):
                inputs, labels = examples(here, rows)
                features = representation(y, inputs)
                loss = cross_entropy(y, features, labels)
                for z, j in zip(features, labels.tolist(), strict=True):
                    if j in prototypes:
                        loss = loss + hyper["lam"] / len(labels) * ((z - prototypes[j]) ** 2).sum() / WIDTH
                y = stepped(y, loss, hyper["lr"])
            models = {**models, i: y}
            sent[i] = of_client(here, i, y)
        for j in range(NUM_CLASSES):
            own = [found[j] for found in sent.values() if j in found]
            if own:
                weights = [1 if hyper["weighting"] == "uniform" else number for _, number in own]
                mean = torch.stack([w * c for w, (c, _) in zip(weights, own, strict=True)]).sum(0) / sum(weights)
                prototypes = {**prototypes, j: mean}
        path.append((models, prototypes, down, {i: len(found) for i, found in sent.items()}))
    return path


def accuracies(here: Setup, models: dict[int, Tree], prototypes: dict[int, Tensor]) -> tuple[dict, dict]:
    """Of each client's test split: by the nearest prototype, and by the own head."""
    nearest, heads, examples = {}, {}, here.dataset.test
    table = torch.stack([prototypes.get(j, torch.full((WIDTH,), torch.inf).double()) for j in range(NUM_CLASSES)])
    for client, model in models.items():
        rows = here.partition.test[client]
        features = representation(model, torch.from_numpy(examples.inputs[rows]).double()).detach()
        labels = torch.from_numpy(examples.labels[rows])
        nearest[client] = (
            (torch.cdist(features, table).nan_to_num(torch.inf).argmin(1) == labels).double().mean().item()
        )
        logits = features @ model["3.weight"].T + model["3.bias"]
        heads[client] = (logits.argmax(1) == labels).double().mean().item()
    return nearest, heads


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize("hyper", [{"lam": 3.0, "epochs": 2}, {"weighting": "samples"}], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_its_equations(engine: str, hyper: dict[str, Any], clients: dict[str, Any]):
    here = made(hyper, engine, clients=clients)
    records, run_states = play(here)
    for record, run_state, (models, prototypes, down, sent) in zip(records, run_states, expected(here), strict=True):
        for client in range(5):
            assert_near(state_of(here, run_state, client), models[client])
        table = run_state.server["table"]
        assert table[:, -1].nonzero().view(-1).tolist() == sorted(prototypes)
        for j, prototype in prototypes.items():
            np.testing.assert_allclose(table[j, :-1], prototype, rtol=2e-4, atol=2e-5)
        # D numbers and a weight for each class of the client, a byte for three bits; D numbers a prototype down.
        up = {row.client: row.uplink_bits for row in record.clients if row.status == "delivered"}
        assert up == {client: 32 * (WIDTH + 1) * number + 8 for client, number in sent.items()}
        reached = {row.downlink_bits for row in record.clients if row.status != "dropped_before_download"}
        assert reached <= {32 * WIDTH * len(down) + 8}
        if not prototypes:
            continue
        nearest, heads = accuracies(here, models, prototypes)
        for name, wanted in (("own/accuracy", nearest), ("own_after_training/accuracy", heads)):
            evaluated = {m.client: m.value for m in record.metrics if m.name == name and m.client is not None}
            assert evaluated == {client: wanted[client] for client in evaluated} and (
                evaluated or name != "own/accuracy"
            )
    assert not any(m.name.startswith("pooled") for m in records[-1].metrics)


def test_without_the_term_clients_train_alone():
    shared = {"epochs": 2, "momentum": 0.5}
    proto, alone = made({**shared, "lam": 0.0}), small("local", shared, dataset=made({}).dataset)
    states = play(proto)[1][-1], play(alone)[1][-1]
    for client in range(5):
        one, other = (state_of(here, state, client) for here, state in zip((proto, alone), states, strict=True))
        assert all(torch.equal(one[name], tensor) for name, tensor in other.items())


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_clients_with_the_same_examples_have_the_prototypes_of_the_server(weighting: str):
    dataset = vectors((7, 7, 7, 7, 7))
    inputs, labels = np.tile(dataset.train.inputs[:7], (5, 1)), np.tile(dataset.train.labels[:7], 5)
    dataset = replace(dataset, train=Examples(inputs, labels))
    hyper = {"batch_size": 0, "weighting": weighting}
    here = small("fedproto", hyper, dataset=dataset, sizes=(7, 7, 7, 7, 7))
    run_state = play(here)[1][-1]
    for client in range(5):
        for j, (own, _) in of_client(here, client, doubled(state_of(here, run_state, client))).items():
            np.testing.assert_allclose(run_state.server["table"][j, :-1], own, rtol=1e-5, atol=1e-6)


def test_the_mean_of_two_by_hand():
    """Weights 1 and 3 of (2, 4) and (6, 0) give (5, 1); a class that nobody sent keeps what it had."""
    method = made({}).method
    assert isinstance(method, FedProto)
    sums = torch.tensor([[2.0 + 18, 4.0, 4.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    before = torch.tensor([[9.0, 9.0, 1.0], [7.0, 8.0, 1.0], [0.0, 0.0, 0.0]])
    received = {"prototypes": Aggregate(Sum(), ({"prototypes": sums},), count=2)}
    here = made({})
    after = method.update({"table": before}, received, here.context(0, here.plan(0), 0, "server"))["table"]
    assert after.tolist() == [[5.0, 1.0, 1.0], [7.0, 8.0, 1.0], [0.0, 0.0, 0.0]]
    # The head 2 C_j, -|C_j|^2 chooses the nearest prototype, and never a class without one.
    head = method.model({"table": after})
    logits = torch.tensor([[5.5, 2.0], [6.9, 7.0], [0.0, 0.0]]) @ head["3.weight"].T + head["3.bias"]
    assert logits.argmax(1).tolist() == [0, 1, 0]


def test_prototypes_are_means_of_evaluation_mode():
    """A model with dropout before its head: sums by class of relu(W a + b), without padding, and the numbers."""
    method, generator = FedProto(classification(Dropping, (6,))), torch.Generator().manual_seed(0)
    params, labels = method.task.init(0), torch.tensor([0, 2, 0, 2, 2, 0, 0])
    inputs, weights = torch.randn(7, 6, generator=generator), torch.tensor([1.0] * 5 + [0.0] * 2)
    carry: Any = {**method.start(params), "found": torch.zeros(3, 5)}
    found = method.step(carry, Batch(inputs, labels, weights), stage=method.plan(0, 0.0).stages[1])["found"]
    features = (inputs @ params["body.weight"].T + params["body.bias"]).relu()[:5]
    for j, number in ((0, 2.0), (1, 0.0), (2, 3.0)):
        torch.testing.assert_close(found[j], torch.cat([features[labels[:5] == j].sum(0), torch.tensor([number])]))


class NoBias(nn.Sequential):
    def __init__(self, num_classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, num_classes, bias=False))


def test_what_does_not_fit_is_refused_before_the_run():
    with refused(names=["FedProto", "classification", "mlp"]):
        on_quadratics(FedProto)
    for model in ("logistic", NoBias):
        with refused(names=["FedProto", "last linear layer", "bias"]):
            on_digits("fedproto")(model=model)
    with refused(names=["FedProto", "task 'classification'"]):
        made_on("multilabel", "fedproto")
    with refused(names=["FedProto", "wrap", "clip", "encoded"]):
        on_digits("fedproto")(wrap=["clip"])

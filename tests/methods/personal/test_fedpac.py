"""FedPAC in plain torch, the combination of heads by trying every set of clients, and its closed forms."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rayfl.methods.personal.fedpac import combination
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from rayfl.tree import Tree
from tests.contracts.every_method import on_digits
from tests.methods.averaging import ABSENCES, ENGINES
from tests.methods.reference import NUM_CLASSES, assert_close, batches
from tests.methods.representations import (
    HEAD,
    WIDTH,
    assert_near,
    averaged,
    cross_entropy,
    doubled,
    examples,
    lacking_classes,
    leaves,
    representation,
    small,
    stepped,
    stored,
)
from tests.methods.staged import stage_batches
from tests.population.statuses import with_status
from tests.refusals import refused


def made(hyper: dict[str, Any], engine: str = "loop", **options: Any) -> Setup:
    """Client 1 has class 0 alone, client 3 none of class 2."""
    return small("fedpac", hyper, engine, dataset=lacking_classes(), **options)


def by_class(here: Setup, client: int, model: Tree) -> dict[int, Tensor]:
    """z of the client's examples of each class that it has."""
    inputs, labels = examples(here, here.partition.train[client])
    z = representation(model, inputs).detach()
    return {c: z[labels == c] for c in range(NUM_CLASSES) if (labels == c).any()}


def simplex_minimum(matrix: np.ndarray) -> np.ndarray:
    """argmin a^T P a over the simplex: of all supports, the stationary point that is feasible and lowest."""
    best, value, size = np.zeros(0), np.inf, len(matrix)
    for count in range(1, size + 1):
        for support in itertools.combinations(range(size), count):
            part = matrix[np.ix_(support, support)]
            solved = np.linalg.lstsq(part, np.ones(count), rcond=None)[0]
            if solved.sum() <= 0 or (solved < -1e-12).any():
                continue
            a = np.zeros(size)
            a[list(support)] = solved / solved.sum()
            if a @ matrix @ a < value - 1e-15:
                best, value = a, a @ matrix @ a
    return best


def combined(variances: dict[int, float], h: dict[int, np.ndarray], i: int) -> dict[int, float]:
    """a of client i over those who delivered."""
    clients = sorted(h)
    matrix = np.array(
        [[((h[i] - h[j]) * (h[i] - h[k])).sum() + variances[j] * (j == k) for k in clients] for j in clients]
    )
    a = simplex_minimum(matrix)
    a = np.where(a < 1e-3, 0, a)
    return dict(zip(clients, a / a.sum(), strict=True))


def expected(here: Setup) -> list[tuple[Tree, dict[int, Tensor], dict[int, Tree]]]:
    """The body, all C_c, and all heads after every round."""
    hyper = here.method.hyper.model_dump()
    start = doubled(here.initial)
    body = {name: tensor for name, tensor in start.items() if name not in HEAD}
    heads = {i: {name: start[name] for name in HEAD} for i in range(5)}
    common: dict[int, Tensor] = {}
    path = []
    for round in range(here.rounds):
        ends, trained, sent = dict[int, Tree](), dict[int, Tree](), dict[int, dict[int, Tensor]]()
        variances, h = dict[int, float](), dict[int, np.ndarray]()
        for i in with_status(here.population.sample_round(round), "delivered"):
            found, number = by_class(here, i, body), len(here.partition.train[i])
            h[i] = np.zeros((NUM_CLASSES, WIDTH))
            spread = 0.0
            for c, z in found.items():
                share = len(z) / number
                h[i][c] = share * z.mean(0).numpy()
                spread += share * (z**2).sum(1).mean().item() - share**2 * (z.mean(0) ** 2).sum().item()
            variances[i] = spread / number
            head = leaves(heads[i])
            for rows in stage_batches(here, round, i, "head", hyper["head_epochs"], hyper["batch_size"]):
                inputs, labels = examples(here, rows)
                head = stepped(head, cross_entropy(head, representation(body, inputs), labels), hyper["head_lr"])
            y = leaves(body)
            for rows in batches(here, round, i):
                inputs, labels = examples(here, rows)
                z = representation(y, inputs)
                loss = cross_entropy({n: t.detach() for n, t in head.items()}, z, labels)
                if common:
                    targets = torch.stack([common.get(c, found[c].mean(0)) for c in labels.tolist()])
                    loss = loss + hyper["lam"] * ((z - targets) ** 2).mean()
                y = stepped(y, loss, hyper["lr"])
            ends[i], trained[i], sent[i] = y, head, by_class(here, i, y)
        body = averaged(here, body, ends)
        for c in range(NUM_CLASSES):
            of_class = [zs[c] for zs in sent.values() if c in zs]
            if of_class:
                common = {**common, c: torch.cat(of_class).mean(0)}
        for i in ends:
            a = combined(variances, h, i)
            heads = {**heads, i: {n: sum(a[j] * trained[j][n].detach() for j in a) for n in HEAD}}  # type: ignore
        path.append((body, common, heads))
    return path


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize(
    "hyper", [{"lam": 2.0, "epochs": 2}, {"weighting": "uniform", "head_epochs": 2, "head_lr": 0.4}], ids=str
)
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_its_equations(engine: str, hyper: dict[str, Any], clients: dict[str, Any]):
    here = made(hyper, engine, clients=clients)
    records, run_states = play(here)
    for record, run_state, (body, common, heads) in zip(records, run_states, expected(here), strict=True):
        assert_near(run_state.server["params"], body)
        table = run_state.server["table"]
        assert table[:, -1].nonzero().view(-1).tolist() == sorted(common)
        for c, mean in common.items():
            assert_close(table[c, :-1], mean)
        for client, head in heads.items():
            assert_near(stored(here, run_state, client)["params"], head)
        test = here.dataset.test
        for client, head in heads.items():
            rows = here.partition.test[client]
            z = representation(body, torch.from_numpy(test.inputs[rows]).double())
            loss = cross_entropy(head, z, torch.from_numpy(test.labels[rows])).item()
            found = [m.value for m in record.metrics if (m.client, m.name) == (client, "own/loss")]
            assert found == pytest.approx([loss], rel=1e-3)
        # Body and head, V, h, and for each class of the client D numbers and a count; and a bit for each class.
        up = {row.client: row.uplink_bits for row in record.clients if row.status == "delivered"}
        count = 64 * (hyper.get("weighting") != "uniform")
        for client, bits in up.items():
            classes = len(set(here.dataset.train.labels[here.partition.train[client]].tolist()))
            assert bits == 32 * (35 + 18 + 1 + NUM_CLASSES * WIDTH + (WIDTH + 1) * classes) + 8 + count


def test_combinations_by_hand():
    variances, d = np.array([0.3, 0.5]), 0.7
    h = np.array([[0.0, 0.0], [d, 0.0]])
    wanted = np.array([0.5 + d**2, 0.3]) / (0.8 + d**2)
    np.testing.assert_allclose(combination(variances, h)[0], wanted, atol=1e-9)
    equal = combination(np.array([1.0, 2.0, 4.0]), np.ones((3, 2)))
    np.testing.assert_allclose(equal, np.tile(np.array([4, 2, 1]) / 7, (3, 1)), atol=1e-9)
    alone = combination(np.full(3, 1e-12), np.eye(3))
    np.testing.assert_allclose(alone, np.eye(3), atol=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_combinations_are_minima(seed: int):
    draw = np.random.default_rng(seed)
    variances, h = draw.uniform(0.01, 1, 5), draw.standard_normal((5, 4)) * draw.uniform(0.1, 1)
    for i, row in enumerate(combination(variances, h)):
        wanted = combined(dict(enumerate(variances)), dict(enumerate(h)), i)
        np.testing.assert_allclose(row, list(wanted.values()), atol=1e-7)


def test_what_does_not_fit_is_refused():
    with refused(names=["FedPAC", "last linear layer"]):
        on_digits("fedpac")(model="logistic")
    with refused(names=["FedPAC", "wrap", "clip"]):
        on_digits("fedpac")(wrap=["clip"])

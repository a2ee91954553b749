"""The LoRA family against its equations in float64: two linear layers, the first frozen with an adapter, the second
trained as it is. Only the draws are shared: who takes part, batches, and FLoRA's new factors."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rayfl import tree
from rayfl.determinism import seeding
from rayfl.methods.adapters.flexlora import cut_to_rank
from rayfl.methods.adapters.hetlora import HetLoRA
from rayfl.methods.base import Method
from rayfl.methods.shared.low_rank import product_norms
from rayfl.methods.shared.own_parts import Parts, with_parts
from rayfl.methods.shared.step_draws import first_key, uniforms
from rayfl.models.adapters import Adapters
from rayfl.rounds.evaluate_round import personal_models
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from tests.methods.reference import DIM, NUM_CLASSES, SIZES, Vectors, batches, doubles, played, setup_of
from tests.population.statuses import with_status
from tests.refusals import refused

HIDDEN, RANK, ALPHA = 5, 4, 6.0
SCALE = ALPHA / RANK
A, B, W, BIAS = "1.lora_A.default.weight", "1.lora_B.default.weight", "1.base_layer.weight", "1.base_layer.bias"
HEAD = ("2.weight", "2.bias")
ROUNDS = 4


def plain() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, NUM_CLASSES))


def setup(
    method: str, adapters: dict[str, Any], clients: dict[str, Any], personal: tuple[str, ...] = (), **hyper: Any
) -> Setup:
    layers = Adapters(**{"layers": ("1",), "rank": RANK, "alpha": ALPHA, "trained": HEAD, **adapters})
    settings = {"lr": 0.3, "batch_size": 4, "epochs": 2, "weight_decay": 0.01, **hyper}
    here = setup_of(method, settings, build=partial(layers.adapted, plain), clients=clients, rounds=ROUNDS)
    if not personal:
        return here
    network = here.method.task.network  # pyright: ignore[reportAttributeAccessIssue]
    shared = network.keep_constants(network.first_weights(here.seed), personal)
    return replace(
        here, method=with_parts(here.method, Parts(personal=personal)), initial_arrays=tree.to_arrays(shared)
    )


@dataclass
class Model:
    """Frozen weights, and one pass of training by hand."""

    here: Setup
    w: np.ndarray
    bias: np.ndarray

    @classmethod
    def of(cls, here: Setup) -> "Model":
        constants = {**here.method.task.constants, **tree.to_arrays(here.initial)}
        return cls(here, np.asarray(constants[W], float), np.asarray(constants[BIAS], float))

    def gradient(self, params: Vectors, rows: np.ndarray, w: np.ndarray) -> Vectors:
        examples = self.here.dataset.train
        x, labels = examples.inputs[rows].astype(float), examples.labels[rows]
        hidden = x @ (w + SCALE * params[B] @ params[A]).T + self.bias
        logits = hidden @ params["2.weight"].T + params["2.bias"]
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        p[np.arange(len(labels)), labels] -= 1
        p /= len(labels)
        of_w = (p @ params["2.weight"]).T @ x
        return {
            A: SCALE * params[B].T @ of_w,
            B: SCALE * of_w @ params[A].T,
            "2.weight": p.T @ hidden,
            "2.bias": p.sum(axis=0),
        }

    def trained(
        self, round: int, client: int, params: Vectors, moving: tuple[str, ...], w: np.ndarray, tail: int = RANK
    ) -> Vectors:
        """SGD with weight decay on `moving`; `tail`: the first rank that HetLoRA's penalty acts on."""
        hyper = self.here.method.innermost.hyper.model_dump()
        params = dict(params)
        for rows in batches(replace(self.here, method=self.here.method.innermost), round, client):
            gradient = self.gradient(params, rows, w)
            row, column = params[A][tail:], params[B][:, tail:]
            norms = np.linalg.norm(row), np.linalg.norm(column)
            if all(norms):
                gradient[A][tail:] += hyper["penalty"] * norms[1] * row / norms[0]
                gradient[B][:, tail:] += hyper["penalty"] * norms[0] * column / norms[1]
            elif norms[0] and "penalty" in hyper:
                assert not column.any()
            for name in moving:
                params[name] = params[name] - hyper["lr"] * (gradient[name] + hyper["weight_decay"] * params[name])
        return params


def cut(params: Vectors, rank: int) -> Vectors:
    """A client's part."""
    rows = (np.arange(RANK) < rank).astype(float)
    return {**params, A: params[A] * rows[:, None], B: params[B] * rows}


def mean(ends: dict[int, Vectors], weights: dict[int, float]) -> Vectors:
    total = sum(weights[i] for i in ends)
    return {
        n: np.sum([weights[i] / total * end[n] for i, end in ends.items()], axis=0) for n in next(iter(ends.values()))
    }


def agree(actual: Any, expected: Vectors) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(doubles(actual)[name], value, rtol=1e-5, atol=2e-6, err_msg=name)


ABSENCES = ({}, {"per_round": 3, "dropout_after_training": 0.2})
RATIOS: Any = {"retention_ratio": [0.25, 0.7, 1.0]}
RANKS = [1, 3, 4, 1, 3]
"""ceil of a quarter, 0.7 and all of rank 4; clients take the ratios in turn."""


@pytest.mark.parametrize("clients", ABSENCES, ids=["all", "some"])
@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("kind", ["fedit", "ffa", "fedsa"])
def test_settings_of_fedavg(kind: str, clients: dict[str, Any], engine: str):
    personal = (B, *HEAD) if kind == "fedsa" else ()
    adapters = {"factors": "B"} if kind == "ffa" else {}
    here = replace(setup("fedavg", adapters, clients, personal), engine_name=engine)
    shared = {"fedit": (A, B, *HEAD), "ffa": (B, *HEAD), "fedsa": (A,)}[kind]
    moving = {"fedit": (A, B, *HEAD), "ffa": (B, *HEAD), "fedsa": (A, B, *HEAD)}[kind]
    model, task = Model.of(here), here.method.task
    first = {**doubles(task.constants), **doubles(task.local), **doubles(here.initial)}
    x, own = {name: first[name] for name in (A, B, *HEAD)}, {i: {n: first[n] for n in personal} for i in range(5)}
    assert not x[B].any() and x[A].any()
    for round, (record, run_state) in enumerate(played(here)):
        ends = {}
        for i in with_status(here.population.sample_round(round), "delivered"):
            ends[i] = model.trained(round, i, {**x, **own[i]}, moving, model.w)
            own[i] = {name: ends[i][name] for name in personal}
        if ends:
            x = {**x, **{n: v for n, v in mean(ends, dict(enumerate(map(float, SIZES)))).items() if n in shared}}
        agree(run_state.server["params"], {name: x[name] for name in shared})
        assert {*run_state.server["params"]} == {*shared}
        bits = 32 * sum(x[name].size for name in shared)
        assert {row.uplink_bits for row in record.clients if row.status == "delivered"} <= {bits + 64}
    if kind == "fedsa":
        models = dict(personal_models(here, InlineExecutor(here), run_state))
        for i, params in own.items():
            agree({name: models[i][name] for name in personal}, params)
        assert not np.allclose(own[0][B], own[1][B])
    if kind == "ffa":
        assert np.array_equal(x[A], first[A])


@pytest.mark.parametrize(
    ("clients", "hyper"),
    [
        (RATIOS, {"pruned_share": 0.75, "penalty": 0.2}),
        ({**RATIOS, **ABSENCES[1]}, {"pruned_share": 0.5, "penalty": 0.5, "least_rank": 2, "weight_decay": 0.0}),
    ],
)
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_hetlora(clients: dict[str, Any], hyper: dict[str, Any], engine: str):
    here = replace(setup("hetlora", {}, clients, **hyper), engine_name=engine)
    model, x, ranks, pruned = Model.of(here), doubles(here.initial), list(RANKS), 0
    for round, (record, run_state) in enumerate(played(here)):
        ends, weights = {}, {}
        for i in with_status(here.population.sample_round(round), "delivered"):
            start = cut(x, ranks[i])
            least = min(ranks[i], hyper.get("least_rank", 1))
            tail = max(least, math.floor(hyper["pruned_share"] * ranks[i]))

            def size(params: Vectors, tail: int = tail) -> float:
                return float(np.linalg.norm(params[A][tail:]) * np.linalg.norm(params[B][:, tail:]))

            end = model.trained(round, i, start, (A, B, *HEAD), model.w, tail)
            if size(end) < size(start):
                ranks[i], pruned = tail, pruned + 1
                end = cut(end, tail)
            ends[i], weights[i] = end, float(np.linalg.norm(end[B] @ end[A]))
        if ends:
            held = (np.arange(RANK) < max(ranks[i] for i in ends)).astype(bool)
            new = mean(ends, weights)
            new[A] = np.where(held[:, None], new[A], x[A])
            new[B] = np.where(held, new[B], x[B])
            x = new
        agree(run_state.server["params"], x)
        if ends:
            assert record.means["hetlora/rank"] == pytest.approx(np.mean([ranks[i] for i in ends]))
            sent = {row.client: row.uplink_bits for row in record.clients if row.status == "delivered"}
            assert sent == {i: 32 * (ranks[i] * (DIM + HIDDEN) + NUM_CLASSES * (HIDDEN + 1)) + 64 for i in ends}
    assert pruned


def test_hetlora_weighs_equally_if_all_products_are_0():
    here = setup("hetlora", {}, {}, lr=1e-12, penalty=0.0)
    (_, run_state), *_ = played(here)
    agree(run_state.server["params"], {name: value for name, value in doubles(here.initial).items() if name != B})
    method = here.method
    assert isinstance(method, HetLoRA) and [method.pruned_rank(rank) for rank in (1, 2, 4)] == [1, 1, 3]


@pytest.mark.parametrize(
    ("clients", "weighting"), [(RATIOS, "samples"), ({**RATIOS, **ABSENCES[1]}, "uniform")], ids=["all", "some"]
)
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_flexlora(clients: dict[str, Any], weighting: str, engine: str):
    here = replace(setup("flexlora", {}, clients, weighting=weighting), engine_name=engine)
    model, x = Model.of(here), doubles(here.initial)
    for round, (record, run_state) in enumerate(played(here)):
        delivered = with_status(here.population.sample_round(round), "delivered")
        ends = {i: model.trained(round, i, cut(x, RANKS[i]), (A, B, *HEAD), model.w) for i in delivered}
        if ends:
            weights = {i: float(SIZES[i]) if weighting == "samples" else 1.0 for i in ends}
            product = mean({i: {"w": end[B] @ end[A]} for i, end in ends.items()}, weights)["w"]
            u, s, vt = np.linalg.svd(product)
            signs = np.sign(u[np.abs(u).argmax(axis=0), np.arange(HIDDEN)])
            x = {
                **mean({i: {n: end[n] for n in HEAD} for i, end in ends.items()}, weights),
                A: (vt[:RANK].T * signs[:RANK]).T,
                B: (u * s * signs)[:, :RANK],
            }
            # Rows that belong to a singular value of 0 are any orthonormal ones.
            rank = int((s > 1e-6).sum())
            assert record.means["flexlora/cut"] == pytest.approx(np.linalg.norm(s[RANK:]) / np.linalg.norm(s), abs=1e-6)
            found = doubles(run_state.server["params"])
            np.testing.assert_allclose(found[A] @ found[A].T, np.eye(RANK), atol=1e-6)
            agree({**found, A: found[A][:rank]}, {**x, A: x[A][:rank]})
            x = found
        sent = {row.client: row.uplink_bits for row in record.clients if row.status == "delivered"}
        extra = 64 * (weighting == "samples") + 32 * NUM_CLASSES * (HIDDEN + 1)
        assert sent == {i: 32 * RANKS[i] * (DIM + HIDDEN) + extra for i in ends}


def test_a_product_of_small_rank_is_returned_and_signs_are_fixed():
    draw = np.random.default_rng(0)
    left, right = draw.standard_normal((7, 3)), draw.standard_normal((3, 6))
    b, a, singular = cut_to_rank(torch.from_numpy(left), torch.from_numpy(right), 5)
    np.testing.assert_allclose((b @ a).numpy(), left @ right, atol=1e-6)
    assert (b.abs().max(0).values[:3] == b.max(0).values[:3]).all() and (singular[3:] < 1e-12).all()
    few, _, _ = cut_to_rank(torch.from_numpy(left), torch.from_numpy(right), 2)
    torch.testing.assert_close(few, b[:, :2])
    wide_b, wide_a, _ = cut_to_rank(torch.from_numpy(left), torch.from_numpy(right), 9)
    assert wide_b.shape == (7, 9) and wide_a.shape == (9, 6) and not wide_b[:, 6:].any()


@pytest.mark.parametrize(
    ("clients", "weighting", "own_ranks"),
    [
        (RATIOS, "samples", RANKS),
        ({**RATIOS, **ABSENCES[1]}, "uniform", RANKS),
        # Stacks of two rows are smaller than the weights, and two such stacks are not.
        ({"retention_ratio": 0.25, "per_round": 2}, "samples", [1] * 5),
    ],
    ids=["all", "some", "stacks"],
)
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_flora(clients: dict[str, Any], weighting: str, own_ranks: list[int], engine: str):
    here = replace(setup("flora", {"merged": True}, clients, weighting=weighting, lr=0.1), engine_name=engine)
    model, x = Model.of(here), doubles(here.initial)
    w, seen, ranks = model.w, dict.fromkeys(range(5), 0), list[int]()
    for round, (record, run_state) in enumerate(played(here)):
        ends, stacked = {}, 0
        for i in with_status(here.population.sample_round(round), "delivered"):
            key = first_key(seeding.generator(here.seed, round, i, "client"))
            drawn = 2 * uniforms(key, {A: torch.zeros(RANK, DIM)})[A].double().numpy() - 1
            start = {**{n: x[n] for n in HEAD}, B: np.zeros((HIDDEN, RANK)), A: np.zeros((RANK, DIM))}
            start[A][: own_ranks[i]] = drawn[: own_ranks[i]] / math.sqrt(DIM)
            ends[i] = model.trained(round, i, start, (A, B, *HEAD), w)
            stacked += own_ranks[i]
            # All stacks that it missed, or the weights if they are smaller.
            missed = sum(ranks[seen[i] :]) * (DIM + HIDDEN)
            down = 32 * (min(missed, DIM * HIDDEN) + NUM_CLASSES * (HIDDEN + 1))
            assert next(row.downlink_bits for row in record.clients if row.client == i) == down
            seen[i] = len(ranks)
        if ends:
            weights = {i: float(SIZES[i]) if weighting == "samples" else 1.0 for i in ends}
            w = w + SCALE * mean({i: {"w": end[B] @ end[A]} for i, end in ends.items()}, weights)["w"]
            x = {**x, **mean({i: {n: end[n] for n in HEAD} for i, end in ends.items()}, weights)}
            ranks.append(stacked)
        agree(run_state.server["params"], {W: w, **{n: x[n] for n in HEAD}, B: np.zeros((HIDDEN, RANK))})


def test_facts_of_lora():
    """The mean of products is not the product of means, unless A is fixed; the first step moves B alone."""
    here = setup("fedavg", {}, {})
    model, x = Model.of(here), doubles(here.initial)
    ends = {i: model.trained(0, i, x, (A, B, *HEAD), model.w) for i in range(5)}
    weights = dict.fromkeys(range(5), 1.0)
    product = mean({i: {"w": end[B] @ end[A]} for i, end in ends.items()}, weights)["w"]
    both = mean(ends, weights)
    assert np.linalg.norm(product - both[B] @ both[A]) > 1e-3 * np.linalg.norm(product)
    fixed = {i: model.trained(0, i, x, (B, *HEAD), model.w) for i in range(5)}
    product = mean({i: {"w": end[B] @ end[A]} for i, end in fixed.items()}, weights)["w"]
    np.testing.assert_allclose(product, mean(fixed, weights)[B] @ x[A], atol=1e-12)
    gradient = model.gradient(x, np.arange(9), model.w)
    assert not gradient[A].any() and gradient[B].any()
    tensors = {n: torch.from_numpy(v) for n, v in ends[0].items()}
    assert float(product_norms(tensors)[0]) == pytest.approx(np.linalg.norm(ends[0][B] @ ends[0][A]))


@pytest.mark.parametrize(
    ("method", "adapters", "names"),
    [
        ("hetlora", None, ["HetLoRA", "adapters", "factors"]),
        ("flexlora", {"factors": "B"}, ["FlexLoRA", "both factors"]),
        ("flora", {}, ["FLoRA", "adapters.merged=true"]),
        ("flora", {"merged": True, "dora": True}, ["FLoRA", "adapters.dora"]),
    ],
)
def test_what_does_not_fit_is_refused(method: str, adapters: dict[str, Any] | None, names: list[str]):
    with refused(names=names):
        here = setup_of(method, {}, build=plain) if adapters is None else setup(method, adapters, {})
        made: Method = here.method
        made.check_model(here.initial)

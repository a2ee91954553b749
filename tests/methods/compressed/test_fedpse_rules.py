"""FedPSE's rules one by one: Appendix A of the paper, the correlation distance, the choice of what goes down."""

from fractions import Fraction
from math import floor
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rayfl.compress.sparse import TopK, sparse_packet
from rayfl.determinism.seeding import NOBODY
from rayfl.gather import Aggregate
from rayfl.methods.compressed.fedpse import FedPSE, FedPSEServer, correlation_distance, personal_support
from rayfl.methods.shared.stored_packets import buffers
from rayfl.tree import Tree
from tests.methods.reference import setup_of

RNG = np.random.default_rng(0)


def sent(x: Tree) -> Tree:
    """A client's uplink as the server keeps it: what is not zero."""
    return buffers(sparse_packet(x, {name: tensor != 0 for name, tensor in x.items()}))


def aggregated(method: FedPSE, updates: list[list[float]], weights: list[float]) -> Aggregate:
    """What the server gathers of sparse updates."""
    rule = method.gather["update"]
    total = rule.empty()
    for sender, (update, weight) in enumerate(zip(updates, weights, strict=True)):
        values = {"w": torch.tensor(update)}
        total = rule.add(total, sparse_packet(values, {"w": values["w"] != 0}), weight, sender)
    return total


def server_after(updates: list[list[float]], weights: list[float] | None = None, **hyper: Any) -> FedPSEServer:
    """The server's state after one round of these updates."""
    setup = setup_of("fedpse", {"absent": "nothing", **hyper})
    assert isinstance(setup.method, FedPSE)
    context = setup.context(0, setup.plan(0), NOBODY, "server")
    before = setup.method.init_server({"w": torch.zeros(len(updates[0]))})
    received = {"update": aggregated(setup.method, updates, weights or [1.0] * len(updates))}
    return setup.method.server_update(before, received, range(len(updates)), context)[0]


IID = [[0.0, 1.0], [2.0, 0.0], [0.0, 3.0]]
NON_IID = [[0.0, 2.0], [3.0, 0.0], [0.0, 4.0]]


@pytest.mark.parametrize(
    ("updates", "aggregation", "expected"),
    [
        (IID, "naive", [2 / 3, 4 / 3]),
        (IID, "ewa", [2.0, 2.0]),
        (NON_IID, "naive", [1.0, 2.0]),
        (NON_IID, "ewa", [3.0, 3.0]),
        ([[1.0, 2.0], [3.0, 2.0], [3.0, 4.0]], "ewa", [7 / 3, 8 / 3]),
        ([[1.0, 2.0], [3.0, 2.0], [3.0, 4.0]], "naive", [7 / 3, 8 / 3]),
        ([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]], "ewa", [2.0, 2.0]),
    ],
)
def test_appendix_a(updates: list[list[float]], aggregation: str, expected: list[float]):
    server = server_after(updates, aggregation=aggregation)
    assert server["update"]["w"].tolist() == pytest.approx(expected, rel=1e-6)


def test_appendix_a_sparsifies_by_top_k():
    # k = ceil(0.5 * 2) = 1; the IID example has ties, which the paper breaks as it likes, this one has none.
    for dense, sparse in zip([[1.0, 2.0], [3.0, 2.0], [3.0, 4.0]], NON_IID, strict=True):
        packet, _ = TopK(keep_ratio=0.5).encode({"w": torch.tensor(dense)}, {}, RNG)
        assert packet.decode()["w"].tolist() == sparse


def test_every_entry_has_its_own_weights():
    # Entry 0: (10 * 4 - 30 * 4) / 40 = -2, opposite signs must not cancel in the denominator; entry 1: sent by the
    # second alone; entry 2: by nobody.
    server = server_after([[4.0, 0.0, 0.0], [-4.0, 7.0, 0.0]], [10.0, 30.0], keep_ratio=1.0)
    assert server["update"]["w"].tolist() == [-2.0, 7.0, 0.0]
    assert server["support"]["w"].tolist() == [True, True, False]
    naive = server_after([[4.0, 0.0, 0.0], [-4.0, 7.0, 0.0]], [10.0, 30.0], aggregation="naive")
    assert naive["update"]["w"].tolist() == [-2.0, 5.25, 0.0]


def test_nothing_delivered_is_a_zero_update():
    setup = setup_of("fedpse", {"absent": "nothing"})
    method = setup.method
    assert isinstance(method, FedPSE)
    before: FedPSEServer = {
        "update": {"w": torch.ones(3)},
        "support": {"w": torch.ones(3, dtype=torch.bool)},
        "round": torch.tensor(0),
    }
    received = {"update": method.gather["update"].empty()}
    after, _ = method.server_update(before, received, (), setup.context(0, setup.plan(0), NOBODY, "server"))
    assert after["update"]["w"].tolist() == [0.0, 0.0, 0.0]
    assert not after["support"]["w"].any()


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([0.1, -0.7, 3e-9], [0.1, -0.7, 3e-9], 0.0),
        ([0.1, -0.7, 3e-9], [-0.1, 0.7, -3e-9], 1.0),
        ([0.1, 0.0], [0.0, 5.0], 0.5),
        ([1.0, 1.0, 0.0], [1.0, 0.0, 1.0], 0.25),  # cos = 1 / (sqrt 2 sqrt 2) = 1/2
        ([1.0, 1.0, 0.0], [-8.0, 0.0, 8.0], 0.75),
        ([0.0, 0.0], [1.0, 2.0], 0.5),
        ([1.0, 2.0], [0.0, 0.0], 0.5),
        ([0.0, 0.0], [0.0, 0.0], 0.5),
        ([1e-30, 1e-30], [1e-30, 0.0], 0.5 - 0.5 / 2**0.5),  # squares beyond float32
        ([1e30, 1e30], [1e30, 0.0], 0.5 - 0.5 / 2**0.5),
    ],
)
def test_correlation_distance(a: list[float], b: list[float], expected: float):
    distance = correlation_distance({"w": torch.tensor(a)}, {"w": torch.tensor(b)})
    assert distance == pytest.approx(expected, abs=1e-15)
    if expected in (0.0, 0.25, 0.5, 0.75, 1.0):
        assert distance == expected, "exactly, or a half is rounded the wrong way"


@pytest.mark.parametrize("correlation", ["pearson", "spearman"])
def test_other_correlations_are_those_of_scipy(correlation: Literal["pearson", "spearman"]):
    function = stats.pearsonr if correlation == "pearson" else stats.spearmanr
    for zeros in (0.0, 0.7):
        a, b = (np.where(RNG.random(60) < zeros, 0, RNG.standard_normal(60)).astype(np.float32) for _ in range(2))
        ours = correlation_distance({"w": torch.from_numpy(a)}, {"w": torch.from_numpy(b)}, correlation)
        assert ours == pytest.approx(0.5 - 0.5 * np.asarray(function(a.astype(float), b.astype(float)))[0], abs=1e-12)
    constant = torch.ones(4)
    assert correlation_distance({"w": constant}, {"w": torch.arange(4.0)}, correlation) == 0.5


def test_the_distance_is_over_the_flattened_model():
    # Over both tensors: dot 1, norms sqrt 2 and sqrt 2; tensor by tensor the cosines would be 0 and 1.
    a = {"w": torch.tensor([[1.0, 0.0]]), "b": torch.tensor([1.0])}
    b = {"w": torch.tensor([[0.0, 1.0]]), "b": torch.tensor([1.0])}
    assert correlation_distance(a, b) == 0.25


def test_the_distance_of_large_updates_is_that_of_float64():
    a, b = (RNG.standard_normal(1_000_000).astype(np.float32) + 10 for _ in range(2))
    x, y = a.astype(np.float64), b.astype(np.float64)
    expected = 0.5 - 0.5 * (x @ y) / np.sqrt((x @ x) * (y @ y))
    assert correlation_distance({"w": torch.from_numpy(a)}, {"w": torch.from_numpy(b)}) == pytest.approx(
        expected, abs=1e-12
    )


masks = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(masks, st.integers(0, 64), st.integers(0, 2**32 - 1))
def test_what_goes_down(pairs: list[tuple[bool, bool]], sixty_fourths: int, seed: int):
    chosen, own = (torch.tensor(column) for column in zip(*pairs, strict=True))
    support = personal_support(chosen, own, sixty_fourths / 64, np.random.default_rng(seed))
    quota = int((chosen & ~own).sum())  # k - k_in
    wanted = floor(Fraction(sixty_fourths, 64) * quota + Fraction(1, 2))
    assert support.sum() == chosen.sum(), "exactly |M_s| entries"
    assert (support | ~(chosen & own)).all(), "the common entries always"
    assert not (support & ~chosen & ~own).any(), "nothing that neither side chose"
    assert (support & own & ~chosen).sum() == min(wanted, int((own & ~chosen).sum()))


@pytest.mark.parametrize(
    ("k", "num_own", "distance", "from_own"),
    [
        (1, 5, 0.5, 1),  # 0.5 rounds up
        (3, 5, 0.5, 2),
        (5, 5, 0.5, 3),
        (4, 5, 0.0, 0),
        (4, 5, 1.0, 4),
        (4, 1, 1.0, 1),  # the client sent one entry; the server's side takes the other three
        (4, 0, 1.0, 0),
        (0, 5, 1.0, 0),  # G = 0: nothing goes down
    ],
)
def test_shares_of_disjoint_supports(k: int, num_own: int, distance: float, from_own: int):
    chosen, own = torch.zeros(2, 5, dtype=torch.bool), torch.zeros(2, 5, dtype=torch.bool)
    chosen[0, :k], own[1, :num_own] = True, True
    support = personal_support(chosen, own, distance, np.random.default_rng(0))
    assert (support[1].sum(), support[0].sum()) == (from_own, k - from_own)


def test_draws_are_uniform():
    # 6 disjoint entries on each side, distance 1/3: 2 of 6 and 4 of 6. Over 3000 draws each of the first comes
    # 1000 times, standard deviation sqrt(3000 * 1/3 * 2/3) = 25.8; 120 is 4.6 of them.
    chosen, own = torch.zeros(2, 6, dtype=torch.bool), torch.zeros(2, 6, dtype=torch.bool)
    chosen[0], own[1] = True, True
    generator = np.random.default_rng(7)
    counts = sum(personal_support(chosen, own, 1 / 3, generator).int() for _ in range(3000))
    assert isinstance(counts, torch.Tensor)
    assert np.abs(counts[1].numpy() - 1000).max() < 120
    assert np.abs(counts[0].numpy() - 2000).max() < 120


@pytest.mark.parametrize("scope", ["tensor", "model"])
def test_a_reply_rounds_for_every_tensor_or_for_the_whole_model(scope: Literal["tensor", "model"]):
    # Both tensors [2]: the server chose the first entry, the client sent the second, so d = 0.5 and the quotas are 1
    # and 1. Tensor by tensor floor(0.5 + 0.5) = 1 comes from the client each time; over the model floor(1 + 0.5) = 1.
    setup = setup_of("fedpse", {"scope": scope, "keep_ratio": 0.5, "absent": "nothing"})
    method = setup.method
    assert isinstance(method, FedPSE)
    dense = {"a": torch.tensor([3.0, 1.0]), "b": torch.tensor([3.0, 1.0])}
    first = {name: torch.tensor([True, False]) for name in dense}
    own = {name: torch.tensor([0.0, -2.0]) for name in dense}
    from_client = []
    for client in range(5):
        context = setup.context(0, setup.plan(0), client, "reply")
        server: FedPSEServer = {"update": dense, "support": first, "round": torch.tensor(0)}
        reply = method.reply(server, {"uplink": sent(own)}, context)
        down = reply.message["update"].decode()
        assert reply.metrics == {"correlation_distance": 0.5}
        assert sum(int((part != 0).sum()) for part in down.values()) == 2
        from_client.append(sum(int(part[1] == 1.0) for part in down.values()))
        assert all(part.tolist() in ([3.0, 0.0], [0.0, 1.0], [3.0, 1.0], [0.0, 0.0]) for part in down.values())
    assert from_client == [2 if scope == "tensor" else 1] * 5


def test_values_that_go_down_are_those_of_the_dense_average():
    # The client's own entry is not in G_hat; it gets G there, not 0 and not its own value.
    setup = setup_of("fedpse", {"keep_ratio": 0.5, "absent": "nothing"})
    method = setup.method
    assert isinstance(method, FedPSE)
    server: FedPSEServer = {
        "update": {"w": torch.tensor([3.0, 1.0])},
        "support": {"w": torch.tensor([True, False])},
        "round": torch.tensor(0),
    }
    reply = method.reply(
        server, {"uplink": sent({"w": torch.tensor([0.0, 9.0])})}, setup.context(0, setup.plan(0), 0, "r")
    )
    assert reply.message["update"].decode()["w"].tolist() == [0.0, 1.0]

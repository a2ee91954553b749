"""FedSTC against its Algorithm 2 in float64 numpy, with what every client lacks counted by hand."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from rayfl import tree
from rayfl.determinism import seeding
from rayfl.methods.compressed.fedstc import FedSTC, FedSTCHyper
from rayfl.rounds.ledger import RoundRecord
from rayfl.rounds.rounds import RunState
from rayfl.rounds.setup import Setup
from tests.compress.ternary_paper import num_bits, stc
from tests.methods.fedpse_paper import Training, close, flat, unflat
from tests.methods.reference import SIZES, TinyCNN, images, initial, played, setup_of, trained, trained_by_torch, weight
from tests.population.statuses import with_status

BASE = {"lr": 0.3, "batch_size": 0, "steps": 3, "keep_ratio": 0.4}
ABSENT = {"per_round": 2, "dropout_after_training": 0.3, "dropout_before_download": 0.2}


@dataclass
class Paper:
    """FedSTC on flat vectors; the sign is rayfl's. A client is the number of broadcasts that it has, and A_i."""

    setup: Setup
    train: Training
    count: dict[int, int] = field(default_factory=dict)
    residual: dict[int, np.ndarray] = field(default_factory=dict)
    broadcasts: list[np.ndarray] = field(default_factory=list)
    up: dict[int, int] = field(default_factory=dict)
    down: dict[int, int] = field(default_factory=dict)
    ways: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        assert isinstance(self.setup.method, FedSTC)
        self.hyper: FedSTCHyper = self.setup.method.hyper
        self.like = initial(self.setup)
        self.x = flat(self.like)
        self.server = np.zeros_like(self.x)
        for client in range(self.setup.num_clients):
            self.count[client], self.residual[client] = 0, np.zeros_like(self.x)
        ends = np.cumsum([value.size for value in self.like.values()]).tolist()
        self.tensors = [slice(first, last) for first, last in zip([0, *ends[:-1]], ends, strict=True)]
        self.blocks = self.tensors if self.hyper.scope == "tensor" else [slice(0, ends[-1])]

    def stc(self, v: np.ndarray) -> np.ndarray:
        sent = np.zeros_like(v)
        for block in self.blocks:
            sent[block] = stc(v[block], self.hyper.keep_ratio)
            inside, outside = np.abs(v[block][sent[block] != 0]), np.abs(v[block][sent[block] == 0])
            assert not outside.size or inside.min() > outside.max() + 1e-6, "must not hang on a rounding error"
        return sent

    def stc_at(self, v: np.ndarray, support: np.ndarray) -> np.ndarray:
        """STC at entries that are the largest but for rounding: the server adds few magnitudes, and often has ties."""
        sent = np.zeros_like(v)
        for block in self.blocks:
            inside, outside = np.abs(v[block][support[block]]), np.abs(v[block][~support[block]])
            k = max(1, int(np.ceil(self.hyper.keep_ratio * v[block].size - 1e-9)))
            assert inside.size == k or (inside.size < k and outside.max() < 1e-6)
            assert not outside.size or inside.min() >= outside.max() - 1e-6
            sent[block] = np.where(support[block], np.sign(v[block]) * inside.sum() / k, 0)
        return sent

    def bits(self, sent: np.ndarray) -> int:
        return sum(num_bits(sent[block], self.hyper.keep_ratio) for block in self.blocks)

    def play(self, round: int, run_state: RunState) -> None:
        drawn = self.setup.population.sample_round(round)
        delivered = with_status(drawn, "delivered")
        self.up, self.down = {}, {i: self.missed(i) for i in with_status(drawn, "delivered", "dropped_after_training")}
        total, weights = np.zeros_like(self.x), 0.0
        for i in delivered:
            end, _ = self.train(self.setup, round, i, unflat(self.x, self.like))
            update = self.residual[i] + self.x - flat(end)
            sent = self.stc(update)
            self.residual[i] = update - sent
            w = weight(self.setup, i, SIZES[i])
            total, weights = total + w * sent, weights + w
            self.up[i] = self.bits(sent) + (64 if self.hyper.weighting == "samples" else 0)
        if not delivered:
            return
        update = self.server + total / weights
        self.broadcasts.append(self.stc_at(update, flat(run_state.server["touched"]) == len(self.broadcasts) + 1))
        self.server = update - self.broadcasts[-1]
        self.x = self.x - self.broadcasts[-1]
        for i in delivered:
            self.count[i] = len(self.broadcasts)
            self.down[i] += self.bits(self.broadcasts[-1])

    def missed(self, i: int) -> int:
        """Bits of what a client lacks before it trains."""
        missing = self.broadcasts[self.count[i] :]
        if not missing:
            return 0
        ways = {"replay": sum(map(self.bits, missing))}
        if len(missing) > 1:
            ways["model"] = 32 * self.x.size
            ways["touched"] = sparse_bits(np.any(np.array(missing) != 0, axis=0), self.tensors)
        way = min(ways, key=lambda name: ways[name])
        self.ways[f"{way}{1 if len(missing) == 1 else ''}"] += 1
        return ways[way]


def sparse_bits(support: np.ndarray, tensors: list[slice]) -> int:
    """Values and positions of tensors below 256 entries: a byte a gap or a bitmap, and a byte that names the code."""
    total = 0
    for part in (support[tensor] for tensor in tensors):
        count, n = int(part.sum()), part.size
        total += 32 * count + 8 * (0 if count in (0, n) else 1 + min(count, -(-n // 8)))
    return total


def check(paper: Paper, record: RoundRecord, run_state: RunState, round: int) -> None:
    """Everything that a round leaves behind."""
    close(flat(run_state.server["params"]), paper.x)
    close(flat(run_state.server["residual"]), paper.server)
    assert int(run_state.server["count"]) == len(paper.broadcasts)
    for row in record.clients:
        assert row.uplink_bits == paper.up.get(row.client, 0)
        assert row.downlink_bits == paper.down.get(row.client, 0), (round, row)
    for i, state in run_state.states.items():
        assert int(run_state.server_memories[i]["count"]) == paper.count[i]
        close(flat(state["residual"]), paper.residual[i])
        if paper.count[i] == len(paper.broadcasts):
            for name, value in run_state.server["params"].items():
                assert state["params"][name].tobytes() == value.numpy().tobytes(), "caught up to the last bit"


def compare(setup: Setup, train: Training = trained) -> Paper:
    paper = Paper(setup, train)
    for round, (record, run_state) in enumerate(played(setup)):
        paper.play(round, run_state)
        check(paper, record, run_state, round)
    return paper


@pytest.mark.parametrize("clients", [{}, {"per_round": 2}, ABSENT], ids=str)
@pytest.mark.parametrize(
    "hyper",
    [
        {},
        {"scope": "model"},
        {"keep_ratio": 0.05},
        {"keep_ratio": 0.1, "weighting": "uniform"},
        {"keep_ratio": 1.0},
        {"optimizer": "adam", "lr": 0.01, "batch_size": 2, "steps": None, "epochs": 2},
        {"batch_size": 4, "steps": None, "epochs": 2, "weight_decay": 0.1, "momentum": 0.9},
    ],
    ids=str,
)
def test_equals_the_algorithm(hyper: dict[str, Any], clients: dict[str, Any]):
    paper = compare(setup_of("fedstc", BASE | hyper, rounds=8, clients=clients))
    if not clients:
        # Everybody has everything when a round begins: down goes C alone.
        assert not paper.ways


def test_each_way_to_catch_up_is_taken():
    ways: Counter[str] = Counter()
    for keep_ratio in (0.05, 0.4, 1.0):
        setup = setup_of("fedstc", BASE | {"keep_ratio": keep_ratio}, rounds=30, clients={"per_round": 1})
        ways += compare(setup).ways
    assert set(ways) == {"replay", "replay1", "touched", "model"}


@pytest.mark.parametrize("clients", [{}, {"per_round": 2}], ids=str)
def test_a_convolutional_network(clients: dict[str, Any]):
    hyper = {"lr": 0.05, "batch_size": 4, "keep_ratio": 0.1}
    compare(setup_of("fedstc", hyper, dataset=images(), build=TinyCNN, rounds=4, clients=clients), trained_by_torch)


def test_nothing_is_lost_on_either_side():
    # sum_t mean_i delta_i = x^0 - x^T + A + mean_i A_i: all that was learned is in the model or in a residual.
    setup = setup_of("fedstc", BASE | {"keep_ratio": 0.1, "weighting": "uniform"}, rounds=12)
    x, learned = flat(initial(setup)), 0.0
    for round, (_, run_state) in enumerate(played(setup)):
        ends = [flat(trained(setup, round, i, unflat(x, initial(setup)))[0]) for i in range(len(SIZES))]
        learned += x - np.mean(ends, axis=0)
        x = flat(run_state.server["params"])
        held = flat(run_state.server["residual"]) + np.mean(
            [flat(s["residual"]) for s in run_state.states.values()], axis=0
        )
        np.testing.assert_allclose(flat(initial(setup)) - x + held, learned, rtol=0, atol=1e-5)
        assert np.abs(held).max() > 1e-3


def test_the_server_keeps_no_more_broadcasts_than_a_model_is_large():
    setup = setup_of("fedstc", BASE, rounds=20)
    numbers: list[list[int]] = []
    for _, run_state in played(setup):
        kept = run_state.server["broadcasts"]
        assert sum(part.nbytes for parts in kept.values() for part in parts.values()) < 4 * 21
        numbers.append([int(number) for number in kept])
    assert all(row == list(range(row[0], round + 1)) for round, row in enumerate(numbers, start=1))
    assert max(map(len, numbers)) > 2
    assert numbers[-1][0] > 1


def test_a_round_in_which_nothing_arrives_changes_nothing():
    setup = setup_of("fedstc", BASE, rounds=2)
    run_state = played(setup)[-1][1]
    context = setup.context(2, setup.plan(2), seeding.NOBODY, "server")
    nothing = {"update": setup.method.gather["update"].empty()}
    after, _ = setup.server_half.server_update(run_state.server, nothing, [], context)
    assert tree.flatten(after).keys() == tree.flatten(run_state.server).keys()
    assert all(value is tree.flatten(run_state.server)[name] for name, value in tree.flatten(after).items())

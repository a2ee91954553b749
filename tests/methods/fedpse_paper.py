"""FedPSE's Algorithms 1 to 4 in float64 numpy, with the paper's sign (W <- W + D), held against rayfl's rounds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
from scipy import stats

from rayfl import tree
from rayfl.determinism import seeding
from rayfl.methods.compressed.fedpse import FedPSE, FedPSEHyper, FedPSEMemory
from rayfl.rounds.ledger import RoundRecord
from rayfl.rounds.rounds import RunState
from rayfl.rounds.setup import Setup
from rayfl.tree import ArrayTree
from tests.methods.reference import (
    Vectors,
    initial,
    played,
    trained,
    weight,
)
from tests.population.statuses import with_status

Training = Callable[[Setup, int, int, Vectors], tuple[Vectors, int]]


@dataclass
class Paper:
    """The whole of FedPSE on flat float64 vectors: one block a tensor, or one for the whole model."""

    setup: Setup
    train: Training
    base: dict[int, np.ndarray] = field(default_factory=dict)
    residual: dict[int, np.ndarray] = field(default_factory=dict)
    trained: dict[int, np.ndarray] = field(default_factory=dict)
    uplink: dict[int, np.ndarray] = field(default_factory=dict)
    distance: dict[int, float] = field(default_factory=dict)
    downlink: dict[int, np.ndarray] = field(default_factory=dict)
    sent: dict[int, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert isinstance(self.setup.method, FedPSE)
        self.hyper: FedPSEHyper = self.setup.method.hyper
        self.like = initial(self.setup)
        clients = range(self.setup.num_clients)
        self.base = {client: flat(self.like) for client in clients}
        self.residual = {client: np.zeros_like(self.base[0]) for client in clients}
        ends = np.cumsum([value.size for value in self.like.values()]).tolist()
        self.tensors = [slice(first, last) for first, last in zip([0, *ends[:-1]], ends, strict=True)]
        self.blocks = self.tensors if self.hyper.scope == "tensor" else [slice(0, ends[-1])]

    def top_k(self, u: np.ndarray) -> np.ndarray:
        """The k entries that Top-K keeps, zeros among them; they must not hang on a rounding error."""
        support = np.zeros(u.size, bool)
        for block in self.blocks:
            n = u[block].size
            k = max(1, int(np.ceil(self.hyper.keep_ratio * n - 1e-9)))
            order = np.argsort(-np.abs(u[block]), kind="stable")
            magnitudes = np.abs(u[block])[order]
            assert k == n or magnitudes[k - 1] == magnitudes[k] == 0 or magnitudes[k - 1] > magnitudes[k] + 1e-6
            support[block.start + order[:k]] = True
        return support

    def play(self, round: int, delivered: tuple[int, ...]) -> None:
        """One round for those who deliver; nobody else is touched."""
        self.uplink, self.distance, self.downlink, weights = {}, {}, {}, {}
        for i in delivered:
            end, num_samples = self.train(self.setup, round, i, unflat(self.base[i], self.like))
            self.trained[i] = flat(end)
            u = self.trained[i] - self.base[i] + self.residual[i]
            self.sent[i] = self.top_k(u)
            self.uplink[i] = u * self.sent[i]
            self.residual[i] = u - self.uplink[i]
            weights[i] = weight(self.setup, i, num_samples)
        if not delivered:
            return
        total = np.sum([weights[i] * self.uplink[i] for i in delivered], axis=0)
        ewa = np.sum([weights[i] * (self.uplink[i] != 0) for i in delivered], axis=0)
        each = ewa if self.hyper.aggregation == "ewa" else np.full(total.shape, sum(weights.values()))
        self.dense = np.divide(total, each, out=np.zeros_like(total), where=each > 0)
        self.support = self.top_k(self.dense) & (self.dense != 0)
        for i in delivered:
            self.distance[i] = distance(self.dense * self.support, self.uplink[i], self.hyper.correlation)
            self.downlink[i] = self.support if self.hyper.downstream == "broadcast_topk" else self.dps(round, i)
            self.base[i] = self.base[i] + self.downlink[i] * self.dense

    def dps(self, round: int, i: int) -> np.ndarray:
        """Algorithm 3: the entries that client i gets."""
        generator = seeding.generator(self.setup.seed, round, i, "reply")
        chosen = np.zeros_like(self.support)
        for block in self.blocks:
            server, own = self.support[block], self.uplink[i][block] != 0
            common, k = server & own, int(server.sum())
            wanted = self.distance[i] * (k - common.sum())
            assert self.distance[i] in (0, 0.5, 1) or abs(wanted % 1 - 0.5) > 1e-5
            n_c = min(int(np.floor(wanted + 0.5)), int((own & ~common).sum()))
            drawn = [
                generator.choice(np.flatnonzero(own & ~common), n_c, replace=False),
                generator.choice(np.flatnonzero(server & ~common), k - common.sum() - n_c, replace=False),
            ]
            chosen[block.start + np.concatenate([np.flatnonzero(common), *drawn])] = True
        return chosen


def distance(a: np.ndarray, b: np.ndarray, correlation: str = "cosine") -> float:
    """0.5 - 0.5 times the correlation, by scipy but for the cosine."""
    if correlation != "cosine":
        function = stats.pearsonr if correlation == "pearson" else stats.spearmanr
        # Equal numbers of float32 must be equal here, too.
        return 0.5 - 0.5 * float(np.asarray(function(a.astype(np.float32), b.astype(np.float32)))[0])
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return 0.5 - 0.5 * float(a @ b) / norms if norms else 0.5


def flat(params: Mapping[str, Any]) -> np.ndarray:
    return np.concatenate([np.asarray(value, np.float64).ravel() for value in params.values()])


def unflat(vector: np.ndarray, like: Vectors) -> Vectors:
    ends = np.cumsum([value.size for value in like.values()])[:-1]
    return {name: part.reshape(like[name].shape) for name, part in zip(like, np.split(vector, ends), strict=True)}


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=5e-7)


def compare(setup: Setup, train: Training = trained) -> Paper:
    """Everything that a round leaves behind, round by round."""
    paper = Paper(setup, train)
    for round, (record, run_state) in enumerate(played(setup)):
        delivered = with_status(setup.population.sample_round(round), "delivered")
        paper.play(round, delivered)
        compare_clients(setup, paper, record, run_state, delivered)
        if delivered:
            close(-flat(run_state.server["update"]), paper.dense)
            assert (flat(run_state.server["support"]) == paper.support).all()
    return paper


def uplink_of(setup: Setup, run_state: RunState, client: int) -> ArrayTree:
    """What the server remembers of a client's last uplink, dense."""
    method = setup.method
    assert isinstance(method, FedPSE)
    memory = cast(FedPSEMemory, tree.to_tensors(run_state.server_memories[client]))
    return tree.to_arrays(method.uplink(memory, setup.initial))


def compare_clients(
    setup: Setup, paper: Paper, record: RoundRecord, run_state: RunState, delivered: tuple[int, ...]
) -> None:
    rows = {row.client: row for row in record.clients}
    distances = {m.client: m.value for m in record.metrics if m.name == "correlation_distance" and m.client is not None}
    assert tuple(distances) == delivered
    for i, state in run_state.states.items():
        close(flat(state["base"]), paper.base[i])
        close(flat(state["residual"]), -paper.residual[i])
        assert ("trained" in state) <= (record.row.round == setup.rounds - 1)
        if "trained" in state:
            close(flat(state["trained"]), paper.trained[i])
    for i in delivered:
        close(flat(uplink_of(setup, run_state, i)), -paper.uplink[i])
        assert distances[i] == pytest.approx(paper.distance[i], abs=1e-6)
        count_bits = 0 if paper.hyper.weighting == "uniform" else 64
        assert rows[i].uplink_bits == bits(paper, paper.sent[i]) + count_bits
        assert rows[i].downlink_bits == bits(paper, paper.downlink[i])
        assert paper.downlink[i].sum() == paper.support.sum(), "exactly |M_s| entries go down"
    for i, row in rows.items():
        if i not in delivered:
            assert (row.uplink_bits, row.downlink_bits) == (0, 0)


def bits(paper: Paper, support: np.ndarray) -> int:
    """Values in 32 bits and positions in the cheapest code, tensor by tensor, for tensors below 256 entries.

    There a gap costs a byte and never an escape, so positions cost min(count, ceil(n / 8)) bytes and one that names
    the code, and nothing where all or no entries are sent.
    """
    total = 0
    for part in (support[tensor] for tensor in paper.tensors):
        count, n = int(part.sum()), part.size
        total += 32 * count + 8 * (0 if count in (0, n) else 1 + min(count, -(-n // 8)))
    return total

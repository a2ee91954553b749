"""What the tests of compressed gradient methods share: a random compressor and its twin in numpy, and convex tasks.

Quadratics (four clients, ten parameters) are followed step by step; softmax regression with l2 on data that differs
between clients has its minimiser computed here, by Newton's method in float64.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from rayfl import tree
from rayfl.compress.base import Compressor, Packet
from rayfl.compress.sparse import sparse_packet
from rayfl.determinism import seeding
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.ledger import RoundRecord
from rayfl.rounds.rounds import RunState
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from rayfl.tree import Tree
from tests.contracts.seams.closed_form import TENSORS, flat, points

CLIENTS = range(4)
RATIO = 0.3
SPARSE_BITS = 8 * (3 * 4 + 2 + 1 * 4 + 2)
"""RandK(0.3) of a quadratic's parameters: 3 of 8 and 1 of 2 entries in 4 bytes each, two bitmaps with their labels."""
DENSE_BITS = 32 * 10


class RandK(Compressor):
    """k = ceil(ratio n) random entries of each tensor, times n / k."""

    name: ClassVar[str] = "test-randk"
    ratio: float = RATIO

    def encode(self, x: Tree, memory: Tree, generator: np.random.Generator) -> tuple[Packet, Tree]:
        support, scaled = {}, {}
        for name, tensor in x.items():
            size = tensor.numel()
            kept = generator.choice(size, math.ceil(self.ratio * size), replace=False)
            mask = np.zeros(size, bool)
            mask[kept] = True
            support[name] = torch.from_numpy(mask).view(tensor.shape)
            scaled[name] = tensor * (size / len(kept))
        return sparse_packet(scaled, support), memory

    def omega(self, num_entries: int) -> float | None:
        return 1 / self.ratio - 1


def rand_k(x: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """RandK() of a quadratic's parameters [10]: 3 of 8 entries times 8 / 3, then 1 of 2 entries times 2."""
    sent = np.zeros_like(x)
    for part, kept in zip(TENSORS, (3, 1), strict=True):
        size = part.stop - part.start
        chosen = part.start + generator.choice(size, kept, replace=False)
        sent[chosen] = x[chosen] * size / kept
    return sent


def top_k(x: np.ndarray, generator: object = None) -> np.ndarray:
    """TopK(0.3) of a quadratic's parameters [10]: the 3 largest of 8 entries, then the larger of 2."""
    sent = np.zeros_like(x)
    for part, count in zip(TENSORS, (3, 1), strict=True):
        chosen = part.start + np.argsort(-np.abs(x[part]))[:count]
        sent[chosen] = x[chosen]
    return sent


def draws(here: Setup, round: int, client: int) -> np.random.Generator:
    """The generator from which a client's compressor draws in a round."""
    return seeding.generator(here.seed, round, client, "client")


def server_draws(here: Setup, round: int) -> np.random.Generator:
    """The generator from which the server's compressor draws in a round."""
    return seeding.generator(here.seed, round, purpose="server")


def gradient(here: Setup, client: int, x: np.ndarray, l2: float = 0.0) -> np.ndarray:
    """grad f_i(x) of a client's quadratics with l2 / 2 ||x||^2."""
    return points(here, client).gradient(x) + l2 * x


def prox(x: np.ndarray, threshold: float) -> np.ndarray:
    """The proximal point of threshold ||x||_1."""
    return np.sign(x) * np.maximum(np.abs(x) - threshold, 0)


def assert_follows(run_states: list[RunState], name: str, expected: list[np.ndarray]) -> None:
    """A part of the server's state after every round, to float32."""
    assert len(run_states) == len(expected)
    for round, (run_state, value) in enumerate(zip(run_states, expected, strict=True)):
        np.testing.assert_allclose(flat(run_state.server[name]), value, atol=5e-6, err_msg=f"{name}, round {round}")


def assert_shift_is_the_mean(here: Setup, executor: InlineExecutor, run_states: list[RunState]) -> None:
    """h = mean_i h_i after every round, where a client that was never there has h_i = 0."""
    for run_state in run_states:
        total = np.zeros(10)
        for ref in run_state.states.values():
            total += flat(tree.to_tensors(executor.get(ref))["shift"])
        shift = flat(run_state.server["shift"])
        np.testing.assert_allclose(shift, total / here.num_clients, atol=1e-6)
    assert np.abs(flat(run_states[-1].server["shift"])).max() > 0.1


def same_coin(setup: Setup, probability: float) -> list[bool]:
    """By round whether the shared coin falls below `probability`."""
    return [seeding.coin(setup.seed, round) < probability for round in range(setup.rounds)]


def softmax_setup(method: Mapping[str, Any], rounds: int, uplink: Compressor | None = None, **tables: Any) -> Setup:
    """Softmax regression (27 parameters) on ten groups of synthetic data, each labelled by a model of its own."""
    experiment: dict[str, Any] = {
        "rounds": rounds,
        "method": dict(method),
        "data": {"name": "synthetic", "num_groups": 10, "samples_per_group": 20, "dim": 8, "num_classes": 3},
        "partition": "natural",
        "model": "logistic",
        "clients": {"count": 10},
        "evaluation": {"every": 0, "pooled": False, "own": False},
        **tables,
    }
    if uplink is not None:
        experiment["uplink"] = uplink
    return prepare(Experiment(**experiment))


class Softmax:
    """mean_i f_i(x) + l2 / 2 ||x||^2 of a setup in float64, with uniform weights; x is [num_classes, dim + 1]."""

    def __init__(self, here: Setup, l2: float) -> None:
        self.l2, data = l2, here.dataset
        self.clients = []
        for rows in (here.partition.train[client] for client in range(here.num_clients)):
            inputs = data.normalise(torch.from_numpy(data.train.inputs[rows])).flatten(1).double().numpy()
            labels = np.eye(data.num_classes)[data.train.labels[rows]]
            self.clients.append((np.column_stack([inputs, np.ones(len(rows))]), labels))

    def gradients(self, x: np.ndarray) -> np.ndarray:
        """Every client's gradient, [num_clients, num_classes, dim + 1]."""
        return np.stack([(_softmax(a @ x.T) - y).T @ a / len(a) + self.l2 * x for a, y in self.clients])

    def hessian(self, x: np.ndarray) -> np.ndarray:
        """[P, P], P the entries of x in C order: mean over examples of (diag p - p p^T) kron a a^T, plus l2."""
        total = self.l2 * np.eye(x.size)
        for a, _ in self.clients:
            p = _softmax(a @ x.T)
            for c, d in np.ndindex(len(x), len(x)):
                weights = p[:, c] * ((c == d) - p[:, d]) / len(a) / len(self.clients)
                block = total[c * a.shape[1] : (c + 1) * a.shape[1], d * a.shape[1] : (d + 1) * a.shape[1]]
                block += (a * weights[:, None]).T @ a
        return total

    def minimiser(self) -> np.ndarray:
        """By Newton's method; the gradient's norm there is below 1e-12."""
        inputs, labels = self.clients[0]
        x = np.zeros((labels.shape[1], inputs.shape[1]))
        for _ in range(12):
            slope = self.gradients(x).mean(axis=0)
            if np.linalg.norm(slope) < 1e-12:
                return x
            x = x - np.linalg.solve(self.hessian(x), slope.ravel()).reshape(x.shape)
        raise AssertionError("Newton's method has not converged")

    def smoothness(self) -> float:
        """max_i L_i: the Hessian of softmax cross-entropy is at most half the mean a a^T."""
        return max(float(np.linalg.eigvalsh(a.T @ a / len(a))[-1]) for a, _ in self.clients) / 2 + self.l2


def _softmax(logits: np.ndarray) -> np.ndarray:
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def joined(params: Tree) -> np.ndarray:
    """The parameters of model "logistic" as `Softmax` has them: weights beside the bias."""
    return torch.cat([params["1.weight"], params["1.bias"][:, None]], dim=1).double().numpy()


def distances(here: Setup, minimiser: np.ndarray) -> list[float]:
    """||x - x*||^2 of the global model after every round."""
    return [
        float(((joined(here.server_half.model(run_state.server)) - minimiser) ** 2).sum())
        for run_state in play(here)[1]
    ]


def bits(records: list[RoundRecord]) -> list[set[tuple[int, int]]]:
    """By round the uplink and downlink bits of the clients that delivered."""
    return [{(r.uplink_bits, r.downlink_bits) for r in record.clients if r.status == "delivered"} for record in records]

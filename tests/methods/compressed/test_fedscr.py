"""FedSCR against its equations in float64 numpy, residuals and adaptive thresholds included."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from rayfl.compress.structured import Structured
from rayfl.methods.compressed.fedscr import FedSCR, FedSCRHyper, divergence, significance
from rayfl.rounds.ledger import RoundRecord
from rayfl.rounds.rounds import RunState
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from rayfl.testing.watching import watched
from tests.contracts.seams import closed_form
from tests.methods import own_models as personal
from tests.methods.fedpse_paper import Training, close, flat
from tests.methods.reference import (
    SIZES,
    TinyCNN,
    Vectors,
    batches,
    images,
    initial,
    played,
    setup_of,
    trained,
    trained_by_torch,
    weight,
)
from tests.population.statuses import with_status
from tests.refusals import refused

BASE = {"lr": 0.3, "batch_size": 0, "steps": 3}
MARGIN = 1e-4
ABSENT = {"per_round": 3, "dropout_after_training": 0.3, "dropout_before_download": 0.2}


@dataclass
class Paper:
    """The whole of FedSCR; updates are x minus what was trained, as in rayfl."""

    setup: Setup
    train: Training
    residual: dict[int, Vectors] = field(default_factory=dict)
    statistics: dict[int, float] = field(default_factory=dict)
    variances: list[float] = field(default_factory=list)
    thresholds: dict[int, float] = field(default_factory=dict)
    up: dict[int, int] = field(default_factory=dict)
    num_cut: int = 0

    def __post_init__(self) -> None:
        assert isinstance(self.setup.method, FedSCR)
        self.hyper: FedSCRHyper = self.setup.method.hyper
        self.x = initial(self.setup)
        self.residual = {i: {n: np.zeros_like(v) for n, v in self.x.items()} for i in range(self.setup.num_clients)}

    def play(self, round: int, delivered: tuple[int, ...], losses: Mapping[int, float]) -> None:
        self.up, self.thresholds, total, weights = {}, {}, {n: np.zeros_like(v) for n, v in self.x.items()}, 0.0
        for i in delivered:
            end, _ = self.train(self.setup, round, i, self.x)
            update = {n: self.residual[i][n] + self.x[n] - end[n] for n in self.x}
            self.thresholds[i] = self.threshold(i)
            sent = {n: cut(v, self.hyper, self.thresholds[i]) for n, v in update.items()}
            self.residual[i] = {n: update[n] - sent[n] for n in update}
            self.num_cut += sum(int((v != 0).sum()) for v in self.residual[i].values())
            w = weight(self.setup, i, SIZES[i])
            total, weights = {n: total[n] + w * sent[n] for n in total}, weights + w
            self.up[i] = sum(map(bits, sent.values())) + 64 * (self.hyper.weighting == "samples")
            self.up[i] += 32 * self.hyper.adaptive
            matrices = [n for n, v in end.items() if v.ndim > 1]
            d = math.sqrt(sum(np.abs(end[n] - self.x[n]).sum() / np.abs(end[n]).sum() for n in matrices))
            s = math.sqrt(abs(sum(v.sum() for v in sent.values()) / sum(v.sum() for v in end.values())))
            self.statistics[i] = self.hyper.divergence_factor * d + self.hyper.significance_factor * s
        if delivered:
            self.x = {n: self.x[n] - total[n] / weights for n in self.x}
            self.variances.append(float(np.var([losses[i] for i in delivered])))

    def threshold(self, i: int) -> float:
        first = 0.3 if self.hyper.threshold is None else self.hyper.threshold
        if not self.hyper.adaptive or i not in self.statistics:
            return first
        return first / (1 + math.exp(-self.statistics[i] - self.hyper.variance_factor * float(np.mean(self.variances))))


def cut(v: np.ndarray, hyper: FedSCRHyper, threshold: float) -> np.ndarray:
    """What of one tensor is sent."""
    if v.ndim < 2:
        return v
    if hyper.scores == "raw":
        filters, channels = (np.abs(v).sum(axis=tuple(a for a in range(v.ndim) if a != axis)) for axis in (0, 1))
        for scores in (filters, channels):
            assert (np.abs(scores - threshold) > MARGIN).all(), "must not hang on a rounding error"
        kept = np.outer(filters >= threshold, channels >= threshold)
        return v * kept.reshape(*kept.shape, *[1] * (v.ndim - 2))
    if hyper.threshold is not None or hyper.adaptive:
        return normalized(v, threshold, strict=True)
    # Every threshold at which anything changes is the score of a filter, or of a channel under some choice of filters.
    ratio = 0.1 if hyper.keep_ratio is None else hyper.keep_ratio
    filters = np.abs(v).sum(axis=tuple(range(1, v.ndim)))
    borders = {*(filters / filters.max()).tolist()}
    for border in filters:
        left = np.abs(v[filters >= border]).sum(axis=(0, *range(2, v.ndim)))
        borders |= {*(left / left.max()).tolist()}
    found = {t - 1e-12: normalized(v, t - 1e-12) for t in borders}
    return found[min(found, key=lambda t: (abs((found[t] != 0).sum() - ratio * v.size), -t))]


def normalized(v: np.ndarray, threshold: float, strict: bool = False) -> np.ndarray:
    """Filters below the threshold are zeroed, then channels of what is left."""
    for axis in (0, 1):
        scores = np.abs(v).sum(axis=tuple(a for a in range(v.ndim) if a != axis))
        scores = scores / scores.max()
        assert not strict or (np.abs(scores - threshold) > MARGIN).all(), "must not hang on a rounding error"
        v = v * (scores >= threshold).reshape([-1 if a == axis else 1 for a in range(v.ndim)])
    return v


def bits(sent: np.ndarray) -> int:
    """Entries that are not zero are sent, for continuous ones; bitmaps of filters and channels."""
    bitmaps = sum(math.ceil(size / 8) for size in sent.shape[:2]) if sent.ndim > 1 else 0
    return 32 * int((sent != 0).sum()) + 8 * bitmaps


def check(paper: Paper, record: RoundRecord, run_state: RunState, delivered: tuple[int, ...]) -> None:
    close(flat(run_state.server["params"]), flat(paper.x))
    down = 32 * flat(paper.x).size + 32 * paper.hyper.adaptive
    for row in record.clients:
        assert row.uplink_bits == paper.up.get(row.client, 0)
        assert row.downlink_bits == (0 if row.status == "dropped_before_download" else down)
    for i, state in run_state.states.items():
        close(flat(state["residual"]), flat(paper.residual[i]))
    if paper.hyper.adaptive:
        told = {m.client: m.value for m in record.metrics if m.name == "threshold" and m.client is not None}
        assert tuple(told) == delivered
        # Updates of softmax regression sum to 0 over the classes: of float32's 1e-8 the significance is 1e-4.
        tolerance = 1e-6 + MARGIN * paper.hyper.significance_factor
        for i in delivered:
            assert told[i] == pytest.approx(paper.thresholds[i], abs=tolerance)
        assert float(run_state.server["variances"]) == pytest.approx(sum(paper.variances), rel=1e-5)
        assert int(run_state.server["rounds"]) == len(paper.variances)


def compare(setup: Setup, train: Training = trained) -> Paper:
    paper = Paper(setup, train)
    for round, (record, run_state) in enumerate(played(setup)):
        delivered = with_status(setup.population.sample_round(round), "delivered")
        found = {m.client: m.value for m in record.metrics if m.name == "train/loss"}
        losses = {client: value for client, value in found.items() if client is not None and value is not None}
        paper.play(round, delivered, losses)
        check(paper, record, run_state, delivered)
    return paper


@pytest.mark.parametrize("clients", [{}, {"per_round": 2}, ABSENT], ids=str)
@pytest.mark.parametrize(
    "hyper",
    [
        {},
        {"keep_ratio": 0.3},
        {"keep_ratio": 0.6, "weighting": "uniform"},
        {"threshold": 0.5},
        {"threshold": 0.6, "scores": "raw"},
        {"scores": "raw"},
        {"adaptive": True, "threshold": 0.9},
        {"adaptive": True, "scores": "raw", "weighting": "uniform"},
        {"adaptive": True, "threshold": 0.8, "divergence_factor": 0.5, "significance_factor": 0.1},
        {"adaptive": True, "threshold": 0.9, "variance_factor": 30.0, "significance_factor": 0.0},
        {"threshold": 0.7, "optimizer": "adam", "lr": 0.01, "batch_size": 2, "steps": None, "epochs": 2},
    ],
    ids=str,
)
def test_equals_the_equations(hyper: dict[str, Any], clients: dict[str, Any]):
    paper = compare(setup_of("fedscr", BASE | hyper, rounds=6, clients=clients))
    assert paper.num_cut, "something must have been left out"


@pytest.mark.parametrize("hyper", [{}, {"threshold": 0.6}, {"adaptive": True, "threshold": 0.8}], ids=str)
def test_a_convolutional_network(hyper: dict[str, Any]):
    hyper = {"lr": 0.05, "batch_size": 4} | hyper
    assert compare(setup_of("fedscr", hyper, dataset=images(), build=TinyCNN, rounds=4), trained_by_torch).num_cut


def test_the_losses_are_those_of_the_equations():
    # The simulator above takes the recorded losses; here is one of them: the mean over the round's steps.
    setup = setup_of("fedscr", BASE | {"adaptive": True, "batch_size": 4}, rounds=1)
    ((record, _),) = played(setup)
    losses = {m.client: m.value for m in record.metrics if m.name == "train/loss" and m.client is not None}
    params, examples, per_step = initial(setup), setup.dataset.train, []
    for rows in batches(setup, 0, 2):
        logits = examples.inputs[rows].astype(np.float64) @ params["1.weight"].T + params["1.bias"]
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        per_step.append(-log_p[np.arange(len(rows)), examples.labels[rows]].mean())
        gradient = np.exp(log_p)
        gradient[np.arange(len(rows)), examples.labels[rows]] -= 1
        gradient /= len(rows)
        params = {
            "1.weight": params["1.weight"] - 0.3 * gradient.T @ examples.inputs[rows],
            "1.bias": params["1.bias"] - 0.3 * gradient.sum(axis=0),
        }
    assert losses[2] == pytest.approx(np.mean(per_step), rel=1e-5)


def test_sent_and_kept_back_is_all_that_was_learned():
    # Uniform weights, everyone present: x^0 - x^T + mean_i e_i = sum_t mean_i delta_i.
    setup = setup_of("fedscr", BASE | {"keep_ratio": 0.2, "weighting": "uniform"}, rounds=10)
    x, learned = initial(setup), 0.0
    for round, (_, run_state) in enumerate(played(setup)):
        learned += np.mean([flat(x) - flat(trained(setup, round, i, x)[0]) for i in range(len(SIZES))], axis=0)
        x = {name: value.double().numpy() for name, value in run_state.server["params"].items()}
        held = np.mean([flat(state["residual"]) for state in run_state.states.values()], axis=0)
        np.testing.assert_allclose(flat(initial(setup)) - flat(x) + held, learned, rtol=0, atol=1e-5)
        assert np.abs(held).max() > 1e-3


def test_threshold_zero_is_fedavg():
    hyper = {"lr": 0.3, "batch_size": 4, "epochs": 2}
    plain = played(setup_of("fedavg", hyper, rounds=3))
    for (_, run_state), (_, expected) in zip(
        played(setup_of("fedscr", hyper | {"threshold": 0.0}, rounds=3)), plain, strict=True
    ):
        close(flat(run_state.server["params"]), flat(expected.server["params"]))
        assert not any(flat(state["residual"]).any() for state in run_state.states.values())


def test_statistics_by_hand():
    trained = {"w": torch.tensor([[1.0, -3.0]]), "v": torch.tensor([[2.0]]), "b": torch.tensor([100.0])}
    received = {"w": torch.tensor([[2.0, -3.0]]), "v": torch.tensor([[0.0]]), "b": torch.tensor([0.0])}
    # 1 / 4 + 2 / 2; biases are not cut and do not count.
    assert divergence(trained, received) == pytest.approx(math.sqrt(1.25))
    sent = {"w": torch.tensor([[0.0, -3.0]]), "v": torch.tensor([[0.0]]), "b": torch.tensor([-1.0])}
    assert significance(sent, trained) == pytest.approx(math.sqrt(4 / 100))
    zeros = {"w": torch.zeros(1, 2)}
    assert (divergence(zeros, zeros), significance(zeros, zeros)) == (0, 0)
    assert math.isfinite(divergence(zeros, trained)) and divergence(zeros, {"w": torch.ones(1, 2)}) > 1e10


@pytest.mark.parametrize(
    ("hyper", "names"),
    [
        ({"keep_ratio": 0.1, "threshold": 0.2}, ["keep_ratio", "threshold"]),
        ({"keep_ratio": 0.1, "adaptive": True}, ["keep_ratio", "adaptive"]),
        ({"keep_ratio": 0.1, "scores": "raw"}, ["keep_ratio", "raw scores"]),
        ({"threshold": 2.0}, ["threshold=2.0", "[0, 1]"]),
    ],
)
def test_what_does_not_go_together_is_refused(hyper: dict[str, Any], names: list[str]):
    with refused(names=names):
        FedSCRHyper(**hyper)


@pytest.mark.parametrize(
    "clients", [{}, {"per_round": 2}, {"dropout_after_training": 0.3, "upload_loss": 0.2}], ids=str
)
def test_a_structured_downlink_cuts_the_mean_with_the_servers_residual(clients: dict[str, Any]):
    # x <- x - C with C = cut(A + mean) and A <- A + mean - C: x + A moves by the mean, and A is what C left out.
    hyper = {"lr": 0.1, "batch_size": 2, "keep_ratio": 0.4, "downlink": "structured", "weighting": "uniform"}
    here, log = watched(personal.made("fedscr", hyper, rounds=6, clients=clients))
    records, states = play(here)
    before, compressor = here.server_half.init_server(here.initial), Structured(keep_ratio=0.4)
    for round, (record, state) in enumerate(zip(records, states, strict=True)):
        arrived = [row.client for row in record.clients if row.status == "delivered"]
        server = state.server
        if arrived:
            deltas = [log.up[round, i]["delta"].decode() for i in arrived]
            update = {n: t + sum(d[n] for d in deltas) / len(arrived) for n, t in before["residual"].items()}
            sent = compressor.encode(update, {}, np.random.default_rng(0))[0].decode()
            for name, cut in sent.items():
                torch.testing.assert_close(server["params"][name], before["params"][name] - cut, rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(server["residual"][name], update[name] - cut, rtol=1e-5, atol=1e-6)
        own = personal.personal(here, state)
        x = closed_form.flat(server["params"])
        for i in arrived:
            np.testing.assert_allclose(own[i], x, rtol=1e-6, atol=1e-6)
            first, reply = log.down[round, i]
            assert all(name in ("touched", "model") or name.startswith("update ") for name in first)
            assert set(reply) == {f"update {int(server['count'])}"}
            # At most the model of 40 bytes for what was missed.
            assert sum(packet.num_bits for packet in first.values()) <= 320
        before = server

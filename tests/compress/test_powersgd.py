"""PowerSGD beside a reference in numpy, its exact error, and what its memory does."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayfl.compress.feedback import ErrorFeedback
from rayfl.compress.powersgd import PowerSGD
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.rounds import first_run_state, play_round
from rayfl.rounds.setup import Setup
from rayfl.testing import contracts
from rayfl.tree import Tree, to_tensors


def matrices(count: int, *shape: int, rank: int | None = None) -> list[torch.Tensor]:
    """Random float32 matrices, of a rank."""
    draws = np.random.default_rng(3)
    inner = min(shape) if rank is None else rank
    made = [draws.standard_normal((shape[0], inner)) @ draws.standard_normal((inner, shape[1])) for _ in range(count)]
    return [torch.from_numpy(one.astype(np.float32)) for one in made]


def send(compressor: PowerSGD | ErrorFeedback, messages: list[torch.Tensor]) -> list[tuple[torch.Tensor, Tree]]:
    """What arrives of each message in turn, and the memory after it."""
    memory, generator, found = compressor.init({"w": messages[0]}), np.random.default_rng(0), []
    for one in messages:
        packet, memory = compressor.encode({"w": one}, memory, generator)
        found.append((packet.decode()["w"], memory))
    return found


def reference(messages: list[np.ndarray], rank: int, feedback: bool) -> list[np.ndarray]:
    """Algorithms 1 and 2 of one worker, with Gram and Schmidt in place of QR; the first Q by the same generator."""
    draws = np.random.default_rng(0)
    factor, error, found = draws.standard_normal((messages[0].shape[1], rank)), np.zeros_like(messages[0]), []
    for one in messages:
        matrix = one + error
        columns: list[np.ndarray] = []
        for column in (matrix @ factor).T:
            for before in columns:
                column = column - before * (before @ column)
            columns.append(column / np.linalg.norm(column))
        left = np.stack(columns, axis=1)
        factor = matrix.T @ left
        found.append(left @ factor.T)
        error = matrix - found[-1] if feedback else error
    return found


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("rank", [1, 3])
def test_several_messages_are_those_of_the_paper(rank: int, feedback: bool):
    messages, plain = matrices(4, 30, 21), PowerSGD(rank=rank)
    found = send(ErrorFeedback(inner=plain) if feedback else plain, messages)
    wanted = reference([one.double().numpy() for one in messages], rank, feedback)
    for (decoded, _), one in zip(found, wanted, strict=True):
        assert np.abs(decoded.numpy() - one).max() < 1e-5 * np.abs(one).max()


def test_a_matrix_of_rank_r_arrives_as_it_is():
    (matrix,) = matrices(1, 40, 30, rank=3)
    for scale in (1.0, 1e-30, 1e30):
        # The second message begins with the first one's Q, whose columns have other lengths.
        for decoded, _ in send(PowerSGD(rank=3), [matrix * scale] * 2):
            assert (decoded / scale - matrix).abs().max() < 1e-5 * matrix.abs().max()


def test_a_column_that_has_vanished_is_drawn_again():
    # Small whole numbers, so that the rank is exactly 1.
    thin, (matrix,) = torch.outer(torch.arange(40.0), torch.arange(30.0) - 9), matrices(1, 40, 30, rank=3)
    (_, memory), (decoded, _) = send(PowerSGD(rank=3), [thin, matrix])
    assert (memory["w.factor"].norm(dim=0) == 0).tolist() == [False, True, True]
    assert (decoded - matrix).abs().max() < 1e-5 * matrix.abs().max()


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_the_error_is_what_the_columns_of_p_miss(rank: int):
    # ||M - P P^T M||^2 = ||M||^2 - ||P^T M||^2 = ||M||^2 - ||Q||^2
    (matrix,) = matrices(1, 50, 35)
    ((decoded, memory),) = send(PowerSGD(rank=rank), [matrix])
    lost = float((matrix.double() - decoded.double()).square().sum())
    missed = float(matrix.double().square().sum() - memory["w.factor"].double().square().sum())
    assert lost == pytest.approx(missed, rel=1e-6)


def test_on_a_matrix_that_stays_the_error_falls_to_the_best_of_rank_r():
    (matrix,) = matrices(1, 40, 30)
    best = np.linalg.svd(matrix.double().numpy(), compute_uv=False)[2:]
    errors = [float((matrix - decoded).double().square().sum()) for decoded, _ in send(PowerSGD(), [matrix] * 60)]
    assert all(after <= before * (1 + 1e-6) for before, after in pairwise(errors))
    assert errors[0] > 1.05 * (best**2).sum()
    assert errors[-1] == pytest.approx((best**2).sum(), rel=1e-4)


def test_small_tensors_and_vectors_are_sent_whole():
    x = {
        "conv": torch.randn(8, 4, 3, 3),
        "wide": torch.randn(4, 500),
        "less": torch.randn(5, 20),
        "bias": torch.randn(400),
        "one": torch.tensor(2.0),
        "none": torch.zeros(0, 30),
    }
    compressor = PowerSGD(rank=1)
    packet, memory = compressor.encode(x, compressor.init(x), np.random.default_rng(0))
    # 1 (8 + 36) < 8 * 36 / 2, and 4 + 500 < 1000; but 5 + 20 < 50, too.
    sizes = {"conv": 44, "wide": 504, "less": 25, "bias": 400, "one": 1, "none": 0}
    assert {name: part.size for name, part in packet.parts.items()} == sizes
    assert packet.num_bits == 32 * sum(sizes.values())
    assert {name: tuple(one.shape) for name, one in memory.items()} == {
        "conv.factor": (36, 1),
        "wide.factor": (500, 1),
        "less.factor": (20, 1),
    }
    whole = PowerSGD(rank=2).encode({"less": x["less"]}, {}, np.random.default_rng(0))
    assert torch.equal(whole[0].decode()["less"], x["less"]) and whole[1] == {}


def test_what_is_sent_and_the_error_are_the_sum_of_all_messages():
    messages = matrices(5, 30, 20)
    found = send(ErrorFeedback(inner=PowerSGD(rank=1)), messages)
    kept = found[-1][1]
    assert list(kept) == ["w.factor", "w"]
    assert torch.allclose(sum((one for one, _ in found), kept["w"]), sum(messages, torch.zeros(30, 20)), atol=1e-4)


def digits(**options: Any) -> Setup:
    """FedAvg on digits with a downlink of one direction."""
    table: dict[str, Any] = {
        "rounds": 4,
        "data": "digits",
        "partition": "iid",
        "model": "logistic",
        "method": {"name": "fedavg", "lr": 0.1, "steps": 1, "batch_size": 8},
        "downlink": {"name": "powersgd", "rank": 1},
        "evaluation": {"own": False, "pooled": False},
        **options,
        "clients": {"count": 3, **options.get("clients", {})},
    }
    return prepare(Experiment(**table))


def test_workers_and_checkpoints_keep_both_memories(tmp_path: Path):
    def made(**options: Any) -> Setup:
        return digits(uplink={"name": "feedback", "inner": {"name": "powersgd", "rank": 1}}, **options)

    contracts.several_workers_give_the_bits_of_one(made())
    contracts.a_run_goes_on_from_its_checkpoint(made, 3, tmp_path)


def test_a_downlink_without_feedback_sends_the_difference_to_what_clients_hold():
    """PowerSGD's memory has no error, so what it leaves out has to be in the next difference."""
    setup = digits()
    executor, state, held = InlineExecutor(setup), first_run_state(setup), None
    for _ in range(4):
        (x,) = to_tensors(executor.get(state.server)).values()
        state, _ = play_round(setup, executor, state)
        before, ((name, held),) = held, state.downlink["held"].items()
        if before:
            # C is a projection, so what is missed is orthogonal to what was sent: of x - h, and of nothing else.
            (weight,) = (each for each in x if x[each].dim() == 2)
            sent, missed = held[weight] - before[weight], x[weight] - held[weight]
            assert abs(float((sent * missed).sum())) < 1e-5 * float(sent.norm() * missed.norm())
            assert list(state.downlink["memory"][name]) == [f"{weight}.factor"]
    assert state.downlink["last"] == {}

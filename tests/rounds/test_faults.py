"""Simulated faults by hand: what each is billed, and that nothing of what is lost leaves a trace."""

from typing import Any

import numpy as np
import pytest

from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.ledger import ClientRow
from rayfl.testing.executors import Shuffled, assert_same_bits, contents, play
from tests.methods.reference import played, setup_of
from tests.three_clients import DOWN, SIZES, UP, end, fated, near, one_round, row, three


@pytest.mark.parametrize(
    ("status", "up", "down", "num_steps", "seconds"),
    [
        ("delivered", UP, DOWN, 2, 6.0),
        ("dropped_before_download", 0, 0, 0, 0.0),
        ("dropped_after_download", 0, DOWN, 0, 1.0),
        ("dropped_after_training", 0, DOWN, 2, 5.0),
        ("upload_lost", UP, DOWN, 2, 6.0),
    ],
)
def test_every_fault_is_billed_what_it_used(
    monkeypatch: pytest.MonkeyPatch, status: str, up: int, down: int, num_steps: int, seconds: float
):
    fated(monkeypatch, "delivered", "delivered", status)
    record, _ = one_round(three())
    assert row(record, 2) == ClientRow(2, status, up, down, 4 * num_steps, num_steps, near(seconds))
    assert record.row.uplink_bits == 2 * UP + up
    assert record.row.downlink_bits == 2 * DOWN + down
    # Client 1 is back after 4 seconds; client 2 is waited for until it is back or gone.
    assert record.row.simulated_s == pytest.approx(max(4.0, seconds))
    assert record.row.delivered == (3 if status == "delivered" else 2)


@pytest.mark.parametrize("status", ["dropped_after_download", "dropped_after_training", "upload_lost"])
@pytest.mark.parametrize("method", ["fedavg", "fedpse", "fedstc", "scaffold"])
def test_what_is_lost_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, method: str, status: str):
    fated(monkeypatch, "delivered", "delivered", "dropped_before_download")
    without = end(three(method, rounds=2))
    fated(monkeypatch, "delivered", "delivered", status)
    assert_same_bits(end(three(method, rounds=2)), without)
    fated(monkeypatch, "delivered", "delivered", "delivered")
    assert any(
        name not in without or not np.array_equal(array, without[name])
        for name, array in end(three(method, rounds=2)).items()
    )


@pytest.mark.parametrize("method", ["fedavg", "fedpse"])
@pytest.mark.parametrize("clients", [{"deadline_s": 4.5}, {"take_first": 4}, {"work": "capacity", "upload_loss": 0.3}])
def test_the_number_of_workers_changes_nothing(method: str, clients: dict[str, Any]):
    speeds = {"median": 8.0, "sigma": 1.0}
    faults: dict[str, Any] = {"dropout_after_download": 0.1, "dropout_after_training": 0.1, "examples_per_s": speeds}
    here = setup_of(method, {"batch_size": 4}, sizes=(8,) * 9, clients={**faults, **clients}, rounds=3)
    alone = played(here)
    workers = Shuffled(here)
    records, run_states = play(here, workers)
    assert [record.clients for record in records] == [record.clients for record, _ in alone]
    assert_same_bits(contents(workers, run_states[-1]), contents(InlineExecutor(here), alone[-1][1]))
    assert {"delivered", "dropped_after_training"} < {row.status for record, _ in alone for row in record.clients}


def test_capacity_is_work_in_proportion_to_the_median_speed():
    # 4 steps; the median speed is 4 examples a second, so shares 1 (capped), 1 and 0.25; 0.1 of 4 is still one step.
    for slowest, num_steps in ((1.0, 1), (0.4, 1), (2.0, 2), (2.6, 3)):
        setup = setup_of(
            "fedavg",
            {"batch_size": 2},
            sizes=SIZES,
            clients={"work": "capacity", "examples_per_s": [8.0, 4.0, slowest]},
        )
        record, _ = played(setup)[0]
        assert [row.num_steps for row in record.clients] == [4, 4, num_steps]
        assert [row.num_samples for row in record.clients] == [8, 8, 2 * num_steps]
        shares = [setup.population.traits(client).work_share for client in range(3)]
        assert shares == [1.0, 1.0, slowest / 4]


def test_replies_go_out_when_all_are_back():
    # FedPSE answers what it was sent: the round lasts until the slowest is back, and then for the largest reply.
    record, _ = one_round(three("fedpse"))
    slowest = max(8 / speed + row.uplink_bits / UP for speed, row in zip((8, 4, 2), record.clients, strict=True))
    assert record.row.simulated_s == near(slowest + max(row.downlink_bits for row in record.clients) / DOWN)
    assert max(row.downlink_bits for row in record.clients) > 0


def test_less_work_is_the_first_steps_of_the_same_work():
    # One client at the median of two equal ones has a share of 1; half of 2 epochs in full batches is 1 epoch.
    one, two = (
        setup_of("fedavg", {"batch_size": 0, "epochs": epochs}, sizes=SIZES, rounds=1, clients=clients)
        for epochs, clients in ((1, {}), (2, {"work": "capacity", "examples_per_s": [2.0, 4.0, 4.0]}))
    )
    full, half = (played(setup)[0][0].clients[0] for setup in (one, two))
    assert (full.num_steps, full.num_samples) == (half.num_steps, half.num_samples) == (1, 8)
    losses = [
        next(m.value for m in played(setup)[0][0].metrics if m.client == 0 and m.name == "train/loss")
        for setup in (one, two)
    ]
    assert losses[0] == losses[1]


def test_a_client_that_returns_is_billed_what_it_missed(tmp_path: Any):
    # Client 2 is away in rounds 1 and 2, and back in round 3.
    trace = tmp_path / "trace.csv"
    trace.write_text("client,first_round,last_round\n0,0,9\n1,0,9\n2,0,0\n2,3,9\n", encoding="utf-8")
    records = [record for record, _ in played(three("fedstc", rounds=4, availability={"trace": str(trace)}))]
    assert [[row.client for row in record.clients] for record in records] == [[0, 1, 2], [0, 1], [0, 1], [0, 1, 2]]
    assert [record.means["population/available"] for record in records] == [3, 2, 2, 3]
    # The others get each round's broadcast as a reply. Two of them in a row go down as they are, or cheaper.
    missed = sum(row(record, 0).downlink_bits for record in records[1:3])
    caught_up = row(records[3], 2).downlink_bits - row(records[3], 0).downlink_bits
    assert 0 < caught_up <= missed
    late = row(records[3], 2).simulated_s - caught_up / DOWN
    assert late == pytest.approx(row(records[3], 0).simulated_s + 3.0)

"""Deadlines and over-selection by hand: what was done and had crossed when the server hung up."""

from dataclasses import replace
from typing import Any

import pytest

from rayfl.methods.personal.fedfomo import FedFomo
from rayfl.methods.server.fedavg import FedAvg
from rayfl.rounds.ledger import ClientRow
from rayfl.testing.executors import assert_same_bits
from tests.contracts.seams.quadratic import setup as quadratic
from tests.methods.reference import played, setup_of
from tests.three_clients import DOWN, SIZES, SPEEDS, UP, end, fated, near, one_round, row, three


@pytest.mark.parametrize(
    ("deadline_s", "bits", "num_samples", "num_steps"),
    [
        # Client 2 has its download after 1 second and its work after 5; 0.1 s of upload are 73.6 bits, so 9 bytes.
        (0.5, (0, 336), 0, 0),
        (1.5, (0, DOWN), 1, 0),
        (3.6, (0, DOWN), 5, 1),
        (5.1, (72, DOWN), 8, 2),
        (5.5, (368, DOWN), 8, 2),
    ],
)
def test_who_is_late_is_billed_what_crossed_until_the_deadline(
    deadline_s: float, bits: tuple[int, int], num_samples: int, num_steps: int
):
    record, _ = one_round(three(deadline_s=deadline_s))
    assert row(record, 2) == ClientRow(2, "late", *bits, num_samples, num_steps, deadline_s)
    assert record.row.simulated_s == deadline_s
    expected = ["delivered" if seconds <= deadline_s else "late" for seconds in (3, 4, 6)]
    assert [row.status for row in record.clients] == expected
    assert record.row.delivered == expected.count("delivered")


@pytest.mark.parametrize("deadline_s", [None, 4.2, 4.9, 5.5])
@pytest.mark.parametrize("status", ["dropped_after_training", "upload_lost"])
def test_no_deadline_makes_a_round_longer(monkeypatch: pytest.MonkeyPatch, status: str, deadline_s: float | None):
    fated(monkeypatch, "delivered", "delivered", status)
    gone = 5.0 if status == "dropped_after_training" else 6.0
    record, _ = one_round(three(deadline_s=deadline_s))
    assert record.row.simulated_s == pytest.approx(min(gone, deadline_s or gone))
    assert row(record, 2).status == (status if (deadline_s or 9.0) > gone else "late")


@pytest.mark.parametrize("clients", [{}, {"deadline_s": 4.5}, {"take_first": 1}])
def test_nobody_waits_for_clients_that_train_for_themselves(monkeypatch: pytest.MonkeyPatch, clients: dict[str, Any]):
    # As pFedMe has it: all train, and the two that are selected send.
    plan = FedAvg.plan
    monkeypatch.setattr(FedAvg, "plan", lambda self, *where: replace(plan(self, *where), trainers="all"))
    speeds: dict[str, Any] = {**SPEEDS, "examples_per_s": [8.0, 4.0, 0.1], "per_round": 2}
    setup = setup_of("fedavg", {"batch_size": 4}, sizes=SIZES, clients={**speeds, **clients}, rounds=4)
    records = [record for record, _ in played(setup)]
    rows = [[row for row in record.clients if row.status != "not_selected"] for record in records]
    assert [record.row.simulated_s for record in records] == [max(row.simulated_s for row in chosen) for chosen in rows]
    assert any(record.row.simulated_s < max(row.simulated_s for row in record.clients) for record in records)


def test_a_client_that_is_done_at_the_deadline_itself_is_in_time():
    # As sums of binary fractions 0.1 + 0.1 + 0.1 is more than 0.3, and 0.3 - 0.1 - 0.1 less than 0.1.
    speeds: dict[str, Any] = {"examples_per_s": 80.0, "uplink_mbps": 10 * UP * 1e-6, "downlink_mbps": 10 * DOWN * 1e-6}
    record, _ = one_round(three(**speeds, deadline_s=0.3))
    assert [(row.status, row.uplink_bits) for row in record.clients] == [("delivered", UP)] * 3
    record, _ = one_round(three(**speeds, take_first=1))
    assert [row.status for row in record.clients] == ["delivered", "surplus", "surplus"]
    assert [row[2:6] for row in record.clients] == [(UP, DOWN, 8, 2)] * 3


@pytest.mark.parametrize(
    ("sizes", "batch_size", "deadline_s", "worked"),
    [
        # Of 33 examples the first batch has 32, so 17 are not yet a step.
        ((33, 33), 32, 17.5, (17, 0)),
        # Two epochs of batches of 4 and 1, and of 4, 4 and 1.
        ((5, 5), 4, 9.5, (9, 3)),
        ((9, 9), 4, 16.5, (16, 4)),
        ((9, 9), 4, 17.5, (17, 5)),
    ],
)
def test_who_is_cut_off_has_done_whole_steps(
    sizes: tuple[int, ...], batch_size: int, deadline_s: float, worked: tuple[int, int]
):
    clients = {"examples_per_s": 1.0, "deadline_s": deadline_s}
    setup = setup_of("fedavg", {"batch_size": batch_size, "epochs": 2}, sizes=sizes, clients=clients, rounds=1)
    record, _ = one_round(setup)
    assert {(row.status, *row[4:6]) for row in record.clients} == {("late", *worked)}


def test_who_is_cut_twice_is_as_if_the_second_cut_were_the_only_one():
    clients: dict[str, Any] = {"examples_per_s": [20 / 10.2, 1.0], "take_first": 1}
    both = [
        one_round(setup_of("fedavg", {"batch_size": 2}, sizes=(20, 20), clients={**clients, **more}, rounds=1))[0]
        for more in ({}, {"deadline_s": 11.5})
    ]
    assert row(both[0], 1)[4:6] == (10, 5)
    assert both[1].clients == both[0].clients


def test_a_deadline_that_everyone_meets_changes_nothing():
    for deadline_s in (6.01, 1e9):
        assert played(three(rounds=2, deadline_s=deadline_s))[-1][0].row.simulated_s == pytest.approx(6.0)
        assert_same_bits(end(three(rounds=2, deadline_s=deadline_s)), end(three(rounds=2)))


@pytest.mark.parametrize("method", ["fedavg", "fedpse", "fedstc", "scaffold"])
@pytest.mark.parametrize("clients", [{"deadline_s": 5.05}, {"deadline_s": 4.5}, {"take_first": 2}])
def test_late_and_surplus_clients_leave_no_trace(monkeypatch: pytest.MonkeyPatch, method: str, clients: dict[str, Any]):
    # Fast wires, so that every method's client 2 works from about 0 to 8 / 1.6 = 5 seconds, the others to 1 and 2.
    speeds: dict[str, Any] = {"examples_per_s": [8.0, 4.0, 1.6], "uplink_mbps": 0.01, "downlink_mbps": 1.0}
    if clients == {"deadline_s": 5.05}:
        # Only the upload is too late: 3 seconds for 672 bits, and no less than 64.
        speeds["uplink_mbps"] = [0.01, 0.01, 672e-6 / 3]
    fated(monkeypatch, "delivered", "delivered", "dropped_before_download")
    without = end(three(method, rounds=2, **speeds))
    fated(monkeypatch, "delivered", "delivered", "delivered")
    cut = three(method, rounds=2, **speeds, **clients)
    assert [[row.status for row in record.clients] for record, _ in played(cut)] == [
        ["delivered", "delivered", "surplus" if "take_first" in clients else "late"]
    ] * 2
    assert_same_bits(end(cut), without)


def test_over_selection_hangs_up_when_enough_are_back():
    record, _ = one_round(three(take_first=2))
    assert [row.status for row in record.clients] == ["delivered", "delivered", "surplus"]
    assert (record.row.selected, record.row.delivered) == (3, 2)
    # Client 1 is back after 4 seconds; client 2 has then worked for 3 of its 4, on 6 examples, so one whole step.
    assert row(record, 2) == ClientRow(2, "surplus", 0, DOWN, 6, 1, near(4.0))
    assert record.row.simulated_s == pytest.approx(4.0)
    record, _ = one_round(three(take_first=1))
    # After 3 seconds client 1 has worked its 2 seconds and sent nothing.
    assert row(record, 1) == ClientRow(1, "surplus", 0, DOWN, 8, 2, near(3.0))


def test_who_finishes_first_is_taken_and_ties_go_to_the_lower_id():
    assert [r.status for r in one_round(three(take_first=1, examples_per_s=[2.0, 4.0, 8.0]))[0].clients] == [
        "surplus", "surplus", "delivered",
    ]  # fmt: skip
    record, _ = one_round(three(take_first=2, examples_per_s=4.0))
    assert [row.status for row in record.clients] == ["delivered", "delivered", "surplus"]
    # It was done at the same moment, and all of its bytes had crossed.
    assert row(record, 2)[2:4] == (UP, DOWN)


def test_over_selection_counts_those_who_come_back(monkeypatch: pytest.MonkeyPatch):
    fated(monkeypatch, "upload_lost", "delivered", "delivered")
    record, _ = one_round(three(take_first=2))
    assert [row.status for row in record.clients] == ["upload_lost", "delivered", "delivered"]
    # Whose upload would be lost in the end is cut off like any other: it has worked for 3 seconds when two are back.
    fated(monkeypatch, "delivered", "delivered", "upload_lost")
    record, _ = one_round(three(take_first=2))
    assert row(record, 2) == ClientRow(2, "surplus", 0, DOWN, 6, 1, near(4.0))
    fated(monkeypatch, "upload_lost", "delivered", "delivered")
    record, _ = one_round(three(take_first=2, deadline_s=5.0))
    assert [row.status for row in record.clients] == ["upload_lost", "delivered", "late"]
    assert record.row.simulated_s == 5.0


def test_relayed_packets_of_surplus_clients_are_not_passed_on():
    here = quadratic(FedFomo, clients={"take_first": 2, "examples_per_s": [4.0, 3.0, 2.0, 1.0]})
    for record, _ in played(here):
        assert [row.status for row in record.clients].count("surplus") == 2

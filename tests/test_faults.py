"""Simulated faults, deadlines and over-selection by hand: three clients whose speeds and bytes are known.

FedAvg on 21 parameters: 672 bits down; 672 and 64 more for the number of examples up, 736. The clients have 8 examples
and do one epoch in batches of 4, so two steps.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.data.batches import amount, schedule
from rayfl.executor import InlineExecutor
from rayfl.ledger import RoundRecord
from rayfl.population import Population, Status
from rayfl.record import ClientRow
from rayfl.rounds import World
from rayfl.settings import SettingsError
from rayfl.setup import Setup
from tests.contracts.every_method import assert_same_bits, contents
from tests.contracts.executors import Shuffled, play
from tests.contracts.seams.fed_fomo import FedFomo
from tests.contracts.seams.quadratic import setup as quadratic
from tests.methods.reference import played, setup_of

DOWN, UP = 672, 736
SIZES = (8, 8, 8)
SPEEDS = {"examples_per_s": [8.0, 4.0, 2.0], "uplink_mbps": UP * 1e-6, "downlink_mbps": DOWN * 1e-6}
"""One second for a download and one for an upload; 1, 2 and 4 seconds of work: back after 3, 4 and 6 seconds."""


def three(method: str = "fedavg", rounds: int = 1, **clients: Any) -> Setup:
    return setup_of(method, {"batch_size": 4}, sizes=SIZES, clients={**SPEEDS, **clients}, rounds=rounds)


def one_round(setup: Setup) -> tuple[RoundRecord, World]:
    ((record, world),) = played(setup)
    return record, world


def fated(monkeypatch: pytest.MonkeyPatch, *fates: Status) -> None:
    """What the seed would decide."""
    monkeypatch.setattr(Population, "_fates", lambda self, round: list(fates))


def row(record: RoundRecord, client: int) -> ClientRow:
    (found,) = [row for row in record.clients if row.client == client]
    return found


# Any: rows are typed, and what pytest compares with is no float.
def near(seconds: float) -> Any:
    return pytest.approx(seconds)


def end(setup: Setup) -> dict[str, np.ndarray]:
    """All that a run leaves behind: the server's state, the clients' and the links."""
    return contents(InlineExecutor(setup), played(setup)[-1][1])


@pytest.mark.parametrize(
    ("fate", "up", "down", "num_steps", "seconds"),
    [
        ("delivered", UP, DOWN, 2, 6.0),
        ("dropped_before_download", 0, 0, 0, 0.0),
        ("dropped_after_download", 0, DOWN, 0, 1.0),
        ("dropped_after_training", 0, DOWN, 2, 5.0),
        ("upload_lost", UP, DOWN, 2, 6.0),
    ],
)
def test_every_fault_is_billed_what_it_used(
    monkeypatch: pytest.MonkeyPatch, fate: Status, up: int, down: int, num_steps: int, seconds: float
):
    fated(monkeypatch, "delivered", "delivered", fate)
    record, _ = one_round(three())
    assert row(record, 2) == ClientRow(2, fate, up, down, 4 * num_steps, num_steps, near(seconds))
    assert record.row.uplink_bits == 2 * UP + up
    assert record.row.downlink_bits == 2 * DOWN + down
    # Nobody waits for those who vanish: client 1 is back after 4 seconds.
    assert record.row.simulated_s == pytest.approx(6.0 if fate == "delivered" else 4.0)
    assert record.row.delivered == (3 if fate == "delivered" else 2)


@pytest.mark.parametrize("fate", ["dropped_after_download", "dropped_after_training", "upload_lost"])
@pytest.mark.parametrize("method", ["fedavg", "fedpse", "fedstc", "scaffold"])
def test_what_is_lost_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, method: str, fate: Status):
    fated(monkeypatch, "delivered", "delivered", "dropped_before_download")
    without = end(three(method, rounds=2))
    fated(monkeypatch, "delivered", "delivered", fate)
    assert_same_bits(end(three(method, rounds=2)), without)
    fated(monkeypatch, "delivered", "delivered", "delivered")
    assert any(
        name not in without or not np.array_equal(array, without[name])
        for name, array in end(three(method, rounds=2)).items()
    )


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
    assert row(record, 2)[2:4] == pytest.approx((UP, DOWN), abs=8)


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


@pytest.mark.parametrize("method", ["fedavg", "fedpse"])
@pytest.mark.parametrize("clients", [{"deadline_s": 4.5}, {"take_first": 4}, {"work": "capacity", "upload_loss": 0.3}])
def test_the_number_of_workers_changes_nothing(method: str, clients: dict[str, Any]):
    speeds = {"median": 8.0, "sigma": 1.0}
    faults: dict[str, Any] = {"dropout_after_download": 0.1, "dropout_after_training": 0.1, "examples_per_s": speeds}
    here = setup_of(method, {"batch_size": 4}, sizes=(8,) * 9, clients={**faults, **clients}, rounds=3)
    alone = played(here)
    workers = Shuffled(here)
    records, worlds = play(here, workers)
    assert [record.clients for record in records] == [record.clients for record, _ in alone]
    assert_same_bits(contents(workers, worlds[-1]), contents(InlineExecutor(here), alone[-1][1]))
    assert {"delivered", "dropped_after_training"} < {row.status for record, _ in alone for row in record.clients}


def test_relayed_packets_of_surplus_clients_are_not_passed_on():
    here = quadratic(FedFomo, clients={"take_first": 2, "examples_per_s": [4.0, 3.0, 2.0, 1.0]})
    for record, _ in played(here):
        assert [row.status for row in record.clients].count("surplus") == 2


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


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.booleans(), st.integers(1, 12) | st.none(), st.integers(1, 3))
def test_work_is_known_before_it_is_done(n: int, number: int, by_epochs: bool, batch_size: int | None, group: int):
    kind: dict[str, Any] = {"epochs": number, "steps": None} if by_epochs else {"epochs": None, "steps": number}
    kind |= {"batch_size": batch_size, "batches_per_step": group}
    drawn = schedule(n, **kind, generator=np.random.default_rng(0))
    assert amount(n, **kind) == (len(drawn) // group, sum(map(len, drawn)))
    for share in (0.01, 0.3, 0.5, 0.99):
        num_steps, num_examples = amount(n, **kind, share=share)
        assert num_steps == max(1, int(share * (len(drawn) // group) + 0.5))
        assert num_examples == sum(map(len, drawn[: num_steps * group]))


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


@pytest.mark.parametrize("clients", [{"deadline_s": 2.0}, {"take_first": 2}, {"upload_loss": 0.1}])
def test_peers_have_no_server_that_hangs_up(clients: dict[str, Any]):
    name = next(iter(clients))
    with pytest.raises(SettingsError, match=rf"^clients\.{name}=.* needs a server, and Local has none; remove it"):
        setup_of("local", {}, clients=clients).check()

"""The books of a round: bits and examples become seconds, waves add up, means are over clients."""

from dataclasses import replace
from typing import Any

import pytest

from rayfl.methods.base import Work
from rayfl.population.client import ClientStatus, Traits
from rayfl.population.sampling import Participation
from rayfl.rounds.ledger import Ledger, RoundRow, client_row, record
from rayfl.rounds.worker_jobs import ClientResult
from tests.methods.reference import SIZES, played, setup_of

TRAITS = Traits(id=3, num_examples=50, examples_per_s=20.0, uplink_bps=1e6, downlink_bps=4e6)


def test_a_client_downloads_works_and_uploads_at_its_own_speeds():
    work = {"a": Work(2, 30), "b": Work(1, 10)}
    row = client_row(TRAITS, ClientResult(3, ClientStatus.DELIVERED, 500_000, 500_000, 1_000_000, work))
    # 1e6 / 4e6 + 40 / 20 + 5e5 / 1e6 = 0.25 + 2 + 0.5 seconds
    assert row.simulated_s == 2.75
    assert (row.client, row.num_samples, row.num_steps) == (3, 40, 3)
    assert (row.uplink_bits, row.downlink_bits) == (500_000, 1_000_000)


@pytest.mark.parametrize("status", list(ClientStatus))
def test_a_row_has_the_word_of_the_status(status: ClientStatus):
    word = client_row(TRAITS, ClientResult(3, status)).status
    assert (word, type(word)) == (status.value, str)


def test_later_waves_add_downloads_and_metrics():
    ledger = Ledger(Participation({1: ClientStatus.DELIVERED, 3: ClientStatus.DROPPED_BEFORE_DOWNLOAD}))
    work = {"train": Work(2, 30)}
    ledger.results[1] = ClientResult(1, ClientStatus.LATE, 10, 9, 20, work, {"loss": 1.0})
    ledger.add([ClientResult(1, downlink_bits=7, reply_bits=7)])
    for client in (1, 2, 3):
        ledger.add([ClientResult(client, metrics={"accuracy": 0.5})])
    metrics = {"loss": 1.0, "accuracy": 0.5}
    assert ledger.results[1] == ClientResult(1, ClientStatus.LATE, 10, 9, 27, work, metrics, reply_bits=7)
    # Who did not train keeps the status that was drawn.
    assert [ledger.result(client).status for client in (2, 3, 4)] == [
        ClientStatus.NOT_SELECTED, ClientStatus.DROPPED_BEFORE_DOWNLOAD, ClientStatus.NOT_SELECTED,
    ]  # fmt: skip


def test_a_round_lasts_as_long_as_its_slowest_client():
    # FedAvg: 32 * 21 = 672 bits down, 64 more up, at 672 bits a second each way; one epoch at 2 examples a second.
    clients = {"examples_per_s": 2.0, "uplink_mbps": 672e-6, "downlink_mbps": [672e-6, 336e-6]}
    ((result, _),) = played(setup_of("fedavg", {}, clients=clients, rounds=1))
    seconds = [
        672 / (672 if client % 2 == 0 else 336) + size / 2 + 736 / 672 for client, size in enumerate(SIZES)
    ]  # fmt: skip
    assert [row.simulated_s for row in result.clients] == pytest.approx(seconds, rel=1e-12)
    assert result.row.simulated_s == max(row.simulated_s for row in result.clients)
    assert result.row.uplink_bits == 5 * 736
    assert result.row.downlink_bits == 5 * 672


def test_a_round_lasts_until_the_last_client_is_back_or_gone():
    # Client 0 needs 100 seconds for its download, and others no more than 14 + 2 for all they do.
    clients: dict[str, Any] = {"dropout_before_download": 0.3, "dropout_after_training": 0.3, "examples_per_s": 1.0}
    clients["downlink_mbps"] = [6.72e-6, 1.0, 1.0, 1.0, 1.0]
    setup = setup_of("fedavg", {}, clients=clients, rounds=12)
    seen = set()
    for result, _ in played(setup):
        assert result.row.simulated_s == max(row.simulated_s for row in result.clients)
        assert result.row.delivered == sum(row.status == "delivered" for row in result.clients)
        assert result.row.selected == len(result.clients) == 5
        seen |= {(row.status, row.simulated_s > 100) for row in result.clients if row.client == 0}
        assert all(row.simulated_s == 0 for row in result.clients if row.status == "dropped_before_download")
    assert seen == {("delivered", True), ("dropped_before_download", False), ("dropped_after_training", True)}


def test_rows_and_means_of_a_record():
    setup = setup_of("fedavg", {})
    ledger = Ledger(Participation({0: ClientStatus.DELIVERED, 2: ClientStatus.DROPPED_BEFORE_DOWNLOAD}))
    metrics = {"train/loss": 2.0, "own/accuracy": 0.5}
    ledger.results[0] = ClientResult(0, ClientStatus.DELIVERED, 8, 8, 16, {"train": Work(1, 9)}, metrics)
    ledger.results[4] = ClientResult(4, work={"train": Work(1, 11)})
    ledger.add([ClientResult(1, metrics={"own/accuracy": 1.0})])
    ledger.metrics["pooled/accuracy"] = 0.25
    result = record(setup, 6, ledger)
    # Who took part, and who worked without being selected; those who were only evaluated have metrics and no row.
    assert [(row.client, row.status) for row in result.clients] == [
        (0, "delivered"), (2, "dropped_before_download"), (4, "not_selected"),
    ]  # fmt: skip
    fairness = {"deviation": 0.25, "difference": 0.5, "worst": 0.5, "worst_tenth": 0.5, "jain": 1.5**2 / (2 * 1.25)}
    assert result.means == {
        "pooled/accuracy": 0.25,
        "train/loss": 2.0,
        "own/accuracy": 0.75,
        **{f"own_{word}/accuracy": value for word, value in fairness.items()},
    }
    of_clients = [(m.client, m.name, m.value) for m in result.metrics if m.client is not None]
    assert of_clients == [(0, "train/loss", 2.0), (0, "own/accuracy", 0.5), (1, "own/accuracy", 1.0)]
    row = replace(result, row=replace(result.row, simulated_s=0.0)).row
    assert row == RoundRow(6, 2, 1, 8, 16, 0.0, 0.0)
    # Client 4 was not selected, so nobody waits for it.
    assert result.row.simulated_s == 9 / 1000 + 8 / 10e6 + 16 / 50e6

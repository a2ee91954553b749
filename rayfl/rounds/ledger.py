"""Ledger: what each client did and was billed in a round, and the rows that go into the records.

Papers report communication as 4 bytes for every number that crosses a node's wire (`paper_comm`, `server_comm`).
Dai et al., DisPFL, ICML 2022, Table 1, column "Comm": "maximum comm cost (download/upload) for the busiest devices".
Such a device is a peer, the server, or a client; the larger of its two directions counts. A number counts once,
whatever its width (`Codec.num_values`); positions do not count. 1 MB = 1e6 bytes. Table 3 has the mean over peers
instead; with a server it is the mean over the clients.
The paper's graphs are directed: every peer receives from 10 others, and sends to more or fewer. Its tables count what a
peer receives, which is `comm/busiest_received_megabytes`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rayfl.population.client import ClientStatus, Traits
from rayfl.population.sampling import Participation
from rayfl.rounds import evaluation
from rayfl.rounds.setup import Setup
from rayfl.rounds.simulated_clock import arrival_s, duration_s, reply_s
from rayfl.rounds.worker_jobs import ClientResult
from rayfl.topology.graphs import Sparse


@dataclass(frozen=True)
class RoundRow:
    """Totals over the clients of one round; `simulated_s` is this round's duration on the simulated clock."""

    round: int
    selected: int
    delivered: int
    uplink_bits: int
    downlink_bits: int
    simulated_s: float
    wall_s: float


OnRound = Callable[[RoundRow, Mapping[str, float]], None]
"""A function that is called with each round's row and means."""


class ClientRow(NamedTuple):
    """One client's row in the record of a round; `status` is a `ClientStatus`."""

    client: int
    status: str
    uplink_bits: int
    downlink_bits: int
    num_samples: int
    num_steps: int
    simulated_s: float


class MetricRow(NamedTuple):
    """One value of the round, None where it is undefined; `client` is None for values of the server and for means over
    clients.

    A value of pairs of clients (`mask/hamming`) has a row for each other client, in ascending order.
    """

    client: int | None
    name: str
    value: float | None


@dataclass(frozen=True)
class RoundRecord:
    """The rows that a round adds to the records."""

    row: RoundRow
    clients: tuple[ClientRow, ...]
    metrics: tuple[MetricRow, ...]

    @property
    def means(self) -> dict[str, float]:
        """The round's own values by name (not those of single clients), without those that are undefined."""
        return {name: value for client, name, value in self.metrics if client is None and value is not None}


@dataclass
class Ledger:
    """The results of a round's clients: first those of their training, to which later waves of calls add.

    `pairs`: values of pairs of clients by name, each [num_clients, num_clients - 1]. `polled`: the results of the poll
    before the round, which `participants.learn` adds. `simulated_s`: seconds since the last update; None: the round
    lasts until all are back.
    """

    participation: Participation
    results: dict[int, ClientResult] = field(default_factory=dict)
    metrics: dict[str, float | None] = field(default_factory=dict)
    pairs: dict[str, np.ndarray] = field(default_factory=dict)
    polled: Mapping[int, ClientResult] = field(default_factory=dict)
    simulated_s: float | None = None

    def result(self, client: int) -> ClientResult:
        """A client's result so far; if it has none, a result with the status that was drawn for it."""
        return self.results.get(client) or ClientResult(
            client, self.participation.statuses.get(client, ClientStatus.NOT_SELECTED)
        )

    def add(self, later: Iterable[ClientResult]) -> None:
        """Add a later wave's results of clients: downloads are added up, metrics are joined."""
        for result in later:
            self.results[result.client] = self.result(result.client).joined(result)


def record(setup: Setup, round_number: int, ledger: Ledger) -> RoundRecord:
    """The rows of a round: clients that took part, their metrics, and the means over clients.

    A metric of the server replaces the mean over clients of the same name.
    """
    took_part = sorted(
        {*ledger.participation.selected, *{client for client, result in ledger.results.items() if result.work}}
    )
    rows = [client_row(setup.population.traits(client), ledger.result(client)) for client in took_part]
    values = dict(ledger.metrics)
    if setup.population.availability is not None:
        values["population/available"] = float(setup.num_clients - len(ledger.participation.unavailable))
    metrics = [MetricRow(None, name, value) for name, value in values.items()]
    results = [ledger.results[client] for client in sorted(ledger.results)]
    by_client = {result.client: result.metrics for result in results}
    for summaries in (
        evaluation.mean_over_clients(by_client.values()),
        evaluation.over_clients(setup, results),
        evaluation.fairness_over_clients(setup, by_client.values()),
        evaluation.means_by_retention(setup, by_client),
    ):
        metrics += [MetricRow(None, name, value) for name, value in summaries.items() if name not in values]
    for name in setup.method.capabilities.metrics_with_variance:
        if values := [value for result in results if (value := result.metrics.get(name)) is not None]:
            metrics.append(MetricRow(None, f"{name}_variance", float(np.var(values))))
    metrics += [MetricRow(None, name, float(values.mean())) for name, values in ledger.pairs.items() if values.size]
    metrics += [MetricRow(result.client, name, value) for result in results for name, value in result.metrics.items()]
    for name, pairs in ledger.pairs.items():
        metrics += [MetricRow(client, name, float(value)) for client, row in enumerate(pairs) for value in row]
    row = RoundRow(
        round=round_number,
        selected=len(ledger.participation.selected),
        delivered=sum(row.status == ClientStatus.DELIVERED for row in rows),
        uplink_bits=sum(row.uplink_bits for row in rows),
        downlink_bits=sum(row.downlink_bits for row in rows),
        simulated_s=duration_s(setup.population, results) if ledger.simulated_s is None else ledger.simulated_s,
        wall_s=0.0,
    )
    return RoundRecord(row, tuple(rows), tuple(metrics))


def client_row(traits: Traits, result: ClientResult) -> ClientRow:
    """One client's row; its time is download, then work, then upload, then the reply, at its own speeds."""
    return ClientRow(
        client=result.client,
        status=result.status.value,
        uplink_bits=result.billed_bits,
        downlink_bits=result.downlink_bits,
        num_samples=result.num_examples,
        num_steps=result.num_steps,
        simulated_s=arrival_s(traits, result) + reply_s(traits, result),
    )


MEGABYTES_A_VALUE = 4e-6


def paper_comm(values: Sparse) -> dict[str, float]:
    """`comm/busiest_megabytes`, `comm/busiest_received_megabytes` and `comm/mean_megabytes` of a round among peers.

    values: numbers in the message that row receives from column, [n, n].
    """
    return comm(values.sum(axis=1), values.sum(axis=0))


def comm(received: np.ndarray, sent: np.ndarray) -> dict[str, float]:
    """The same metrics, from the numbers that each peer has received and sent, [n]."""
    return _metrics(received.max(), sent.max(), received.mean())


def server_comm(uploads: Sequence[int], downloads: Sequence[int], num_clients: int) -> dict[str, float]:
    """The same metrics of a round with a server.

    uploads: numbers in each message that arrived; downloads: numbers that the server sent to each of its clients.
    """
    arrived, sent = sum(uploads), sum(downloads)
    return _metrics(max(arrived, *downloads, 0), max(sent, *uploads, 0), max(arrived, sent) / num_clients)


def _metrics(busiest_received: float, busiest_sent: float, mean: float) -> dict[str, float]:
    """The metrics, from the numbers that the busiest node receives and sends, and a client's mean."""
    return {
        "comm/busiest_megabytes": float(max(busiest_received, busiest_sent)) * MEGABYTES_A_VALUE,
        "comm/busiest_received_megabytes": float(busiest_received) * MEGABYTES_A_VALUE,
        "comm/mean_megabytes": float(mean) * MEGABYTES_A_VALUE,
    }

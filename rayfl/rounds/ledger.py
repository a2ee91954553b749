"""The books of a round: what each client did and was billed, and the rows that go into the records."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rayfl.population.client import Traits
from rayfl.population.sampling import Participation, Status
from rayfl.rounds import evaluation
from rayfl.rounds.calls import ClientResult
from rayfl.rounds.setup import Setup
from rayfl.rounds.simulated_clock import arrival_s, reply_s


class RoundRow(NamedTuple):
    """Totals over the clients of one round; `simulated_s` is this round's duration on the simulated clock."""

    round: int
    selected: int
    delivered: int
    uplink_bits: int
    downlink_bits: int
    simulated_s: float
    wall_s: float


class ClientRow(NamedTuple):
    """One client in the round that it is recorded with; `status` is "delivered", "dropped_before_download", ..."""

    client: int
    status: str
    uplink_bits: int
    downlink_bits: int
    num_samples: int
    num_steps: int
    simulated_s: float


class MetricRow(NamedTuple):
    """One value of the round; `client` None: of the server or a mean over clients."""

    client: int | None
    name: str
    value: float


@dataclass(frozen=True)
class RoundRecord:
    """The rows that a round adds to the records."""

    row: RoundRow
    clients: tuple[ClientRow, ...]
    metrics: tuple[MetricRow, ...]

    @property
    def means(self) -> dict[str, float]:
        """The round's own values by name (not those of single clients)."""
        return {metric.name: metric.value for metric in self.metrics if metric.client is None}


@dataclass
class Ledger:
    """What a round's clients did, as their reports come in."""

    participation: Participation
    reports: dict[int, ClientResult] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, report: ClientResult) -> None:
        """Another wave's report of a client: bits add up, metrics join."""
        known = self.reports.get(report.client)
        if known is not None:
            report = replace(
                known,
                sent=known.sent or report.sent,
                uplink_bits=known.uplink_bits + report.uplink_bits,
                downlink_bits=known.downlink_bits + report.downlink_bits,
                reply_bits=known.reply_bits + report.reply_bits,
                work={**known.work, **report.work},
                metrics={**known.metrics, **report.metrics},
            )
        self.reports[report.client] = report


def record(setup: Setup, round: int, ledger: Ledger) -> RoundRecord:
    """The rows of a round: clients that took part, their metrics, and the means over clients."""
    rows, participation = [], ledger.participation
    for client in sorted(set(participation.selected) | {c for c, r in ledger.reports.items() if r.work}):
        report = ledger.reports.get(client, ClientResult(client))
        rows.append(client_row(setup.population.traits(client), participation.status.get(client), report))
    if setup.population.availability is not None:
        ledger.metrics["population/available"] = float(setup.num_clients - len(participation.unavailable))
    metrics = [MetricRow(None, name, value) for name, value in ledger.metrics.items()]
    reports = sorted(ledger.reports.items())
    means = evaluation.mean_over_clients(report.metrics for _, report in reports)
    metrics += [MetricRow(None, name, value) for name, value in means.items()]
    metrics += [MetricRow(client, name, value) for client, report in reports for name, value in report.metrics.items()]
    row = RoundRow(
        round=round,
        selected=len(participation.selected),
        delivered=sum(row.status == "delivered" for row in rows),
        uplink_bits=sum(row.uplink_bits for row in rows),
        downlink_bits=sum(row.downlink_bits for row in rows),
        simulated_s=duration(setup, ledger),
        wall_s=0.0,
    )
    return RoundRecord(row, tuple(rows), tuple(metrics))


def duration(setup: Setup, ledger: Ledger) -> float:
    """Simulated seconds of a round: until the last client is back, gone or cut off, and then until the last has its
    reply.

    A client is gone at the moment at which it vanishes or its update is lost. Nobody waits for those that train for
    themselves: who was not selected, and peers that are away from the exchange.
    """
    awaited = {*ledger.participation.selected} - {*ledger.participation.with_status("dropped_before_download")}
    reports = [(setup.population.traits(c), report) for c, report in ledger.reports.items() if c in awaited]
    back = (arrival_s(traits, report) for traits, report in reports)
    return max(back, default=0.0) + max((reply_s(traits, report) for traits, report in reports), default=0.0)


def client_row(traits: Traits, drawn: Status | None, report: ClientResult) -> ClientRow:
    """One client's row; its time is download, then work, then upload, then the reply, at its own speeds."""
    num_examples = sum(work.num_examples for work in report.work.values())
    seconds = arrival_s(traits, report) + reply_s(traits, report)
    status: str = report.status or drawn or "not_selected"
    if status in ("delivered", "upload_lost") and not (report.sent or report.undone):
        status = "silent"
    num_steps = sum(work.num_steps for work in report.work.values())
    return ClientRow(traits.id, status, report.uplink_bits, report.downlink_bits, num_examples, num_steps, seconds)

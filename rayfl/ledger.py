"""The books of a round: what each client did and was billed, and the rows that go into the records."""

from dataclasses import dataclass, field, replace

from rayfl import evaluation
from rayfl.methods.base import Traits
from rayfl.population import Participation, Status
from rayfl.record import ClientRow, MetricRow, RoundRow
from rayfl.setup import Setup
from rayfl.work import Report


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
    reports: dict[int, Report] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, report: Report) -> None:
        """Another wave's report of a client: bits add up, metrics join."""
        known = self.reports.get(report.client)
        if known is not None:
            report = replace(
                known,
                sent=known.sent or report.sent,
                uplink_bits=known.uplink_bits + report.uplink_bits,
                downlink_bits=known.downlink_bits + report.downlink_bits,
                work={**known.work, **report.work},
                metrics={**known.metrics, **report.metrics},
            )
        self.reports[report.client] = report


def record(setup: Setup, round: int, ledger: Ledger) -> RoundRecord:
    """The rows of a round: clients that took part, their metrics, and the means over clients."""
    rows, participation = [], ledger.participation
    for client in sorted(set(participation.selected) | {c for c, r in ledger.reports.items() if r.work}):
        report = ledger.reports.get(client, Report(client))
        rows.append(client_row(setup.population.traits(client), participation.status.get(client), report))
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
        simulated_s=max((row.simulated_s for row in rows if row.status != "dropped_after_training"), default=0.0),
        wall_s=0.0,
    )
    return RoundRecord(row, tuple(rows), tuple(metrics))


def client_row(traits: Traits, drawn: Status | None, report: Report) -> ClientRow:
    """One client's row; its time is download, then work, then upload, at its own speeds."""
    num_examples = sum(work.num_examples for work in report.work.values())
    seconds = (
        report.downlink_bits / traits.downlink_bps
        + num_examples / traits.examples_per_s
        + report.uplink_bits / traits.uplink_bps
    )
    status: str = drawn or "not_selected"
    if status == "delivered" and not report.sent:
        status = "silent"
    num_steps = sum(work.num_steps for work in report.work.values())
    return ClientRow(traits.id, status, report.uplink_bits, report.downlink_bits, num_examples, num_steps, seconds)

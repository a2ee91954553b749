"""A run's metrics for Ray, which every node exports in the format of Prometheus and k8s/grafana.json draws.

Ray puts `ray_` before each name and sends the values every ten seconds (its metrics_report_interval_ms). The values
come from the run's records, so a round that is played again counts again.
"""

from ray.util.metrics import Counter, Gauge

from actors.retry_policy import Cause
from rayfl.rounds.ledger import RoundRecord

RUN, METRIC, CAUSE = "run", "metric", "cause"
"""The labels: the run directory's name; a metric of the records, such as own/accuracy; the cause of a loss."""


class RunMetrics:
    """The metrics of the run with the label `run`."""

    def __init__(self, run: str) -> None:
        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(name, about, (RUN, *labels)).set_default_tags({RUN: run})

        def gauge(name: str, about: str, *labels: str) -> Gauge:
            return Gauge(name, about, (RUN, *labels)).set_default_tags({RUN: run})

        self.rounds = counter("rayfl_rounds", "rounds played")
        self.uplink = counter("rayfl_uplink_bytes", "bytes that clients have sent")
        self.downlink = counter("rayfl_downlink_bytes", "bytes that clients have received")
        self.losses = counter("rayfl_losses", "actors and objects lost", CAUSE)
        self.delivered = gauge("rayfl_delivered_clients", "clients whose message arrived in the last round")
        self.round_seconds = gauge("rayfl_round_seconds", "seconds of the last round")
        self.checkpoint_seconds = gauge("rayfl_checkpoint_seconds", "seconds of the last checkpoint")
        self.actors = gauge("rayfl_client_actors", "client actors that are ready")
        self.means = gauge("rayfl_mean", "the last value of a metric of the records, as a mean over clients", METRIC)

    def round(self, record: RoundRecord, num_actors: int) -> None:
        """Count a round that is over."""
        row = record.row
        self.rounds.inc()
        for counter, bits in ((self.uplink, row.uplink_bits), (self.downlink, row.downlink_bits)):
            # Ray refuses to add 0 to a counter.
            if bits:
                counter.inc(bits / 8)
        self.delivered.set(row.delivered)
        self.round_seconds.set(row.wall_s)
        self.actors.set(num_actors)
        for name, value in record.means.items():
            self.means.set(value, {METRIC: name})

    def loss(self, cause: Cause) -> None:
        """Count a loss."""
        self.losses.inc(1.0, {CAUSE: cause})

"""GossipSchedule: peers on their own clocks, without a server and without rounds."""

from rayfl.schedules.base import Field, PeerSchedule
from rayfl.settings import unused_with


class GossipSchedule(PeerSchedule):
    """Each peer trains at its own speed, and mixes the newest messages that have arrived from its neighbours.

    With `partners` = 1 a peer averages models with one random neighbour after each training: Lian, Zhang, Zhang, Liu,
    Asynchronous Decentralized Parallel Stochastic Gradient Descent, ICML 2018 (method `adpsgd`).

    A round of the records is as many trainings as there are peers. A message takes its bits over the sender's uplink,
    after the messages that the peer sent before, then `latency_s`, then its bits over the receiver's downlink. Peers of
    equal speed on links that take no time do what they do under `synchronous`.
    """

    name = "gossip"
    most_staleness: float = Field(
        default=10.0,
        ge=0,
        description="messages older than this number of rounds are left out, and the peer itself gets their weight",
        json_schema_extra=unused_with(partners=[1]),
    )

    def scale(self, staleness: float) -> float | None:
        return 1.0 if staleness <= self.most_staleness else None

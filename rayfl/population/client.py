"""Traits: a client's id and fixed properties, which methods see. ClientStatus: what happens to it in a round."""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class Traits:
    """A client's fixed traits: size of its train split, share of the model it can keep, and its speeds.

    `work_share`: the share of a plan's training steps that it does.
    `retention_given`: whether the experiment sets `retention_ratio`; if not, a method's own default applies.
    `label_counts`: its train examples of each class, for methods whose capabilities have `label_counts`; else ().
    """

    id: int
    num_examples: int
    retention_ratio: float = 1.0
    examples_per_s: float = 1000.0
    uplink_bps: float = 10e6
    downlink_bps: float = 50e6
    retention_given: bool = False
    work_share: float = 1.0
    label_counts: tuple[int, ...] = ()


class ClientStatus(StrEnum):
    """What happens to a client in a round: drawn before the round, final after it; the records have the same words."""

    DELIVERED = "delivered"
    SILENT = "silent"
    """It trained and had nothing to send."""
    NOT_SELECTED = "not_selected"
    """It may train for itself; the round does not wait for it."""
    NOT_ASKED = "not_asked"
    """The server asked it for nothing (`Method.has_work`); the round does not wait for it."""
    DROPPED_BEFORE_DOWNLOAD = "dropped_before_download"
    """It cannot be reached: with a server it does nothing, among peers it trains for itself."""
    DROPPED_AFTER_DOWNLOAD = "dropped_after_download"
    DROPPED_AFTER_TRAINING = "dropped_after_training"
    UPLOAD_LOST = "upload_lost"
    LATE = "late"
    """It had not finished by the deadline."""
    SURPLUS = "surplus"
    """It was not among the first to finish (`take_first`)."""
    AT_WORK = "at_work"
    """A peer on its own clock, of which no training has ended since the last round."""
    STALE = "stale"
    """Its message was older than the schedule's `most_staleness`."""

    @property
    def trains(self) -> bool:
        """Whether its training is computed. Training that is lost before it is sent is only billed."""
        return self.keeps_state or self is ClientStatus.UPLOAD_LOST

    @property
    def uploads(self) -> bool:
        """Whether a client that was drawn this status sends its message."""
        return self in (ClientStatus.DELIVERED, ClientStatus.UPLOAD_LOST)

    @property
    def awaited(self) -> bool:
        """Whether the round lasts until this client is back, gone or cut off."""
        return self not in (ClientStatus.NOT_SELECTED, ClientStatus.NOT_ASKED, ClientStatus.DROPPED_BEFORE_DOWNLOAD)

    @property
    def keeps_state(self) -> bool:
        """Whether the client keeps its state after training; otherwise its state is that before the round."""
        return self in (ClientStatus.DELIVERED, ClientStatus.SILENT) or not self.awaited

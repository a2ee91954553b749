"""The clients' traits, and for every round who is selected and who drops out.

All draws come from the experiment's seed. A simulated dropout changes the results and is recorded.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from rayfl.determinism import seeding
from rayfl.errors import refuse_if
from rayfl.population.availability import Availability, Diurnal, PerClient, Trace, TraceLines, available
from rayfl.population.client import ClientStatus, Traits
from rayfl.population.distributions import Shares, Speeds, values
from rayfl.selections.base import Seen
from rayfl.selections.plain import Uniform
from rayfl.settings import Settings

DROPOUTS: dict[str, ClientStatus] = {
    "dropout_before_download": ClientStatus.DROPPED_BEFORE_DOWNLOAD,
    "dropout_after_download": ClientStatus.DROPPED_AFTER_DOWNLOAD,
    "dropout_after_training": ClientStatus.DROPPED_AFTER_TRAINING,
    "upload_loss": ClientStatus.UPLOAD_LOST,
}
"""The chances of the `[clients]` table as they are drawn, and the status of clients that they hit."""

Choose = Callable[[np.ndarray, int, np.random.Generator], Sequence[int]]
"""A function of the available clients, the number wanted and the round's generator: the clients to ask."""

TRAITS = ("retention_ratio", "examples_per_s", "uplink_mbps", "downlink_mbps")


class Clients(Settings):
    """The `[clients]` table of an experiment."""

    count: int = Field(ge=1, description="number of clients, N")
    per_round: int | None = Field(default=None, ge=1, description="clients selected each round, m; peers: all")
    fraction: float | None = Field(
        default=None, gt=0, le=1, description="share of the clients selected each round; peers: all"
    )
    unseen: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of the clients that take part in no round and are evaluated as new clients; per_round and "
        "fraction do not count them",
    )
    dropout_before_download: float = Field(
        default=0.0, ge=0, lt=1, description="probability to vanish before the download"
    )
    dropout_after_download: float = Field(
        default=0.0, ge=0, lt=1, description="probability to vanish after the download, before any work"
    )
    dropout_after_training: float = Field(
        default=0.0, ge=0, lt=1, description="probability to vanish after training, before the upload"
    )
    upload_loss: float = Field(
        default=0.0, ge=0, lt=1, description="probability that an update is sent and never arrives"
    )
    availability: Availability | None = Field(
        default=None,
        description="which clients can be selected: at random, by time of day or from a file; default: all",
    )
    availability_s: float = Field(
        default=60.0,
        gt=0,
        description="simulated seconds that count as one round of availability, with an asynchronous schedule",
    )
    retention_ratio: Shares | None = Field(
        default=None,
        description="share of the model that a client keeps or sends, r_i; default: set by method or uplink",
    )
    examples_per_s: Speeds = Field(
        default=1000.0, description="training speed: gradients of one example per second, of the whole model"
    )
    sparse_speedup: bool = Field(
        default=False,
        description="training under a mask takes time only for the operations under the mask, as on sparse hardware",
    )
    uplink_mbps: Speeds = Field(default=10.0, description="megabits (1e6) per second from the client")
    downlink_mbps: Speeds = Field(default=50.0, description="megabits (1e6) per second to the client")

    deadline_s: float | None = Field(
        default=None, gt=0, description="simulated seconds after which the server stops waiting for clients"
    )
    take_first: int | None = Field(
        default=None, ge=1, description="over-selection: use only this number of selected clients, the first to finish"
    )
    work: Literal["full", "capacity"] = Field(
        default="full",
        description="capacity: clients slower than the median do proportionally fewer training steps, at least one",
    )

    @model_validator(mode="after")
    def _participants_exist(self) -> "Clients":
        others = f", as unseen={self.unseen:g} leaves {self.num_unseen} out" if self.unseen else ""
        refuse_if(
            [
                (
                    self.per_round is not None and self.fraction is not None,
                    "per_round",
                    f"={self.per_round} and fraction={self.fraction} are both given; give one",
                ),
                (
                    self.unseen > 0 and not 0 < self.num_unseen < self.count,
                    "unseen",
                    f"={self.unseen:g} makes {self.num_unseen} of count={self.count} clients unseen; at least one must "
                    "be, and at least one must be left to train",
                ),
                (
                    (self.per_round or 0) > self.num_seen,
                    "per_round",
                    f"={self.per_round} is more than the {self.num_seen} clients there are{others}; lower per_round or "
                    "raise count",
                ),
                (
                    (self.take_first or 0) > self.num_selected,
                    "take_first",
                    f"={self.take_first} is more than the {self.num_selected} clients that are selected; lower "
                    "take_first or raise per_round",
                ),
            ]
        )
        return self

    @property
    def num_unseen(self) -> int:
        """Clients that no round asks."""
        return math.floor(self.unseen * self.count + 0.5)

    @property
    def num_seen(self) -> int:
        """Clients that rounds ask."""
        return self.count - self.num_unseen

    def unseen_numbers(self, seed: int) -> list[int]:
        """The numbers in the partition of the clients that no round asks, ascending: those of a run's last clients."""
        return sorted(
            seeding.generator(seed, purpose="unseen clients")
            .choice(self.count, self.num_unseen, replace=False)
            .tolist()
        )

    @property
    def num_selected(self) -> int:
        """Clients selected each round."""
        return self.per_round or max(1, math.floor((self.fraction or 1.0) * self.num_seen + 0.5))


def attackers(seed: int, num_clients: int, share: float) -> frozenset[int]:
    """The clients that attack: a share of all, rounded to a whole number, the same in all rounds. The attackers of a
    smaller share are among those of a larger one."""
    return frozenset(
        seeding.generator(seed, purpose="attackers")
        .permutation(num_clients)[: math.floor(share * num_clients + 0.5)]
        .tolist()
    )


@dataclass(frozen=True)
class Participation:
    """The clients selected in a round, ascending, the status drawn for each, and the unavailable clients."""

    statuses: Mapping[int, ClientStatus]
    unavailable: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64), compare=False)
    """int64, ascending."""

    @property
    def selected(self) -> tuple[int, ...]:
        """The clients selected, ascending."""
        return tuple(self.statuses)


@dataclass(frozen=True)
class Population:
    """All clients of an experiment: those that rounds ask, and after them the unseen ones, which only have traits.

    The constructor reads the trace. Raise RayflError if it cannot be read.
    """

    settings: Clients
    seed: int
    num_examples: np.ndarray
    """Train examples of each client, int64 [clients.count]."""
    availability: PerClient | Diurnal | TraceLines | None = field(init=False, repr=False)
    """Who can be selected in each round; a trace as its lines instead of its file."""

    def __post_init__(self) -> None:
        model = self.settings.availability
        object.__setattr__(self, "availability", model.read(len(self)) if isinstance(model, Trace) else model)

    def __len__(self) -> int:
        return self.settings.num_seen

    def traits(self, client: int) -> Traits:
        """The fixed traits of a client."""
        trait_values = self._drawn
        return Traits(
            id=client,
            num_examples=int(self.num_examples[client]),
            retention_ratio=float(trait_values["retention_ratio"][client]),
            examples_per_s=float(trait_values["examples_per_s"][client]),
            uplink_bps=float(trait_values["uplink_mbps"][client]) * 1e6,
            downlink_bps=float(trait_values["downlink_mbps"][client]) * 1e6,
            retention_given=self.settings.retention_ratio is not None,
            work_share=float(self.work_shares[client]),
        )

    def seen(self, round_number: int) -> Seen:
        """What the server may know before a round."""
        return Seen(round_number, self.num_examples[: len(self)], self._drawn["examples_per_s"][: len(self)])

    def sample_round(self, round_number: int, everyone: bool = False, choose: Choose | None = None) -> Participation:
        """Draw who is selected in a round and who drops out.

        Only available clients are selected: all of them if `everyone` is True, else those that `choose` names (None:
        uniformly, without replacement), which gets the available clients, the number wanted and the round's generator.
        """
        reachable = available(self.availability, len(self), self.seed, round_number)
        candidates = np.flatnonzero(reachable)
        choose = choose or partial(Uniform().choose, {}, self.seen(round_number))
        draws = seeding.generator(self.seed, round_number, purpose="participants")
        selected = candidates.tolist() if everyone else sorted(choose(candidates, self.settings.num_selected, draws))
        return Participation(self.drawn_statuses(round_number, selected), np.flatnonzero(~reachable))

    def slot(self, second: float) -> int:
        """The round of availability at this second of a run that is not in rounds."""
        # A slot begins at a product that may be rounded down.
        return math.floor(second / self.settings.availability_s + 1e-9)

    def next_slot_s(self, second: float) -> float:
        """The second at which the available clients change next; infinite if all are always available."""
        return math.inf if self.availability is None else (self.slot(second) + 1) * self.settings.availability_s

    def drawn_statuses(self, round_number: int, clients: Sequence[int]) -> dict[int, ClientStatus]:
        """The statuses that clients, ascending, would have in a round, or in the flight of this number.

        The chances are independent; the first that hits decides.
        """
        statuses = dict.fromkeys(clients, ClientStatus.DELIVERED)
        chances = [getattr(self.settings, name) for name in DROPOUTS]
        if not (statuses and any(chances)):
            return statuses
        before, training = self._two_draws(round_number, "dropout", clients)
        download, upload = self._two_draws(round_number, "further faults", clients)
        hits = zip(DROPOUTS.values(), (before, download, training, upload), chances, strict=True)
        # The first status that hits is written last.
        for status, draws, chance in reversed([*hits]):
            statuses |= dict.fromkeys(np.asarray(clients)[draws < chance].tolist(), status)
        return statuses

    def _two_draws(self, round_number: int, purpose: str, clients: Sequence[int]) -> np.ndarray:
        """The two numbers in [0, 1) that each of these clients gets if all clients draw in turn, float64 [2, n]."""
        draws = seeding.generator(self.seed, round_number, purpose=purpose)
        first = clients[0]
        # A number takes one step.
        draws.bit_generator.advance(2 * first)  # pyright: ignore[reportAttributeAccessIssue]
        return draws.random((clients[-1] + 1 - first, 2))[np.asarray(clients) - first].T

    @cached_property
    def work_shares(self) -> np.ndarray:
        """By client, float64 [clients.count]: speed over the median speed of those that rounds ask, at most 1; 1 where
        all do the full work."""
        speeds = self._drawn["examples_per_s"]
        shares = np.minimum(1.0, speeds / np.median(speeds[: len(self)]))
        return shares if self.settings.work == "capacity" else np.ones(len(speeds))

    @cached_property
    def retention_groups(self) -> list[float]:
        """The different retention ratios of all clients, ascending; [] if the experiment gives none."""
        return [] if self.settings.retention_ratio is None else np.unique(self._drawn["retention_ratio"]).tolist()

    @cached_property
    def _drawn(self) -> dict[str, np.ndarray]:
        """Each trait's values by name, float64 [clients.count]; 1 where the experiment gives none.

        The unseen clients get values as if they were all, so that those of the others do not depend on them.
        """
        settings = {name: getattr(self.settings, name) for name in TRAITS}
        groups = ((len(self), ""), (self.settings.num_unseen, "unseen "))
        return {
            name: np.concatenate(
                [values(1.0 if setting is None else setting, count, self.seed, group + name) for count, group in groups]
            )
            for name, setting in settings.items()
        }

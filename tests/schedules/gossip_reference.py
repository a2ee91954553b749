"""An event-driven simulator in numpy of peers on their own clocks, on quadratics: inboxes, and AD-PSGD's pairs.

A heap holds what happens: arrivals of messages, ends of trainings and transfers, openings of slots of availability. At
one moment all arrivals come first, then ends, then starts, each by ascending peer. Nothing of rayfl computes here but
the draws that both sides must share: batches, partners, who is available.
"""

import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rayfl.determinism import seeding
from rayfl.population.availability import available
from rayfl.rounds.setup import Setup
from tests.contracts.seams.closed_form import batches, start
from tests.contracts.seams.quadratic import TRAIN
from tests.methods.plain_peers import matrix

NUM_PEERS, BITS = len(TRAIN), 10 * 32
ARRIVAL, END, OPENING = range(3)


class Closed(NamedTuple):
    """A round when it closes: its second, all models [4, 10] then and after each peer's last training, ages by peer."""

    second: float
    x: np.ndarray
    y: np.ndarray
    ages: dict[int, float]


def twelve_digits(second: float) -> float:
    """Times that differ only by rounding are one moment."""
    return float(np.format_float_scientific(second, precision=11))


class Peers:
    """Peers and the heap of what will happen."""

    def __init__(
        self,
        here: Setup,
        latency_s: float,
        share: Callable[[float], float],
        combine: Callable[[np.ndarray, np.ndarray, int], np.ndarray] = lambda rows, weights, own: weights @ rows,
    ) -> None:
        self.here, self.latency_s, self.share, self.combine = here, latency_s, share, combine
        self.x = np.tile(start(here), (NUM_PEERS, 1))
        self.begun, self.trained = self.x.copy(), self.x.copy()
        self.counts, self.num_ends, self.done, self.round = [0] * NUM_PEERS, 0, 0, 0
        self.waiting, self.free_s = set(range(NUM_PEERS)), [0.0] * NUM_PEERS
        self.inboxes: list[dict[int, tuple[int, np.ndarray]]] = [{} for _ in range(NUM_PEERS)]
        self.heap: list[tuple] = []
        self.ages: dict[int, float] = {}
        self.changes = [0] * NUM_PEERS
        self.partners: dict[int, int] = {}

    def put(self, second: float, kind: int, *what: object) -> None:
        heapq.heappush(self.heap, (twelve_digits(second), kind, *what))

    def is_here(self, i: int, second: float) -> bool:
        population = self.here.population
        slot = population.slot(second)
        return bool(available(population.availability, NUM_PEERS, population.seed, slot)[i])

    def change(self, i: int) -> np.ndarray:
        """delta of the training from `begun`."""
        hyper, y = self.here.method.innermost.hyper.model_dump(), self.begun[i].copy()
        for batch in batches(
            self.here, self.counts[i], i, epochs=hyper["epochs"], steps=hyper["steps"], batch_size=hyper["batch_size"]
        ):
            y -= hyper["lr"] * hyper["lr_decay"] ** self.round_begun[i] * batch.gradient(y)
        return self.begun[i] - y

    def seconds(self, i: int) -> float:
        """The time of a training."""
        hyper = self.here.method.innermost.hyper.model_dump()
        examples = TRAIN[i] * hyper["epochs"] if hyper["epochs"] else hyper["steps"] * hyper["batch_size"]
        return examples / self.here.population.traits(i).examples_per_s

    def run(self) -> list[Closed]:
        """All rounds of the experiment."""
        closed: list[Closed] = []
        second, is_empty, self.round_begun = 0.0, False, [0] * NUM_PEERS
        while True:
            ready = [i for i in sorted(self.waiting) if self.is_here(i, second)]
            # With nobody at work the round is over when others may be available.
            for i in () if is_empty else ready:
                self.mix(i)
            if self.done >= NUM_PEERS or is_empty:
                closed.append(Closed(second, self.x.copy(), self.trained.copy(), self.ages))
                self.ages, self.round, self.done = {}, self.round + 1, max(0, self.done - NUM_PEERS)
                if self.round == self.here.rounds:
                    return closed
            for i in () if is_empty else ready:
                self.waiting.remove(i)
                self.begin(i, second)
            if is_empty:
                is_empty = False
                continue
            if self.waiting:
                self.put(self.here.population.next_slot_s(second), OPENING)
            second, is_empty = self.heap[0][0], len(self.waiting) == NUM_PEERS and self.heap[0][1] == OPENING
            while self.heap and self.heap[0][0] == second and self.heap[0][1] != OPENING:
                _, kind, *what = heapq.heappop(self.heap)
                (self.end if kind == END else self.arrive)(second, *what)
            while self.heap and self.heap[0][:2] == (second, OPENING):
                heapq.heappop(self.heap)

    def begin(self, i: int, second: float) -> None:
        self.round_begun[i] = self.round
        self.begun[i] = self.x[i]
        self.put(second + self.seconds(i), END, i)

    def mix(self, i: int) -> None:
        """The newest message of each neighbour; the peer itself gets the weight of what is missing or too old."""
        if not self.counts[i] or not hasattr(self, "pending") or i not in self.pending:
            return
        self.pending.remove(i)
        assert self.here.topology is not None
        weights = matrix(self.here.topology, self.here.seed, self.round, range(NUM_PEERS))[i]
        heard, ages = {i: (1.0, self.x[i])}, []
        for j, (end, y) in self.inboxes[i].items():
            age = (self.num_ends - end) / NUM_PEERS
            if weights[j] and self.share(age):
                ages.append(age)
                heard[j] = weights[j] * self.share(age), y
        heard[i] = 1.0 - sum(weight for j, (weight, _) in heard.items() if j != i), self.x[i]
        senders = sorted(heard)
        rows, given = (np.array([heard[j][part] for j in senders]) for part in (1, 0))
        self.x[i] = self.combine(rows, given, senders.index(i)) if ages else self.x[i]
        self.ages |= {i: float(np.mean(ages))} if ages else {}

    pending: set[int]

    def end(self, second: float, i: int) -> None:
        """The peer has trained: copies of its model leave one after another."""
        self.x[i] = self.trained[i] = self.begun[i] - self.change(i)
        self.counts[i] += 1
        self.num_ends, self.done = self.num_ends + 1, self.done + 1
        self.waiting.add(i)
        self.pending = {*getattr(self, "pending", ()), i}
        leaves_s, traits = max(second, self.free_s[i]), self.here.population.traits(i)
        assert self.here.topology is not None
        hearers = np.flatnonzero(self.here.topology.receives(NUM_PEERS, self.here.seed, self.round)[:, i])
        for j in hearers.tolist():
            leaves_s += BITS / traits.uplink_bps
            down_s = BITS / self.here.population.traits(j).downlink_bps
            self.put(leaves_s + self.latency_s + down_s, ARRIVAL, j, i, self.num_ends, tuple(self.x[i]))
        self.free_s[i] = leaves_s

    def arrive(self, second: float, j: int, i: int, end: int, y: tuple[float, ...]) -> None:
        if end > self.inboxes[j].get(i, (0,))[0]:
            self.inboxes[j][i] = (end, np.array(y))


class Pairs(Peers):
    """AD-PSGD."""

    def mix(self, i: int) -> None:
        return

    def begin(self, i: int, second: float) -> None:
        if self.ended_s.get(i) == second:
            # From what its own averaging has left, whoever has changed its model since.
            begun = self.begun[i].copy()
            super().begin(i, second)
            self.begun[i] = begun
        else:
            super().begin(i, second)

    ended_s: dict[int, float] = {}

    def end(self, second: float, i: int) -> None:
        if i not in self.partners:
            assert self.here.topology is not None
            heard = np.flatnonzero(self.here.topology.receives(NUM_PEERS, self.here.seed, self.round)[i])
            near = [j for j in heard.tolist() if self.is_here(j, second)]
            draws = seeding.generator(self.here.seed, self.counts[i], i, "partner")
            if near:
                j = self.partners[i] = near[draws.integers(len(near))]
                mine, other = self.here.population.traits(i), self.here.population.traits(j)
                there = BITS / mine.uplink_bps + BITS / other.downlink_bps
                back = BITS / other.uplink_bps + BITS / mine.downlink_bps
                self.put(second + max(there, back) + self.latency_s, END, i)
                return
        delta, j = self.change(i), self.partners.pop(i, i)
        self.trained[i] = self.begun[i] - delta
        self.x[i] = self.x[j] = (self.x[i] + self.x[j]) / 2
        self.x[i] = self.x[i] - delta
        self.begun[i] = self.x[i]
        self.counts[i] += 1
        self.num_ends, self.done = self.num_ends + 1, self.done + 1
        self.ages[i] = float(self.changes[i])
        self.changes[i] = 0
        self.changes[j] += j != i
        self.waiting.add(i)
        self.ended_s = {**self.ended_s, i: second}

"""Flights: simulates the time between two updates of the server, under a schedule that collects from flights.

A flight is a client's download, training and upload. Its training depends only on the client's state and on what it has
received at the flight's start, and on random numbers keyed by the flight's number, so it can be computed at any later
time. When a flight ends depends on the training, and on the bits that it sends; the earliest end is known before.
Flights end in the order of (second, client): if the first of them is not trained yet, all flights under way are trained
in one wave. `UnderWay` does this, also for peers on their own clocks (wakes.py).

A client's state and the server's memory of it are replaced when its flight ends. At one moment flights end before
others begin. After each end the schedule says whether the server updates, so a client that begins downloads the model
of the last of these updates.

A client begins at most one flight between two updates, and none before it has received the reply to its last one. If no
flight is under way and no client can begin, the server updates with what has arrived. A client that drops out before
the download is never under way: another one begins in its place.

Only when a flight has ended is it known whether its update is one that evaluates. Unless all do, the trained model
stays with the flight until then: one model for each flight that has trained, in the object store of its worker. To
evaluate it at once would cost more if most updates do not evaluate. Checkpoints have neither models nor messages of
flights under way: a resumed run trains these flights again, with the same bits.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from rayfl import tree
from rayfl.compress.base import message_bits
from rayfl.determinism import seeding
from rayfl.determinism.addition_order import runs
from rayfl.errors import HookError
from rayfl.gather import Aggregate
from rayfl.population.availability import available
from rayfl.population.client import ClientStatus
from rayfl.population.sampling import Participation
from rayfl.rounds import label_counts
from rayfl.rounds.aggregation import add_messages, merge_sums
from rayfl.rounds.check_hooks import checked
from rayfl.rounds.downlinks import broadcast
from rayfl.rounds.executor import Job, Ref
from rayfl.rounds.participants import clients_named, train_jobs
from rayfl.rounds.run_state import Air, CurrentRound, Flight, RunState, server_inputs
from rayfl.rounds.simulated_clock import arrival_s, example_costs, moment, reply_s
from rayfl.rounds.worker_jobs import ClientOutputs, ClientResult, EvaluateTrainedJob, RoundInputs
from rayfl.schedules.base import AT_ONCE, NOT_YET, Now


@dataclass
class UnderWay(ABC):
    """The flights under way at a second of the simulated clock."""

    current: CurrentRound
    second: float
    flights: dict[int, Flight]
    queue: list[tuple[float, int, int]] = field(init=False)
    """A heap of (second, client, number) for each flight, and for earlier forms of it, which `first` skips."""
    drawn: dict[int, np.ndarray] = field(default_factory=dict, init=False)
    """What `reachable` returned last, by the round of availability."""

    def __post_init__(self) -> None:
        self.began_s = self.second
        self.queue = sorted((flight.ends_s, flight.client, flight.number) for flight in self.flights.values())

    def put(self, flight: Flight) -> None:
        """Add a flight that begins, or replace it by a later form of it."""
        self.flights[flight.client] = flight
        heapq.heappush(self.queue, (flight.ends_s, flight.client, flight.number))

    def first(self, due: float) -> Flight | None:
        """The flight that ends next, trained if it may end by `due`; None if no flight is under way."""
        while self.flights:
            ends_s, client, number = self.queue[0]
            flight = self.flights.get(client)
            if flight is None or (flight.ends_s, flight.number) != (ends_s, number):
                heapq.heappop(self.queue)
            elif flight.result is not None or ends_s > due:
                return flight
            else:
                self.train()
        return None

    def reachable(self) -> np.ndarray:
        """Boolean [num_clients], which nobody changes: whether the client is available."""
        population = self.current.setup.population
        slot = population.slot(self.second)
        if slot not in self.drawn:
            self.drawn = {slot: available(population.availability, len(population), population.seed, slot)}
        return self.drawn[slot]

    def status(self, number: int, client: int) -> ClientStatus:
        """The status that is drawn for a flight."""
        return self.current.setup.population.drawn_statuses(number, [client])[client]

    def start(self, number: int, began_s: float, result: ClientResult) -> None:
        """Let a flight of `result.client` begin; `result`: before its training.

        The earliest second at which it can end follows from the plan's work, unless this may turn out to be less.
        """
        setup, client, plan = self.current.setup, result.client, self.current.inputs.plan
        # A client that drops out after the download does no work; its state may shorten any work.
        may_be_less = setup.method.has_own_stages or setup.population.settings.sparse_speedup
        if not (may_be_less or result.status is ClientStatus.DROPPED_AFTER_DOWNLOAD):
            task = setup.local_task(client, number, plan.stages)
            work = {stage.name: task.planned(stage) for stage in plan.stages}
            ctx = replace(setup.context(self.current.number, plan, client, "client"), work=work)
            result = replace(result, work=work, costs=example_costs(setup, ctx, {}))
        most_s = setup.population.settings.deadline_s or NOT_YET
        earliest_s = moment(began_s + min(most_s, arrival_s(setup.population.traits(client), result)))
        self.put(Flight(number, client, self.current.number, began_s, earliest_s, earliest_s))

    def train(self) -> None:
        """Train all flights under way that are not trained yet, of all versions in one wave."""
        current, setup = self.current, self.current.setup
        jobs: list[Job] = []
        untrained = [flight for _, flight in sorted(self.flights.items()) if flight.result is None]
        for version in sorted({flight.version for flight in untrained}):
            numbers = {flight.client: flight.number for flight in untrained if flight.version == version}
            statuses = {client: self.status(number, client) for client, number in numbers.items()}
            own_inputs = None if version == current.number else current.executor.put(self.inputs_of(version))
            jobs += train_jobs(current, statuses, numbers, own_inputs, self.begun())
        for job, answer in zip(jobs, current.run(jobs), strict=True):
            outputs = ClientOutputs.unpack(setup.output_slots, job.work.trained, answer.outputs)
            for result in answer.result:
                flight = self.flights[result.client]
                back_s = flight.began_s + arrival_s(setup.population.traits(result.client), result)
                # A client without work may be done sooner, but its flight does not end before `earliest_s`.
                ends_s = max(flight.ends_s, moment(back_s))
                self.put(flight._replace(ends_s=ends_s, result=result, outputs=outputs.get(result.client)))

    def begun(self) -> RunState:
        """The run state with the clients' states from which flights under way began."""
        return self.current.run_state

    @abstractmethod
    def inputs_of(self, version: int) -> RoundInputs:
        """The inputs of clients that began with an earlier version than that of the round."""

    def timed(self, flight: Flight, result: ClientResult, **further: float) -> ClientResult:
        """The result with its flight's version, times and `further` metrics of it."""
        times = {"version": float(flight.version), "began_s": flight.began_s, "ended_s": flight.ends_s, **further}
        return replace(result, metrics={**result.metrics, **{f"flight/{name}": x for name, x in times.items()}})

    def evaluate(self, models: Mapping[int, Ref], began: Mapping[int, tuple[int, int]]) -> None:
        """Evaluate models after their training if this round evaluates; `began`: as in `EvaluateTrainedJob`."""
        current = self.current
        parts = runs([*models], current.calls_per_wave) if current.inputs.evaluated else ()
        works = [EvaluateTrainedJob({client: began[client] for client in part}) for part in parts]
        jobs = [Job(work, tuple(models[client] for client in work.clients)) for work in works]
        for answer in current.run(jobs) if jobs else ():
            current.ledger.add(answer.result)


def fly(current: CurrentRound) -> dict[str, Aggregate]:
    """Simulate flights until the schedule's next update. Returns the aggregates of what arrived, by message name."""
    before = current.run_state.air
    window = Window(current, before.second, dict(before.flights), before.next_number)
    while True:
        due, first = window.due(), window.first(window.second)
        if first is not None and first.ends_s <= window.second <= due:
            window.end(first)
        elif due <= window.second or window.go_on():
            return window.close()


def await_replies(current: CurrentRound) -> None:
    """Mark clients that get a reply after the update as busy until they have downloaded it."""
    traits, air = current.setup.population.traits, current.run_state.air
    busy_s = {
        client: moment(air.second + reply_s(traits(client), result))
        for client, result in sorted(current.ledger.results.items())
        if result.reply_bits
    }
    still = {client: until for client, until in air.busy_s.items() if until > air.second}
    current.run_state = replace(current.run_state, air=replace(air, busy_s={**still, **busy_s}))


@dataclass
class Window(UnderWay):
    """The time between two updates while it is simulated: the flights under way, and those that have ended."""

    next_number: int
    ended: dict[int, Flight] = field(default_factory=dict)

    @property
    def before(self) -> Air:
        """The air at the last update."""
        return self.current.run_state.air

    @property
    def now(self) -> Now:
        """What the server knows."""
        return Now(
            second=self.second,
            updated_s=self.began_s,
            version=self.current.number,
            under_way=len(self.flights),
            arrived=len(self._messages()),
            places=self.current.setup.population.settings.num_selected,
        )

    def _messages(self) -> dict[int, Flight]:
        """The ended flights whose messages are used in the update, by ascending client."""
        return {
            client: flight
            for client, flight in sorted(self.ended.items())
            if flight.result and flight.result.status is ClientStatus.DELIVERED
        }

    def _scale(self, flight: Flight) -> float | None:
        """The factor of a flight's message."""
        return checked(
            self.current.setup.schedule.scale,
            "a finite number, or None",
            lambda factor: factor is None or np.isfinite(factor),
        )(self.current.number - flight.version)

    def _idle(self) -> np.ndarray:
        """The clients that can begin, int64, ascending."""
        reachable = self.reachable().copy()
        busy = (client for client, until in self.before.busy_s.items() if until > self.second)
        reachable[[*self.flights, *self.ended, *busy]] = False
        return np.flatnonzero(reachable)

    def due(self) -> float:
        """The second of the next update, if nothing else happens.

        An update without a message is later than the update before it, so that no schedule makes them for ever.
        """
        due = moment(
            checked(self.current.setup.schedule.due, "a number of seconds", lambda s: not np.isnan(s))(self.now)
        )
        return due if due > self.began_s or self._messages() else NOT_YET

    def go_on(self) -> bool:
        """Let clients begin, and move the clock to what happens next. Returns whether that is the update."""
        lacks, due = self.begin(), self.due()
        first = self.first(due)
        ends_s = NOT_YET if first is None else first.ends_s
        busy_s = self.before.busy_s.values() if lacks else ()
        ready_s = min((s for s in busy_s if s > self.second), default=NOT_YET)
        opens_s = self.current.setup.population.next_slot_s(self.second) if lacks else NOT_YET
        if first is None and ready_s == due == NOT_YET:
            due, opens_s = (AT_ONCE if opens_s == NOT_YET else opens_s), NOT_YET
        next_s = min(ends_s, ready_s, opens_s)
        self.second = max(self.second, min(due, next_s))
        return due < next_s

    def begin(self) -> bool:
        """Let idle clients begin, as many as the schedule wants. Returns whether there were too few of them."""
        setup, state = self.current.setup, self.current.run_state.selection
        begins = checked(setup.schedule.begins, "a whole number", lambda count: isinstance(count, int | np.integer))
        while (wanted := begins(self.now)) > 0 and len(idle := self._idle()):
            draws = seeding.generator(setup.seed, self.next_number, purpose="participants")
            chosen = clients_named(
                setup.selection.choose, state, setup.population.seen(self.current.number), idle, wanted, draws
            )
            for number, client in enumerate(chosen, self.next_number):
                status = self.status(number, client)
                if status is ClientStatus.DROPPED_BEFORE_DOWNLOAD:
                    now, result = self.second, ClientResult(client, status)
                    self.ended[client] = Flight(number, client, self.current.number, now, now, now, result)
                else:
                    telling_s = label_counts.telling_s(self.current, [client]).get(client, 0.0)
                    self.start(
                        number,
                        self.second + telling_s,
                        ClientResult(client, status, downlink_bits=message_bits(self.current.inputs.message)),
                    )
            # If a selection draws nobody, the number still moves on, so that the next draw is a new one.
            self.next_number += max(1, len(chosen))
            if self.ended.keys().isdisjoint(chosen):
                return len(chosen) < wanted
        return wanted > 0

    def _server(self, version: int) -> tree.State:
        """The server's state of a version."""
        if version == self.current.number:
            return self.current.run_state.server
        return tree.to_tensors(self.current.executor.get(self.before.versions[version]))

    def inputs_of(self, version: int) -> RoundInputs:
        """See `UnderWay`."""
        setup = self.current.setup
        ctx = setup.context(version, setup.plan(version), seeding.NOBODY, "server")
        server = self._server(version)
        message, _ = broadcast(setup, server, {}, ctx)
        return server_inputs(setup, server, ctx, message)

    def end(self, flight: Flight) -> None:
        """End a flight: its message has arrived, or is dropped as too stale, and its state becomes the client's."""
        result = flight.result
        setup = self.current.setup
        assert result is not None
        del self.flights[flight.client]
        if result.status is ClientStatus.DELIVERED and self._scale(flight) is None:
            result = replace(result, status=ClientStatus.STALE, metrics={}, sums={})
        self.ended[flight.client] = flight._replace(result=result)
        if flight.outputs is not None and result.status.keeps_state:
            self.current.run_state = self.current.run_state.updated(setup.memory_slots, {flight.client: flight.outputs})

    def close(self) -> dict[str, Aggregate]:
        """End the window with an update: fill the ledger, keep the flights under way, and return what has arrived."""
        current, ledger, before = self.current, self.current.ledger, self.before
        ended = [flight for _, flight in sorted(self.ended.items())]
        statuses = {flight.client: self.status(flight.number, flight.client) for flight in ended}
        ledger.participation = Participation(statuses, np.flatnonzero(~self.reachable()))
        ledger.results = {flight.client: flight.result for flight in ended if flight.result}
        models = {
            flight.client: flight.outputs.model
            for flight in ended
            if flight.result
            and flight.result.status.keeps_state
            and flight.outputs
            and flight.outputs.model is not None
        }
        self.evaluate(models, {flight.client: (flight.version, flight.number) for flight in ended})
        for flight in ended:
            staleness, result = float(current.number - flight.version), ledger.results[flight.client]
            ledger.results[flight.client] = self.timed(flight, result, staleness=staleness)
        ledger.simulated_s = self.second - self.began_s
        if ledger.simulated_s:
            flown = sum(
                min(flight.ends_s, self.second) - max(flight.began_s, self.began_s)
                for flight in (*ended, *self.flights.values())
            )
            ledger.metrics["flight/idle_share"] = max(0.0, 1.0 - moment(flown / ledger.simulated_s / self.now.places))
        received = self._received()
        used = sorted({flight.version for flight in self.flights.values()})
        state = current.executor.put(tree.to_arrays(current.run_state.server)) if current.number in used else None
        versions = {version: before.versions.get(version, state) for version in used}
        air = Air(self.second, self.next_number, self.flights, before.busy_s, versions)
        current.run_state = replace(current.run_state, air=air)
        return received

    def _received(self) -> dict[str, Aggregate]:
        """The aggregates of the messages, by name, with each message scaled by its staleness."""
        current, setup, flights = self.current, self.current.setup, self._messages()
        scales = {client: self._scale(flight) or 0.0 for client, flight in flights.items()}
        messages = {client: flight.outputs.message for client, flight in flights.items() if flight.outputs}
        mixes = setup.schedule.mixes_models
        if mixes and len(flights) > 1:
            raise HookError(
                f"{setup.schedule.due.__qualname__} waits for several messages; mixes_models allows one an update"
            )
        received = merge_sums(current, add_messages(current, messages, {} if mixes else scales))
        if mixes and flights:
            ((client, flight),) = flights.items()
            name, model = setup.method.difference, setup.server_half.model
            now, then = (model(self._server(version)) for version in (current.number, flight.version))
            moved = {key: value + (now[key] - then[key]) for key, value in received[name].result.items()}
            received[name] = replace(received[name], sums=(), weights={}, known=tree.scale(moved, scales[client]))
        return received

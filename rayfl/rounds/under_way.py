"""What clients with a server and peers on their own clocks share outside rounds: flights under way, which end one after
another, and their training in waves.

A flight's training depends only on the client's state and on what it has received at the flight's start, and on random
numbers keyed by the flight's number, so it can be computed at any later time. When a flight ends may depend on the
training; the earliest end is known before. Flights end in the order of (second, client): if the first of them is not
trained yet, all flights under way are trained in one wave.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from rayfl.determinism.addition_order import runs
from rayfl.determinism.seeding import NOBODY
from rayfl.methods.base import Plan
from rayfl.population.availability import available
from rayfl.population.client import ClientStatus
from rayfl.rounds.air import Flight
from rayfl.rounds.engines import LocalTask
from rayfl.rounds.executor import Job, Ref
from rayfl.rounds.run_state import CurrentRound, RunState
from rayfl.rounds.simulated_clock import arrival_s, example_costs, moment
from rayfl.rounds.train import train_jobs
from rayfl.rounds.worker_jobs import ClientOutputs, ClientResult, EvaluateTrainedJob


@dataclass
class UnderWay(ABC):
    """The flights under way at a second of the simulated clock."""

    current: CurrentRound
    second: float
    flights: dict[int, Flight]
    queue: list[tuple[float, int, int]] = field(init=False)
    """A heap of (second, client, number) for each flight, and for earlier forms of it, which `first` skips."""
    drawn: tuple[int, np.ndarray] = field(default=(NOBODY, np.empty(0)), init=False)
    """The round of availability for which `reachable` was called last, and what it returned."""

    def __post_init__(self) -> None:
        self.queue = [(flight.ends_s, flight.client, flight.number) for flight in self.flights.values()]
        heapq.heapify(self.queue)

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
        """Boolean [num_clients], read-only: whether the client is available."""
        population = self.current.setup.population
        slot = population.slot(self.second)
        if slot != self.drawn[0]:
            reachable = available(population.availability, len(population), population.seed, slot)
            reachable.flags.writeable = False
            self.drawn = slot, reachable
        return self.drawn[1]

    def status(self, number: int, client: int) -> ClientStatus:
        """The status that is drawn for a flight."""
        return self.current.setup.population.drawn_statuses(number, [client])[client]

    def planned(self, flight: Flight, plan: Plan, result: ClientResult) -> ClientResult:
        """The flight's result before its training, with the work of `plan` unless it may turn out to be less."""
        setup, client = self.current.setup, flight.client
        # A client that drops out after the download does no work; its state may shorten any work.
        may_be_less = setup.method.has_own_stages or setup.population.settings.sparse_speedup
        if result.status is ClientStatus.DROPPED_AFTER_DOWNLOAD or may_be_less:
            return result
        share = setup.population.traits(client).work_share
        data = setup.data(client)
        task = LocalTask(client, flight.number, setup.seed, dict, data, plan.stages, setup.device, share=share)
        work = {stage.name: task.planned(stage) for stage in plan.stages}
        ctx = replace(setup.context(flight.version, plan, client, "client"), work=work)
        return replace(result, work=work, costs=example_costs(setup, ctx, {}))

    def train(self) -> None:
        """Train all flights under way that are not trained yet, of all versions in one wave."""
        current, setup = self.current, self.current.setup
        jobs: list[Job] = []
        untrained = [flight for _, flight in sorted(self.flights.items()) if flight.result is None]
        begun = self.begun()
        for version in sorted({flight.version for flight in untrained}):
            numbers = {flight.client: flight.number for flight in untrained if flight.version == version}
            statuses = {client: self.status(number, client) for client, number in numbers.items()}
            jobs += train_jobs(current, statuses, numbers, self.put_inputs(version), begun)
        for job, answer in zip(jobs, current.run(jobs), strict=True):
            outputs = ClientOutputs.unpack(setup.output_slots, job.work.trained, answer.outputs)
            for result in answer.result.results:
                flight = self.flights[result.client]
                traits = setup.population.traits(result.client)
                # A client without work may be done sooner, but its flight does not end before `earliest_s`.
                ends_s = max(flight.ends_s, moment(flight.began_s + arrival_s(traits, result)))
                self.put(flight._replace(ends_s=ends_s, result=result, outputs=outputs.get(result.client)))

    def begun(self) -> RunState:
        """The run state with the clients' states from which flights under way began."""
        return self.current.run_state

    @abstractmethod
    def put_inputs(self, version: int) -> Ref:
        """The inputs of clients that began with another version; None for those of the round itself."""

    def evaluate(self, models: Mapping[int, Ref], began: Mapping[int, tuple[int, int]]) -> None:
        """Evaluate models after their training; `began`: by client as in `EvaluateTrainedJob`."""
        current = self.current
        parts = runs([*models], current.calls_per_wave)
        works = [EvaluateTrainedJob({client: began[client] for client in part}) for part in parts]
        jobs = [Job(work, tuple(models[client] for client in work.clients)) for work in works]
        for answer in current.run(jobs) if jobs else ():
            current.ledger.add(answer.result)

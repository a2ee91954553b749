"""RunState: what is kept from one round to the next. Round: one round while it runs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rayfl import tree
from rayfl.determinism.addition_order import runs
from rayfl.determinism.global_draws import apart
from rayfl.methods.base import Context, Message, State
from rayfl.rounds.air import Air, Clocks
from rayfl.rounds.executor import Executor, Job, JobResult, Ref
from rayfl.rounds.ledger import Ledger
from rayfl.rounds.setup import Setup
from rayfl.rounds.worker_jobs import ClientJob, ClientOutputs, RoundInputs, Slots
from rayfl.untyped import Anything


@dataclass(frozen=True)
class RunState:
    """What is kept from one round to the next: the next round's number, the states of the server, the selection, a
    compressed downlink and the early stop, references to clients' states and to the server's memories of them, the
    flights under way, and those of peers on their own clocks.

    A client that has not taken part yet is in neither `states` nor `server_memories`. `changed`: by client, the round
    in which they last changed; clients that have not changed since the run was started or resumed may be missing.
    """

    round: int = 0
    server: State = field(default_factory=dict)
    selection: State = field(default_factory=dict)
    downlink: State = field(default_factory=dict)
    stop: tree.ArrayTree = field(default_factory=dict)
    states: Mapping[int, Ref] = field(default_factory=dict)
    server_memories: Mapping[int, Ref] = field(default_factory=dict)
    air: Air = field(default_factory=Air)
    clocks: Clocks = field(default_factory=Clocks)
    changed: Mapping[int, int] = field(default_factory=dict)

    def inputs(self, slots: Slots, clients: Sequence[int]) -> tuple[Ref, ...]:
        """References to the states and memories of clients, which a call reads; None before a client's first round."""
        kept = (ClientOutputs(self.states.get(client), self.server_memories.get(client)) for client in clients)
        return tuple(ref for outputs in kept for ref in outputs.pack(slots))

    def updated(self, slots: Slots, outputs: Mapping[int, ClientOutputs]) -> "RunState":
        """The run state with the new states and memories of these clients."""
        if not slots:
            return self
        states = {client: output.state for client, output in outputs.items()} if slots.state else {}
        memories = {client: output.memory for client, output in outputs.items()} if slots.memory else {}
        return replace(
            self,
            states={**self.states, **states},
            server_memories={**self.server_memories, **memories},
            changed={**self.changed, **dict.fromkeys(outputs, self.round)},
        )


LARGE_MODEL = 2_000_000
"""Above this number of parameters, sending a partial sum costs more than waiting for the slowest call."""

MANY_WORKERS = 32
"""Above this number of workers a second call of each costs more than it evens out: one process sends all calls, and
needs up to 2 ms for each."""


def server_inputs(setup: Setup, server: State, ctx: Context, message: Message) -> RoundInputs:
    """The inputs of clients that begin in the round of `ctx`; `server` is the server's state before that round."""
    return RoundInputs(
        round=ctx.round,
        plan=ctx.plan,
        message=message,
        server=tree.to_arrays(server) if setup.server_half.overrides("personal_message") else None,
        evaluated=setup.evaluated(ctx.round),
    )


@dataclass
class CurrentRound:
    """One round while it runs.

    `inputs`: what the workers read in the next wave of calls; `change_inputs` replaces them. `run_state`: replaced
    whenever clients have new states; the run state before the round is never changed. `ledger`: what clients did.
    """

    setup: Setup
    executor: Executor
    run_state: RunState
    inputs: RoundInputs
    ledger: Ledger
    _put: Ref = field(default=None, init=False)

    @property
    def number(self) -> int:
        """The number of this round, from 0."""
        return self.inputs.round

    def change_inputs(self, **fields: Anything) -> None:
        """Replace fields of `inputs` for the calls that follow."""
        self.inputs, self._put = replace(self.inputs, **fields), None

    def run(self, jobs: Sequence[Job]) -> list[JobResult]:
        """Run one wave of jobs. All waves with the same `inputs` share one object."""
        if self._put is None:
            self._put = self.executor.put(self.inputs)
        # Whoever runs them, the round's own draws go on afterwards.
        with apart():
            return self.executor.run(self._put, jobs)

    @property
    def calls_per_wave(self) -> int:
        """Calls that a wave is cut into: two per worker, which evens out unequal clients; one if models are large or
        workers many."""
        is_large = tree.num_entries(self.setup.initial) > LARGE_MODEL
        return self.executor.num_workers * (1 if is_large or self.has_many_workers else 2)

    @property
    def has_many_workers(self) -> bool:
        """Whether there are so many workers that a second call of each costs more than it evens out."""
        return self.executor.num_workers > MANY_WORKERS

    def client_jobs(
        self, kind: type[ClientJob], clients: Sequence[int], slots: Slots, outputs: int = 0, kept: bool = False
    ) -> list[Job]:
        """Jobs of one kind that together cover `clients`, with what is kept of each client.

        `outputs`: the number of values that a call leaves behind per client; `kept`: whether they are those of `slots`.
        """
        return [
            Job(
                kind(part),
                self.run_state.inputs(slots, part),
                outputs * len(part),
                slots.kept(len(part)) if kept else (),
                self.setup.together if kept else 1,
            )
            for part in runs(clients, self.calls_per_wave)
        ]

    def keep(self, slots: Slots, jobs: Iterable[Job], answers: Iterable[JobResult]) -> None:
        """Take the new states and memories of clients, which are the outputs of these jobs, into the run state."""
        outputs: dict[int, ClientOutputs] = {}
        for job, answer in zip(jobs, answers, strict=True):
            outputs |= ClientOutputs.unpack(slots, job.work.clients, answer.outputs)
        self.run_state = self.run_state.updated(slots, outputs)

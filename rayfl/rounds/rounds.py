"""Runs the rounds of an experiment on an `Executor`.

No method's name appears here. Randomness is keyed by (seed, round, client, purpose) and additions follow
`determinism/addition_order.py`, so a round's result does not depend on where its jobs ran.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from rayfl import tree
from rayfl.compress.base import message_bits
from rayfl.data.transfer import to_device
from rayfl.determinism.global_draws import key, keyed, preserved
from rayfl.determinism.seeding import NOBODY
from rayfl.determinism.torch_flags import fixed
from rayfl.errors import RayflError, did_you_mean, naming_round
from rayfl.gather import Aggregate
from rayfl.methods.base import Context
from rayfl.population.client import ClientStatus
from rayfl.population.sampling import Participation
from rayfl.rounds import downlinks, flights, label_counts
from rayfl.rounds.check_hooks import A_STATE, HookInputs, checked, checked_hook
from rayfl.rounds.early_stop import StopRule
from rayfl.rounds.evaluate_round import compare_masks, evaluate
from rayfl.rounds.executor import Executor
from rayfl.rounds.ledger import Ledger, RoundRecord, record, server_comm
from rayfl.rounds.own_clocks import Inboxes, Meetings
from rayfl.rounds.participants import ask, learn, server_participants, train
from rayfl.rounds.peer_exchange import mix
from rayfl.rounds.run_state import CurrentRound, RunState, server_inputs
from rayfl.rounds.setup import Setup
from rayfl.rounds.worker_jobs import ReplyJob, RoundInputs
from rayfl.settings import require_read


def first_run_state(setup: Setup) -> RunState:
    """The run state before round 0."""
    with naming_round(0), keyed(setup.seed, purpose="first server state"):
        server = {} if setup.is_peer else checked_hook(setup.server_half.init_server)(setup.initial)
    return RunState(server=server, selection=checked(setup.selection.init, *A_STATE)(setup.num_clients))


def simulate(
    setup: Setup,
    executor: Executor,
    on_round: Callable[[RoundRecord, RunState], None],
    run_state: RunState | None = None,
    rounds: int | None = None,
) -> RunState:
    """Run from `run_state` (None: from the start) to `rounds` (None: the experiment's); `on_round` after each round.

    Raise UnusedSetting after the first round that evaluates, if a setting of `Setup.unread` is still unread.
    """
    with fixed(setup.threads, torch.device("cpu")), preserved():
        # After a resume it is not known which settings the earlier rounds have read.
        unread = setup.unread if run_state is None else ()
        run_state = run_state or first_run_state(setup)
        while not is_over(setup, run_state) and (rounds is None or run_state.round < rounds):
            begun = time.perf_counter()
            with naming_round(run_state.round), keyed(setup.seed, run_state.round, purpose="round"):
                run_state, recorded = play_round(setup, executor, run_state)
            recorded = replace(recorded, row=replace(recorded.row, wall_s=time.perf_counter() - begun))
            on_round(recorded, run_state)
            if unread and setup.evaluated(recorded.row.round) and (read := executor.settings_read()) is not None:
                require_read(unread, read, recorded.row.round)
                unread = ()
    return run_state


def play_round(setup: Setup, executor: Executor, run_state: RunState) -> tuple[RunState, RoundRecord]:
    """One round and its evaluation: the run state after it, and its rows for the records."""
    current = (peer_round if setup.is_peer else server_round)(setup, executor, run_state)
    evaluate(current)
    recorded = record(setup, current.number, current.ledger)
    run_state = replace(current.run_state, round=current.number + 1)
    if setup.stop is not None and current.inputs.evaluated:
        run_state = replace(run_state, stop=stop_state(setup.stop, run_state.stop, recorded))
    if setup.evaluation.masks and is_over(setup, run_state):
        compare_masks(current)
        recorded = record(setup, current.number, current.ledger)
    return run_state, recorded


def is_over(setup: Setup, run_state: RunState) -> bool:
    """Whether all rounds are played, or an early stop has ended the run."""
    return run_state.round >= setup.rounds or (setup.stop is not None and setup.stop.reason(run_state.stop) != "")


def stop_state(stop: StopRule, before: tree.ArrayTree, recorded: RoundRecord) -> tree.ArrayTree:
    """The state of an early stop after a round that was evaluated; `before` if the round has no value of its metric.

    Raise RayflError if the first one has none.
    """
    values = {row.name: row.value for row in recorded.metrics if row.client is None}
    if stop.metric in values:
        return stop.after(before, values[stop.metric])
    if not before:
        known = did_you_mean(stop.metric, [name for name in values if name.partition("/")[2]])
        raise RayflError(f"={stop.metric!r} is not recorded in this experiment; {known}", ("stop", "metric"))
    return before


def ask_and_wait(current: CurrentRound) -> dict[str, Aggregate]:
    """Ask the clients that the selection chooses, and wait until all are back, gone or too late."""
    ask(current)
    participants = server_participants(current.setup, current.inputs.plan, current.ledger.participation)
    downloading = {*participants, *current.ledger.polled}
    begins = dict(current.inputs.begins)
    for client, telling_s in label_counts.telling_s(current, participants).items():
        begins[client] = begins.get(client, 0.0) + telling_s
    missed = downlinks.missed(current.run_state.downlink, current.inputs.message, downloading)
    current.change_inputs(missed=missed, begins=begins)
    received, _ = train(current, participants)
    return received


COLLECTORS: Mapping[str, Callable[[CurrentRound], dict[str, Aggregate]]] = {
    "rounds": ask_and_wait,
    "flights": flights.fly,
}
"""The ways to collect a server's messages, by the names in `Schedule.collects`: each returns what has arrived, by
message name, fills the ledger and keeps clients' new states."""


def server_round(setup: Setup, executor: Executor, run_state: RunState) -> CurrentRound:
    """A round of a server method: broadcast, local work and uploads as the schedule collects them, update, replies."""
    ctx = setup.context(run_state.round, setup.plan(run_state.round), NOBODY, "server")
    current = broadcast(setup, executor, run_state, ctx)
    received = COLLECTORS[setup.schedule.collects](current)
    learn(current)
    label_counts.bill(current)
    note_downloads(current)
    delivered = update(current, received, ctx)
    reply(current, delivered)
    if setup.schedule.collects == "flights":
        flights.await_replies(current)
    uploads = [current.ledger.results[client].num_values for client in delivered]
    downloads = [result.num_received for result in current.ledger.results.values()]
    current.ledger.metrics |= server_comm(uploads, downloads, setup.num_clients)
    return current


def peer_round(setup: Setup, executor: Executor, run_state: RunState) -> CurrentRound:
    """A round of a peer method: local work, then every peer mixes in its neighbours' messages.

    Of peers on their own clocks: what they do until as many trainings have ended as there are peers.
    """
    round_number = run_state.round
    plan = setup.plan(run_state.round)
    participation = setup.population.sample_round(round_number, everyone=True)
    inputs = RoundInputs(round_number, plan, evaluated=setup.evaluated(round_number))
    current = CurrentRound(setup, executor, run_state, inputs, Ledger(participation))
    if setup.on_own_clocks:
        (Meetings if setup.method.capabilities.in_pairs else Inboxes).at(current).play()
        return current
    _, messages = train(current, participation.statuses)
    if setup.topology is not None and plan.up:
        mix(current, messages)
    return current


def broadcast(setup: Setup, executor: Executor, run_state: RunState, ctx: Context) -> CurrentRound:
    """Begin a server round with the message that every participant downloads."""
    message, downlink = downlinks.broadcast(setup, run_state.server, run_state.downlink, ctx)
    inputs = server_inputs(setup, run_state.server, ctx, message)
    run_state = replace(run_state, downlink=downlink or run_state.downlink)
    return CurrentRound(setup, executor, run_state, inputs, Ledger(Participation({})))


def note_downloads(current: CurrentRound) -> None:
    """Note which clients have received the broadcast; a client that was cut off while it downloaded has not."""
    bits = message_bits(current.inputs.message)
    whole = {client: bits + missed.bits for client, missed in current.inputs.missed.items()}
    reached = [client for client, bits in whole.items() if current.ledger.result(client).downlink_bits >= bits > 0]
    current.run_state = replace(current.run_state, downlink=downlinks.received(current.run_state.downlink, reached))


def update(current: CurrentRound, received: Mapping[str, Aggregate], ctx: Context) -> list[int]:
    """The server's update with what has arrived. Returns the clients that delivered, ascending."""
    setup, server = current.setup, current.run_state.server
    delivered = sorted(
        client for client, result in current.ledger.results.items() if result.status is ClientStatus.DELIVERED
    )
    # Sums that were added here may have drawn, and workers decide where sums are added.
    key(setup.seed, current.number, purpose="server update")
    if setup.server_on_device:
        server = to_device(server, setup.device)
        received = {name: aggregate.on_device(setup.device) for name, aggregate in received.items()}
    given = HookInputs(setup.method)
    given.note("the server's state", server)
    server, metrics = checked_hook(setup.server_half.server_update)(server, received, delivered, ctx)
    given.require_unchanged()
    current.ledger.metrics |= metrics
    current.run_state = replace(current.run_state, server=server)
    return delivered


def reply(current: CurrentRound, delivered: Sequence[int]) -> None:
    """Send the server's replies, if it makes any, to the clients that delivered, which receive them in the same
    round."""
    if not (current.setup.server_half.overrides("reply") and current.inputs.plan.down):
        return
    slots = current.setup.memory_slots
    current.change_inputs(message={}, server=tree.to_arrays(current.run_state.server))
    jobs = current.client_jobs(ReplyJob, delivered, slots, len(slots), kept=True)
    answers = current.run(jobs)
    for answer in answers:
        current.ledger.add(answer.result)
    current.keep(slots, jobs, answers)

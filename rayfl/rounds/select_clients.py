"""Chooses the clients of a round by the experiment's selection: polls candidates before, and informs it afterwards.

A polled client downloads the broadcast, computes the loss of the server's model on its train examples, and reports it
in 32 bits. Training begins when all reports are back; polled clients that are then chosen have the broadcast already.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rayfl import tree
from rayfl.compress.base import message_bits
from rayfl.errors import HookError, RayflError
from rayfl.population.client import Traits
from rayfl.rounds import downlinks
from rayfl.rounds.check_hooks import A_STATE, checked, checked_hook
from rayfl.rounds.run_state import CurrentRound
from rayfl.rounds.simulated_clock import arrival_s
from rayfl.rounds.worker_jobs import ClientResult, Missed, PollJob, Slots, num_values
from rayfl.selections.base import Answer, Seen, Selection

REPORT_BITS = 32
"""A loss, as float32."""
KEY = ("selection",)
LOSS = "train/loss"
"""The client metric that is reported to the server."""


def ask(current: CurrentRound) -> None:
    """Choose the clients of a server round, after a poll if the selection has candidates, into the round's ledger.

    The bills of the poll go into the ledger, and the seconds from which polled clients can train into the inputs.
    """
    setup, state, selection = current.setup, current.run_state.selection, current.setup.selection
    seen = setup.population.seen(current.number)

    def choose(available: np.ndarray, wanted: int, draws: np.random.Generator) -> Sequence[int]:
        candidates = clients_named(selection.candidates, state, seen, available, wanted, draws)
        losses = poll(current, candidates) if candidates else {}
        return clients_named(selection.choose, state, replace(seen, losses=losses), available, wanted, draws)

    current.ledger.participation = setup.population.sample_round(current.number, choose=choose)


def poll(current: CurrentRound, candidates: Sequence[int]) -> dict[int, float]:
    """The losses that candidates report, by client."""
    setup, message, server = current.setup, current.inputs.message, current.run_state.server
    if not (setup.method.capabilities.has_global_model and (model := checked_hook(setup.server_half.model)(server))):
        raise RayflError(
            " polls clients by the server's model, but with this method, or with [parts], no client has that model; "
            "choose another one",
            KEY,
        )
    current.change_inputs(message={}, model=tree.to_arrays(model))
    answers = current.run(current.client_jobs(PollJob, candidates, Slots()))
    polled = dict[int, ClientResult]()
    owed = downlinks.missed(current.run_state.downlink, message, candidates)
    bits, values = message_bits(message), num_values(message)
    for result in (result for answer in answers for result in answer.result):
        late = owed.get(result.client, Missed())
        polled[result.client] = replace(
            result, billed_bits=REPORT_BITS, downlink_bits=bits + late.bits, num_received=values + late.values
        )
    traits = {client: setup.population.traits(client) for client in polled}
    end = max(arrival_s(traits[client], result) for client, result in polled.items())
    # A polled client that trains downloads nothing more, but `arrival_s` will count its download.
    begins = {client: end - result.downlink_bits / traits[client].downlink_bps for client, result in polled.items()}
    current.change_inputs(message=message, model=None, begins=begins)
    current.ledger.polled = polled
    return {client: loss for client, result in polled.items() if (loss := result.metrics["poll/loss"]) is not None}


def learn(current: CurrentRound) -> None:
    """Bill the poll and the reports of this round, and let the selection observe the selected clients."""
    setup, ledger, selection = current.setup, current.ledger, current.setup.selection
    for client, polled in ledger.polled.items():
        asked = client in ledger.results
        traits = setup.population.traits(client)
        ledger.results[client] = _with_poll(ledger.result(client), asked, polled, traits)
    if type(selection).observe is Selection.observe and not selection.hears_losses:
        return
    answers: list[Answer] = []
    for client in ledger.participation.selected:
        result = ledger.result(client)
        loss = None
        traits = setup.population.traits(client)
        if selection.hears_losses and result.status == "delivered":
            if (loss := result.metrics.get(LOSS)) is None:
                name = type(setup.method).__name__
                raise RayflError(f" {selection.name!r} needs {LOSS}, which {name} does not report", KEY)
            result = ledger.results[client] = replace(result, billed_bits=result.billed_bits + REPORT_BITS)
        answers.append(Answer(client, traits.num_examples, loss, arrival_s(traits, result)))
    observed = checked(selection.observe, *A_STATE)(current.run_state.selection, current.number, answers)
    current.run_state = replace(current.run_state, selection=observed)


def clients_named(
    hook: Callable[[tree.State, Seen, np.ndarray, int, np.random.Generator], Sequence[int]],
    state: tree.State,
    seen: Seen,
    available: np.ndarray,
    wanted: int,
    draws: np.random.Generator,
) -> list[int]:
    """The clients that a hook names, ascending. Raise HookError unless each is available, and named once."""
    named = checked(hook, "clients, by their numbers", lambda returned: [*map(int, returned)] == [*returned])
    clients = sorted(int(client) for client in named(state, seen, available, wanted, draws))
    if len({*clients}) < len(clients) or not np.isin(np.array(clients, np.int64), available, kind="table").all():
        raise HookError(f"{hook.__qualname__} names clients {clients}; name available clients, each once")
    return clients


def _with_poll(result: ClientResult, asked: bool, polled: ClientResult, traits: Traits) -> ClientResult:
    """A client's result with the bill of its poll. A client that was then selected has downloaded the broadcast only
    once, and the time of its poll lies before `begins_s`."""
    if not asked:
        return replace(polled, status=result.status, metrics={})
    return replace(
        result,
        billed_bits=result.billed_bits + polled.billed_bits,
        begins_s=result.begins_s - polled.billed_bits / traits.uplink_bps,
        work={**result.work, **polled.work},
        costs={**result.costs, **dict.fromkeys(polled.work, 0.0)},
    )

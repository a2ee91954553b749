"""Collects the messages of a server's update in the way that the schedule names (`Schedule.collects`), and checks that
the schedule fits the experiment."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from rayfl.errors import RayflError
from rayfl.gather import Aggregate
from rayfl.rounds import downlinks, flights, own_clocks
from rayfl.rounds.run_state import CurrentRound
from rayfl.rounds.select_clients import ask
from rayfl.rounds.setup import Setup
from rayfl.rounds.train import server_participants, train


class Collector(NamedTuple):
    """One way to collect messages.

    collect: from the broadcast to what has arrived, by message name; it fills the ledger and keeps clients' new states.
    replied: called when the server has replied to those who delivered. check: raises RayflError for settings that this
    way cannot use; it takes the name of the method's class.
    """

    collect: Callable[[CurrentRound], dict[str, Aggregate]]
    replied: Callable[[CurrentRound], None]
    check: Callable[[Setup, str], None]


def ask_and_wait(current: CurrentRound) -> dict[str, Aggregate]:
    """Ask the clients that the selection chooses, and wait until all are back, gone or too late."""
    ask(current)
    participants = server_participants(current.setup, current.inputs.plan, current.ledger.participation)
    downloading = {*participants, *current.ledger.polled}
    current.change_inputs(missed=downlinks.missed(current.run_state.downlink, current.inputs.message, downloading))
    received, _ = train(current, participants)
    return received


def check_rounds(setup: Setup, name: str) -> None:
    """Reject settings that only flights use, and methods that cannot be in rounds."""
    if setup.method.capabilities.in_pairs:
        raise RayflError(
            f"={setup.schedule.name!r} cannot be used with {name}, whose peers average models in pairs, each at its "
            "own time; take schedule.name='gossip' with schedule.partners=1",
            ("schedule",),
        )
    clients = setup.population.settings
    if clients.is_given("availability_s"):
        raise RayflError(
            f"={clients.availability_s:g} does nothing, as clients are available by rounds, not seconds; remove it",
            ("clients", "availability_s"),
        )


COLLECTORS: Mapping[str, Collector] = {
    "rounds": Collector(ask_and_wait, lambda current: None, check_rounds),
    "flights": Collector(flights.fly, flights.await_replies, flights.check),
}
"""The ways to collect a server's messages, by the names in `Schedule.collects`."""


def check_schedule(setup: Setup, name: str) -> None:
    """Raise RayflError for settings that the schedule cannot use; `name`: of the method's class."""
    check = own_clocks.check if setup.on_own_clocks else COLLECTORS[setup.schedule.collects].check
    check(setup, name)

"""Peers on their own clocks: a round of them, and the settings that they cannot use."""

from dataclasses import replace

from rayfl.errors import RayflError
from rayfl.rounds.air import Peer
from rayfl.rounds.inboxes import Inboxes
from rayfl.rounds.meetings import Meetings
from rayfl.rounds.run_state import CurrentRound
from rayfl.rounds.setup import Setup
from rayfl.rounds.under_way import check_availability
from rayfl.schedules.base import PeerSchedule
from rayfl.topology.graphs import KnownWeights
from rayfl.topology.mixing import is_symmetric


def wake(current: CurrentRound) -> None:
    """Simulate peers on their own clocks for a round of the records."""
    before = current.run_state.clocks
    peers = [replace(peer) for peer in before.peers] or [Peer() for _ in range(current.setup.num_clients)]
    kind = Meetings if current.setup.method.capabilities.in_pairs else Inboxes
    kind(current, before.second, dict(before.flights), peers, before.num_ended, before.done).play()


def check(setup: Setup, name: str) -> None:
    """Reject settings that peers on their own clocks cannot use; `name`: of the method's class."""
    schedule, can, key = setup.schedule, setup.method.capabilities, ("schedule",)
    cannot = f"={schedule.name!r} cannot be used with"
    if not setup.is_peer:
        raise RayflError(f"{cannot} {name}, which has a server; take 'synchronous' or 'buffered'", key)
    if can.takes_stale < setup.method.innermost.capabilities.takes_stale:
        raise RayflError(f"{cannot} the wrapper around {name} (wrap, or [parts]); remove the wrapper", key)
    if not can.takes_stale or setup.peer_half.has_link_messages:
        raise RayflError(
            f"{cannot} {name}: peers need their neighbours' messages of the same round, or its class does not set "
            "takes_stale; take dpsgd, dispfl or adpsgd",
            key,
        )
    assert isinstance(schedule, PeerSchedule), "`PeerSchedule` alone collects by clocks"
    if can.in_pairs != (schedule.partners == 1):
        given = f"partners={schedule.partners}" if schedule.partners else "without partners = 1"
        others = "1: its peers average models in pairs" if can.in_pairs else "none, or take adpsgd"
        raise RayflError(f"{cannot} {name} {given}; give partners = {others}", key)
    check_availability(setup)
    if can.in_pairs and setup.topology is not None:
        graphs = [setup.topology.sparse(setup.num_clients, setup.seed, number) for number in range(2)]
        if not all(map(is_symmetric, graphs)):
            raise RayflError(
                f"={getattr(setup.topology, 'name', 'file')!r} has links that go one way, and peers of {name} change "
                "each other's models; take a symmetric one, such as ring",
                ("topology",),
            )
        given = [name for name in ("weights", "epsilon") if setup.topology.is_given(name)]
        if given := given + ["weighted"] * isinstance(setup.topology, KnownWeights):
            raise RayflError(" does nothing, as pairs average with weights 1/2; remove it", ("topology", given[0]))

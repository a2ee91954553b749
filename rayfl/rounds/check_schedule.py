"""Checks before a run that the schedule and the rest of the experiment go together."""

from collections.abc import Mapping

import numpy as np

from rayfl.compress.dense import Dense
from rayfl.determinism.seeding import generator
from rayfl.errors import refuse_if
from rayfl.rounds.check_hooks import A_STATE, checked
from rayfl.rounds.setup import Setup
from rayfl.schedules.base import PeerSchedule
from rayfl.topology.graphs import KnownWeights, Topology
from rayfl.topology.mixing import is_symmetric


def check_schedule(setup: Setup, name: str) -> None:
    """Raise RayflError for settings that the schedule cannot use; `name`: of the method's class."""
    schedule = setup.schedule
    mistakes = {"rounds": in_rounds, "flights": in_flights, "clocks": on_own_clocks}[schedule.collects](setup, name)
    cannot = f"={schedule.name!r} cannot be used with"
    refuse_if((is_wrong, "schedule", f"{cannot} {words}") for words, is_wrong in mistakes.items())
    clients = setup.population.settings
    by_rounds = schedule.collects == "rounds"
    why = "clients are available by rounds, not seconds" if by_rounds else "all clients are available"
    refuse_if(
        [
            (
                clients.is_given("availability_s") and (by_rounds or clients.availability is None),
                "clients.availability_s",
                f"={clients.availability_s:g} does nothing, as {why}; remove it",
            )
        ]
    )
    if schedule.collects == "flights":
        checked(schedule.check)(clients.num_selected, setup.num_clients)
    if setup.method.capabilities.in_pairs and setup.topology is not None:
        check_pairs(setup, setup.topology, name)


def in_rounds(setup: Setup, name: str) -> Mapping[str, bool]:
    """What cannot be used in rounds, in words, and whether it is given."""
    words = f"{name}, whose peers average models in pairs, each at its own time; take schedule.name='gossip' with "
    return {f"{words}schedule.partners=1": setup.method.capabilities.in_pairs}


def in_flights(setup: Setup, name: str) -> Mapping[str, bool]:
    """What cannot be used with flights, in words, and whether it is given."""
    can = setup.method.capabilities
    return {
        f"{name}, which has no server; take 'synchronous' or 'gossip'": setup.is_peer,
        f"the wrapper around {name} (wrap, or parts.buffers='average'), which needs the messages of one round "
        "together; remove the wrapper": can.takes_stale < setup.method.innermost.capabilities.takes_stale,
        f"{name}: its server needs the messages of one round together, or its class does not set takes_stale; take "
        "fedavg, fedprox, fedopt, ditto or fedpse": not can.takes_stale,
        f"{name}: its server does not subtract a mean of differences from a model (difference); take fedavg or "
        "fedprox": setup.schedule.mixes_models and not setup.method.difference,
        "clients.take_first, as the server does not wait for the slowest; remove it": (
            setup.population.settings.take_first is not None
        ),
        "a compressed downlink, as clients hold models of several versions; remove it": setup.downlink != Dense(),
        f"selection {setup.selection.name!r}, which polls clients before a round": polls(setup),
    }


def polls(setup: Setup) -> bool:
    """Whether the selection asks candidates before it chooses."""
    state = checked(setup.selection.init, *A_STATE)(setup.num_clients)
    candidates = checked(setup.selection.candidates, "clients, by their numbers", lambda named: len(named) >= 0)
    everyone = np.arange(setup.num_clients)
    wanted = setup.population.settings.num_selected
    return len(candidates(state, setup.population.seen(0), everyone, wanted, generator(setup.seed))) > 0


def on_own_clocks(setup: Setup, name: str) -> Mapping[str, bool]:
    """What peers on their own clocks cannot use, in words, and whether it is given."""
    schedule = setup.schedule
    can = setup.method.capabilities
    assert isinstance(schedule, PeerSchedule), "`PeerSchedule` alone collects by clocks"
    given = f"partners={schedule.partners}" if schedule.partners else "without partners = 1"
    others = "1: its peers average models in pairs" if can.in_pairs else "none, or take adpsgd"
    return {
        f"{name}, which has a server; take 'synchronous' or 'buffered'": not setup.is_peer,
        f"the wrapper around {name} (wrap, or [parts]); remove the wrapper": (
            can.takes_stale < setup.method.innermost.capabilities.takes_stale
        ),
        f"{name}: peers need their neighbours' messages of the same round, or its class does not set takes_stale; take "
        "dpsgd, dispfl or adpsgd": not can.takes_stale or (setup.is_peer and setup.peer_half.has_link_messages),
        f"{name} {given}; give partners = {others}": can.in_pairs != (schedule.partners == 1),
    }


def check_pairs(setup: Setup, topology: Topology, name: str) -> None:
    """Reject a graph whose links go one way, or have weights, for peers that average models in pairs."""
    graphs = [topology.sparse(setup.num_clients, setup.seed, number) for number in range(2)]
    given = [key for key in ("weights", "epsilon") if topology.is_given(key)]
    given += ["weighted"] * isinstance(topology, KnownWeights)
    refuse_if(
        [
            (
                not all(map(is_symmetric, graphs)),
                "topology",
                f"={getattr(topology, 'name', 'file')!r} has links that go one way, and peers of {name} change each "
                "other's models; take a symmetric one, such as ring",
            ),
            (
                given,
                ".".join(["topology", *given[:1]]),
                " does nothing, as pairs average with weights 1/2; remove it",
            ),
        ]
    )

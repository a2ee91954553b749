"""Measures the messages of a method: plays one small run and records every message of one client."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from docs.generate.markdown import code, table
from rayfl.choices.kinds import named
from rayfl.compress.base import Message
from rayfl.determinism.process import prepare_process
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.methods.adapters.flora import FLoRA
from rayfl.methods.base import Method, PeerHalf
from rayfl.methods.shared.low_rank import LowRank
from rayfl.testing.executors import fitting_graph, play
from rayfl.testing.watching import Log, buffer_bits, watched

MEASURED: Mapping[str, Any] = {
    "rounds": 4,
    "seed": 1,
    "data": {"name": "synthetic", "num_groups": 4, "samples_per_group": 40, "dim": 64},
    "partition": "natural",
    "clients": {"count": 4},
    "model": {"name": "mlp", "hidden": [10]},
}
"""The experiment that measures every method's messages."""
ADAPTERS: Mapping[str, Any] = {"adapters": {"layers": ["1"], "rank": 4, "trained": ["3.*"]}}
"""The same for methods that combine adapters."""

prepare_process()


@dataclass(frozen=True)
class Sent:
    """A message of a method: its name, direction, sizes in bytes, and the rounds in which it was sent."""

    name: str
    direction: str
    num_bytes: tuple[int, ...]
    rounds: tuple[int, ...]


@cache
def measured(name: str) -> tuple[tuple[Sent, ...], frozenset[str]]:
    """The messages that one client sends and receives in a small run, and the names of the recorded metrics."""
    kind = named(Method)[name]
    can = kind.capabilities
    has_graph = can.uses_graph or (kind.gather and issubclass(kind, PeerHalf))
    graph = {"topology": fitting_graph(can)} if has_graph else {}
    adapters = dict(ADAPTERS) if issubclass(kind, LowRank) else {}
    if issubclass(kind, FLoRA):
        adapters = {"adapters": {**ADAPTERS["adapters"], "merged": True}}
    pairs = {"schedule": {"name": "gossip", "partners": 1}} if can.in_pairs else {}
    setup, log = watched(prepare(Experiment(**MEASURED, **graph, **adapters, **pairs, method=name)))
    records, _ = play(setup)
    seen: dict[tuple[str, str], dict[int, int]] = {}
    for record in records:
        round_number = record.row.round
        down = [log.broadcasts.get(round_number, {}), *log.down.get((round_number, 0), [])]
        messages = [("up", sent_by_first(log, round_number)), *(("down", message) for message in down)]
        for direction, message in messages:
            for word, packet in message.items():
                key = (re.sub(r" \d+$", " N", word), "to each neighbour" if issubclass(kind, PeerHalf) else direction)
                sizes = seen.setdefault(key, {})
                sizes[round_number] = sizes.get(round_number, 0) + buffer_bits({word: packet}) // 8
    sent = [Sent(*key, tuple(sizes.values()), tuple(sizes)) for key, sizes in seen.items()]
    return tuple(sent), frozenset(metric.name for record in records for metric in record.metrics)


def sent_by_first(log: Log, round_number: int) -> Message:
    """What client 0 sent, to its first neighbour if each gets a message of its own."""
    links = [message for (number, sender, _), message in log.links.items() if (number, sender) == (round_number, 0)]
    return links[0] if links else log.up.get((round_number, 0), {})


def _num_parameters() -> int:
    setup = prepare(Experiment(**MEASURED, method="local"))
    return sum(array.size for array in setup.initial_arrays.values())


def sent_section(name: str) -> str:
    """The section about the messages and their sizes."""
    sent, _ = measured(name)
    size = _num_parameters()
    intro = (
        "Measured when this page was built, with default settings: the real buffers of one of four clients in "
        f"{MEASURED['rounds']} rounds, with a model of {size} parameters, {4 * size:,} bytes as fp32."
    )
    if named(Method)[name].capabilities.in_pairs:
        return "Two peers that meet send each other what `message_to_partner` returns, as it is (fp32).\n"
    if not sent:
        return f"{intro} It sent and received nothing.\n"
    rows = []
    for one in sent:
        low, high = min(one.num_bytes), max(one.num_bytes)
        rounds = "every" if len(one.rounds) == MEASURED["rounds"] else ", ".join(map(str, one.rounds))
        rows.append([code(one.name), one.direction, f"{low:,}" if low == high else f"{low:,} to {high:,}", rounds])
    return f"{intro}\n\n{table(['message', 'direction', 'bytes', 'rounds'], rows)}"

"""What every method must hold on the wire: it is billed for its real buffers, and it compresses what it sends."""

from collections.abc import Iterable, Mapping

import pytest

from rayfl.compress.base import Message, Packet
from rayfl.compress.dense import Dense
from rayfl.compress.held import HeldCodec
from rayfl.compress.scalar import CountCodec
from rayfl.compress.sparse import TopK
from rayfl.methods.base import PeerHalf
from rayfl.rounds.ledger import RoundRecord
from rayfl.rounds.setup import Setup
from rayfl.rounds.worker_jobs import Missed
from rayfl.testing import contracts
from rayfl.testing.executors import play
from rayfl.testing.watching import Log
from tests.contracts.every_method import (
    FREE_CASES,
    FREE_DOWNLINKS,
    REGISTERED,
    Case,
    cases,
    every_method,
    experiment,
    played,
)
from tests.refusals import refused
from tests.small_cases import small_cases

COMM = ("busiest_megabytes", "busiest_received_megabytes", "mean_megabytes")
"""Of the busiest node, of the busiest receiver, and the mean; not recorded in a round without an exchange."""


def test_the_wire_cases_are_not_empty():
    assert {"fedavg", "lag"} <= {case.name for case in FREE_CASES}
    assert {"fedavg", "seam Elastic"} <= {case.name for case in FREE_DOWNLINKS}


@every_method
def test_the_bill_is_the_size_of_the_buffers(case: Case):
    here, log, (records, run_states) = contracts.the_bill_is_the_size_of_the_buffers(case.make, case.num_clients)
    for round, record in enumerate(records if not here.method.capabilities.in_pairs else ()):
        comm = [record.means.get(f"comm/{name}", 0.0) for name in COMM]
        late = contracts.owed(run_states, round, log.broadcasts.get(round, {}))
        assert comm == pytest.approx(comm_by_hand(here, log, record, round, late)), round


def comm_by_hand(here: Setup, log: Log, record: RoundRecord, round: int, late: Mapping[int, Missed]) -> list[float]:
    """`COMM` from the entries that are sent to every receiver, counts of examples aside, and the round's links."""

    def seen(messages: Iterable[Message]) -> int:
        packets = [packet for one in messages for packet in one.values() if not isinstance(packet.codec, CountCodec)]
        # Of what a receiver adds to a tree that it has, only the difference is sent.
        sent = [Packet(one.parts, one.codec.inner) if isinstance(one.codec, HeldCodec) else one for one in packets]
        return sum(int(mask.sum()) for packet in sent for mask in packet.support().values())

    up = {row.client: seen([log.up[round, row.client]]) for row in record.clients if row.status == "delivered"}
    if isinstance(here.method, PeerHalf):
        if here.topology is None:
            return [0.0, 0.0, 0.0]
        graph = here.topology.receives(here.num_clients, here.seed, round)
        links = [(one, other) for one in up for other in up if graph[one, other]]
        size = {(one, other): seen([log.links[round, other, one]]) if log.links else up[other] for one, other in links}
        received = [sum(size[link] for link in links if link[0] == peer) for peer in up]
        sent = [sum(size[link] for link in links if link[1] == peer) for peer in up]
        busiest, mean = (max(received, default=0), max(sent, default=0)), sum(sent) / here.num_clients
    else:
        reached = [row.client for row in record.clients if row.status != "dropped_before_download"]
        down = [
            seen([log.broadcasts.get(round, {}), *log.down.get((round, client), [])])
            + late.get(client, Missed()).values
            for client in reached
        ]
        arrived, sent = sum(up.values()), sum(down)
        busiest, mean = (max(arrived, *down, 0), max(sent, *up.values(), 0)), max(arrived, sent) / here.num_clients
    return [4e-6 * max(busiest), 4e-6 * busiest[0], 4e-6 * mean]


@cases(FREE_CASES)
def test_the_uplink_compressor_is_used(case: Case):
    plain, records, _ = played(case)
    assert plain.uplink == Dense()
    sparse, _ = play(case.make(uplink=TopK(keep_ratio=0.1)))
    dense_bits, sparse_bits = (sum(record.row.uplink_bits for record in found) for found in (records, sparse))
    assert 0 < sparse_bits < dense_bits


@cases(FREE_DOWNLINKS)
def test_the_downlink_compressor_is_used(case: Case):
    plain, records, _ = played(case)
    assert plain.downlink == Dense()
    half, _ = play(case.make(downlink=Dense(dtype="fp16")))
    full_bits, half_bits = (sum(record.row.downlink_bits for record in found) for found in (records, half))
    assert 0 < half_bits < full_bits


@cases([case for case in REGISTERED if case not in FREE_CASES])
@small_cases("direction", ["uplink", "downlink"])
def test_a_method_with_its_own_compression_refuses_another(case: Case, direction: str):
    with refused(names=[case.kind.__name__, direction, "remove"]):
        experiment(case.name, **{direction: {"name": "topk", "keep_ratio": 0.5}})

"""What every method must hold on the wire: it is billed for its real buffers, and it compresses what it sends."""

import numpy as np
import pytest

from rayfl.compress.dense import Dense
from rayfl.compress.sparse import TopK
from rayfl.testing import contracts
from rayfl.testing.executors import play
from rayfl.testing.watching import buffer_bits, watched
from tests.contracts.every_method import FREE_CASES, FREE_DOWNLINKS, REGISTERED, Case, cases, every_method, experiment
from tests.refusals import refused


def test_the_wire_cases_are_not_empty():
    assert {"fedavg", "lag"} <= {case.name for case in FREE_CASES}
    assert {"fedavg", "seam Elastic"} <= {case.name for case in FREE_DOWNLINKS}


@every_method
def test_the_bill_is_the_size_of_the_buffers(case: Case):
    contracts.the_bill_is_the_size_of_the_buffers(case.make, case.num_clients)


@every_method
def test_a_packet_says_how_large_it_is(case: Case):
    here, log = watched(case.make(rounds=2))
    play(here)
    messages = [*log.up.values(), *log.broadcasts.values(), *(m for row in log.down.values() for m in row)]
    for packet in (packet for message in messages for packet in message.values()):
        assert packet.num_bits == buffer_bits({"packet": packet})
        assert all(isinstance(part, np.ndarray) and part.ndim == 1 for part in packet.parts.values())


@cases(FREE_CASES)
def test_the_uplink_compressor_is_used(case: Case):
    # Three rounds, as the first may be an uncompressed start (MARINA).
    dense, sparse = (
        sum(record.row.uplink_bits for record in play(case.make(rounds=3, uplink=compressor))[0])
        for compressor in (Dense(), TopK(keep_ratio=0.1))
    )
    assert 0 < sparse < dense


@cases(FREE_DOWNLINKS)
def test_the_downlink_compressor_is_used(case: Case):
    # Three rounds, as the first may download nothing (L2GD).
    full, half = (
        sum(record.row.downlink_bits for record in play(case.make(rounds=3, downlink=Dense(dtype=dtype)))[0])
        for dtype in ("fp32", "fp16")
    )
    assert 0 < half < full


@cases([case for case in REGISTERED if case not in FREE_CASES])
@pytest.mark.parametrize("direction", ["uplink", "downlink"])
def test_a_method_with_its_own_compression_refuses_another(case: Case, direction: str):
    with refused(names=[case.name, f"[{direction}]"]):
        experiment(case.name, **{direction: {"name": "topk", "keep_ratio": 0.5}})

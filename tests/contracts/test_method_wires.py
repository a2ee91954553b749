"""What every method must hold on the wire: it is billed for its real buffers, and it compresses what it sends."""

import pytest

from rayfl.compress.dense import Dense
from rayfl.compress.sparse import TopK
from rayfl.testing import contracts
from rayfl.testing.executors import play
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


def test_the_wire_cases_are_not_empty():
    assert {"fedavg", "lag"} <= {case.name for case in FREE_CASES}
    assert {"fedavg", "seam Elastic"} <= {case.name for case in FREE_DOWNLINKS}


@every_method
def test_the_bill_is_the_size_of_the_buffers(case: Case):
    contracts.the_bill_is_the_size_of_the_buffers(case.make, case.num_clients)


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
@pytest.mark.parametrize("direction", ["uplink", "downlink"])
def test_a_method_with_its_own_compression_refuses_another(case: Case, direction: str):
    with refused(names=[case.kind.__name__, direction, "remove"]):
        experiment(case.name, **{direction: {"name": "topk", "keep_ratio": 0.5}})

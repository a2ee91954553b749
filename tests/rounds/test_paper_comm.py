"""The column Comm of papers on peer methods: numbers of the busiest peer, one direction, no positions and no masks."""

import math

import numpy as np
import pytest
import torch

from rayfl.compress.base import Packet, message_bits
from rayfl.compress.dense import Dense
from rayfl.compress.masks import mask_packet
from rayfl.compress.scalar import count_packet
from rayfl.compress.sparse import sparse_packet
from rayfl.methods.shared import masks
from rayfl.rounds.ledger import paper_comm
from rayfl.rounds.worker_jobs import num_values
from rayfl.topology.graphs import FullyConnected, RandomNeighbours, Ring, Topology
from tests.models.paper_resnet import PaperResNet18


def resnet(density: float) -> dict[str, torch.Tensor]:
    """A mask of Dis-PFL's ResNet-18 at an ERK density."""
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in PaperResNet18().named_parameters()}
    params = {name: torch.zeros(shape) for name, shape in shapes.items()}
    return masks.random_mask(params, masks.erk_densities(shapes, density), np.random.default_rng(0))


def test_values_are_counted_and_nothing_else():
    x = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(3)}
    support = {"w": x["w"] > 6, "b": torch.tensor([True, False, False])}
    draw = np.random.default_rng(0)
    assert num_values({"model": Dense().encode(x, {}, draw)[0]}) == 15
    assert num_values({"model": Dense(dtype="fp16").encode(x, {}, draw)[0]}) == 15
    assert num_values({"model": sparse_packet(x, support)}) == 6
    # A mask that is sent by itself is the message: MCE-PL's peers average it.
    assert num_values({"mask": mask_packet(support), "count": count_packet("count", 3)}) == 15
    assert num_values({"a": sparse_packet(x, support), "b": sparse_packet(x, support)}) == 12


def test_the_busiest_peer_by_hand():
    # 0 receives from 1 and 2, 1 from 2 alone, 2 from nobody: 4 (10 + 30), 4 * 30 and 0 bytes. 2 sends 2 * 4 * 30.
    graph = np.array([[0, 1, 1], [0, 0, 1], [0, 0, 0]], dtype=bool)
    found = paper_comm(graph * np.array([20, 10, 30]))
    assert found == pytest.approx(
        {
            "comm/busiest_megabytes": 240e-6,
            "comm/busiest_received_megabytes": 160e-6,
            "comm/mean_megabytes": 280e-6 / 3,
        }
    )
    assert set(paper_comm(0 * graph).values()) == {0.0}


def test_a_codec_that_does_not_count_is_named():
    class Silent:
        """A codec as it was before codecs counted."""

    with pytest.raises(AttributeError, match=r"Silent.*num_values"):
        _ = Packet({}, Silent()).num_values  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("density", "topology", "printed"),
    [
        (1.0, RandomNeighbours(degree=10), 446.9),
        (0.5, RandomNeighbours(degree=10), 223.4),
        (1.0, Ring(), 89.4),
        (0.2, RandomNeighbours(degree=10), 89.30),
        (0.4, RandomNeighbours(degree=10), 178.69),
        (0.6, RandomNeighbours(degree=10), 268.1),
        (0.8, RandomNeighbours(degree=10), 357.5),
        (0.5, FullyConnected(), 2211.4),
    ],
    ids=str,
)
def test_the_comm_column_of_dis_pfl(density: float, topology: Topology, printed: float):
    # Tables 1, 2 and 4, N = 100. The authors count nonzeros, which differ from the mask's entries by up to 0.11 %.
    count = sum(int(tensor.sum()) for tensor in resnet(density).values())
    found = paper_comm(topology.receives(100, 1, 0) * count)["comm/busiest_received_megabytes"]
    assert found == pytest.approx(printed, rel=1.1e-3)


def test_the_paper_s_setting_beside_the_real_bytes():
    mask = resnet(0.5)
    params = {name: torch.ones(tensor.shape) for name, tensor in mask.items()}
    message = {"weights": sparse_packet(params, mask)}
    assert num_values(message) == 5_586_977
    graph = RandomNeighbours(degree=10).receives(100, 1, 0)
    found = paper_comm(graph * num_values(message))["comm/busiest_received_megabytes"]
    # 10 * 4 * 5,586,977 bytes: 0.04 % above Table 1's 223.4, which they are to the digit that is printed.
    assert found == pytest.approx(223.47908)
    assert math.floor(found * 10) / 10 == 223.4
    # Really: one bit an entry and a byte that says so for every tensor that is neither empty nor dense.
    bits = sum(8 * (-(-tensor.numel() // 8) + 1) for tensor in mask.values() if int(tensor.sum()) < tensor.numel())
    assert message_bits(message) == 32 * num_values(message) + bits

"""Computes the communication that papers report: only numbers count, and only what a node receives.

Dai et al., DisPFL, ICML 2022, Table 1, column "Comm": 4 bytes for every number that the busiest node receives. That is
a peer, or the server, or a client that receives more than the server does (other clients' models). Positions and masks
do not count. 1 MB = 1e6 bytes. Table 3 has the mean over peers instead; with a server it is the mean over the clients.
"""

import math
from collections.abc import Mapping, Sequence
from functools import singledispatch

import numpy as np

from rayfl.compress.base import Codec, Message, Packet
from rayfl.compress.dense import DenseCodec
from rayfl.compress.known_support import KnownSupportCodec
from rayfl.compress.sparse import SparseCodec

BYTES_A_VALUE = 4


def num_values(message: Message) -> int:
    """Numbers in a message's dense and sparse packets."""
    return sum(_values(packet.codec, packet) for packet in message.values())


@singledispatch
def _values(codec: Codec, packet: Packet) -> int:
    return 0


@_values.register
def _(codec: DenseCodec, packet: Packet) -> int:
    return sum(math.prod(shape) for _, shape in codec.shapes)


@_values.register
def _(codec: KnownSupportCodec, packet: Packet) -> int:
    return sum(part.size for part in packet.parts.values())


@_values.register
def _(codec: SparseCodec, packet: Packet) -> int:
    return sum(packet.parts[f"{name}.values"].size for name, _ in codec.shapes)


def paper_comm(graph: np.ndarray, values: Mapping[int, int]) -> dict[str, float]:
    """`comm/busiest_megabytes` and `comm/mean_megabytes` of a round among peers; {} if nobody sent a number.

    graph: boolean [n, n], True where row receives from column; values: numbers in each sender's message.
    """
    sizes = np.zeros(len(graph))
    sizes[list(values)] = list(values.values())
    if not sizes.any():
        return {}
    received = (graph @ sizes) * BYTES_A_VALUE / 1e6
    return {"comm/busiest_megabytes": float(received.max()), "comm/mean_megabytes": float(received.mean())}


def server_comm(arrived: int, received: Sequence[int], num_clients: int) -> dict[str, float]:
    """The same metrics of a round with a server.

    arrived: numbers that the server received; received: numbers that each of its clients received.
    """
    if not arrived and not any(received):
        return {}
    busiest, mean = max(arrived, *received, 0), sum(received) / num_clients
    return {
        "comm/busiest_megabytes": busiest * BYTES_A_VALUE / 1e6,
        "comm/mean_megabytes": mean * BYTES_A_VALUE / 1e6,
    }

"""The communication that papers on peer methods report, beside the real bytes: numbers only, in one direction.

Dai et al., DisPFL, ICML 2022, Table 1, column "Comm": 4 bytes for every number that the busiest peer receives;
positions and masks are not counted. 1 MB = 1e6 bytes. Table 3 has the mean over peers instead.
"""

from collections.abc import Mapping
from functools import singledispatch

import numpy as np

from rayfl.compress.base import Codec, Message
from rayfl.compress.dense import DenseCodec
from rayfl.compress.sparse import SparseCodec

BYTES_A_VALUE = 4


def num_values(message: Message) -> int:
    """Numbers in a message's dense and sparse packets."""
    return sum(_values(packet.codec, packet.parts) for packet in message.values())


@singledispatch
def _values(codec: Codec, parts: Mapping[str, np.ndarray]) -> int:
    return 0


@_values.register
def _(codec: DenseCodec, parts: Mapping[str, np.ndarray]) -> int:
    return sum(part.size for part in parts.values())


@_values.register
def _(codec: SparseCodec, parts: Mapping[str, np.ndarray]) -> int:
    return sum(parts[f"{name}.values"].size for name, _ in codec.shapes)


def paper_comm(graph: np.ndarray, values: Mapping[int, int]) -> dict[str, float]:
    """`comm/busiest_megabytes` and `comm/mean_megabytes` of a round.

    graph: boolean [n, n], True where row receives from column; values: numbers in each sender's message. {} if nobody
    sent a number.
    """
    sizes = np.zeros(len(graph))
    sizes[list(values)] = list(values.values())
    if not sizes.any():
        return {}
    received = (graph @ sizes) * BYTES_A_VALUE / 1e6
    return {"comm/busiest_megabytes": float(received.max()), "comm/mean_megabytes": float(received.mean())}

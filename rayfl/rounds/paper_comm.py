"""Computes the communication that papers report: 4 bytes for every number that crosses a node's wire.

Dai et al., DisPFL, ICML 2022, Table 1, column "Comm": "maximum comm cost (download/upload) for the busiest devices".
Such a device is a peer, the server, or a client; the larger of its two directions counts. A number counts once,
whatever its width (`Codec.num_values`); positions do not count. 1 MB = 1e6 bytes. Table 3 has the mean over peers
instead; with a server it is the mean over the clients.
The paper's graphs are directed: every peer receives from 10 others, and sends to more or fewer. Its tables count what a
peer receives, which is `comm/busiest_received_megabytes`.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from rayfl.compress.base import Message
from rayfl.topology.graphs import Sparse

MEGABYTES_A_VALUE = 4e-6


def num_values(message: Message) -> int:
    """Numbers in all packets of a message."""
    return sum(packet.num_values for packet in message.values())


def paper_comm(graph: Sparse, values: Mapping[int, int]) -> dict[str, float]:
    """`comm/busiest_megabytes`, `comm/busiest_received_megabytes` and `comm/mean_megabytes` of a round among peers.

    graph: boolean [n, n], True where row receives from column; values: numbers in each sender's message.
    """
    sizes = np.zeros(graph.shape[0])
    sizes[list(values)] = list(values.values())
    received, sent = graph @ sizes, graph.sum(axis=0) * sizes
    return _metrics(received.max(), sent.max(), received.mean())


def server_comm(uploads: Sequence[int], downloads: Sequence[int], num_clients: int) -> dict[str, float]:
    """The same metrics of a round with a server.

    uploads: numbers in each message that arrived; downloads: numbers that the server sent to each of its clients.
    """
    arrived, sent = sum(uploads), sum(downloads)
    return _metrics(max(arrived, *downloads, 0), max(sent, *uploads, 0), max(arrived, sent) / num_clients)


def _metrics(busiest_received: float, busiest_sent: float, mean: float) -> dict[str, float]:
    """The metrics, from the numbers that the busiest node receives and sends, and a client's mean."""
    return {
        "comm/busiest_megabytes": float(max(busiest_received, busiest_sent)) * MEGABYTES_A_VALUE,
        "comm/busiest_received_megabytes": float(busiest_received) * MEGABYTES_A_VALUE,
        "comm/mean_megabytes": float(mean) * MEGABYTES_A_VALUE,
    }

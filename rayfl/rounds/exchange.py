"""An exchange among peers: who mixes in which call, with which weights, and what every link costs."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from rayfl.determinism.addition_order import runs
from rayfl.rounds.ledger import Ledger
from rayfl.rounds.paper_comm import paper_comm
from rayfl.rounds.worker_jobs import MixJob

CALL_BYTES = 2_500_000_000
"""What a call may hold of its own: the results of all distinct rows of weights, and one receiver's new state.

Results are let go as the new states go to the object store, so that both together are never more than the new states.
"""


def bill(graph: np.ndarray, senders: Collection[int], ledger: Ledger) -> None:
    """Bill every link of the round's graph [n, n] on both ends, from the sizes of the messages in the ledger."""
    sent = {client: ledger.results[client] for client in senders}
    for client, result in sent.items():
        ledger.results[client] = replace(
            result,
            billed_bits=result.message_bits * int(graph[:, client].sum()),
            downlink_bits=sum(sent[sender].message_bits for sender in np.flatnonzero(graph[client]).tolist()),
        )
    ledger.metrics |= paper_comm(graph, {client: result.num_values for client, result in sent.items()})


def in_calls(
    receivers: Sequence[int], weights: np.ndarray, num_workers: int, model_bytes: int
) -> list[tuple[int, ...]]:
    """The receivers of each call: one call a worker, or more where a call would hold too much at once.

    Every call opens all messages that its receivers hear, so the fewer the better. No result depends on it.
    """

    def held(part: tuple[int, ...]) -> int:
        return model_bytes * (1 + len({weights[client].tobytes() for client in part}))

    number = min(num_workers, len(receivers))
    while True:
        calls = runs(receivers, number)
        if number == len(receivers) or max(map(held, calls)) <= CALL_BYTES:
            return calls
        number = min(number + num_workers, len(receivers))


def mix_job(receivers: Sequence[int], weights: np.ndarray, present: np.ndarray) -> MixJob:
    """The rows of the mixing matrix [n, n] that these receivers need; an absent peer's row is empty."""
    rows = {
        client: {int(sender): float(weights[client, sender]) for sender in np.flatnonzero(weights[client])}
        if present[client]
        else {}
        for client in receivers
    }
    return MixJob(rows, tuple(sorted({sender for row in rows.values() for sender in row})))

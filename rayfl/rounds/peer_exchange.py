"""The exchange among peers: the calls with their receivers and weights, and the bill of every link."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from rayfl import tree
from rayfl.determinism.addition_order import runs
from rayfl.gather import ElementwiseMean
from rayfl.rounds.check_hooks import checked
from rayfl.rounds.executor import Job, Ref
from rayfl.rounds.ledger import Ledger, paper_comm
from rayfl.rounds.run_state import CurrentRound
from rayfl.rounds.setup import Setup
from rayfl.rounds.worker_jobs import MixJob
from rayfl.topology.graphs import graph_of, link_weights
from rayfl.topology.mixing import Exchange, Sparse, check_weights, without_diagonal
from rayfl.topology.statistics import round_metrics

CALL_BYTES = 2_500_000_000
"""Memory that a call may use for the results of all distinct rows of weights and for one receiver's new state.

Results are freed while the new states go to the object store, so both together never take more than the new states.
"""


WEIGHTS = "a sparse array [n, n] of weights"


def mix(current: CurrentRound, messages: Mapping[int, Ref]) -> None:
    """The exchange among peers: every peer that is present reads its neighbours' messages and mixes them in.

    Both ends of a link are billed for it.
    """
    setup, ledger = current.setup, current.ledger
    assert setup.topology is not None
    present = np.zeros(setup.num_clients, dtype=bool)
    present[list(messages)] = True
    exchange = setup.exchange(current.number, present)
    graph = graph_among(setup, exchange)
    weights = mixing_weights(setup, graph, exchange)
    ledger.metrics |= round_metrics(weights, present)
    if setup.method.capabilities.weighs_links:
        weights = link_weights(setup.topology, graph, exchange)
    weights = checked(setup.peer_half.mixing, WEIGHTS, lambda made: made.shape == graph.shape)(weights, exchange)
    if not setup.method.capabilities.include_self:
        weights = without_diagonal(weights)
    bill(graph, messages, ledger, setup.method.capabilities.num_exchanges)
    listeners = graph.T.tocsr()
    counted = [client for client, result in ledger.results.items() if result.status.keeps_state]
    receivers = [client for client in counted if client in current.run_state.states or not setup.stateful]
    slots = setup.state_slots
    jobs = []
    for part in in_calls(receivers, weights, current.executor.num_workers, 4 * tree.num_entries(setup.initial)):
        work = mix_job(part, weights, present, listeners)
        inputs = (*current.run_state.inputs(slots, part), *(messages[sender] for sender in work.senders))
        jobs.append(Job(work, inputs, len(slots) * len(part), slots.kept(len(part)), setup.together))
    current.keep(slots, jobs, current.run(jobs))


def graph_among(setup: Setup, exchange: Exchange) -> Sparse:
    """The graph [n, n] of a round among the peers that are present."""
    assert setup.topology is not None
    links = setup.topology.sparse(setup.num_clients, exchange.seed, exchange.round).tocoo()
    counted = exchange.present[links.row] & exchange.present[links.col]
    return graph_of(setup.num_clients, links.row[counted], links.col[counted])


def mixing_weights(setup: Setup, graph: Sparse, exchange: Exchange) -> Sparse:
    """The topology's mixing weights [n, n] of a round. Raise RayflError if they are not what the method needs."""
    assert setup.topology is not None
    mixing = checked(setup.topology.mixing, WEIGHTS, lambda made: made.shape == graph.shape)
    weights = mixing(graph, exchange).tocsr()
    may_be_negative = not any(isinstance(rule, ElementwiseMean) for rule in setup.method.gather.values())
    check_weights(weights, graph, setup.method.capabilities.needs_weights, may_be_negative)
    return weights


def bill(graph: Sparse, senders: Collection[int], ledger: Ledger, exchanges: int = 1) -> None:
    """Bill every link of the round's graph [n, n] on both ends for each exchange, from the messages in the ledger."""
    sent, listeners = {client: ledger.results[client] for client in senders}, graph.sum(axis=0)
    for client, result in sent.items():
        ledger.results[client] = replace(
            result,
            billed_bits=exchanges * result.message_bits * int(listeners[client]),
            downlink_bits=exchanges * sum(sent[sender].message_bits for sender in row(graph, client)),
        )
    ledger.metrics |= paper_comm(graph, {client: exchanges * result.num_values for client, result in sent.items()})


def in_calls(receivers: Sequence[int], weights: Sparse, num_workers: int, model_bytes: int) -> list[tuple[int, ...]]:
    """The receivers of each call: one call per worker, or more if a call would use too much memory.

    Every call decodes all messages for its receivers, so fewer calls decode less. Results do not depend on the calls.
    """

    def held(part: tuple[int, ...]) -> int:
        return model_bytes * (1 + len({tuple(row(weights, client).items()) for client in part}))

    number = min(num_workers, len(receivers))
    while True:
        calls = runs(receivers, number)
        if number == len(receivers) or max(map(held, calls)) <= CALL_BYTES:
            return calls
        number = min(number + num_workers, len(receivers))


def row(weights: Sparse, client: int) -> dict[int, float]:
    """The entries of a client's row that are not 0, by column, ascending."""
    part = slice(*weights.indptr[client : client + 2])
    return dict(zip(weights.indices[part].tolist(), weights.data[part].tolist(), strict=True))


def mix_job(receivers: Sequence[int], weights: Sparse, present: np.ndarray, listeners: Sparse) -> MixJob:
    """The job for these receivers, with their rows of the mixing matrix [n, n]; an absent peer's row is empty.

    listeners: the transposed graph [n, n].
    """
    rows = {client: row(weights, client) if present[client] else {} for client in receivers}
    senders = tuple(sorted({sender for heard in rows.values() for sender in heard}))
    return MixJob(rows, senders, {client: tuple(row(listeners, client)) for client in receivers})

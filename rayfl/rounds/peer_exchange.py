"""The exchange among peers: the calls with their receivers and weights, and the bill of every link."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
from scipy.sparse import csr_array

from rayfl import tree
from rayfl.determinism.addition_order import runs
from rayfl.gather import ElementwiseMean, RobustMean
from rayfl.rounds.check_hooks import checked
from rayfl.rounds.executor import Job, JobResult, Ref
from rayfl.rounds.ledger import Ledger, paper_comm
from rayfl.rounds.mix import MixJob, Row, SendJob
from rayfl.rounds.run_state import CurrentRound
from rayfl.rounds.setup import Setup
from rayfl.topology.graphs import graph_of, link_weights
from rayfl.topology.mixing import Exchange, Sparse, check_weights, without_diagonal
from rayfl.topology.statistics import round_metrics

CALL_BYTES = 2_500_000_000
"""Memory that a call may use for the results of all distinct rows of weights and for one receiver's new state.

Results are freed while the new states go to the object store, so both together never take more than the new states.
"""


WEIGHTS = "an array [n, n] of weights, sparse or plain"


def mix(current: CurrentRound, messages: Mapping[int, Ref]) -> None:
    """The exchange among peers: every peer that is present reads its neighbours' messages and mixes them in.

    Both ends of a link are billed for it.
    """
    setup, ledger = current.setup, current.ledger
    present = np.zeros(setup.num_clients, dtype=bool)
    present[list(messages)] = True
    graph, weights = weighted_graph(current, setup.exchange(current.number, present))
    if not setup.method.capabilities.include_self:
        weights = without_diagonal(weights)
    listeners = graph.T.tocsr()
    rows = {
        client: row(weights, client) if present[client] else {}
        for client, result in ledger.results.items()
        if result.status.keeps_state and (client in current.run_state.states or not setup.stateful)
    }
    parts = in_calls(rows, current.executor.num_workers, 4 * tree.num_entries(setup.initial))
    if setup.peer_half.has_link_messages:
        sent, bits, values = send(current, graph, listeners, parts)
    else:
        sent, times = None, setup.method.capabilities.num_exchanges
        bits, values = (times * link_sizes(graph, ledger, messages, size) for size in ("message_bits", "num_values"))
    bill(ledger, messages, bits, values)
    slots = setup.state_slots
    jobs = []
    for index, part in enumerate(parts):
        work = mix_job({client: rows[client] for client in part}, listeners)
        inputs = [messages[sender] for sender in work.senders] if sent is None else [x.outputs[index] for x in sent]
        jobs.append(
            Job(
                work,
                (*current.run_state.inputs(slots, part), *inputs),
                len(slots) * len(part),
                slots.kept(len(part)),
                setup.together,
            )
        )
    current.keep(slots, jobs, current.run(jobs))


def send(
    current: CurrentRound, graph: Sparse, listeners: Sparse, parts: Sequence[tuple[int, ...]]
) -> tuple[list[JobResult], Sparse, Sparse]:
    """Let the peers make a message for each link of the round's graph [n, n]. Returns the results of the `SendJob`s,
    and the bits and numbers of what row receives from column, [n, n].

    listeners: the transposed graph. parts: the receivers of each mixing call.
    """
    setup = current.setup
    senders = np.flatnonzero(np.diff(listeners.indptr)).tolist()
    rows = {peer: row(listeners, peer) for peer in senders}
    jobs = []
    for part in in_calls(rows, current.executor.num_workers, 4 * tree.num_entries(setup.initial)):
        heard, told = ({peer: tuple(row(links, peer)) for peer in part} for links in (graph, listeners))
        jobs.append(
            Job(SendJob(told, heard, tuple(parts)), current.run_state.inputs(setup.state_slots, part), len(parts))
        )
    answers = current.run(jobs)
    sizes = np.array([size for answer in answers for size in answer.result], np.int64).reshape(-1, 4).T
    bits, values = (csr_array((size, (sizes[1], sizes[0])), shape=graph.shape) for size in sizes[2:])
    return answers, bits, values


def weighted_graph(current: CurrentRound, exchange: Exchange) -> tuple[Sparse, Sparse]:
    """The graph among the peers that are present, and its weights in the method's mixing; its statistics are noted in
    the ledger."""
    setup = current.setup
    graph = graph_among(setup, exchange)
    weights = mixing_weights(setup, graph, exchange)
    current.ledger.metrics |= round_metrics(weights, exchange.present)
    if setup.method.capabilities.weighs_links:
        weights = link_weights(setup.graph_topology, graph, exchange)
    mixing = checked(setup.peer_half.mixing, WEIGHTS, lambda made: made.shape == graph.shape)
    return graph, csr_array(mixing(weights, exchange))


def graph_among(setup: Setup, exchange: Exchange) -> Sparse:
    """The graph [n, n] of a round among the peers that are present."""
    links = setup.graph_topology.sparse(setup.num_clients, exchange.seed, exchange.round).tocoo()
    counted = exchange.present[links.row] & exchange.present[links.col]
    return graph_of(setup.num_clients, links.row[counted], links.col[counted])


def mixing_weights(setup: Setup, graph: Sparse, exchange: Exchange) -> Sparse:
    """The topology's mixing weights [n, n] of a round. Raise RayflError if they are not what the method needs."""
    mixing = checked(setup.graph_topology.mixing, WEIGHTS, lambda made: made.shape == graph.shape)
    weights = csr_array(mixing(graph, exchange))
    may_be_negative = not any(isinstance(rule, ElementwiseMean | RobustMean) for rule in setup.method.gather.values())
    check_weights(weights, graph, setup.method.capabilities.needs_weights, may_be_negative)
    return weights


def link_sizes(graph: Sparse, ledger: Ledger, senders: Collection[int], size: str) -> Sparse:
    """The size of the message on each link of a graph [n, n], from those of the senders in the ledger."""
    sizes = np.zeros(graph.shape[0], np.int64)
    sizes[[*senders]] = [getattr(ledger.results[client], size) for client in senders]
    return (graph.astype(np.int64) * sizes).tocsr()


def bill(ledger: Ledger, senders: Collection[int], bits: Sparse, values: Sparse) -> None:
    """Bill every link on both ends. bits, values: the size of the message that row receives from column, [n, n]."""
    received, sent = bits.sum(axis=1), bits.sum(axis=0)
    for client in senders:
        up, down = int(sent[client]), int(received[client])
        ledger.results[client] = replace(ledger.results[client], billed_bits=up, downlink_bits=down)
    ledger.metrics |= paper_comm(values)


def in_calls(rows: Mapping[int, Row], num_workers: int, model_bytes: int) -> list[tuple[int, ...]]:
    """The receivers of each call, from their rows: one call per worker, or more if a call would use too much memory.

    Every call decodes all messages for its receivers, so fewer calls decode less. Results do not depend on the calls.
    """

    def held(part: tuple[int, ...]) -> int:
        return model_bytes * (1 + len({tuple(rows[client].items()) for client in part}))

    number = min(num_workers, len(rows))
    while True:
        calls = runs([*rows], number)
        if number == len(rows) or max(map(held, calls)) <= CALL_BYTES:
            return calls
        number = min(number + num_workers, len(rows))


def row(weights: Sparse, client: int) -> dict[int, float]:
    """The entries of a client's row that are not 0, by column, ascending."""
    part = slice(*weights.indptr[client : client + 2])
    return dict(zip(weights.indices[part].tolist(), weights.data[part].tolist(), strict=True))


def mix_job(rows: Mapping[int, Row], listeners: Sparse) -> MixJob:
    """The job for these receivers, with their rows of the mixing matrix; listeners: the transposed graph [n, n]."""
    senders = tuple(sorted({sender for heard in rows.values() for sender in heard}))
    return MixJob(rows, senders, {client: tuple(row(listeners, client)) for client in rows})

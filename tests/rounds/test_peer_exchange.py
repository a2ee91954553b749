"""An exchange among peers: bills by hand, how much a call takes on, and how often a message is opened."""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array

from rayfl.compress.base import PIECE, Divisible, Packet
from rayfl.compress.dense import Dense
from rayfl.compress.masks import mask_packet
from rayfl.compress.random import RandK
from rayfl.compress.sparse import TopK, sparse_packet
from rayfl.determinism.seeding import FirstDraws
from rayfl.errors import MethodError
from rayfl.experiment.prepare import prepare
from rayfl.gather import Aggregate, ElementwiseMean, Received, Sum, WeightedMean, WeightedSum
from rayfl.methods.base import Context, Message, State, Traits, Upload
from rayfl.methods.peers.dpsgd import DPSGD, DPSGDCarry, DPSGDState
from rayfl.population.client import ClientStatus
from rayfl.population.sampling import Participation
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.ledger import Ledger
from rayfl.rounds.mix import gather_rows, gathered
from rayfl.rounds.peer_exchange import CALL_BYTES, bill, in_calls, link_sizes, mix_job
from rayfl.rounds.peer_exchange import row as row_of
from rayfl.rounds.setup import Setup
from rayfl.rounds.worker_jobs import ClientResult
from rayfl.testing.contracts import (
    a_run_goes_on_from_its_checkpoint,
    several_workers_give_the_bits_of_one,
    the_bill_is_the_size_of_the_buffers,
)
from rayfl.testing.executors import assert_same_bits, contents, play
from rayfl.topology.graphs import FullyConnected, RandomNeighbours, Ring
from rayfl.topology.mixing import Exchange, Sparse, mixing_weights
from rayfl.tree import Tree
from tests.contracts.every_method import experiment
from tests.contracts.seams.quadratic import Quadratic, setup
from tests.refusals import refused

SIZES = ("message_bits", "num_values")


def test_links_are_billed_on_both_ends():
    # 0 hears 1 and 2; 1 hears 0; 2 hears 0. Messages of 100, 30 and 7 bits; 5, 4 and 3 numbers.
    graph = np.array([[0, 1, 1], [1, 0, 0], [1, 0, 0]], bool)
    ledger = Ledger(Participation(dict.fromkeys(range(3), ClientStatus.DELIVERED)))
    for client, bits, values in ((0, 100, 5), (1, 30, 4), (2, 7, 3)):
        ledger.results[client] = ClientResult(client, ClientStatus.DELIVERED, message_bits=bits, num_values=values)
    bill(ledger, [0, 1, 2], *(link_sizes(csr_array(graph), ledger, [0, 1, 2], size) for size in SIZES))
    # Peer 0 is the busiest: it sends 100 bits to each of two, and receives 30 + 7.
    assert [ledger.results[i].billed_bits for i in range(3)] == [200, 30, 7]
    assert [ledger.results[i].downlink_bits for i in range(3)] == [37, 100, 100]
    # Received: 4 + 3 numbers by peer 0, 5 by each of the others. Sent: 2 * 5, 4 and 3.
    assert ledger.metrics == {
        "comm/busiest_megabytes": pytest.approx(10 * 4e-6),
        "comm/busiest_received_megabytes": pytest.approx(7 * 4e-6),
        "comm/mean_megabytes": pytest.approx(17 / 3 * 4e-6),
    }


def rows(weights: Sparse, size: int = 8) -> dict[int, dict[int, float]]:
    return {client: row_of(weights, client) for client in range(size)}


def test_a_call_a_worker_while_there_is_room():
    ring = mixing_weights(Ring().receives(8, 0, 0), "uniform")
    assert in_calls(rows(ring), 2, model_bytes=4) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert in_calls(rows(ring, 2), 5, model_bytes=4) == [(0,), (1,)]
    assert in_calls({}, 2, model_bytes=4) == []


def test_large_models_make_more_calls_and_equal_rows_fewer():
    # A call with d distinct rows holds d results and a state in the making; four models fit.
    ring, full = (mixing_weights(t.receives(8, 0, 0), "uniform") for t in (Ring(), FullyConnected()))
    assert [len(call) for call in in_calls(rows(ring), 1, CALL_BYTES // 4)] == [2, 3, 3]
    assert [len(call) for call in in_calls(rows(full), 1, CALL_BYTES // 4)] == [8]
    assert [len(call) for call in in_calls(rows(ring), 2, CALL_BYTES // 4)] == [2, 2, 2, 2]
    # What does not fit at all goes one by one.
    assert in_calls(rows(ring, 3), 1, 2 * CALL_BYTES) == [(0,), (1,), (2,)]


class Counting:
    """A codec that counts how often it is asked to decode."""

    def __init__(self, packet: Packet) -> None:
        self.inner, self.decoded = packet.codec, 0

    def decode(self, parts):
        self.decoded += 1
        return self.inner.decode(parts)

    def support(self, parts):
        return self.inner.support(parts)

    def add_to(self, parts, total, weight):
        self.decoded += 1
        self.inner.add_to(parts, total, weight)

    def num_values(self, parts):
        return self.inner.num_values(parts)


@pytest.mark.parametrize("rule", [WeightedMean(), ElementwiseMean()], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("topology", [FullyConnected(), Ring()], ids=lambda graph: graph.name)
def test_every_message_is_opened_once_a_call(topology, rule):
    size, draw = 100, np.random.default_rng(0)
    values = draw.standard_normal((size, 6)).astype(np.float32)
    masks = draw.random((size, 6)) < 0.5
    packets = [
        sparse_packet({"x": torch.from_numpy(v)}, {"x": torch.from_numpy(m)})
        for v, m in zip(values, masks, strict=True)
    ]
    codecs = [Counting(packet) for packet in packets]
    messages = {i: {"m": Packet(packets[i].parts, codecs[i])} for i in range(size)}
    weights = mixing_weights(topology.receives(size, 0, 0), "uniform")
    job = mix_job(rows(weights, size), weights)
    found = gather_rows({"m": rule}, job, messages)
    assert [codec.decoded for codec in codecs] == [1] * size
    shared = {id(sums) for sums in found.values()}
    assert len(shared) == (1 if topology.name == "fully-connected" else size)
    sums = weights @ np.where(masks, values, 0)
    counts = weights @ masks if isinstance(rule, ElementwiseMean) else np.ones((size, 6))
    expected = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
    for i in range(size):
        np.testing.assert_allclose(found[i]["m"].result["x"], expected[i], rtol=1e-5, atol=1e-6)


def test_an_opened_packet_adds_what_the_packet_adds():
    draw = np.random.default_rng(1)
    x = {"a": torch.from_numpy(draw.standard_normal((5, 40)).astype(np.float32)), "b": torch.tensor([0.0, -3.0])}
    kept = {name: tensor.abs() > 0.5 for name, tensor in x.items()}
    for packet in (
        Dense(dtype="bf16").encode(x, {}, draw)[0],
        TopK(keep_ratio=0.1).encode(x, {}, draw)[0],
        sparse_packet(x, kept),
        mask_packet(kept),
    ):
        one, other = ({name: torch.full(t.shape, 0.25) for name, t in x.items()} for _ in range(2))
        packet.add_to(one, 0.5)
        packet.opened().add_to(other, 0.5)
        support, presence = packet.support(), packet.opened().presence()
        for name in x:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-6)
            assert presence[name].dtype == torch.float32
            assert np.array_equal(presence[name] == 1, support[name]) and set(presence[name].unique().tolist()) <= {
                0,
                1,
            }


def packets_of_two_pieces() -> dict[str, Packet]:
    """Packets of one model, in every code that can be read in pieces; the last piece of "a" is no whole vector."""
    draw = np.random.default_rng(2)
    shapes = {"a": (PIECE + 77, 2), "b": (3,), "c": ()}
    x = {name: torch.from_numpy(np.asarray(draw.standard_normal(shape), np.float32)) for name, shape in shapes.items()}
    some = {name: tensor > 0.2 for name, tensor in x.items()}
    return {
        "fp32": Dense().encode(x, {}, draw)[0],
        "bf16": Dense(dtype="bf16").encode(x, {}, draw)[0],
        "bitmap": sparse_packet(x, some),
        "fp16": TopK(keep_ratio=0.4, values="fp16").encode(x, {}, draw)[0],
        "gaps": TopK(keep_ratio=0.05).encode(x, {}, draw)[0],
        "int32": TopK(keep_ratio=1e-4).encode(x, {}, draw)[0],
        "seed": RandK(keep_ratio=0.3).encode(x, {}, draw)[0],
        "all": sparse_packet(x, {name: torch.ones_like(mask) for name, mask in some.items()}),
        "none": sparse_packet(x, {name: torch.zeros_like(mask) for name, mask in some.items()}),
        "mask": mask_packet(some),
    }


def numbers(x: Tree) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in x.items()}


@pytest.mark.parametrize("code", packets_of_two_pieces())
def test_the_pieces_of_a_packet_are_the_packet(code: str):
    packet = packets_of_two_pieces()[code]
    decoded, present = packet.decode(), packet.presence()
    pieces = list(packet.pieces())
    assert [piece.decode()[name].numel() for piece in pieces for name in piece.decode()] == [PIECE, PIECE, 154, 3, 1]
    for whole, part in ((decoded, Packet.decode), (present, Packet.presence)):
        joined = {
            name: torch.cat([part(p)[name] for p in pieces if name in part(p)]).view_as(whole[name]) for name in whole
        }
        assert_same_bits(numbers(joined), numbers(whole))


@pytest.mark.parametrize(
    "rule",
    [WeightedMean(), WeightedSum(), Sum(), ElementwiseMean(), ElementwiseMean("nonzero")],
    ids=lambda rule: str(rule),
)
def test_pieces_add_up_to_the_bits_of_whole_messages(rule):
    packets = dict(enumerate(packets_of_two_pieces().values()))
    # The last row hears nobody who sent.
    rows = [dict.fromkeys(packets, 0.1), {1: 0.3, 2: 0.7, 9: 1 / 3}, {99: 1.0}]
    for row, found in zip(rows, gathered(rule, packets, rows), strict=True):
        total: Aggregate = rule.empty()
        for sender, packet in packets.items():
            if sender in row:
                total = rule.add(total, packet.opened(), row[sender], sender)
        assert_same_bits(numbers(found.result), numbers(total.result))
        assert (found.weight, found.count) == (total.weight, total.count)


def test_what_cannot_be_cut_is_added_as_a_whole():
    packets = {
        0: mask_packet({"x": torch.tensor([True, False])}),
        1: sparse_packet({"x": torch.ones(2)}, {"x": torch.tensor([True, True])}),
    }
    packets[0] = Packet(packets[0].parts, Counting(packets[0]))
    assert not isinstance(packets[0].codec, Divisible)
    (mean,) = gathered(WeightedMean(), packets, [{0: 0.5, 1: 0.5}])
    assert mean.result["x"].tolist() == [1.0, 0.5]
    with refused(names=["whole"], error=TypeError):
        packets[0].pieces()


@pytest.mark.parametrize("method", ["dpsgd", "dispfl"])
def test_the_cut_into_calls_changes_no_bit(method: str, monkeypatch: pytest.MonkeyPatch):
    run_states = []
    for most in (CALL_BYTES, 1):
        monkeypatch.setattr("rayfl.rounds.peer_exchange.CALL_BYTES", most)
        here = prepare(experiment(method, topology={"name": "erdos-renyi", "p": 0.6}))
        run_states.append(contents(InlineExecutor(here), play(here)[1][-1]))
    assert_same_bits(*run_states)


class NotingState(DPSGDState):
    met: torch.Tensor


class Noting(DPSGD):
    """D-PSGD whose peers keep, one by one, whom they heard (1) and who heard them (2) in each round."""

    name = "noting"

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> NotingState:
        return {"params": params, "met": torch.zeros(0, 4)}

    def mix(self, state: NotingState, received: Received, ctx: Context) -> NotingState:
        seen = torch.zeros(4)
        seen[list(ctx.neighbours_in)] += 1
        seen[list(ctx.neighbours_out)] += 2
        return {**super().mix(state, received, ctx), "met": torch.cat([state["met"], seen[None]])}


def test_peers_know_who_hears_whom_among_those_present():
    clients = {"dropout_before_download": 0.4}
    method = Noting(Quadratic(), lr=0.1)
    here = setup(method, rounds=5, topology=RandomNeighbours(degree=2), clients=clients)
    last = play(here)[1][-1]
    states = [InlineExecutor(here).get(last.states[peer])["met"] for peer in range(4)]
    for round_number in range(5):
        statuses = here.population.sample_round(round_number, everyone=True).statuses
        away = [peer for peer, status in statuses.items() if status is not ClientStatus.DELIVERED]
        graph = RandomNeighbours(degree=2).receives(4, here.seed, round_number).astype(int)
        graph[away] = graph[:, away] = 0
        assert away or round_number
        np.testing.assert_array_equal([state[round_number] for state in states], graph + 2 * graph.T)


EXAMPLE = f"{Path(__file__).resolve().parents[2]}/jobs/examples/my_peers.py:Slices"


def slices(**options: Any) -> Setup:
    """A plug-in that sends each neighbour other tensors: a model of 64 x 12, 12, 12 x 10 and 10 entries."""
    tables = {"method": {"name": EXAMPLE, "lr": 0.1, "batch_size": 60}, "topology": "ring", **options}
    return prepare(experiment("dpsgd", **tables))


def test_each_neighbour_has_a_message_of_its_own():
    here = slices(rounds=2)
    records, _ = play(here)
    by_name = {name: tensor.numel() for name, tensor in here.initial.items()}
    names = sorted(by_name)
    # Of both slices that a peer sends, its lower neighbour gets the first in round 0, and the second in round 1.
    halves = [sum(by_name[name] for name in names[first::2]) for first in (0, 1)]
    for round_number, record in enumerate(records):
        assert [row.uplink_bits for row in record.clients] == [32 * sum(halves)] * 6
        # Peer 1 hears peer 0, of which it is the lower neighbour (the other is 5), and peer 2, of which it is, too.
        received = 2 * halves[round_number]
        assert record.clients[1].downlink_bits == 32 * received
        # Peer 0 is the lower neighbour of both 1 and 5, peer 5 the higher one of both.
        assert record.clients[0].downlink_bits == 32 * received
        assert record.clients[5].downlink_bits == 32 * 2 * halves[1 - round_number]


def test_messages_of_links_do_not_depend_on_calls_workers_and_stops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    clients = {"dropout_after_training": 0.2, "dropout_before_download": 0.2}
    several_workers_give_the_bits_of_one(slices(rounds=3, clients=clients))
    a_run_goes_on_from_its_checkpoint(lambda **options: slices(**options), 6, tmp_path)
    the_bill_is_the_size_of_the_buffers(lambda **options: slices(**options), 6)
    run_states = []
    for most in (CALL_BYTES, 1):
        monkeypatch.setattr("rayfl.rounds.peer_exchange.CALL_BYTES", most)
        here = slices(rounds=3)
        run_states.append(contents(InlineExecutor(here), play(here)[1][-1]))
    assert_same_bits(*run_states)


def test_what_belongs_to_one_peer_is_freed_before_the_next_one():
    refs: dict[str, list[weakref.ref[torch.Tensor]]] = {"begin": [], "mix": []}
    alive: list[int] = []

    class Watching(DPSGD):
        """Counts the tensors of earlier peers that are still there."""

        name = "watching"

        def noted(self, hook: str, trees: Sequence[Tree], ctx: Context) -> None:
            # In round 0 all begin with the same tensors.
            if ctx.round == 0:
                return
            alive.append(sum(ref() is not None for ref in refs[hook]))
            refs[hook] += [weakref.ref(tensor) for tree in trees for tensor in tree.values()]

        def begin(self, state: DPSGDState, received: Message, ctx: Context) -> DPSGDCarry:
            self.noted("begin", [state["params"]], ctx)
            return super().begin(state, received, ctx)

        def mix(self, state: DPSGDState, received: Received, ctx: Context) -> DPSGDState:
            self.noted("mix", [state["params"], received["change"].result], ctx)
            return super().mix(state, received, ctx)

    here = prepare(experiment("dpsgd", topology="ring", rounds=2, model="logistic", clients={"count": 40}))
    play(replace(here, method=Watching(here.method.task, here.method.hyper)))
    # A model has two tensors, and `mix` has two trees.
    assert len(alive) == 2 * 40 and max(alive) <= 4


class Plain(Ring):
    """Returns weights as a plain array."""

    def mixing(self, graph: Sparse, exchange: Exchange) -> Any:
        return super().mixing(graph, exchange).toarray()


def test_weights_may_be_a_plain_array():
    plain, sparse = (setup(DPSGD(Quadratic(), lr=0.1), rounds=2, topology=topology) for topology in (Plain(), Ring()))
    assert_same_bits(*(contents(InlineExecutor(here), play(here)[1][-1]) for here in (plain, sparse)))


class Both(DPSGD):
    """Sends a message to all, and one to each."""

    name = "both"

    def message_to(self, state: State, neighbour: int, ctx: Context) -> Upload:
        return {"change": state["params"]}


def test_messages_that_nobody_would_read_or_that_lose_something_are_refused():
    with pytest.raises(MethodError, match=r"Both\.finish.*message_to"):
        play(setup(Both(Quadratic(), lr=0.1), rounds=1, topology=Ring()))
    with refused(names=["uplink='topk'", "Slices", "neighbour"]):
        slices(uplink="topk")
    with refused(names=["clip", "Slices"]):
        slices(wrap=[{"name": "clip", "norm": 1.0}])

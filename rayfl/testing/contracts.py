"""The contract of every method. `make` builds setups of a method; it takes engine, seed, rounds, ... by name.

And the contract of every task: its own functions, and runs of six methods.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from rayfl.choices.kinds import find
from rayfl.compress.base import Message
from rayfl.compress.sparse import TopK
from rayfl.data.partition import Partition, Shards
from rayfl.determinism.seeding import NOBODY, FirstDraws
from rayfl.methods.base import Batch, Method, PeerHalf, RayflError
from rayfl.methods.shared.own_parts import OwnParts
from rayfl.population.sampling import Population
from rayfl.rounds import downlinks, label_counts
from rayfl.rounds.evaluation_settings import Evaluation
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.ledger import RoundRecord
from rayfl.rounds.rounds import RunState
from rayfl.rounds.setup import Setup
from rayfl.rounds.worker_jobs import Missed
from rayfl.run_directory import checkpoint
from rayfl.task import NetworkTask
from rayfl.testing.executors import Apart, assert_close, assert_same_bits, contents, fitting_graph, owners, play, rows
from rayfl.testing.watching import Log, buffer_bits, watched
from rayfl.untyped import Anything, SettingsTable, Value

Make = Callable[..., Setup]
Played = tuple[list[RoundRecord], list[RunState]]
TASK_METHODS: Mapping[str, SettingsTable] = {
    "fedavg": {},
    "fedavgm": {"momentum": 0.5},
    "ditto": {},
    "fedpse": {"keep_ratio": 0.3},
    "dpsgd": {},
    "dispfl": {"density": 0.5},
}
"""Plain averaging, momentum on both sides, personal models, a compressed exchange, peers, and masks among peers."""
_MOST_EXAMPLES = 8
"""The most examples of which a task's functions are tested."""


def loop_and_vmap_agree(loop: Setup, vmap: Setup, played: Played | None = None) -> None:
    """Training clients one after another and in stacks gives the same states, bits and metrics, up to rounding."""
    (looped, run_states), (stacked, stacked_states) = played or play(loop), play(vmap)
    assert_close(
        contents(InlineExecutor(loop), run_states[-1]),
        contents(InlineExecutor(vmap), stacked_states[-1]),
        tolerance=1e-5,
    )
    assert [(r.row.uplink_bits, r.row.downlink_bits) for r in looped] == [
        (r.row.uplink_bits, r.row.downlink_bits) for r in stacked
    ]
    for record, other in zip(looped, stacked, strict=True):
        assert [(m.client, m.name) for m in record.metrics] == [(m.client, m.name) for m in other.metrics]
        # A test example on the border between two classes may change sides.
        numbers = [np.array([m.value for m in r.metrics if "accuracy" not in m.name], float) for r in (record, other)]
        np.testing.assert_allclose(numbers[0], numbers[1], rtol=1e-4, atol=1e-5)


def several_workers_give_the_bits_of_one(here: Setup, played: Played | None = None) -> None:
    """Three workers that do their jobs in any order, and get everything as bytes, give the same bits as one worker.

    A plug-in is played on two workers, too. The message of a failure names the values that the plug-in keeps from one
    job to the next, in modules, classes and objects: each worker has others.
    """
    executor = InlineExecutor(here)
    records, run_states = played or play(here, executor)
    for number in (2, 3) if owners(here) else (3,):
        many = Apart(here, number)
        others, other_states = play(here, many)
        try:
            assert rows(records) == rows(others)
            assert_same_bits(contents(executor, run_states[-1]), contents(many, other_states[-1]))
        except AssertionError as error:
            kept = ", ".join(many.changed) or "nothing that this test finds"
            pytest.fail(f"{number} workers give other numbers than one; kept from one job to the next: {kept}\n{error}")


def absences(make: Make, num_clients: int, **chances: float) -> dict[str, float]:
    """Settings by which clients miss rounds: one client is not asked (peers all train), and `chances` to drop out.

    {} for a method that needs every client in every round.
    """
    settings = chances if (here := make()).is_peer else {"per_round": num_clients - 1, **chances}
    return {} if here.method.capabilities.needs_everyone else settings


def a_run_goes_on_from_its_checkpoint(make: Make, num_clients: int, folder: Path) -> None:
    """A checkpoint after two of four rounds, with clients missing, holds all that the other two need."""
    clients = absences(make, num_clients, dropout_after_training=0.2)
    here = make(rounds=4, clients=clients)
    records, run_states = play(here)
    executor = InlineExecutor(here)
    checkpoint.save(folder, run_states[1], executor)
    read_back = checkpoint.load(folder, executor)
    assert read_back is not None and read_back.round == 2
    assert_same_bits(contents(executor, run_states[1]), contents(executor, read_back))
    later, later_states = play(make(rounds=4, clients=clients), run_state=read_back)
    assert rows(records[2:]) == rows(later)
    assert_same_bits(contents(executor, run_states[-1]), contents(executor, later_states[-1]))


class Normed(nn.Module):
    """A small network with BatchNorm, whose buffers training changes."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        # A bias before BatchNorm has a gradient of rounding errors only, by which top-k would choose.
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), 12, bias=False))
        # Batches of two examples have small variances, by whose roots rounding grows.
        self.norm = nn.BatchNorm1d(12, eps=0.1)
        self.head = nn.Linear(12, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs [batch, *input_shape] to logits [batch, num_classes]."""
        return self.head(self.norm(self.body(inputs)).relu())


def parts_stay_with_their_clients(make: Make, parts: Mapping[str, object], num_clients: int, folder: Path) -> None:
    """With `parts` of a network with BatchNorm the contracts above hold, and messages have no personal entries."""

    def made(**options: Value) -> Setup:
        return make(**{"model": Normed, "parts": parts, **options})

    here = made()
    played = play(here)
    loop_and_vmap_agree(here, made(engine="vmap"), played)
    several_workers_give_the_bits_of_one(here, played)
    a_run_goes_on_from_its_checkpoint(made, num_clients, folder)
    setup = made(rounds=2)
    assert isinstance(setup.method, OwnParts), "training changes the running statistics"
    here, log = watched(setup)
    play(here)
    assert log.modified == []
    messages = [*log.up.values(), *log.broadcasts.values(), *(message for row in log.down.values() for message in row)]
    sent = {name for message in messages for packet in message.values() for name in packet.support()}
    assert sent.isdisjoint(setup.method.trains if setup.method.averaged else setup.method.kept)
    assert sent.issuperset(setup.method.averaged)


def no_hook_modifies_what_it_was_given(setup: Setup, played: Played, unread: Collection[str] = ()) -> None:
    """Arguments and the method's own values are unchanged after every call, and states have the declared keys.

    Every setting of the method is read or declared in `Hyper.unused`, except for those in `unread`. The watching itself
    does not change results.
    """
    here, log = watched(setup)
    if not hasattr(here.method, "inner"):
        # The constructor may read settings, too.
        type(setup.method)(here.method.task, here.method.hyper)
    here.method.check(here.num_clients, here.topology, here.seed)
    here.method.init_params(here.initial, FirstDraws(here.seed, NOBODY))
    records, run_states = play(here)
    settings = setup.method.hyper
    assert type(settings).model_fields.keys() - log.read - settings.unused().keys() <= {*unread}
    assert log.modified == []
    assert log.undeclared == []
    assert rows(records) == rows(played[0])
    assert {"begin", "step", "finish"} <= set(log.calls)
    assert not here.method.gather or ("mix" if here.is_peer else "server_update") in log.calls
    assert_same_bits(contents(InlineExecutor(here), run_states[-1]), contents(InlineExecutor(setup), played[1][-1]))


def the_bill_is_the_size_of_the_buffers(make: Make, num_clients: int) -> tuple[Setup, Log, Played]:
    """Every client is billed in every round eight times the bytes that it sent and received, also if clients drop out.

    Returns the setup that was run, the log of the watched hooks, and the records and run states.
    """
    clients = absences(make, num_clients, dropout_after_training=0.2, dropout_before_download=0.2)
    here, log = watched(make(seed=1, rounds=4, clients=clients, evaluation=Evaluation(every=0)))
    records, run_states = play(here)
    messages = [*log.up.values(), *log.links.values(), *log.broadcasts.values()]
    messages += [m for row in log.down.values() for m in row]
    for packet in (packet for message in messages for packet in message.values()):
        assert packet.num_bits == buffer_bits({"packet": packet})
        assert all(isinstance(part, np.ndarray) and part.ndim == 1 for part in packet.parts.values())
    statuses = {client.status for record in records for client in record.clients}
    assert not clients or {"dropped_after_training", "dropped_before_download"} <= statuses
    counts_bits = label_counts.COUNT_BITS * here.dataset.num_classes if here.method.capabilities.label_counts else 0
    told = set[int]()
    for round_number, record in enumerate(records):
        late = owed(run_states, round_number, log.broadcasts.get(round_number, {}))
        for row in record.clients:
            sent = row.status == "delivered"
            expected = [0, 0]
            if here.method.capabilities.in_pairs:
                # Partners send each other as much.
                expected = [row.uplink_bits] * 2
            elif isinstance(here.method, PeerHalf):
                expected = peer_bits(here, log, record, round_number, row.client) if sent else expected
            elif row.status != "dropped_before_download":
                down = [log.broadcasts.get(round_number, {}), *log.down.get((round_number, row.client), [])]
                first = 0 if row.client in told else counts_bits
                told.add(row.client)
                expected = [
                    first + (buffer_bits(log.up[round_number, row.client]) if sent else 0),
                    sum(map(buffer_bits, down)) + late.get(row.client, Missed()).bits,
                ]
            assert [row.uplink_bits, row.downlink_bits] == expected, (round_number, row)
        assert record.row.uplink_bits == sum(row.uplink_bits for row in record.clients)
        assert record.row.downlink_bits == sum(row.downlink_bits for row in record.clients)
    return here, log, (records, run_states)


def owed(run_states: Sequence[RunState], round_number: int, message: Message) -> Mapping[int, Missed]:
    """The broadcasts that each client had missed when a round's message went down; {} if none can be missed."""
    before = run_states[round_number - 1].downlink if round_number else {}
    state = before and {**run_states[round_number].downlink, "had": before["had"]}
    return downlinks.missed(state, message, range(len(state.get("had", ()))))


def peer_bits(here: Setup, log: Log, record: RoundRecord, round_number: int, client: int) -> list[int]:
    """Up: the own message, once per receiver; down: the messages that the client receives. Both ends are billed."""
    present = [row.client for row in record.clients if row.status == "delivered"]
    assert here.topology is not None
    graph = here.topology.receives(here.num_clients, here.seed, round_number)

    def size(sender: int, receiver: int) -> int:
        return buffer_bits(log.links.get((round_number, sender, receiver), log.up[round_number, sender]))

    return [
        sum(size(client, other) for other in present if graph[other, client]),
        sum(size(other, client) for other in present if graph[client, other]),
    ]


def unseen_clients_are_evaluated_and_leave_no_trace(make: Make) -> None:
    """Unseen clients are evaluated in every round, and everything else is as if they did not exist.

    Their metrics, too, do not depend on the engine and the workers. A method that defines no model for a client that
    comes for the first time refuses `clients.unseen`, with its own name in the error.
    """
    clients = {"unseen": 0.3}
    method = make().method
    if method.capabilities.newcomer == "undefined":
        with pytest.raises(RayflError, match=rf"clients\.unseen.*\b{type(method).__name__}\b"):
            make(clients=clients)
        return
    options = {"clients": clients, "rounds": 2, "evaluation": Evaluation(train=True)}
    here = make(**options)
    records, run_states = played = play(here)
    for record in records:
        evaluated = {metric.client for metric in record.metrics if metric.name == "unseen/loss"}
        assert evaluated == {None, *(client for client in here.unseen if len(here.partition.test[client]))}
    alone = without_unseen(here)
    others, other_states = play(alone)
    seen = [
        replace(record, metrics=tuple(m for m in record.metrics if not m.name.startswith("unseen")))
        for record in records
    ]
    assert rows(seen) == rows(others)
    assert_same_bits(contents(InlineExecutor(here), run_states[-1]), contents(InlineExecutor(alone), other_states[-1]))
    several_workers_give_the_bits_of_one(here, played)
    loop_and_vmap_agree(here, make(**options, engine="vmap"), played)


def without_unseen(setup: Setup) -> Setup:
    """The same experiment without the unseen clients and their examples."""
    number = setup.num_clients
    splits = [setup.partition.split(name) for name in ("train", "validation", "heldout", "test")]
    partition = Partition(
        *(Shards(shards.indices[: shards.offsets[number]], shards.offsets[: number + 1]) for shards in splits)
    )
    clients = setup.population.settings.model_copy(update={"count": number, "unseen": 0.0})
    return replace(setup, partition=partition, population=Population(clients, setup.seed, partition.train.sizes))


def bits_fall_under_a_compressor(make: Make) -> None:
    """Top-k of a tenth of the entries sends fewer bits, so no large message bypasses the uplink's compressor."""
    plain, sparse = (
        sum(r.row.uplink_bits for r in play(here)[0]) for here in (make(), make(uplink=TopK(keep_ratio=0.1)))
    )
    assert sparse < 0.5 * plain or not plain


def task_tables(method: str, **options: Value) -> dict[str, Value]:
    """The tables of an experiment in which a method trains, one of `TASK_METHODS` with their settings."""
    kind: type[Method] = find(Method, method)
    settings = {"lr": 0.1, "batch_size": 16, **TASK_METHODS.get(method, {}), **options}
    graph = {"topology": fitting_graph(kind.capabilities)} if kind.gather and issubclass(kind, PeerHalf) else {}
    return {"method": {"name": method, **settings}, **graph}


def examples_are_evaluated_one_by_one(setup: Setup) -> None:
    """An example's loss, count and score do not depend on the others in its batch, and padding adds nothing."""
    task = setup.method.task
    assert isinstance(task, NetworkTask)
    train = setup.data(0).all("train")
    batch = Batch(train.inputs[:_MOST_EXAMPLES], train.labels[:_MOST_EXAMPLES])
    outputs = tree_map(torch.Tensor.detach, task.evaluated(setup.initial, batch))
    sums, counts = task.task.loss(outputs, batch.labels)
    scores = task.task.score(outputs, batch.labels)
    assert bool(((scores >= 0) & (scores <= 1)).all() and (counts >= 0).all() and torch.isfinite(sums).all())

    def some(rows: slice | torch.Tensor) -> tuple[Anything, torch.Tensor]:
        return tree_map(lambda output: output[rows], outputs), batch.labels[rows]

    for row in range(len(batch.labels)):
        span = slice(row, row + 1)
        alone = (*task.task.loss(*some(span)), task.task.score(*some(span)))
        torch.testing.assert_close(alone, (sums[span], counts[span], scores[span]), rtol=1e-5, atol=1e-6)
    weights = (torch.arange(len(batch.labels)) % 2).float()
    torch.testing.assert_close(
        task.task.mean_loss(outputs, batch.labels, weights),
        task.task.mean_loss(*some(weights > 0)),
        rtol=1e-5,
        atol=1e-6,
    )


def a_method_trains_on_it(make: Callable[[str], Setup]) -> None:
    """Both engines agree, and three workers give the bits of one. `make`: a setup for an engine, "loop" or "vmap"."""
    here = make("loop")
    played = play(here)
    if here.method.task.vmappable:
        loop_and_vmap_agree(here, make("vmap"), played)
    several_workers_give_the_bits_of_one(here, played)

"""Peers on their own clocks: an event-driven reference, equal speeds, workers, checkpoints, bills, refusals."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayfl import tree
from rayfl.choices.kinds import named
from rayfl.data.datasets import Examples
from rayfl.data.partition import Partition, Shards
from rayfl.experiment.prepare import prepare
from rayfl.methods.base import Method, PeerHalf
from rayfl.population.sampling import Clients, Population
from rayfl.rounds.evaluation_settings import Evaluation
from rayfl.rounds.executor import InlineExecutor, Job, JobResult, Ref
from rayfl.rounds.ledger import RoundRecord
from rayfl.rounds.run_state import RunState
from rayfl.rounds.setup import Setup
from rayfl.run_directory import checkpoint
from rayfl.run_directory.states import load_states
from rayfl.schedules.base import PeerSchedule
from rayfl.schedules.gossip import GossipSchedule
from rayfl.testing.contracts import loop_and_vmap_agree
from rayfl.testing.executors import Shuffled, assert_same_bits, contents, leaves, play, rows
from rayfl.topology.graphs import FullyConnected, Grid, OnePeerExponential, Ring
from rayfl.wrappers.robust import CenteredClipping, CoordinateMedian, Krum, RobustWrapper, TrimmedMean
from tests.contracts.every_method import experiment
from tests.contracts.seams import quadratic
from tests.contracts.seams.closed_form import flat, start
from tests.methods.gossip import trained
from tests.methods.plain_peers import made, world_of
from tests.refusals import refused
from tests.schedules.gossip_reference import NUM_PEERS, Pairs, Peers

FAST: dict[str, Any] = {"uplink_mbps": 1e9, "downlink_mbps": 1e9}
EQUAL = {"examples_per_s": [float(size) for size in quadratic.TRAIN], **FAST}
UNEQUAL: dict[str, Any] = {"examples_per_s": {"median": 6.0, "sigma": 1.0}, "uplink_mbps": 0.002}
AWAY = {**UNEQUAL, "availability": {"probability": 0.7}, "availability_s": 0.8}
SGD = {"batch_size": 2, "lr": 0.05, "lr_decay": 0.999}


def models(here: Setup, run_state: RunState) -> np.ndarray:
    """All models [4, 10]."""
    executor = InlineExecutor(here)
    states = {client: tree.to_tensors(executor.get(ref))["params"] for client, ref in run_state.states.items()}
    return np.array([flat(states[i]) if i in states else start(here) for i in range(NUM_PEERS)])


def noted(record: RoundRecord, name: str) -> dict[int, float]:
    """A metric by client."""
    return {
        client: value
        for client, what, value in record.metrics
        if what == name and client is not None and value is not None
    }


# Any: hyper-parameters, and arguments of `[clients]`.
@pytest.mark.parametrize(
    ("method", "hyper", "schedule", "clients", "topology"),
    [
        ("dpsgd", SGD, GossipSchedule(), UNEQUAL, Ring()),
        (
            "dpsgd",
            SGD,
            GossipSchedule(most_staleness=1.2, latency_s=0.2),
            UNEQUAL,
            FullyConnected(weights="metropolis"),
        ),
        ("dpsgd", {**SGD, "steps": 2}, GossipSchedule(), {**UNEQUAL, "uplink_mbps": 0.0008}, Grid(rows=1)),
        ("dpsgd", SGD, GossipSchedule(), UNEQUAL, OnePeerExponential()),
        ("dpsgd", SGD, GossipSchedule(most_staleness=2), AWAY, Ring()),
        ("dpsgd", SGD, GossipSchedule(), EQUAL, Ring()),
        ("adpsgd", SGD, GossipSchedule(partners=1), UNEQUAL, Ring()),
        ("adpsgd", {**SGD, "epochs": 2}, GossipSchedule(partners=1, latency_s=0.3), UNEQUAL, FullyConnected()),
        ("adpsgd", {**SGD, "epochs": 1}, GossipSchedule(partners=1), EQUAL, FullyConnected()),
        ("adpsgd", SGD, GossipSchedule(partners=1), AWAY, FullyConnected()),
    ],
)
def test_500_trainings_are_those_of_the_reference(
    method: str, hyper: dict[str, Any], schedule: GossipSchedule, clients: dict[str, Any], topology: Any
):
    here = made(method, hyper, clients=clients, topology=topology, rounds=125, schedule=schedule)
    kind = Pairs if schedule.partners else Peers
    expected = kind(here, schedule.latency_s, lambda age: schedule.scale(age) or 0.0).run()
    records, run_states = play(here)
    assert run_states[-1].clocks.num_ended >= (490 if clients is AWAY else 500)
    found = np.stack([models(here, run_state) for run_state in run_states])
    x = np.stack([closed.x for closed in expected])
    np.testing.assert_allclose(found, x, rtol=0, atol=1e-6 * np.abs(x).max())
    np.testing.assert_allclose([state.clocks.second for state in run_states], [closed.second for closed in expected])
    for record, closed in zip(records, expected, strict=True):
        assert noted(record, "flight/staleness") == pytest.approx(closed.ages)
    ages = {age for closed in expected for age in closed.ages.values()}
    assert len(ages) > 1 or (clients is EQUAL and ages == {0.375})


def trimmed(rows: np.ndarray, weights: np.ndarray, own: int) -> np.ndarray:
    cut = int(0.34 * len(rows))
    return np.sort(rows, axis=0)[cut : len(rows) - cut].mean(axis=0)


def nearest(rows: np.ndarray, weights: np.ndarray, own: int) -> np.ndarray:
    """Krum with f = 1."""
    squares = ((rows[:, None] - rows) ** 2).sum(axis=2)
    scores = [np.sort(np.delete(row, i))[: max(1, len(rows) - 3)].sum() for i, row in enumerate(squares)]
    return rows[int(np.argmin(scores))]


def clipped(rows: np.ndarray, weights: np.ndarray, own: int) -> np.ndarray:
    moves = [row - rows[own] for row in rows]
    return rows[own] + sum(
        w * move * min(1.0, 0.2 / max(1e-30, np.linalg.norm(move))) for w, move in zip(weights, moves, strict=True)
    )


@pytest.mark.parametrize(
    ("rule", "combine"),
    [
        (CoordinateMedian(), lambda rows, weights, own: np.median(rows, axis=0)),
        (TrimmedMean(trim=0.34), trimmed),
        (Krum(byzantine=1), nearest),
        (CenteredClipping(radius=0.2), clipped),
    ],
    ids=["median", "trimmed", "krum", "clipped"],
)
def test_robust_rules_combine_what_has_arrived(rule: RobustWrapper, combine: Any):
    here = made("dpsgd", SGD, clients=UNEQUAL, topology=FullyConnected(weights="metropolis"), rounds=12)
    here = replace(here, method=rule.around(here.method), schedule=GossipSchedule(most_staleness=1.2, latency_s=0.2))
    expected = Peers(here, 0.2, lambda age: float(age <= 1.2), combine).run()
    found = np.stack([models(here, run_state) for run_state in play(here)[1]])
    x = np.stack([closed.x for closed in expected])
    np.testing.assert_allclose(found, x, rtol=0, atol=1e-5 * np.abs(x).max())


@pytest.mark.parametrize("order", ["average_first", "lian"])
@pytest.mark.parametrize("evaluation", [{"own": True, "train": True}, {"own": True, "every": 3}])
def test_equal_speeds_without_delay_have_the_bits_of_rounds(order: str, evaluation: dict[str, Any]):
    hyper = {**SGD, "order": order, "epochs": 1}
    here = replace(made("dpsgd", hyper, clients=EQUAL, rounds=5), evaluation=Evaluation(pooled=False, **evaluation))
    (rounds, states), (gossip, own_states) = play(here), play(replace(here, schedule=GossipSchedule()))
    for state, other in zip(states, own_states, strict=True):
        assert_same_bits(*(leaves("", {f"{i}": ref for i, ref in one.states.items()}) for one in (state, other)))
    for record, other in zip(rounds, gossip, strict=True):
        assert record.clients == other.clients
        assert {*record.metrics} == {row for row in other.metrics if not row.name.startswith("flight/")}
        assert other.row.simulated_s == pytest.approx(record.row.simulated_s)
        assert max(noted(other, "flight/staleness").values()) < 1


@pytest.mark.parametrize(("method", "hyper"), [("dfedavgm", {"momentum": 0.5}), ("dfedsam", {"rho": 0.1})])
def test_kin_of_dpsgd_at_equal_speeds_have_the_models_of_rounds(method: str, hyper: dict[str, Any]):
    here = made(method, {**SGD, **hyper, "epochs": 1}, clients=EQUAL, rounds=3)
    for state, other in zip(play(here)[1], play(replace(here, schedule=GossipSchedule()))[1], strict=True):
        assert np.array_equal(models(here, state), models(here, other))


def two_peers(seconds: tuple[float, float], method: str, schedule: GossipSchedule) -> Setup:
    """f_i = (x - b_i)^2 / 2 in ten equal entries, b = (0, 4), full steps of 1/2, from 0."""
    hyper = {"batch_size": 0, "lr": 0.5, "steps": 1}
    here = made(method, hyper, topology=FullyConnected(), rounds=4, schedule=schedule)
    inputs = np.ones((2, 2, 10), np.float32) * np.array([[[0.0], [1.0]], [[4.0], [1.0]]], np.float32)
    none, ones = Shards.of([np.empty(0, np.int64)] * 2), Shards.of([np.array([0]), np.array([1])])
    examples = Examples(inputs, np.zeros(2, np.int64))
    clients = Clients(count=2, examples_per_s=tuple(1 / s for s in seconds), **FAST)
    return replace(
        here,
        dataset=replace(here.dataset, train=examples, test=examples),
        partition=Partition(ones, none, none, none),
        population=Population(clients, here.seed, np.array([1, 1])),
        initial_arrays={name: np.zeros_like(array) for name, array in here.initial_arrays.items()},
    )


def test_two_peers_by_hand():
    """One second and two a training, and a quarter for a message: after two seconds (0, 1), after four (1.25, 1.25)."""
    here = two_peers((1.0, 2.0), "dpsgd", GossipSchedule(latency_s=0.25))
    _, run_states = play(here)
    seen = {state.clocks.second: models(here, state)[:2, 0].tolist() for state in run_states}
    assert seen[2.0] == [0.0, 1.0] and seen[3.0] == [1.0, 1.0] and seen[4.0] == [1.25, 1.25]


def test_a_pair_by_hand():
    """After two trainings of each x is (1, 2). Only the first averaging of all met a model that nobody had changed."""
    here = two_peers((1.0, 1.0), "adpsgd", GossipSchedule(partners=1))
    records, run_states = play(here)
    assert models(here, run_states[1])[:2, 0].tolist() == [1.0, 2.0]
    assert [noted(record, "flight/staleness") for record in records[:2]] == [{0: 0.0, 1: 1.0}, {0: 1.0, 1: 1.0}]


class Waves(InlineExecutor):
    """A number of workers, and the kinds and sizes of the waves that they get."""

    def __init__(self, setup: Setup, num_workers: int) -> None:
        super().__init__(setup)
        self.num_workers, self.waves = num_workers, list[tuple[str, int]]()

    def run(self, shared: Ref, jobs: Sequence[Job]) -> list[JobResult]:
        self.waves.append((jobs[0].kind, len(jobs)))
        return super().run(shared, jobs)


ON_DIGITS: dict[str, tuple[str, dict[str, Any]]] = {
    "dpsgd": ("dpsgd", {"schedule": {"name": "gossip", "latency_s": 0.3}}),
    "dispfl": ("dispfl", {"schedule": "gossip", "topology": {"name": "random", "degree": 2}}),
    "mcepl, dropouts": ("mcepl", {"clients": {"dropout_before_download": 0.2, "dropout_after_training": 0.2}}),
    "dpsgd_ft, two": ("dpsgd_ft", {"uplink": "qsgd", "evaluation": {"every": 2, "clients": 2}}),
    "dsgdprox, away": ("dsgdprox", {"clients": {"availability": {"probability": 0.6}, "availability_s": 0.7}}),
    "clipped": ("dpsgd", {"wrap": [{"name": "clip", "norm": 0.5}], "uplink": "feedback"}),
    "adpsgd": ("adpsgd", {"schedule": {"name": "gossip", "partners": 1, "latency_s": 0.2}}),
    "adpsgd, away": ("adpsgd", {"clients": {"availability": {"probability": 0.6}, "availability_s": 0.7}}),
    "adpsgd, dropouts": ("adpsgd", {"clients": {"dropout_before_download": 0.2, "dropout_after_training": 0.2}}),
}


def on_digits(case: str, engine: str = "loop", **options: Any) -> Setup:
    """Six peers with speeds far apart on slow links."""
    method, tables = ON_DIGITS[case]
    schedule = {"name": "gossip", "partners": 1} if method == "adpsgd" else "gossip"
    tables = {"schedule": schedule, "rounds": 6, "runtime": {"engine": engine}, **tables, **options}
    tables["clients"] = {
        "examples_per_s": {"median": 300.0, "sigma": 1.2},
        "uplink_mbps": 0.05,
        **tables.get("clients", {}),
    }
    return prepare(experiment(method, **tables))


played = functools.cache(lambda case: (here := on_digits(case), *play(here)))


@pytest.mark.parametrize("case", ON_DIGITS)
def test_any_number_of_workers_gives_the_same_bits(case: str):
    here, records, run_states = played(case)
    expected = contents(InlineExecutor(here), run_states[-1])
    several = Waves(here, 4)
    for executor in (Shuffled(here), Waves(here, 2), several):
        others, other_states = play(here, executor)
        assert rows(others) == rows(records)
        assert_same_bits(contents(executor, other_states[-1]), expected)
    assert max(size for kind, size in several.waves if kind == "train") >= 4
    stale = [value for record in records for value in noted(record, "flight/staleness").values()]
    assert len({*stale}) > 1


@pytest.mark.parametrize("case", ON_DIGITS)
def test_a_run_resumes_after_every_round(case: str, tmp_path: Path):
    here, records, run_states = played(case)
    executor = InlineExecutor(here)
    for number, run_state in enumerate(run_states[:-1], 1):
        checkpoint.save(tmp_path, run_state, executor)
        read_back = checkpoint.load(tmp_path, executor)
        assert read_back is not None and read_back.round == number
        assert_same_bits(contents(executor, run_state), contents(executor, read_back))
        later, later_states = play(here, run_state=read_back)
        assert rows(later) == rows(records[number:])
        assert_same_bits(contents(executor, later_states[-1]), contents(executor, run_states[-1]))


@pytest.mark.parametrize("case", ["dpsgd", "adpsgd"])
def test_stacks_and_the_loop_agree(case: str, tmp_path: Path):
    loop, vmap = on_digits(case, rounds=3), on_digits(case, "vmap", rounds=3)
    loop_and_vmap_agree(loop, vmap)
    records, run_states = play(vmap)
    executor = InlineExecutor(vmap)
    checkpoint.save(tmp_path, run_states[0], executor)
    later, later_states = play(vmap, run_state=checkpoint.load(tmp_path, executor))
    assert rows(later) == rows(records[1:])
    assert_same_bits(contents(executor, later_states[-1]), contents(executor, run_states[-1]))


@pytest.mark.parametrize("case", ON_DIGITS)
def test_every_bit_is_billed_on_both_ends(case: str):
    _, records, run_states = played(case)
    for record in records:
        assert record.row.uplink_bits == record.row.downlink_bits
    ended = sum(client.num_steps > 0 for record in records for client in record.clients)
    assert ended <= run_states[-1].clocks.num_ended and sum(record.row.uplink_bits for record in records)


def test_a_round_evaluates_each_peer_as_it_is_and_after_its_last_training():
    _, records, run_states = played("dpsgd")
    ended = set[int]()
    for record in records:
        ended |= {*noted(record, "train/loss")}
        assert {*noted(record, "own/accuracy")} == {*range(6)}
        assert {*noted(record, "own_after_training/accuracy")} == ended
    assert run_states[0].clocks.peers[0].trained != run_states[-1].clocks.peers[0].trained
    every_third = on_digits("dpsgd", evaluation={"every": 3})
    for record, other in zip(records, play(every_third)[0], strict=True):
        if record.row.round in (2, 5):
            assert {*other.metrics} == {*record.metrics}


def test_each_message_is_in_a_checkpoint_once(tmp_path: Path):
    here, _, run_states = played("dpsgd")
    executor = InlineExecutor(here)
    checkpoint.save(tmp_path, run_states[2], executor)
    (file,) = tmp_path.glob("checkpoints/*/messages-*")
    names = [name for name, _ in load_states(file)]
    mails = [mail.end for peer in run_states[2].clocks.peers for mail in peer.mail]
    assert sorted(map(int, names)) == sorted(mails) and len(mails) > 6


class Halved(PeerSchedule):
    """Every message keeps half of its weight."""

    name = "test-halved"

    def scale(self, staleness: float) -> float:
        return 0.5


def test_what_a_schedule_takes_from_a_message_the_peer_itself_gets():
    here = made("dpsgd", {**SGD, "epochs": 1}, clients=EQUAL, rounds=3, topology=FullyConnected(), schedule=Halved())
    x = np.tile(start(here), (NUM_PEERS, 1))
    weights = np.full((4, 4), 0.125) + 0.5 * np.eye(4)
    for number, run_state in enumerate(play(here)[1]):
        x = weights @ trained(here, number, x)
        np.testing.assert_allclose(models(here, run_state), x, atol=1e-6)


def test_pairs_keep_the_sum_and_agree():
    """Averages keep the sum, and without a step the peers' models come together."""
    here = made("adpsgd", {**SGD, "lr": 1e-9}, clients=UNEQUAL, rounds=60, schedule=GossipSchedule(partners=1))
    x = np.random.default_rng(1).standard_normal((NUM_PEERS, 10))
    found = [models(here, state) for state in play(here, run_state=world_of(x, here))[1]]
    np.testing.assert_allclose([each.sum(axis=0) for each in found], np.tile(x.sum(axis=0), (60, 1)), atol=1e-5)
    assert np.abs(found[-1] - x.mean(axis=0)).max() < 1e-5


def test_refusals(tmp_path: Path):
    clients = {"clients": {"examples_per_s": 100.0}}
    (tmp_path / "one_way.txt").write_text("0 1\n1 2\n2 3\n3 4\n4 5\n5 0\n")
    (tmp_path / "weights.txt").write_text("0 1 .5\n1 2 .5\n2 3 .5\n3 4 .5\n4 5 .5\n")
    one_way = {"topology": {"name": "file", "path": str(tmp_path / "one_way.txt"), "directed": True}}
    weighted = {"topology": {"name": "file", "path": str(tmp_path / "weights.txt"), "weighted": True}}
    for name, kind in named(Method).items():
        can = kind.capabilities
        if not (can.takes_stale and issubclass(kind, PeerHalf)) or can.in_pairs:
            with refused(names=["schedule", "gossip", kind.__name__]):
                prepare(experiment(name, schedule="gossip"))
    pairs = {"schedule": {"name": "gossip", "partners": 1}}
    for method, tables, names in (
        ("dpsgd", pairs, ["schedule", "DPSGD", "partners", "adpsgd"]),
        ("adpsgd", {"schedule": "synchronous"}, ["schedule", "ADPSGD", "gossip", "partners=1"]),
        ("dpsgd", {"schedule": "buffered"}, ["schedule", "buffered", "DPSGD", "gossip"]),
        ("adpsgd", {**pairs, "topology": "exponential"}, ["topology", "exponential", "ADPSGD", "ring"]),
        ("adpsgd", {**pairs, "topology": {"name": "ring", "weights": "metropolis"}}, ["topology.weights"]),
        ("adpsgd", {**pairs, **one_way}, ["topology", "file", "ADPSGD", "ring"]),
        ("adpsgd", {**pairs, **weighted}, ["topology.weighted"]),
        ("adpsgd", {**pairs, "uplink": "topk"}, ["uplink", "ADPSGD"]),
        ("adpsgd", {"schedule": {"name": "gossip", "partners": 2}}, ["schedule.partners=2"]),
        ("dpsgd", {"schedule": {"name": "gossip", "partners": 1, "most_staleness": 2}}, ["most_staleness"]),
        ("dfedavgm", {"schedule": "gossip", "method": {"name": "dfedavgm", "exchange": "printed"}}, ["DFedAvgM"]),
        ("dfedsam", {"schedule": "gossip", "method": {"name": "dfedsam", "exchanges": 2}}, ["DFedSAM"]),
        ("adpsgd", {**pairs, "wrap": [{"name": "coordinate-median"}]}, ["coordinate-median", "ADPSGD"]),
        ("dpsgd", {"schedule": {"name": "gossip", "latency_s": -1}}, ["schedule.latency_s=-1"]),
        ("dpsgd", {"schedule": "gossip", "clients": {"availability_s": 3.0}}, ["clients.availability_s=3"]),
    ):
        with refused(names=names):
            prepare(experiment(method, **{**clients, **tables}))

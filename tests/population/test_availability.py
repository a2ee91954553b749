"""Who can be reached: exact counts, monotone in the chances, as periodic as the day, and of each client alone."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.methods.peers.dpsgd import DPSGD
from rayfl.population.availability import Diurnal, Trace, available, read_trace
from rayfl.population.sampling import DROPOUTS, Clients, Population
from rayfl.testing.executors import Shuffled, play
from rayfl.topology.graphs import Ring
from tests.contracts.seams.quadratic import Quadratic
from tests.contracts.seams.quadratic import setup as quadratic
from tests.methods.reference import played, setup_of
from tests.refusals import refused

chance = st.floats(0.0, 0.99)
share = st.floats(0.01, 1.0)
seeds, rounds = st.integers(0, 2**40), st.integers(0, 10**6)
few = settings(max_examples=40, deadline=None)


def population(seed: int = 1, **clients: Any) -> Population:
    table = Clients(**clients)
    return Population(table, seed, np.full(table.count, 10))


def there(people: Population, round: int) -> set[int]:
    return set(range(len(people))) - set(people.sample_round(round).unavailable)


@few
@given(st.integers(1, 40), st.data(), share, seeds, rounds)
def test_as_many_as_wanted_of_those_who_are_there(count: int, data: st.DataObject, p: float, seed: int, round: int):
    wanted = data.draw(st.integers(1, count))
    people = population(seed, count=count, per_round=wanted, availability={"probability": p})
    draw = people.sample_round(round)
    assert len(draw.selected) == min(wanted, count - len(draw.unavailable))
    assert list(draw.selected) == sorted(set(draw.selected) - set(draw.unavailable))
    assert set(draw.statuses) == set(draw.selected)
    assert people.sample_round(round, everyone=True).selected == tuple(sorted(there(people, round)))
    if p == 1.0:
        assert draw.selected == population(seed, count=count, per_round=wanted).sample_round(round).selected


@few
@given(share, share, seeds, rounds)
def test_a_higher_chance_loses_nobody(a: float, b: float, seed: int, round: int):
    low, high = (population(seed, count=30, availability={"probability": p}) for p in sorted((a, b)))
    assert there(low, round) <= there(high, round)


@few
@given(st.lists(share, min_size=2, max_size=12), share, seeds, rounds)
def test_a_clients_chances_are_its_own(chances: list[float], other: float, seed: int, round: int):
    first, second = (
        population(seed, count=len(chances), availability={"probability": list(p)})
        for p in (chances, [*chances[:-1], other])
    )
    last = len(chances) - 1
    assert there(first, round) - {last} == there(second, round) - {last}


@few
@given(st.fixed_dictionaries(dict.fromkeys(DROPOUTS, chance)), st.data(), seeds, rounds)
def test_faults_strike_the_same_whoever_is_selected(
    faults: dict[str, float], data: st.DataObject, seed: int, round: int
):
    everyone = population(seed, count=20, **faults).sample_round(round).statuses
    some = population(seed, count=20, per_round=data.draw(st.integers(1, 20)), **faults).sample_round(round)
    assert some.statuses == {client: everyone[client] for client in some.selected}
    assert set(everyone.values()) <= {"delivered", *(DROPOUTS[name] for name, p in faults.items() if p > 0)}


@few
@given(st.sampled_from(list(DROPOUTS)), chance, chance, seeds, rounds)
def test_a_higher_chance_of_a_fault_spares_nobody(name: str, a: float, b: float, seed: int, round: int):
    low, high = (population(seed, count=30, **{name: p}).sample_round(round).statuses for p in sorted((a, b)))
    struck, more = ({c for c, word in status.items() if word == DROPOUTS[name]} for status in (low, high))
    assert struck <= more
    assert {word for c, word in high.items() if c not in more} <= {"delivered"}


def test_faults_come_as_often_as_they_are_said_to():
    # The first that strikes decides: 0.2, 0.8 * 0.25 = 0.2, 0.6 * 0.5 = 0.3, 0.3 * 0.4 = 0.12, and 0.18 deliver.
    # Of 20,000 the standard deviation of a share is at most sqrt(0.25 / 20000) = 0.0035; the bound is five of them.
    people = population(
        count=20, dropout_before_download=0.2, dropout_after_download=0.25, dropout_after_training=0.5, upload_loss=0.4
    )
    words: list[str] = [word for round in range(1000) for word in people.sample_round(round).statuses.values()]
    expected = dict(zip((*DROPOUTS.values(), "delivered"), (0.2, 0.2, 0.3, 0.12, 0.18), strict=True))
    for word, p in expected.items():
        assert abs(words.count(word) / len(words) - p) < 0.018


def test_clients_are_there_as_often_as_they_are_said_to_be():
    people = population(count=4, availability={"probability": [0.1, 0.5, 0.9, 1.0]})
    seen = np.mean([[client in there(people, round) for client in range(4)] for round in range(2000)], axis=0)
    # A standard deviation is at most sqrt(0.25 / 2000) = 0.011.
    assert np.abs(seen - [0.1, 0.5, 0.9, 1.0]).max() < 5 * 0.011
    assert seen[3] == 1.0


@few
@given(st.integers(2, 48), share, st.floats(0, 1), seeds, st.integers(0, 1000))
def test_the_day_repeats(period: int, high: float, spread: float, seed: int, round: int):
    day = Diurnal(period=float(period), low=0.0, high=high, spread=spread)
    now = day.chances(20, seed, round)
    assert now == pytest.approx(day.chances(20, seed, round + period), abs=1e-9)
    # Half a day later it is as dark as it was light.
    assert now + Diurnal(period=2.0 * period, high=high, spread=spread).chances(20, seed, 2 * round + period) == (
        pytest.approx(np.full(20, high), abs=1e-9)
    )
    assert now.min() >= 0
    assert now.max() <= high


def test_noon_and_midnight_in_one_time_zone():
    day = Diurnal(period=24.0, low=0.2, high=0.8, spread=0.0)
    for round, p in ((0, 0.8), (6, 0.5), (12, 0.2), (18, 0.5), (24, 0.8)):
        assert day.chances(3, 1, round) == pytest.approx([p] * 3, abs=1e-12)


def test_noons_lie_all_over_the_day():
    # Phases are uniform, so at any time the mean chance is the middle; cos has a deviation of sqrt(1/2).
    chances = Diurnal(period=24.0).chances(4000, 1, 5)
    assert abs(chances.mean() - 0.5) < 5 * 0.5 * np.sqrt(0.5 / 4000)


def trace(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(("client,first_round,last_round", *lines)) + "\n", encoding="utf-8")
    return path


def test_a_trace_says_who_is_there(tmp_path: Path):
    path = str(trace(tmp_path, "0,0,1", "2,1,3", "0,3,3", ""))
    people = population(count=3, availability={"trace": path})
    assert [people.sample_round(round).selected for round in range(5)] == [(0,), (0, 2), (2,), (0, 2), ()]
    assert people.sample_round(2).unavailable.tolist() == [0, 1]
    again = population(count=3, availability={"trace": path, "repeat": 4})
    assert [again.sample_round(round).selected for round in range(4, 9)] == [(0,), (0, 2), (2,), (0, 2), (0,)]


@few
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 9)), max_size=12), st.integers(0, 9))
def test_a_trace_says_the_same_as_its_lines(tmp_path_factory: Any, lines: list[tuple[int, int, int]], round: int):
    spans = [(client, min(a, b), max(a, b)) for client, a, b in lines]
    path = trace(tmp_path_factory.mktemp("traces"), *(",".join(map(str, span)) for span in spans))
    expected = {client for client, first, last in spans if first <= round <= last}
    assert set(np.flatnonzero(available(Trace(trace=str(path)).read(5), 5, 1, round)).tolist()) == expected


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        (["0,0"], ["line 2", "trace", "'0,0'"]),
        (["0,0,1", "1,x,2"], ["line 3", "trace", "'1,x,2'"]),
        (["3,0,1"], ["line 2", "trace", "'3,0,1'", "0 to 2", "clients.count"]),
        (["0,2,1"], ["line 2", "trace", "'0,2,1'", "from 0"]),
    ],
)
def test_a_wrong_trace_is_refused(tmp_path: Path, lines: list[str], names: list[str]):
    with refused(names=names):
        read_trace(trace(tmp_path, *lines), 3)


def test_what_is_no_trace_is_refused_before_anything_starts(tmp_path: Path):
    other = tmp_path / "other.csv"
    other.write_text("who,when\n0,1\n", encoding="utf-8")
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, names in (
        (tmp_path / "others.csv", ["others.csv", "does not exist", "'other.csv'"]),
        (other, [str(other), "client,first_round,last_round"]),
        (binary, ["binary.csv", "CSV"]),
    ):
        with refused(names=names):
            setup_of("fedavg", {}, clients={"availability": {"trace": str(path)}})


def test_a_line_may_end_after_all_rounds(tmp_path: Path):
    ever = Trace(trace=str(trace(tmp_path, f"0,1,{10**30}", f"1,{10**30},{10**31}"))).read(2)
    assert available(ever, 2, 1, 0).tolist() == [False, False]
    assert available(ever, 2, 1, 2**31).tolist() == [True, False]


def test_a_path_that_no_file_can_have_is_refused():
    with refused(names=["trace", "null character"]):
        Trace(trace="a\0b")


@pytest.mark.parametrize(
    ("table", "names"),
    [
        (
            {"availability": {"probability": 1.5}},
            ["availability.probability=1.5", "(0, 1]"],
        ),
        ({"availability": {"period": 24.0, "low": 0.9, "high": 0.1}}, ["availability.low=0.9", "high=0.1"]),
        ({"availability": {"perod": 24.0}}, ["availability.perod", "period"]),
        ({"availability": {"period": 24.0, "spread": 2.0}}, ["availability.spread=2.0", "[0, 1]"]),
        ({"availability": {"trace": "a", "repeat": 0}}, ["availability.repeat=0", "whole number"]),
        (
            {"availability": {"probability": {"low": 0.0, "high": 0.5}}},
            ["availability.probability.low=0.0", "(0, 1]"],
        ),
        ({"examples_per_s": {"median": 1.0, "sigma": 2000.0}}, ["examples_per_s.sigma=2000.0", "(0, 10]"]),
        ({"uplink_mbps": {"low": 1e300, "high": 1e308}}, ["uplink_mbps", "low=1e+300", "[1e-09, 1e+12]"]),
        ({"uplink_mbps": {"median": 1e300, "sigma": 1.0}}, ["uplink_mbps", "median=1e+300", "[1e-09, 1e+12]"]),
        ({"availability": 0.5}, ["availability=0.5", "table", "probability"]),
        ({"deadline_s": 0.0}, ["deadline_s=0.0", "greater than 0"]),
        ({"upload_loss": 1.0}, ["upload_loss=1.0", "[0, 1)"]),
        ({"per_round": 3, "take_first": 4}, ["take_first=4", "3 clients", "lower"]),
        ({"work": "half"}, ["work='half'", "full", "capacity"]),
    ],
)
def test_mistakes_get_one_sentence(table: dict[str, Any], names: list[str]):
    with refused(names=names):
        Clients(count=9, **table)


def test_nobody_there_is_a_round_without_anybody(tmp_path: Path):
    table = {"availability": {"trace": str(trace(tmp_path, "0,1,1"))}}
    empty, one, *_ = [record for record, _ in played(setup_of("fedavg", {}, clients=table))]
    assert (empty.row.selected, empty.row.uplink_bits, empty.row.simulated_s) == (0, 0, 0.0)
    assert (one.row.selected, one.row.delivered) == (1, 1)


def test_peers_come_and_go():
    # Peer 0 is there in about 3 rounds of 10; who is away keeps its state, and its links carry nothing.
    chances = {"availability": {"probability": [0.3, 0.6, 0.9, 1.0]}}
    here = quadratic(DPSGD(Quadratic()), rounds=6, clients=chances, topology=Ring())
    records, run_states = play(here)
    shuffled, _ = play(here, Shuffled(here))
    assert [record.clients for record in records] == [record.clients for record in shuffled]
    away = 0
    for round, (before, after) in enumerate(itertools.pairwise(run_states), start=1):
        draw = here.population.sample_round(round, everyone=True)
        assert tuple(row.client for row in records[round].clients) == draw.selected
        away += len(draw.unavailable)
        assert all(after.states.get(client) is before.states.get(client) for client in draw.unavailable)
    assert away > 0

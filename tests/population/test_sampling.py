"""Who shows up: m distinct clients, each as often as any other, every round afresh, the same for the same seed."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.determinism.seeding import generator
from rayfl.population.client import ClientStatus
from rayfl.population.distributions import LogNormal, UniformValues
from rayfl.population.sampling import DROPOUTS, Clients, Participation, Population
from tests.population.statuses import with_status
from tests.refusals import refused


def population(seed: int = 1, **clients: Any) -> Population:
    table = Clients(**clients)
    return Population(table, seed, np.arange(table.count) + 10)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.data(), st.integers(0, 2**40), st.integers(0, 10**6))
def test_m_distinct_clients_in_ascending_order(count: int, data: st.DataObject, seed: int, round: int):
    wanted = data.draw(st.integers(1, count))
    selected = population(seed, count=count, per_round=wanted).sample_round(round).selected
    assert len(selected) == wanted
    assert list(selected) == sorted(set(selected))
    assert set(selected) <= set(range(count))
    again = population(seed, count=count, per_round=wanted).sample_round(round)
    assert again == population(seed, count=count, per_round=wanted).sample_round(round)
    assert again.selected == selected


@pytest.mark.parametrize(
    ("count", "fraction", "expected"),
    [
        (10, 0.1, 1),
        (10, 1.0, 10),
        (5, 0.5, 3),
        (7, 0.5, 4),
        (99, 0.015, 1),
        (100, 0.015, 2),
        (3, 0.01, 1),
        (9, None, 9),
    ],
)
def test_a_fraction_is_rounded_half_up_and_never_to_nobody(count: int, fraction: float | None, expected: int):
    assert Clients(count=count, fraction=fraction).num_selected == expected
    assert len(population(count=count, fraction=fraction).sample_round(0).selected) == expected


def chi_square(counts: np.ndarray, expected: float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_every_client_is_selected_equally_often():
    # 4 of 10 in 3000 rounds: 1200 each. Drawing without replacement makes counts vary less than a multinomial, by the
    # factor (1 - 4/10) 10/9 = 2/3: the statistic is 2/3 of a chi-square with 9 degrees of freedom, whose 1e-6
    # quantile is 45.1 (scipy.stats.chi2.isf(1e-6, 9)); the seed is fixed, so this passes always or never.
    people = population(count=10, per_round=4)
    counts = np.bincount(np.concatenate([people.sample_round(round).selected for round in range(3000)]), minlength=10)
    assert counts.sum() == 12000
    assert chi_square(counts, 1200) < 45.1 * 2 / 3


def test_pairs_are_selected_equally_often():
    # 2 of 5: each of the 10 pairs in one round of ten; 2000 rounds are 200 each, chi-square with 9 degrees of freedom.
    people = population(count=5, per_round=2)
    pairs = [people.sample_round(round).selected for round in range(2000)]
    counts = np.array([pairs.count((a, b)) for a in range(5) for b in range(a + 1, 5)])
    assert chi_square(counts, 200) < 45.1


def test_rounds_are_independent():
    # Of the 4 clients of a round, 4 * 4 / 10 = 1.6 on average are among the next round's. The overlap is
    # hypergeometric with variance 4 * 0.4 * 0.6 * 6 / 9 = 0.64, so the mean of 2000 has a standard deviation of 0.018.
    people = population(count=10, per_round=4)
    chosen = [set(people.sample_round(round).selected) for round in range(2001)]
    overlaps = [len(a & b) for a, b in itertools.pairwise(chosen)]
    assert abs(np.mean(overlaps) - 1.6) < 5 * 0.018


def test_another_seed_is_another_draw():
    draws = [
        [population(seed, count=50, per_round=10).sample_round(round).selected for round in range(5)]
        for seed in range(4)
    ]
    assert len({tuple(rounds) for rounds in draws}) == 4
    assert len({selected for rounds in draws for selected in rounds}) == 20


def test_dropouts_come_as_often_as_they_are_said_to():
    # 20,000 chances: before the download 0.3, else after training 0.25, so 0.3, 0.7 * 0.25 = 0.175 and 0.525.
    # Standard deviations at most sqrt(0.25 / 20000) = 0.0035; the bound is five of them.
    people = population(count=20, dropout_before_download=0.3, dropout_after_training=0.25)
    status: list[str] = [word for round in range(1000) for word in people.sample_round(round).statuses.values()]
    expected = {"dropped_before_download": 0.3, "dropped_after_training": 0.175, "delivered": 0.525}
    for word, share in expected.items():
        assert abs(status.count(word) / len(status) - share) < 0.018
    assert set(status) == set(expected)


def test_dropouts_are_independent_between_clients_and_rounds():
    # Two clients both drop in 0.5 * 0.5 of the rounds, and so does one client in two rounds in a row.
    people = population(count=2, dropout_after_training=0.5)
    lost = np.array([[s != "delivered" for s in people.sample_round(round).statuses.values()] for round in range(4000)])
    for both in (lost[:, 0] & lost[:, 1], lost[1:, 0] & lost[:-1, 0]):
        assert abs(both.mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / 4000)


def test_selection_does_not_depend_on_dropout_nor_dropout_on_selection():
    plain, dropping = (population(count=10, per_round=4, dropout_after_training=p) for p in (0.0, 0.5))
    everyone = population(count=10, dropout_after_training=0.5)
    for round in range(20):
        draw = dropping.sample_round(round)
        assert draw.selected == plain.sample_round(round).selected
        assert set(plain.sample_round(round).statuses.values()) == {"delivered"}
        whole = everyone.sample_round(round)
        assert draw.statuses == {client: whole.statuses[client] for client in draw.selected}


def test_everyone_means_everyone():
    people = population(count=10, per_round=4, dropout_before_download=0.5)
    assert people.sample_round(3, everyone=True).selected == tuple(range(10))


def test_among():
    draw = Participation({1: ClientStatus.DELIVERED, 4: ClientStatus.DROPPED_AFTER_TRAINING, 6: ClientStatus.DELIVERED})
    assert with_status(draw, "delivered") == (1, 6)
    assert with_status(draw, "dropped_after_training", "delivered") == (1, 4, 6)
    assert with_status(draw, "dropped_before_download") == ()


def test_traits():
    people = population(
        count=5, retention_ratio=[0.5, 0.25], examples_per_s=200, uplink_mbps=2, downlink_mbps=[8.0, 9.0, 7.0]
    )
    traits = [people.traits(client) for client in range(5)]
    assert [t.id for t in traits] == [0, 1, 2, 3, 4]
    assert [t.num_examples for t in traits] == [10, 11, 12, 13, 14]
    assert [t.retention_ratio for t in traits] == [0.5, 0.25, 0.5, 0.25, 0.5], "a list is dealt out in turn"
    assert {t.examples_per_s for t in traits} == {200.0}
    assert {t.uplink_bps for t in traits} == {2e6}
    assert [t.downlink_bps for t in traits] == [8e6, 9e6, 7e6, 8e6, 9e6]
    assert len(people) == 5


def test_values_in_turn_are_the_fifths_of_dis_pfl():
    # Index mod 5, as Dis-PFL's code has it.
    people = population(count=12, retention_ratio=[0.2, 0.4, 0.6, 0.8, 1.0])
    assert [people.traits(i).retention_ratio for i in range(12)] == [0.2, 0.4, 0.6, 0.8, 1.0] * 2 + [0.2, 0.4]


def test_a_method_knows_whether_the_experiment_says_what_clients_keep():
    free, full = (population(1, count=2, **table).traits(1) for table in ({}, {"retention_ratio": 1.0}))
    assert (free.retention_ratio, free.retention_given) == (1.0, False)
    assert (full.retention_ratio, full.retention_given) == (1.0, True)


def test_drawn_traits_follow_their_distributions_and_the_seed():
    tables = {"examples_per_s": {"median": 100, "sigma": 0.5}, "retention_ratio": {"low": 0.2, "high": 0.6}}
    people, again, other = (population(seed, count=4000, **tables) for seed in (1, 1, 2))
    speeds = np.array([people.traits(client).examples_per_s for client in range(4000)])
    # log speed ~ N(log 100, 0.25): standard deviations of its mean 0.5 / sqrt 4000 = 0.008, of its deviation 0.0056.
    assert abs(np.log(speeds).mean() - np.log(100)) < 5 * 0.008
    assert abs(np.log(speeds).std() - 0.5) < 5 * 0.0056
    kept = np.array([people.traits(client).retention_ratio for client in range(4000)])
    # Uniform on [0.2, 0.6): mean 0.4, standard deviation 0.4 / sqrt 12 = 0.1155, of the mean 0.0018.
    assert kept.min() >= 0.2
    assert kept.max() < 0.6
    assert abs(kept.mean() - 0.4) < 5 * 0.0018
    assert people.traits(7) == again.traits(7)
    assert people.traits(7) != other.traits(7)


def test_two_traits_of_one_client_are_drawn_apart():
    table = {"median": 1.0, "sigma": 1.0}
    people = population(count=2000, examples_per_s=table, uplink_mbps=table)
    pairs = [(people.traits(i).examples_per_s, people.traits(i).uplink_bps) for i in range(2000)]
    # The example correlation of independent normals has a standard deviation of 1 / sqrt 2000 = 0.022.
    assert abs(np.corrcoef(np.log(np.array(pairs).T))[0, 1]) < 5 * 0.022


def test_distributions_need_positive_numbers():
    for kind, table in ((LogNormal, {"median": 0.0, "sigma": 1.0}), (UniformValues, {"low": 0.0, "high": 1.0})):
        with refused(names=["=0.0", "[1e-09, 1e+12]"]):
            kind(**table)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.data(), st.integers(0, 2**40), st.integers(0, 10**6))
def test_fates_of_some_clients_are_those_that_they_have_among_all(
    count: int, data: st.DataObject, seed: int, round: int
):
    """The first of four chances that hits decides; a client's two numbers of a generator follow those of the others."""
    chances = {"dropout_before_download": 0.2, "dropout_after_download": 0.3}
    people = population(seed, count=count, **chances, dropout_after_training=0.4, upload_loss=0.5)
    chosen = sorted(data.draw(st.sets(st.integers(0, count - 1))))
    first, third = generator(seed, round, purpose="dropout").random((count, 2)).T
    second, fourth = generator(seed, round, purpose="further faults").random((count, 2)).T
    hits = np.stack([first < 0.2, second < 0.3, third < 0.4, fourth < 0.5, np.ones(count, bool)])
    statuses = [*DROPOUTS.values(), ClientStatus.DELIVERED]
    assert people.drawn_statuses(round, chosen) == {client: statuses[hits[:, client].argmax()] for client in chosen}

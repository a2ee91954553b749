"""Differential privacy: the accountant, the noise, and the experiments that cannot be private."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rayfl import tree
from rayfl.determinism.seeding import NOBODY
from rayfl.gather import Aggregate, WeightedMean
from rayfl.testing.executors import play
from rayfl.wrappers.differential_privacy import ORDERS, CentralDP, LocalDP, epsilon, one_round
from tests.refusals import refused
from tests.wrappers.every_wrapper import UNIFORM, Recorder, flat, here

POISSON: dict[str, Any] = {**UNIFORM, "selection": "poisson", "clients": {"count": 6, "per_round": 2}}


def test_epsilon_is_the_published_one():
    """Google's accountant, tensorflow_privacy's compute_dp_sgd_privacy_test: examples, batch, z, epochs, delta."""
    for examples, batch, z, epochs, delta, expected in (
        (60000, 150, 1.3, 15, 1e-5, 0.7242234026109595),
        (100000, 100, 1.0, 30, 1e-7, 1.4154988495444845),
    ):
        steps = math.ceil(epochs * examples / batch)
        assert epsilon(z, batch / examples, steps, delta) == pytest.approx(expected, rel=1e-6)


def test_epsilon_of_everybody_is_that_of_renyi_by_hand():
    """alpha T / (2 z^2) of order alpha (Mironov, CSF 2017), converted as Canonne, Kamath, Steinke, NeurIPS 2020."""
    orders, z, rounds, delta = np.array(ORDERS), 4.0, 10, 1e-5
    renyi = orders * rounds / (2 * z**2)
    by_order = renyi + np.log((orders - 1) / orders) - (np.log(delta) + np.log(orders)) / (orders - 1)
    assert epsilon(z, 1.0, rounds, delta) == pytest.approx(by_order.min(), rel=1e-9)


@pytest.mark.parametrize("uplink", ["dense", {"name": "topk", "keep_ratio": 0.5}])
def test_the_server_adds_noise_to_clipped_sums_and_divides_by_what_it_expects(uplink: Any):
    wrap = {"name": "central-dp", "norm": 0.1, "noise_multiplier": 0.5}
    made = here(Recorder, wrap, rounds=12, uplink=uplink, **POISSON)
    records, states = play(made)
    before, asked = dict(made.initial), []
    for record, state in zip(records, states, strict=True):
        number = record.row.round
        sent = [flat(trees) for seen, _, trees in Recorder.seen if seen == number]
        total = sum((one * min(1.0, 0.1 / np.linalg.norm(one)) for one in sent), np.zeros(tree.num_entries(before)))
        now = dict(state.server["params"])
        # Of 2 expected clients, however many there were.
        noise = 2 * tree.vector(tree.sub(before, now)).double().numpy() - total
        asked.append(len(sent))
        if uplink == "dense" or not sent:
            assert noise.std() == pytest.approx(0.5 * 0.1, rel=0.1)
            assert abs(noise.mean()) < 5 * 0.05 / math.sqrt(len(noise))
        assert record.means["privacy/epsilon"] == pytest.approx(epsilon(0.5, 2 / 6, number + 1, 1e-5))
        before = now
    # Rounds in which nobody is asked release noise as well.
    assert 0 in asked and len({*asked}) > 2


def test_the_noise_follows_the_bound_that_follows_the_quantile():
    wrap = {
        "name": "central-dp",
        "norm": 5.0,
        "noise_multiplier": 0.5,
        "quantile": 0.5,
        "count_noise": 0.6,
        "rate": 1.5,
    }
    made = here(Recorder, wrap, rounds=5, **UNIFORM)
    Recorder.seen.clear()
    records, states = play(made)
    before, bounds, multiplier = dict(made.initial), [], (0.5**-2 - (2 * 0.6) ** -2) ** -0.5
    for record, state in zip(records, states, strict=True):
        bound = record.means["clip/bound"]
        sent = [flat(trees) for number, _, trees in Recorder.seen if number == record.row.round]
        total = sum((one * min(1.0, bound / np.linalg.norm(one)) for one in sent), np.zeros(tree.num_entries(before)))
        now = dict(state.server["params"])
        noise = 6 * tree.vector(tree.sub(before, now)).double().numpy() - total
        assert noise.std() == pytest.approx(multiplier * bound, rel=0.1), record.row.round
        bounds.append(bound)
        before = now
    # Nobody's message is as long as the first bound, so it falls.
    assert bounds[0] == 5.0 and bounds[-1] < 1.0


def test_dropouts_change_nothing_in_epsilon():
    clients = {"count": 6, "per_round": 2, "dropout_after_training": 0.5}
    records, _ = play(here({"name": "central-dp"}, **{**POISSON, "clients": clients}))
    one_round.cache_clear()
    assert [one.means["privacy/epsilon"] for one in records] == [epsilon(1.0, 2 / 6, t, 1e-5) for t in (1, 2, 3)]
    # The accountant's part that takes tenths of a second is computed once for all rounds.
    assert one_round.cache_info().misses == 1


def test_a_round_without_uploads_releases_nothing():
    made = here({"name": "central-dp"})
    context, nothing = made.context(0, made.plan(0), NOBODY, "server"), {"delta": Aggregate(WeightedMean())}
    quiet = replace(context, plan=replace(context.plan, up=False))
    assert CentralDP().aggregate(nothing, {}, quiet)[0] == nothing
    noisy = CentralDP().aggregate(nothing, {}, context)[0]["delta"]
    assert noisy.count == 6 and tree.norm(noisy.result) > 0


def test_the_quantile_takes_its_part_of_epsilon():
    """Andrew et al., section 3.2: z = (z_delta^-2 + (2 sigma_b)^-2)^(-1/2)."""
    wrap = CentralDP(quantile=0.5, noise_multiplier=1.2, count_noise=2.0)
    assert (wrap.multiplier(2.0) ** -2 + 4.0**-2) ** -0.5 == pytest.approx(1.2)
    assert CentralDP().multiplier(2.0) == 1.0
    made = here({"name": "central-dp", "quantile": 0.5, "count_noise": 0.6, "norm": 0.05, "rate": 1.0}, **UNIFORM)
    bounds = [record.means["clip/bound"] for record in play(made)[0]]
    assert bounds[0] == pytest.approx(0.05) and len({*bounds}) == 3


@pytest.mark.parametrize("method", ["fedavg", "dpsgd"])
def test_each_client_adds_noise_of_its_own(method: str):
    wrap = {"name": "local-dp", "norm": 0.1, "noise_multiplier": 2.0, "delta": 1e-6}
    tables = {"name": method, "batch_size": 60, **({"weighting": "uniform"} if method == "fedavg" else {})}
    made = here(Recorder, wrap, method=tables, rounds=2)
    records, states = play(made)
    # 2 S is what a client's message can move by: the noise counts half.
    expected = [epsilon(1.0, 1.0, rounds, 1e-6) for rounds in (1, 2)]
    assert [record.means["privacy/epsilon"] for record in records] == pytest.approx(expected)
    if method == "fedavg":
        moved = tree.vector(tree.sub(made.initial, dict(states[0].server["params"]))).double().numpy()
        sent = [flat(trees) for number, _, trees in Recorder.seen if number == 0]
        noise = moved - np.mean([one * min(1.0, 0.1 / np.linalg.norm(one)) for one in sent], axis=0)
        assert noise.std() == pytest.approx(0.2 / math.sqrt(6), rel=0.1)


def test_local_epsilon_under_a_schedule_is_what_a_client_can_have_spent():
    clients, schedule = {"count": 6, "per_round": 3}, {"name": "buffered", "buffer": 2}
    records, _ = play(here({"name": "local-dp"}, clients=clients, schedule=schedule, rounds=4))
    bounds = [epsilon(0.5, 1.0, rounds, 1e-5) for rounds in (1, 2, 3, 4)]
    assert [record.means["privacy/epsilon"] for record in records] == bounds
    own = [
        [float(row.value or 0) for row in one.metrics if row.name == "privacy/epsilon" and row.client is not None]
        for one in records
    ]
    # Messages are of several rounds, so that their mean is less.
    assert all(max(values) <= bound for values, bound in zip(own, bounds, strict=True))
    assert any(np.mean(values) < bound for values, bound in zip(own, bounds, strict=True))


REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("central-dp", {"uplink": {"name": "feedback", "inner": "topk"}}, ["uplink='feedback'", "dense"]),
    ("central-dp", {"uplink": "qsgd"}, ["uplink='qsgd'"]),
    ("central-dp", {"uplink": "randk"}, ["uplink='randk'"]),
    ("central-dp", {"uplink": {"name": "dense", "dtype": "fp16"}}, ["uplink='dense'", "fp32"]),
    ("central-dp", {"selection": "uniform"}, ["selection='poisson'"]),
    ("central-dp", {"selection": "oort"}, ["selection='oort'", "losses"]),
    ("local-dp", {"selection": "power-of-choice"}, ["selection='power-of-choice'"]),
    ("central-dp", {"clients": {"count": 6, "per_round": 3, "take_first": 2}}, ["clients.take_first"]),
    ("central-dp", {"method": {"name": "fedavg"}}, ["method.weighting='uniform'", "samples"]),
    ("local-dp", {"method": {"name": "fedavg"}}, ["method.weighting='uniform'", "samples"]),
    ("central-dp", {"method": {"name": "fedmgda"}}, ["single messages"]),
    ("central-dp", {"method": {"name": "dpsgd"}, "selection": "uniform", "clients": {"count": 6}}, ["DPSGD", "server"]),
    ("central-dp", {"method": {"name": "signsgd"}}, ["SignSGD", "encodes"]),
    ("central-dp", {"method": {"name": "lag"}}, ["LAG", "nothing in some rounds"]),
    ("local-dp", {"method": {"name": "marina"}}, ["MARINA", "nothing in some rounds"]),
]


@pytest.mark.parametrize(("name", "options", "names"), REFUSED, ids=str)
def test_a_run_that_cannot_be_private_is_refused(name: str, options: dict[str, Any], names: list[str]):
    with refused(names=["wrap", name, *names]):
        here({"name": name}, **{**POISSON, **options})


def test_settings_that_do_not_go_together():
    with refused(names=["count_noise", "noise_multiplier", "0.5"]):
        here({"name": "central-dp", "quantile": 0.5, "count_noise": 0.4}, **POISSON)
    with refused(names=["wrap", "central-dp", "encoded"]):
        here("elastic", {"name": "central-dp"}, **POISSON)
    with refused(names=["wrap", "central-dp", "last"]):
        here({"name": "central-dp"}, "elastic", **POISSON)
    with refused(names=["quantile=0.5", "nothing"]):
        LocalDP(quantile=0.5)
    with refused(names=["count_noise=1.0", "quantile"]):
        CentralDP(count_noise=1.0)

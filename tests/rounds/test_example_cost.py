"""The simulated clock counts gradients: pFedMe's inner steps, STEM's two points, masks on request."""

from typing import Any

import pytest

from rayfl.experiment.prepare import prepare
from rayfl.rounds.ledger import RoundRecord
from rayfl.rounds.simulated_clock import FORWARD
from rayfl.testing.executors import play
from tests.contracts.every_method import experiment
from tests.refusals import refused

WIRES = {"uplink_mbps": 1e9, "downlink_mbps": 1e9}
"""Wires that take no time."""
SPEED = 100.0


def rounds_of(name: str, clients: Any = None, rounds: int = 1, **hyper: Any) -> list[RoundRecord]:
    table = {"examples_per_s": SPEED, **WIRES, **(clients or {})}
    given = {"name": name, **hyper}
    return play(prepare(experiment(name, clients=table, method=given, rounds=rounds, evaluation={"every": 0})))[0]


def flops_of(record: RoundRecord) -> dict[int, float]:
    found = {m.client: m.value for m in record.metrics if m.name == "flops/training"}
    return {client: value for client, value in found.items() if client is not None and value is not None}


@pytest.mark.parametrize(
    ("name", "hyper", "gradients"),
    [
        ("fedavg", {}, 2 * 5),
        ("pfedme", {"inner_steps": 1}, 2 * 5),
        ("pfedme", {"inner_steps": 50}, 2 * 5 * 50),
        ("perfedavg", {"variant": "fo"}, 2 * (5 + 5)),
        ("perfedavg", {"variant": "hf"}, 2 * (5 + 5 + 2 * 5)),
    ],
)
def test_time_follows_gradients(name: str, hyper: dict[str, Any], gradients: int):
    (record,) = rounds_of(name, steps=2, batch_size=5, **hyper)
    assert [row.simulated_s for row in record.clients] == pytest.approx([gradients / SPEED] * 6)
    assert record.row.simulated_s == pytest.approx(gradients / SPEED)


@pytest.mark.parametrize("name", ["stem", "adiana", "marina", "fedavg", "scaffold"])
def test_time_is_as_flops(name: str):
    # Of a dense model a gradient is three forward passes of 2 (64 * 12 + 12 * 10) operations.
    forward = 2 * (64 * 12 + 12 * 10)
    for record in rounds_of(name, rounds=2, **({"dense_probability": 0.01} if name == "marina" else {})):
        found = flops_of(record)
        for row in record.clients:
            assert row.simulated_s == pytest.approx(found[row.client] / (3 * forward) / SPEED)


def test_an_example_that_only_runs_forward_takes_a_third():
    here = prepare(experiment("subfedavg", evaluation={"every": 0}))
    (record,) = rounds_of("subfedavg", epochs=2)
    for row in record.clients:
        trained, evaluated = (2 * len(here.partition.train[row.client]), len(here.partition.validation[row.client]))
        assert row.num_samples == trained + evaluated
        assert row.simulated_s == pytest.approx((trained + FORWARD * evaluated) / SPEED)


@pytest.mark.parametrize("regrow", ["random", "gradient"])
def test_sparse_work_takes_as_long_as_dense_work_unless_told_otherwise(regrow: str):
    forward = 2 * (64 * 12 + 12 * 10)
    seconds = {}
    for density in (0.1, 0.9):
        for speedup in (False, True):
            clients = {"sparse_speedup": speedup}
            (record,) = rounds_of("dispfl", clients, steps=4, batch_size=5, regrow=regrow, density=density)
            seconds[density, speedup] = [row.simulated_s for row in record.clients]
            if speedup:
                flops = [value / (3 * forward) / SPEED for value in flops_of(record).values()]
                assert seconds[density, speedup] == pytest.approx(flops)
    for density in (0.1, 0.9):
        assert seconds[density, False] == pytest.approx([(20 + 5 * (regrow == "gradient")) / SPEED] * 6)
    assert max(seconds[0.1, True]) < min(seconds[0.9, True]) < min(seconds[0.9, False])


@pytest.mark.parametrize("name", ["fedavg", "dpsgd"])
def test_sparse_speedup_is_refused_where_nobody_trains_under_a_mask(name: str):
    with refused(names=["sparse_speedup", "mask"]):
        rounds_of(name, {"sparse_speedup": True})


def test_deadlines_and_over_selection_use_the_same_cost():
    # Two steps of 5 examples with K = 5 are 50 gradients: half a second at 100 a second.
    late = {"deadline_s": 0.27}
    for inner, status, steps in ((1, "delivered", 2), (2, "delivered", 2), (5, "late", 1)):
        (record,) = rounds_of("pfedme", late, steps=2, batch_size=5, inner_steps=inner)
        assert {(row.status, row.num_steps) for row in record.clients} == {(status, steps)}
    assert {row.simulated_s for row in record.clients} == {0.27}
    # 27 gradients are 5 whole examples of 5.
    assert {row.num_samples for row in record.clients} == {5}
    speeds = {"take_first": 1, "examples_per_s": [100.0, 50.0, 50.0, 50.0, 50.0, 50.0]}
    (record,) = rounds_of("pfedme", speeds, steps=2, batch_size=5, inner_steps=5)
    assert [(row.status, row.num_steps, row.num_samples) for row in record.clients] == [
        ("delivered", 2, 10), *[("surplus", 1, 5)] * 5,
    ]  # fmt: skip


def test_a_cut_off_client_begins_no_stage_before_the_one_before_has_ended():
    # Sub-FedAvg's gate is cheaper than training: what is left of the time does not go to it.
    (record,) = rounds_of("subfedavg", {"deadline_s": 0.255}, epochs=2)
    assert {row.num_samples for row in record.clients if row.status == "late"} == {25}

"""FedALA against its equations in numpy, a weight by hand, and FedAvg where it is FedAvg."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rayfl import tree
from rayfl.compress.dense import Dense
from rayfl.data.batches import Batch, schedule
from rayfl.determinism import seeding
from rayfl.methods.base import Stage, Work
from rayfl.methods.personal.fedala import FedALA
from rayfl.rounds.engines import LocalTask
from rayfl.rounds.evaluation_settings import Evaluation
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import BIAS, Points, flat, points, start
from tests.contracts.seams.quadratic import TRAIN, Quadratic
from tests.methods.averaging import ABSENCES, ENGINES, made, rate, share, train_batches
from tests.methods.own_models import personal
from tests.population.statuses import with_status
from tests.refusals import refused

HYPER = {"lr": 0.1, "batch_size": 2, "weights_lr": 0.7}
ALL = slice(0, 10)


def passes(here: Setup, round: int, client: int, is_first: bool) -> list[Points]:
    """The batches by which a client fits its weights: passes over one share of its examples, drawn for the round."""
    hyper, mine = here.method.hyper.model_dump(), points(here, client)
    generator = seeding.generator(here.seed, round, client, "train/weights/batches")
    kept = np.sort(generator.permutation(len(mine))[: max(1, int(hyper["share"] * len(mine) + 0.5))])
    epochs, size = hyper["first_passes"] if is_first else 1, hyper["batch_size"] or None
    rows = schedule(len(kept), epochs=epochs, steps=None, batch_size=size, generator=generator)
    return [mine[kept[batch]] for batch in rows]


def mixing(here: Setup, last: slice) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, int]]:
    """x, all u_i and W_i [4, 10] after every round, with W_i = 1 in the first tensors; and the batches left out."""
    eta = here.method.hyper.model_dump()["weights_lr"]
    x, u, weights, left_out, seen = start(here), np.stack([start(here)] * 4), np.ones((4, 10)), 0, []
    fitted = [False] * 4
    for round in range(here.rounds):
        delivered = with_status(here.population.sample_round(round), "delivered")
        for i in delivered:
            t, losses = u[i] + (x - u[i]) * weights[i], []
            for batch in passes(here, round, i, not fitted[i]) if round else []:
                if not fitted[i] and len(losses) >= 10 and np.std(losses[-10:]) < 0.1:
                    left_out += 1
                    continue
                losses.append(batch.loss(t))
                step = eta * batch.gradient(t) * (x - u[i])
                weights[i][last] = np.clip(weights[i] - step, 0, 1)[last]
                t = u[i] + (x - u[i]) * weights[i]
            fitted[i] |= bool(round) and bool((x != u[i])[last].any())
            for batch in train_batches(here, round, i):
                t = t - rate(here, round) * batch.gradient(t)
            u[i] = t
        if delivered:
            p = np.array([share(here, i) for i in delivered])
            x = p @ u[list(delivered)] / p.sum()
        seen.append((x, u.copy(), weights.copy(), left_out))
    return seen


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize(
    ("hyper", "last"),
    [
        ({}, ALL),
        ({"batch_size": 0}, ALL),
        ({"num_mixed": 1, "share": 0.5, "first_passes": 9, "weighting": "uniform", "epochs": 2}, BIAS),
    ],
    ids=str,
)
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_its_equations(engine: str, hyper: dict[str, Any], last: slice, clients: dict[str, Any]):
    here = made("fedala", {**HYPER, **hyper}, rounds=4, clients=clients, engine=engine)
    records, run_states = play(here)
    path = mixing(here, last)
    for run_state, (x, u, weights, _) in zip(run_states, path, strict=True):
        np.testing.assert_allclose(flat(run_state.server["params"]), x, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(personal(here, run_state), u, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(personal(here, run_state, "weights"), weights[:, last], rtol=1e-4, atol=3e-5)
    assert 0 <= path[-1][2].min() < 0.9 and path[-1][2].max() == 1
    if not clients:
        assert bool(path[-1][3]) == (hyper == {"batch_size": 0})
    up = 320 + (0 if hyper.get("weighting") == "uniform" else 64)
    delivered = [row for record in records for row in record.clients if row.status == "delivered"]
    assert {(row.uplink_bits, row.downlink_bits) for row in delivered} == {(up, 320)}


def test_a_weight_by_hand():
    # One example with c = 0 and a = 1, so the gradient is t. x = 3, u = 1, W = 1: t = 3, and W = 1 - 0.1 * 3 * 2 = 0.4.
    # Then t = 1 + 2 * 0.4 = 1.8, and W = 0.4 - 0.1 * 1.8 * 2 = 0.04; t = 1.08, and W is cut at 0, so that t = u = 1.
    method = FedALA(Quadratic(), FedALA.Hyper(weights_lr=0.1, num_mixed=1))
    x, own = ({"weight": torch.full((2, 4), value), "bias": torch.full((2,), value)} for value in (3.0, 1.0))
    sample = torch.stack([torch.zeros(10), torch.ones(10)])
    batch, stage = Batch(sample[None], torch.zeros(1, dtype=torch.int64)), Stage("weights", epochs=1)
    losses, weights = torch.full((10,), torch.nan), {"bias": torch.ones(2)}
    carry: Any = {**method.start(x), "own": own, "weights": weights, "losses": losses}
    for weight, t in ((0.4, 1.8), (0.04, 1.08), (0.0, 1.0)):
        carry = method.step(carry, batch, stage=stage)
        np.testing.assert_allclose(carry["weights"]["bias"], [weight] * 2, atol=1e-6)
        np.testing.assert_allclose(flat(carry["params"]), [3.0] * 8 + [t] * 2, rtol=1e-6)
    # Where x is the own model nothing moves.
    carry = {**carry, "received": own, "weights": weights}
    assert method.step(carry, batch, stage=stage)["weights"]["bias"].tolist() == [1, 1]


def test_weights_that_stay_at_1_are_fedavg():
    settings = {**HYPER, "momentum": 0.5}
    mixed = play(made("fedala", {**settings, "weights_lr": 0.0}, clients=ABSENCES[1]))[1]
    del settings["weights_lr"]
    for one, two in zip(mixed, play(made("fedavg", settings, clients=ABSENCES[1]))[1], strict=True):
        np.testing.assert_allclose(flat(one.server["params"]), flat(two.server["params"]), rtol=1e-6)


def fits(here: Setup) -> list[tuple[int, int, int]]:
    """Round, client and examples of each fit, from the records: those that were trained on are taken off."""
    rows = [(record.row.round, row) for record in play(here)[0] for row in record.clients]
    found = [(round, row.client, row.num_samples - TRAIN[row.client]) for round, row in rows if row.num_samples]
    return [one for one in found if one[2]]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_long_fit_is_the_first_of_each_client_in_whichever_round_it_comes(engine: str):
    here = made("fedala", {**HYPER, "first_passes": 7, "share": 0.6}, rounds=7, clients={"per_round": 2}, engine=engine)
    size, seen = {i: max(1, int(0.6 * n + 0.5)) for i, n in enumerate(TRAIN)}, set[int]()
    for round, client, examples in fits(here):
        assert examples == (1 if client in seen else 7) * size[client], (round, client)
        seen.add(client)
    firsts = {client: round for round, client, _ in reversed(fits(here))}
    # Clients come for the first time in several rounds, and some clients of one stack do and others do not.
    assert seen == {0, 1, 2, 3} and len({*firsts.values()}) > 1


def test_a_fit_whose_round_is_lost_is_still_the_first():
    clients = {"dropout_after_training": 0.5}
    here, fitted = made("fedala", {**HYPER, "first_passes": 5, "share": 1.0}, rounds=6, clients=clients), set[int]()
    records, _ = play(here)
    long = 0
    for record in records[1:]:
        for row in record.clients:
            assert row.num_samples == TRAIN[row.client] * (1 + (1 if row.client in fitted else 5))
            long += row.client not in fitted
            fitted |= {row.client} if row.status == "delivered" else set()
    assert long > len(fitted) == 4


def test_all_passes_are_over_the_same_share_of_the_examples():
    here = made("fedala", {**HYPER, "share": 0.7})
    fit = Stage("weights", epochs=20, batch_size=2, subset=0.7)
    task = LocalTask(0, 1, here.seed, dict, here.data(0), (fit,), here.device)
    order, size = task.order(fit), max(1, int(0.7 * TRAIN[0] + 0.5))
    rows = order.rows.reshape(20, size)
    assert all(np.array_equal(np.sort(one), np.unique(rows)) for one in rows)
    assert task.planned(fit) == Work(20 * -(-size // 2), 20 * size)
    others = {tuple(np.unique(replace(task, round=round).order(fit).rows)) for round in range(1, 9)}
    assert len(others) > 1


def test_a_first_fit_where_nothing_differs_does_not_count():
    # Client 1's first model is the server's in round 1: it fits nothing, and its long fit is still to come.
    method = FedALA(Quadratic(), FedALA.Hyper())
    here = made("fedala", HYPER)
    plan, ctx = here.plan(1), here.context(1, here.plan(1), 1, "client")
    state: Any = here.first_state(1)
    for x, fitted in ((state["params"], False), (tree.map(lambda one: one + 1, state["params"]), True)):
        received = {"model": Dense().encode(x, {}, ctx.generator)[0]}
        carry = method.begin(state, received, ctx)
        after: Any = method.finish(state, carry, replace(ctx, work={"weights": Work(1, 2), "train": Work(1, 2)})).state
        assert bool(after["fitted"]) == fitted
        assert method.stages(after, plan, ctx)[0].epochs == (1 if fitted else 20)


def test_the_clock_counts_each_clients_own_passes():
    clients = {"per_round": 2, "examples_per_s": 10.0}
    here = made("fedala", {**HYPER, "first_passes": 9}, rounds=5, clients=clients)
    for record in play(here)[0]:
        examples = [row.num_samples for row in record.clients]
        # Transfers take some microseconds.
        assert [row.simulated_s for row in record.clients] == pytest.approx([one / 10 for one in examples], rel=1e-3)
        assert record.row.simulated_s == pytest.approx(max(examples) / 10, rel=1e-3)


def test_a_deadline_cuts_a_long_fit_in_the_middle_of_its_passes():
    # 10 examples a second, 2.5 s: 25 examples of the long fit, or all of a short round.
    clients = {"examples_per_s": 10.0, "deadline_s": 2.5}
    settings = {**HYPER, "first_passes": 9, "share": 1.0, "batch_size": 1, "weights_lr": 0.0}
    records, _ = play(made("fedala", settings, rounds=3, clients=clients))
    for record in records[1:]:
        late = {row.client: (row.num_steps, row.num_samples) for row in record.clients if row.status == "late"}
        assert late == {i: (25, 25) for i, n in enumerate(TRAIN) if 10 * n > 25}


def test_the_start_and_the_trained_model_are_evaluated():
    here = made("fedala", HYPER, rounds=3, clients={"per_round": 2}, evaluation=Evaluation())
    records, run_states = play(here)
    x, u = flat(run_states[-1].server["params"]), personal(here, run_states[-1])
    weights = personal(here, run_states[-1], "weights")
    found = {(m.client, m.name): m.value for m in records[-1].metrics}
    for i in range(4):
        t = u[i] + (x - u[i]) * weights[i]
        assert found[i, "own/loss"] == pytest.approx(points(here, i, "test").loss(t), rel=1e-4)
    for i in here.population.sample_round(2).selected:
        assert found[i, "own_after_training/loss"] == pytest.approx(points(here, i, "test").loss(u[i]), rel=1e-4)
        (row,) = [row for row in records[-1].clients if row.client == i]
        is_first = i not in here.population.sample_round(1).selected
        assert row.num_samples == TRAIN[i] + sum(len(batch) for batch in passes(here, 2, i, is_first))


def test_settings_out_of_bounds_are_refused():
    with refused(names=["num_mixed=0", "1"]):
        FedALA.Hyper(num_mixed=0)
    with refused(names=["share=1.2", "1"]):
        FedALA.Hyper(share=1.2)

"""Clients that no round asks: which they are, by what model they are evaluated, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayfl.choices.kinds import named
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.population.availability import Trace
from rayfl.population.sampling import Clients, Population
from rayfl.rounds.check_setup import check_setup
from rayfl.rounds.evaluation_settings import Evaluation
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from rayfl.selections.base import Selection
from rayfl.testing.contracts import without_unseen
from rayfl.testing.executors import Shuffled, assert_same_bits, contents, play
from tests.methods.reference import NUM_CLASSES, played, setup_of
from tests.refusals import refused
from tests.rounds.test_evaluation import Params, by_numpy

SIZES = (9, 4, 14, 6, 11)


def values(setup: Setup, round: int = -1) -> dict[tuple[int | None, str], float]:
    rows = played(setup)[round][0].metrics
    return {(metric.client, metric.name): metric.value for metric in rows if metric.value is not None}


def evaluated(method: str, hyper: dict[str, Any] | None = None, evaluation: Evaluation | None = None, **clients: Any):
    """Five clients, of which the last two are unseen: full batches, so that no draw depends on the round."""
    clients = {"unseen": 0.4, **clients}
    setup = setup_of(method, {"lr": 0.5, "batch_size": 0, **(hyper or {})}, sizes=SIZES, clients=clients)
    return replace(setup, evaluation=evaluation or Evaluation())


def digits(**tables: Any) -> Setup:
    """Ten clients on digits, three of them unseen."""
    given = {
        "rounds": 2,
        "data": "digits",
        "partition": "iid",
        "clients": {"count": 10, "unseen": 0.3},
        "model": {"name": "mlp", "hidden": [8]},
        "method": "fedavg",
        **tables,
    }
    return prepare(Experiment(**given))


def test_the_global_model_is_evaluated_on_the_unseen_clients_test_splits():
    setup = evaluated("fedavg")
    params: Params = {
        name: value.numpy().astype(np.float64) for name, value in played(setup)[-1][1].server["params"].items()
    }
    measured = values(setup)
    rows = [setup.partition.test[client] for client in (3, 4)]
    assert [measured[client, "unseen/accuracy"] for client in (3, 4)] == [
        by_numpy(setup, params, row)[1] for row in rows
    ]
    mean = np.mean([by_numpy(setup, params, row)[0] for row in rows])
    assert measured[None, "unseen/loss"] == pytest.approx(mean, rel=1e-5)
    own = [measured[client, "own/accuracy"] for client in range(3)]
    assert measured[None, "own/accuracy"] == pytest.approx(np.mean(own))
    assert not any("adapting" in name or "training" in name for _, name in measured if name.startswith("unseen"))


def test_they_are_evaluated_also_where_nobody_else_is():
    setup = evaluated("fedavg", evaluation=Evaluation(pooled=False, own=False))
    found = {name.rpartition("/")[0] for _, name in values(setup)}
    assert "unseen" in found and not found & {"own", "pooled"}


def test_a_step_of_per_fedavg_from_the_global_model():
    hyper = {"alpha": 0.3, "steps": 2, "variant": "fo"}
    setup = evaluated("perfedavg", hyper)
    params: Params = {
        name: value.numpy().astype(np.float64) for name, value in played(setup)[-1][1].server["params"].items()
    }
    measured = values(setup)
    for client in (3, 4):
        train = setup.partition.train[client]
        inputs = setup.dataset.train.inputs[train].astype(np.float64)
        logits = inputs @ params["1.weight"].T + params["1.bias"]
        shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        # The gradient of the mean cross-entropy in the logits.
        error = (shares - np.eye(NUM_CLASSES)[setup.dataset.train.labels[train]]) / len(train)
        adapted = {
            "1.weight": params["1.weight"] - 0.3 * error.T @ inputs,
            "1.bias": params["1.bias"] - 0.3 * error.sum(0),
        }
        rows = setup.partition.test[client]
        assert measured[client, "unseen/loss"] == pytest.approx(by_numpy(setup, adapted, rows)[0], rel=1e-5)
        before = by_numpy(setup, params, rows)[0]
        assert measured[client, "unseen_before_adapting/loss"] == pytest.approx(before, rel=1e-5)


@pytest.mark.parametrize(
    "method, hyper",
    [
        ("ditto", {}),
        ("pfedme", {"lr": 0.05, "steps": 2}),
        ("fedpse", {"keep_ratio": 0.5}),
        ("lotteryfl", {"min_accuracy": 0.0, "epochs": 1}),
        ("subfedavg", {"min_accuracy": 0.0, "epochs": 2}),
    ],
)
def test_an_unseen_client_does_what_a_client_does_that_arrives_late(method: str, hyper: dict[str, Any], tmp_path: Path):
    """After its own training, a client that takes part for the first time in round 1 has the model of an unseen one at
    the end of round 0: both start from the server after round 0."""
    trace = tmp_path / "late.csv"
    trace.write_text("client,first_round,last_round\n0,0,9\n1,0,9\n2,0,9\n3,1,9\n4,1,9\n")
    unseen = evaluated(method, hyper)
    # The gates count on validation examples.
    partition = replace(unseen.partition, validation=unseen.partition.train)
    unseen = replace(unseen, partition=partition)
    arriving = Population(Clients(count=5, availability=Trace(trace=str(trace))), unseen.seed, partition.train.sizes)
    first, second = values(unseen, 0), values(replace(unseen, population=arriving), 1)
    for client in (3, 4):
        for what in ("loss", "accuracy"):
            assert first[client, f"unseen_after_training/{what}"] == second[client, f"own_after_training/{what}"]


def test_which_clients_are_unseen_is_drawn_from_the_seed_and_changes_no_clients_samples():
    everyone = digits(clients={"count": 10}).partition
    held = {tuple(everyone.train[client]): tuple(everyone.test[client]) for client in range(10)}
    drawn = []
    for _ in range(2):
        partition = digits().partition
        assert {tuple(partition.train[client]): tuple(partition.test[client]) for client in range(10)} == held
        drawn.append([list(held).index(tuple(partition.train[client])) for client in range(10)])
    assert drawn[0] == drawn[1]
    # Both parts keep their order.
    assert drawn[0][:7] == sorted(drawn[0][:7]) and drawn[0][7:] == sorted(drawn[0][7:])
    assert drawn[0] != list(range(10))
    of_two_others = digits(seed=2), digits(seed=2, clients={"count": 10})
    other, whole = (setup.partition.train for setup in of_two_others)
    others = [next(k for k in range(10) if np.array_equal(whole[k], other[client])) for client in range(10)]
    assert others[7:] != drawn[0][7:]


def test_traits_of_the_others_do_not_depend_on_the_unseen_clients():
    ratios = [0.2, 0.4, 0.6, 1.0]
    speeds = {"median": 100.0, "sigma": 1.0}
    clients = {"retention_ratio": ratios, "examples_per_s": speeds, "work": "capacity"}
    some, alone = (
        Population(Clients(count=count, unseen=share, **clients), 1, np.full(count, 5))
        for count, share in ((9, 0.33), (6, 0))
    )
    assert len(some) == len(alone) == 6
    assert [some.traits(client) for client in range(6)] == [alone.traits(client) for client in range(6)]
    # For the unseen clients the list begins again.
    assert [some.traits(client).retention_ratio for client in (6, 7, 8)] == [0.2, 0.4, 0.6]


def test_groups_by_retention_and_the_comparison_of_masks():
    method = {"name": "subfedavg", "epochs": 2, "lr": 0.1, "min_accuracy": 0.05, "prune_ratio": 0.3}
    clients = {"count": 10, "unseen": 0.4, "retention_ratio": [0.3, 0.8]}
    setup = digits(method=method, clients=clients, evaluation={"masks": True})
    measured = values(setup)
    for place in ("own", "unseen"):
        ids = {0.3: [0, 2, 4], 0.8: [1, 3, 5]} if place == "own" else {0.3: [6, 8], 0.8: [7, 9]}
        for ratio, members in ids.items():
            mean = np.mean([measured[client, f"{place}/accuracy"] for client in members])
            assert measured[None, f"{place}/accuracy_at_retention_{ratio:g}"] == pytest.approx(mean)
    assert {client for client, name in measured if name == "mask/hamming"} == {None, *range(6)}
    assert {client for client, name in measured if name == "labels/similarity"} == {None, *range(6)}


@pytest.mark.parametrize("share, count", [(0.01, 20), (0.99, 20), (0.5, 1)])
def test_one_client_is_unseen_and_one_is_left(share: float, count: int):
    refused(lambda: Clients(count=count, unseen=share), names=[f"unseen={share:g}", f"count={count}"])


def test_a_round_selects_from_the_others():
    assert Clients(count=20, unseen=0.2, fraction=0.25).num_selected == 4
    refused(lambda: Clients(count=20, unseen=0.2, per_round=17), names=["per_round=17", "16", "unseen=0.2", "4"])


def test_a_method_without_a_model_for_newcomers_refuses_them():
    names = ["clients.unseen=0.3", "L2GD", "remove it"]
    refused(lambda: digits(method={"name": "l2gd"}), names=names)
    own = {"name": "dpsgd_ft", "ft_from": "own"}
    refused(lambda: digits(method=own, topology="ring"), names=["clients.unseen", "DPSGDFT", "remove it"])


def test_unseen_clients_without_test_examples_are_refused():
    setup = evaluated("fedavg")
    test = setup.partition.test
    nothing = replace(test, offsets=np.minimum(test.offsets, test.offsets[3]))
    setup = replace(setup, partition=replace(setup.partition, test=nothing))
    refused(lambda: check_setup(setup), names=["clients.unseen", "test examples"])


def test_a_trace_has_the_clients_that_rounds_ask(tmp_path: Path):
    trace = tmp_path / "trace.csv"
    trace.write_text("client,first_round,last_round\n3,0,9\n")
    clients = Clients(count=4, unseen=0.25, availability=Trace(trace=str(trace)))
    refused(lambda: Population(clients, 1, np.full(4, 5)), names=["3,0,9", "0 to 2", "clients.count", "unseen"])


def test_sums_over_the_unseen_clients_are_theirs():
    evaluation = Evaluation(merged=True)
    measured = values(evaluated("ditto", evaluation=evaluation))
    sizes = {client: len(setup_of("ditto", {}, sizes=SIZES).partition.test[client]) for client in (3, 4)}
    for place in ("unseen", "unseen_after_training", "unseen_before_adapting"):
        right = sum(sizes[client] * measured[client, f"{place}/accuracy"] for client in sizes)
        assert measured[None, f"{place}_merged/accuracy"] == pytest.approx(right / sum(sizes.values()))


def test_an_unseen_clients_many_samples_do_not_change_the_stacks_of_the_others():
    hyper = {"lr": 0.5, "batch_size": 32, "epochs": 2}
    here = setup_of("fedavg", hyper, sizes=(5, 3, 4, 24), clients={"unseen": 0.25})
    here = replace(here, engine_name="vmap", stack_width=3)
    ends = [contents(InlineExecutor(one), played(one)[-1][1]) for one in (here, without_unseen(here))]
    assert_same_bits(*ends)
    assert here.data(0).most_examples("train") == 5


def test_first_rounds_of_unseen_clients_are_stacked():
    """With the same results as looped, and the same bits on one worker and on three."""
    hyper = {"lr": 0.1, "batch_size": 8, "epochs": 2}
    looped = setup_of("ditto", hyper, sizes=(5, 3, 4, 24, 2, 9), clients={"unseen": 0.5})
    stacked = replace(looped, engine_name="vmap", stack_width=2)
    found = [
        play(one, executor(one))[0][-1].metrics for one, executor in ((looped, InlineExecutor), (stacked, Shuffled))
    ]
    plain, vmapped = ({(row.client, row.name): row.value for row in rows} for rows in found)
    assert {client for client, name in plain if name == "unseen/loss"} == {3, 4, 5, None}
    assert vmapped == pytest.approx(plain, rel=1e-4)
    assert found[1] == play(stacked)[0][-1].metrics


@pytest.mark.parametrize("selection", sorted(named(Selection)))
def test_no_selection_asks_an_unseen_client(selection: str):
    here = digits(selection=selection, rounds=3, clients={"count": 10, "unseen": 0.3, "per_round": 4})
    records, run_states = play(here)
    asked = {row.client for record in records for row in record.clients}
    assert asked and asked <= set(range(7))
    alone = without_unseen(here)
    others, other_states = play(alone)
    assert [record.row.selected for record in records] == [record.row.selected for record in others]
    ends = [contents(InlineExecutor(one), end[-1]) for one, end in ((here, run_states), (alone, other_states))]
    assert_same_bits(*ends)

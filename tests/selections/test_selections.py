"""Each selection by hand, and under the engine: bills, the clock, checkpoints, any number of workers."""

import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayfl.choices.kinds import find, named
from rayfl.errors import HookError, MethodError
from rayfl.experiment.prepare import prepare
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from rayfl.run_directory import checkpoint
from rayfl.selections.base import Answer, Seen, Selection
from rayfl.selections.oort import Oort
from rayfl.selections.plain import Poisson, RoundRobin, Uniform, Weighted
from rayfl.selections.power_of_choice import PowerOfChoice
from rayfl.testing.executors import Shuffled, assert_same_bits, contents, play, rows
from tests.contracts.every_method import experiment
from tests.refusals import refused

EXAMPLE = f"{Path(__file__).resolve().parents[2]}/jobs/examples/fastest_first.py:FastestFirst"
EVERY = [*sorted(named(Selection)), EXAMPLE]


def seen(count: int = 10, number: int = 0, **losses: Any) -> Seen:
    return Seen(number, np.arange(count) + 1, np.full(count, 100.0), **losses)


def draws(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def here(selection: Any, method: str = "fedavg", **options: Any) -> Setup:
    clients = {"count": 6, "per_round": 2, **options.pop("clients", {})}
    return prepare(experiment(method, selection=selection, clients=clients, **{"rounds": 4, **options}))


def test_uniform_draws_as_ever():
    available = np.array([1, 3, 5, 7])
    expected = draws(4).choice(available, 2, replace=False).tolist()
    assert list(Uniform().choose({}, seen(), available, 2, draws(4))) == expected
    assert list(Uniform().choose({}, seen(), available, 9, draws(4))) == available.tolist()


def test_poisson_asks_everyone_independently_with_one_chance():
    available, sizes, hits = np.arange(10), Counter[int](), Counter[int]()
    for number in range(4000):
        chosen = Poisson().choose({}, seen(), available, 3, draws(number))
        sizes[len(chosen)] += 1
        hits.update(chosen)
    # 4000 x .3 = 1200, deviation sqrt(4000 x .3 x .7) = 29; nobody at all: .7^10 = .0282, that is 113, deviation 10.5.
    assert all(abs(hits[client] - 1200) < 5 * 29 for client in range(10))
    assert abs(sizes[0] - 113) < 5 * 10.5
    # Who else is available changes nobody's draw.
    few = np.array([2, 5, 8])
    everyone = set(Poisson().choose({}, seen(), available, 3, draws(1)))
    assert set(Poisson().choose({}, seen(), few, 3, draws(1))) == everyone & set(few.tolist())


def test_weighted_draws_by_the_number_of_examples():
    hits = Counter(int(Weighted().choose({}, seen(), np.arange(10), 1, draws(number))[0]) for number in range(5000))
    for client in range(10):
        chance = (client + 1) / 55
        assert abs(hits[client] - 5000 * chance) < 5 * math.sqrt(5000 * chance * (1 - chance))
    assert sorted(Weighted().choose({}, seen(), np.arange(4), 9, draws())) == [0, 1, 2, 3]
    empty = Seen(0, np.array([0, 5, 0]), np.ones(3))
    assert Weighted().choose({}, empty, np.arange(3), 2, draws())[0] == 1


def test_round_robin_goes_round_and_skips_the_absent():
    selection, state, asked = RoundRobin(), RoundRobin().init(5), list[list[int]]()
    for number, available in enumerate([[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 2, 4], [], [0, 1]]):
        chosen = list(selection.choose(state, seen(5), np.array(available, dtype=np.int64), 2, draws()))
        asked.append(chosen)
        state = selection.observe(state, number, [Answer(client, 1, None, 0.0) for client in sorted(chosen)])
    assert asked == [[0, 1], [2, 3], [4, 0], [2, 4], [], [0, 1]]


def test_power_of_choice_takes_the_largest_losses_of_its_candidates():
    selection = PowerOfChoice(candidate_count=4)
    candidates = selection.candidates({}, seen(), np.arange(10), 2, draws(3))
    assert len(set(candidates)) == 4
    losses = {client: float(client % 3) for client in candidates}
    expected = sorted(candidates, key=lambda client: (-losses[client], client))[:2]
    assert list(selection.choose({}, seen(losses=losses), np.arange(10), 2, draws(3))) == expected
    assert len(PowerOfChoice().candidates({}, seen(), np.arange(10), 3, draws())) == 6


def test_power_of_choice_without_a_poll_asks_everybody_once_first():
    selection = PowerOfChoice(variant="rpow-d", candidate_count=10)
    state = selection.init(10)
    asked: list[int] = []
    for number in range(5):
        chosen = selection.choose(state, seen(), np.arange(10), 2, draws(number))
        asked += chosen
        state = selection.observe(state, number, [Answer(client, 1, float(client), 0.0) for client in chosen])
    assert sorted(asked) == list(range(10))
    assert list(selection.choose(state, seen(), np.arange(10), 2, draws())) == [9, 8]


def test_the_utilities_of_oort_by_hand():
    state = {
        "utility": torch.tensor([4.0, 2.0, 0.0, 0.0], dtype=torch.float64),
        "seconds": torch.tensor([1.0, 2.0, 1.0, 0.0], dtype=torch.float64),
        "last": torch.tensor([2, 10, 5, 0]),
    }
    oort = Oort(percentile=50.0)
    found = oort.utilities(state, np.array([0, 1, 2]), 10)
    high = np.percentile([4.0, 2.0, 0.0], 95)
    bonus = [math.sqrt(0.1 * math.log(10) / last) for last in (2, 10, 5)]
    assert bonus[0] == pytest.approx(0.3393, abs=1e-4)
    # T is the median second, 1: client 1 takes twice as long.
    expected = [1.0 + bonus[0], (2.0 / high + bonus[1]) / 4, bonus[2]]
    assert found == pytest.approx(expected)


def test_oort_tries_everyone_before_it_asks_anyone_again_if_it_only_explores():
    oort = Oort(exploration=1.0, exploration_decay=1.0)
    state, asked = oort.init(9), list[int]()
    for number in range(3):
        chosen = oort.choose(state, seen(9, number), np.arange(9), 3, draws(number))
        asked += chosen
        state = oort.observe(state, number, [Answer(client, 10, None, 1.0) for client in chosen])
    assert sorted(asked) == list(range(9))
    assert len(oort.choose(state, seen(9, 3), np.arange(9), 3, draws())) == 3


def test_oort_exploits_the_useful_and_fast():
    oort = Oort(exploration=0.0, least_exploration=0.0)
    state = oort.init(6)
    answers = [Answer(client, 10, 1.0 + client, 1.0 if client != 5 else 50.0) for client in range(6)]
    state = oort.observe(state, 0, answers)
    hits = Counter(
        client for number in range(200) for client in oort.choose(state, seen(6, 1), np.arange(6), 2, draws(number))
    )
    # Of the fast ones the two with the largest losses; client 5 has the largest of all, and is slow.
    assert set(hits) == {3, 4}


@pytest.mark.parametrize("name", EVERY)
def test_every_selection_under_the_engine(name: str, tmp_path: Path):
    """On one worker and on three, in stacks, and from a checkpoint: the same bits."""
    clients = {"dropout_after_training": 0.2, "availability": {"probability": 0.8}}
    made = here(name, clients=clients)
    records, run_states = play(made)
    again, later = play(made, Shuffled(made))
    assert rows(records) == rows(again)
    executor = InlineExecutor(made)
    checkpoint.save(tmp_path, run_states[1], executor)
    read_back = checkpoint.load(tmp_path, executor)
    assert read_back is not None
    assert_same_bits(contents(executor, run_states[1]), contents(executor, read_back))
    rest, rest_states = play(made, run_state=read_back)
    assert rows(records[2:]) == rows(rest)
    assert_same_bits(contents(executor, run_states[-1]), contents(executor, rest_states[-1]))
    assert_same_bits(contents(executor, run_states[-1]), contents(Shuffled(made), later[-1]))


@pytest.mark.parametrize("name", EVERY)
def test_a_selection_is_a_table_and_comes_back(name: str):
    made = experiment("fedavg", selection={"name": name}, clients={"count": 6, "per_round": 2})
    assert type(made.selection) is find(Selection, name)
    assert type(made)(**made.as_dict()) == made


def test_the_bill_and_the_clock_of_a_poll():
    speeds = {"examples_per_s": 50.0, "uplink_mbps": 0.001, "downlink_mbps": [0.01, 0.02]}
    made = here({"name": "power-of-choice", "candidate_count": 4}, rounds=1, clients=speeds)
    (record,), _ = play(made)
    asked = [row for row in record.clients if row.status == "delivered"]
    polled = [row for row in record.clients if row.status == "not_selected"]
    assert len(asked) == len(polled) == 2 and record.row.selected == 2
    plain = play(here("uniform", rounds=1))[0][0].row
    bits, sent = plain.downlink_bits // 2, plain.uplink_bits // 2
    ends = {}
    for row in record.clients:
        assert row.downlink_bits == bits
        assert row.uplink_bits == 32 + (sent if row in asked else 0)
        size, traits = len(made.partition.train[row.client]), made.population.traits(row.client)
        ends[row.client] = bits / traits.downlink_bps + size / 3 / 50.0 + 32 / 1000.0
        if row in polled:
            assert (row.num_steps, row.num_samples) == (0, size)
            assert row.simulated_s == pytest.approx(ends[row.client])
    trained = [len(made.partition.train[row.client]) / 50.0 + sent / 1000.0 for row in asked]
    assert record.row.simulated_s == pytest.approx(max(ends.values()) + max(trained), rel=1e-9)


def test_polled_losses_are_those_of_the_servers_model():
    made = here({"name": "power-of-choice", "candidate_count": 6}, rounds=1)
    (record,), _ = play(made)
    losses = {}
    for client in range(6):
        train, index = made.dataset.train, made.partition.train[client]
        inputs = made.dataset.prepare(train.inputs[index])
        flat = inputs.flatten(1).double().numpy()
        layers = [tensor.double().numpy() for tensor in made.initial.values()]
        hidden = np.maximum(flat @ layers[0].T + layers[1], 0.0)
        out = hidden @ layers[2].T + layers[3]
        out -= np.log(np.exp(out - out.max(1, keepdims=True)).sum(1, keepdims=True)) + out.max(1, keepdims=True)
        losses[client] = -out[np.arange(len(index)), train.labels[index]].mean()
    greatest = sorted(losses, key=lambda client: -losses[client])[:2]
    assert sorted(row.client for row in record.clients if row.status == "delivered") == sorted(greatest)


def test_a_model_that_nobody_has_polls_nobody():
    with refused(names=["selection", "polls", "[parts]"]):
        play(here("power-of-choice", parts={"personal": ["3"]}, rounds=1))
    with refused(names=["selection", "polls"]):
        play(here("power-of-choice", method="fedpse", rounds=1))
    play(here({"name": "power-of-choice", "variant": "rpow-d"}, parts={"personal": ["3"]}, rounds=1))


def test_a_report_is_billed():
    plain, hearing = (
        play(here(name, rounds=1))[0][0].row.uplink_bits for name in ("uniform", {"name": "oort", "exploration": 1.0})
    )
    assert hearing == plain + 2 * 32


def test_what_a_selection_cannot_be_asked():
    with refused(names=["selection", "DPSGD", "no server"]):
        experiment("dpsgd", selection="oort")
    with refused(names=["oort", "all of them", "clients.per_round"]):
        prepare(experiment("fedavg", selection="oort"))
    with refused(names=["selection.batch_size=7", "variant='pow-d'"]):
        experiment("fedavg", selection={"name": "power-of-choice", "batch_size": 7})


WRONG = """
from rayfl.selections.base import Selection


class Twice(Selection):
    def choose(self, state, seen, available, num_wanted, generator):
        return [int(available[0])] * 2


class Broken(Selection):
    def choose(self, state, seen, available, num_wanted, generator):
        return available[:1 / 0]
"""


def test_somebodys_selection_that_fails(tmp_path: Path):
    (tmp_path / "wrong.py").write_text(WRONG)
    with pytest.raises(MethodError, match=r"round 0: Twice\.choose"):
        play(here(f"{tmp_path}/wrong.py:Twice"))
    with pytest.raises(MethodError, match=r"Broken\.choose.*ZeroDivisionError.*wrong\.py:12"):
        play(here(f"{tmp_path}/wrong.py:Broken"))


def test_a_copied_example_runs(tmp_path: Path):
    shutil.copy(EXAMPLE.partition(":")[0], tmp_path / "mine.py")
    records, _ = play(here(f"{tmp_path}/mine.py:FastestFirst", rounds=3))
    asked = [[row.client for row in record.clients] for record in records]
    # Nobody twice before everybody once.
    assert sorted(client for clients in asked for client in clients) == list(range(6))


@pytest.mark.parametrize(
    ("hook", "match"),
    [
        ("def choose(self, *given): return None", "round 0: Mine.choose must return clients, .* it returns None"),
        ("def choose(self, *given): return ['x']", "Mine.choose must return clients"),
        ("def candidates(self, *given): return 3", "Mine.candidates must return clients"),
        ("def observe(self, *given): return {'a': 'x'}", "Mine.observe returns 'a' as a value of type str"),
        ("def init(self, num_clients): return None", "Mine.init returns nothing; it must return tensors by name"),
    ],
)
def test_what_somebodys_selection_must_return(hook: str, match: str, tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        f"from rayfl.selections.plain import Uniform\n\n\nclass Mine(Uniform):\n    {hook}\n"
    )
    with pytest.raises((MethodError, HookError), match=match):
        play(here(f"{tmp_path}/mine.py:Mine", rounds=1))

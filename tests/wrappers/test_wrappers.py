"""Every wrapper under the engine, and what wrappers refuse."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayfl import tree
from rayfl.choices.kinds import find
from rayfl.data.sources.arrays import Arrays
from rayfl.errors import ClientError, HookError, MethodError, RayflError
from rayfl.experiment.experiment import Experiment
from rayfl.experiment.prepare import prepare
from rayfl.population.sampling import attackers
from rayfl.rounds.executor import InlineExecutor
from rayfl.run_directory import checkpoint
from rayfl.testing.executors import Shuffled, assert_same_bits, contents, play, rows
from rayfl.wrappers.base import Wrapper
from tests.contracts.every_method import experiment
from tests.refusals import refused
from tests.wrappers.every_wrapper import EVERY, ROBUST, TRAINING, here


@pytest.mark.parametrize("name", EVERY)
def test_every_wrapper_under_the_engine(name: str, tmp_path: Path):
    """On one worker and on three, and from a checkpoint: the same bits; in stacks nearly the same numbers."""
    made = here(name, clients={"dropout_after_training": 0.2})
    records, run_states = play(made)
    again, later = play(made, Shuffled(made))
    assert rows(records) == rows(again)
    executor = InlineExecutor(made)
    checkpoint.save(tmp_path, run_states[0], executor)
    read_back = checkpoint.load(tmp_path, executor)
    assert read_back is not None
    rest, rest_states = play(made, run_state=read_back)
    assert rows(records[1:]) == rows(rest)
    assert_same_bits(contents(executor, run_states[-1]), contents(executor, rest_states[-1]))
    assert_same_bits(contents(executor, run_states[-1]), contents(Shuffled(made), later[-1]))
    stacked, _ = play(here(name, clients={"dropout_after_training": 0.2}, runtime={"engine": "vmap", "stack_width": 4}))
    for one, other in zip(records, stacked, strict=True):
        assert one.means == pytest.approx(other.means, rel=1e-3, abs=1e-4)
    plain, _ = play(prepare(experiment("fedavg", clients={"dropout_after_training": 0.2})))
    assert rows(records) != rows(plain)


@pytest.mark.parametrize("name", EVERY)
def test_a_wrapper_is_a_table_and_comes_back(name: str):
    made = experiment("fedavg", wrap=name)
    assert [type(one) for one in made.wrap] == [find(Wrapper, name)]
    assert type(made)(**made.as_dict()) == made


def test_what_wrappers_refuse():
    with refused(names=["wrap", "clip", "twice"]):
        experiment("fedavg", wrap=["clip", {"name": "clip", "norm": 2.0}])
    with refused(names=["wrapper", "clp", "did you mean 'clip'"]):
        experiment("fedavg", wrap="clp")
    with refused(names=["wrap", "rate=0.5", "quantile"]):
        experiment("fedavg", wrap=[{"name": "clip", "rate": 0.5}])
    with refused(names=["wrap", "clip", "FedPSE", "encodes"]):
        here("clip", method="fedpse")
    with refused(names=["wrap", "attack", "Local", "none"]):
        here("attack", method="local")
    with refused(names=["wrap", "clip", "DPSGD", "server"]):
        here("clip", method="dpsgd")
    with refused(names=["wrap", "attack", "encoded", "first"]):
        here("elastic", "attack")
    play(here("attack", "elastic", rounds=1))


def test_other_schedules_take_wrappers_that_leave_the_server_alone():
    clients = {"count": 6, "per_round": 3}
    records, _ = play(here("attack", schedule={"name": "buffered", "buffer": 2}, clients=clients))
    assert all("attack/share" in record.means for record in records)
    for name in ("clip", "local-dp"):
        records, _ = play(here({"name": name}, schedule={"name": "buffered", "buffer": 2}, clients=clients))
        assert all("clip/norm" in record.means for record in records)
    for name in ("clip", "krum", "elastic", "central-dp"):
        with refused(names=["schedule", "buffered", "around FedAvg", "wrap"]):
            here(name, schedule={"name": "buffered", "buffer": 2}, clients=clients)


def test_the_examples_by_hand():
    """Weight decay after each step, and the mean of the shortest messages."""
    plain, decayed = (play(here(*wrap, rounds=1))[1][0].server["params"] for wrap in ((), ({"name": TRAINING},)))
    assert tree.norm(decayed) < tree.norm(plain)
    rows = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 2.0]])
    rule = find(Wrapper, ROBUST)(share=0.67)
    assert rule.combine(rows, rule.decide(rule.measure(rows))).tolist() == [0.5, 1.0]


WRONG = """
from rayfl import tree
from rayfl.gather import Sum
from rayfl.wrappers.base import MessageWrapper


class Wrong(MessageWrapper):
    def client(self, trees, state, received, ctx):
        {client}

    def gather(self):
        return {gather}


class More(Wrong):
    {more}
"""


@pytest.mark.parametrize(
    ("client", "gather", "match"),
    [
        ("return {}, state, {}", "{}", "Wrong.client must return the trees 'delta'"),
        ("return {**trees, 'more': trees['delta']}, state, {}", "{}", "Wrong.client must return"),
        ("return {'delta': {n: t[:1] for n, t in trees['delta'].items()}}, state, {}", "{}", "shapes"),
        ("return 1 / 0", "{}", r"round 0, client 0: Wrong\.client: ZeroDivisionError.*wrong\.py:9"),
        ("return trees, state, {}", "{'delta': Sum()}", "adds a message 'delta'"),
    ],
)
def test_somebodys_wrapper_that_is_wrong(client: str, gather: str, match: str, tmp_path: Path):
    """A message that it drops, cuts or adds is not silently another one."""
    (tmp_path / "wrong.py").write_text(wrong(client, gather))
    with pytest.raises((ClientError, MethodError, RayflError), match=match):
        play(here(f"{tmp_path}/wrong.py:Wrong", rounds=1))


def wrong(client: str = "return trees, state, {}", gather: str = "{}", more: str = "pass") -> str:
    return WRONG.replace("{client}", client).replace("{gather}", gather).replace("{more}", more)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ("def aggregate(self, received, server, ctx): return {}, server, {}", "round 0: More.aggregate must return"),
        ("def aggregate(self, received, server, ctx): return None", "More.aggregate must return .* it returns None"),
        ("def aggregate(self, received, server, ctx): return received, {'a': 3}, {}", "More.aggregate .* 'a' .* int"),
        ("def client(self, *given): return None", "client 0: More.client must return .* it returns None"),
        ("def client(self, trees, *given): return trees, {}", "More.client must return"),
        ("def client(self, trees, *given): return trees, {}, {'a': 'x'}", "More.client returns metrics with 'a'"),
        ("def download(self, server): return 3", "More.download returns a value of type int"),
        ("def init_client(self, params): return {'a': 'x'}", "More.init_client returns 'a' as a value of type str"),
        ("def around(self, method): return None", "More.around must return a method; it returns None"),
        ("def check(self, setup, store_bytes): return 1 / 0", r"More.check: ZeroDivisionError.*wrong\.py:16"),
    ],
)
def test_hooks_of_somebodys_wrapper(more: str, match: str, tmp_path: Path):
    (tmp_path / "wrong.py").write_text(wrong(more=more))
    with pytest.raises((MethodError, HookError), match=match):
        play(here(f"{tmp_path}/wrong.py:More", rounds=1))


def test_a_wrapper_may_hand_over_nothing(tmp_path: Path):
    nothing = "return {name: one.gather.empty() for name, one in received.items()}, server, {}"
    (tmp_path / "none.py").write_text(wrong(more=f"def aggregate(self, received, server, ctx): {nothing}"))
    made = here(f"{tmp_path}/none.py:More", rounds=1)
    assert_same_bits(tree.to_arrays(play(made)[1][0].server["params"]), made.initial_arrays)


def test_labels_flip_where_attackers_train():
    options: dict[str, Any] = {"clients": {"count": 10}, "splits": {"validation_ratio": 0.2}}
    honest = prepare(experiment("fedavg", **options))
    flipped = prepare(experiment("fedavg", data={"name": "digits", "flipped_clients": 0.3}, **options))
    wrong = attackers(flipped.seed, 10, 0.3)
    assert len(wrong) == 3 and wrong < attackers(flipped.seed, 10, 0.5)
    for client in range(10):
        for split in ("train", "validation"):
            own = flipped.partition.split(split)[client]
            true, now = honest.dataset.train.labels[own], flipped.dataset.train.labels[own]
            assert (now == (9 - true if client in wrong else true)).all()
    assert (honest.dataset.test.labels == flipped.dataset.test.labels).all()
    numbers = np.zeros((60, 3), np.float32)
    with refused(names=["data.flipped_clients=0.3", "classes"]):
        prepare(
            Experiment(
                rounds=1,
                data=Arrays(numbers, numbers[:, :1], flipped_clients=0.3),
                partition="iid",
                clients={"count": 2},
                model={"name": "mlp", "hidden": [4]},
                method="fedavg",
            )
        )

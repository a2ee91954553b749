"""Objects that several clients' states share: what is read of them, when they are put together again, and the bits."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from actors import ray_executor
from actors.object_store import Packed, Stored, ValueRef, in_objects, objects, value
from benchmarks.client_actors import client_actors
from rayfl.determinism.seeding import FirstDraws
from rayfl.experiment.prepare import prepare
from rayfl.experiment.runtime import Runtime
from rayfl.methods.server.fedavg import FedAvg
from rayfl.population.client import Traits
from rayfl.rounds.executor import InlineExecutor, Job
from rayfl.rounds.worker_jobs import OBJECT_BYTES
from rayfl.testing.executors import assert_same_bits, contents, frozen, leaves, play, rows, thawed
from rayfl.tree import PackedBits, State, Tree
from tests.actors.toys import experiment


def test_each_value_is_read_by_itself_with_its_bits() -> None:
    draw = np.random.default_rng(0)
    one = {"w": draw.standard_normal((3, 5)).astype(np.float32), "n": np.array(7), "none": np.empty((0, 2))}
    other = {"mask": PackedBits(np.array([5], np.uint8), (3,)), "more": {"t": one["w"].T}}
    for packed in (Packed([one, other, {}]), thawed(frozen(Packed([one, other, {}])))):
        assert_same_bits(leaves("one", one), leaves("one", packed[0]))
        assert_same_bits(leaves("other", other), leaves("other", packed[1]))
        assert value(packed, 2) == {} and value(one, 0) is one
        # Views, at which a tensor may look.
        assert np.shares_memory(packed[0]["w"], packed.buffer)
    # One buffer in place of one for each array.
    assert len(frozen(Packed([one, other]))[1]) == 2


def test_states_and_memories_share_objects_and_others_have_their_own() -> None:
    # Three clients with state, memory and message, then a sum; two of a kind share an object.
    job = Job(None, (), 10, (range(0, 9, 3), range(1, 9, 3)), 2)
    assert [tuple(group) for group in objects(job)] == [(2,), (0, 3), (1, 4), (5,), (6,), (7,), (8,), (9,)]
    made = list(in_objects(iter("smMsmMsmM+"), objects(job)))
    assert [one if isinstance(one, str) else (one[0], one[1]) for one in made] == [
        "M", ("s", "s"), ("m", "m"), "M", "s", "m", "M", "+",
    ]  # fmt: skip
    assert [tuple(group) for group in objects(Job(None, (), 2))] == [(0,), (1,)]


class Growing(FedAvg):
    """Its clients have a number first, and a model later."""

    def init_client(self, client: Traits, params: Tree, draws: FirstDraws) -> State:
        return {"rounds": torch.zeros(())}


def test_no_more_clients_share_an_object_than_there_is_room_for_their_models_in_it() -> None:
    small, large = (experiment(model={"name": "mlp", "hidden": [width]}) for width in (32, 5000))
    shared = [prepare(one) for one in (small, large)]
    (few, none) = (replace(one, method=Growing(one.method.task, one.method.hyper)).together for one in shared)
    # 65 weights and biases a unit, 10 more for each class, in float32.
    assert few == OBJECT_BYTES // (4 * (32 * 65 + 33 * 10)) and none == 1


def test_an_object_counts_the_references_that_are_held() -> None:
    stored, other = Stored(None, 3), Stored(None, 1)  # pyright: ignore[reportArgumentType]
    parts = [ValueRef(stored, index) for index in range(3)]
    del parts[1]
    assert sorted(part.index for part in stored.parts) == [0, 2]
    kept = parts[1]
    kept.move(ValueRef(other, 0))
    assert (kept.stored, kept.index) == (other, 0) and len(stored.parts) == len(other.parts) == 1
    assert pickle.loads(pickle.dumps(Packed(["a"])))[0] == "a"  # noqa: S301 - our own bytes


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("method", ["fedpse"])
def test_states_that_are_put_together_again_have_the_bits_of_this_process(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_executor, "MOST_THIN", 1)
    monkeypatch.setattr(ray_executor, "MOST_SMALL", 3)
    setup = prepare(experiment(method, rounds=6, clients={"count": 10, "per_round": 4}))
    alone = InlineExecutor(setup)
    records, run_states = play(setup, alone)
    rewritten: list[int] = []
    with client_actors(setup, Runtime(actors=2, num_cpus=0.1)) as executor:
        rewrite = executor.rewrite
        monkeypatch.setattr(
            executor, "rewrite", lambda shared, stored: (rewritten.append(len(stored)), rewrite(shared, stored))
        )
        others, other_states = play(setup, executor)
        assert rows(records) == rows(others)
        last = other_states[-1]
        parts = [*last.states.values(), *last.server_memories.values()]
        assert rewritten and len({part.stored for part in parts}) < len(parts)
        again = executor.put_all([executor.get(part) for part in last.states.values()])
        assert len({part.stored for part in again}) == 1
        assert_same_bits(contents(alone, run_states[-1]), contents(executor, last))
        assert_same_bits(leaves("", executor.get(again[-1])), leaves("", executor.get([*last.states.values()][-1])))

"""FedFomo on quadratics: who hears whom, how candidates are weighed, and what the server sends on unopened."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rayfl import tree
from rayfl.determinism import seeding
from rayfl.methods.base import Carry, Context, Finished, ModelState, Work
from rayfl.methods.personal.fedfomo import FedFomo
from rayfl.rounds.evaluation_settings import Evaluation
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.rounds import RunState
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import Shuffled, play
from tests.contracts.seams.closed_form import batches, flat, points, start
from tests.contracts.seams.quadratic import setup
from tests.methods.averaging import ENGINES, made
from tests.population.statuses import with_status
from tests.refusals import refused

HYPER = {"lr": 0.1, "epochs": 1, "batch_size": 2, "num_candidates": 2, "epsilon": 0.0}
ROUNDS = 6


def chosen(setup: Setup, round: int, client: int, others: list[int], affinity: np.ndarray) -> list[int]:
    """Whom a client hears: the largest affinities, ties to the lowest id; anyone with a chance of epsilon_t."""
    hyper = setup.method.hyper.model_dump()
    draw = seeding.generator(setup.seed, round, client, "personal")
    epsilon, left, found = max(0.0, hyper["epsilon"] - hyper["epsilon_decay"] * round), list(others), []
    for _ in range(min(hyper["num_candidates"] or 10, len(others))):
        left.sort(key=lambda j: (-affinity[j], j))
        place = draw.integers(len(left)) if epsilon and draw.random() < epsilon else 0
        found.append(left.pop(place))
    return sorted(found)


def expected(setup: Setup) -> tuple[list[dict[int, np.ndarray]], list[list[list[int]]], np.ndarray]:
    """Everyone's model after each round, whom each selected client heard, and the affinities P [4, 4] at the end."""
    models: dict[int, np.ndarray] = dict.fromkeys(range(4), start(setup))
    relayed: dict[int, np.ndarray] = {}
    affinity, heard, seen = np.zeros((4, 4)), [], []
    for round in range(setup.rounds):
        new, heard_now = {}, []
        for i in with_status(setup.population.sample_round(round), "delivered"):
            others = chosen(setup, round, i, [j for j in relayed if j != i], affinity[i])
            before = trained = models[i]
            for batch in batches(setup, round, i, epochs=1, batch_size=2):
                trained = trained - 0.1 * batch.gradient(trained)
            mine = points(setup, i, "validation")
            moves = [model - before for model in (trained, *(relayed[j] for j in others))]
            gains = np.array([mine.loss(before) - mine.loss(before + move) for move in moves])
            gains = gains / np.maximum([np.linalg.norm(move) for move in moves], 1e-30)
            useful = np.maximum(gains, 0)
            weights = useful / max(useful.sum(), 1e-30)
            new[i] = before + sum(weight * move for weight, move in zip(weights, moves, strict=True))
            affinity[i, others] += gains[1:]
            heard_now.append(others)
        models = models | new
        relayed |= new
        seen.append(models)
        heard.append(heard_now)
    return seen, heard, affinity


def held(here: Setup, run_state: RunState) -> np.ndarray:
    executor = InlineExecutor(here)
    states = {client: tree.to_tensors(executor.get(ref)) for client, ref in run_state.states.items()}
    return np.stack([flat(states[i]["params"]) if i in states else start(here) for i in range(4)])


@pytest.mark.parametrize(
    ("hyper", "clients"),
    [
        ({}, {}),
        # In round 1 those who were there know one other model, the rest two, so that their carries differ in shape.
        ({}, {"per_round": 2}),
        ({"epsilon": 0.8, "epsilon_decay": 0.1}, {}),
        ({"num_candidates": None}, {"per_round": 3, "dropout_after_training": 0.2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_its_equations(engine: str, hyper: dict[str, Any], clients: dict[str, Any]):
    here = made("fedfomo", {**HYPER, **hyper}, rounds=ROUNDS, engine=engine, clients=clients)
    models, heard, affinity = expected(here)
    records, run_states = play(here)
    for run_state, row in zip(run_states, models, strict=True):
        np.testing.assert_allclose(held(here, run_state), [row[i] for i in range(4)], rtol=1e-4, atol=1e-5)
    for client, memory in run_states[-1].server_memories.items():
        # P is the sum over all rounds: no gain is forgotten.
        np.testing.assert_allclose(tree.to_tensors(memory)["affinity"], affinity[client], rtol=1e-4, atol=1e-6)
    # A model is 10 entries of 4 bytes, a gain 4 bytes. Of a client that drops the download is billed all the same.
    for record, lists in zip(records, heard, strict=True):
        delivered = [row for row in record.clients if row.status == "delivered"]
        assert [row.downlink_bits for row in delivered] == [320 * len(others) for others in lists]
        assert [row.uplink_bits for row in delivered] == [320 + 32 * len(others) for others in lists]
    if not clients:
        # The choice is not always the same, so that affinity or chance decides.
        assert len({tuple(row[0]) for row in heard[1:]}) > 1


def test_a_candidate_at_no_distance_or_of_no_use_has_no_weight():
    here = made("fedfomo", HYPER)
    before = here.initial
    far = {name: tensor + 3.0 for name, tensor in before.items()}
    near = {name: tensor + 1.0 for name, tensor in before.items()}
    carry = here.method.begin({"params": before}, {}, here.context(1, here.plan(1), 0, "client"))
    work = {"train": Work(1, 1), "compare": Work(1, 2)}
    ctx = replace(here.context(1, here.plan(1), 0, "client"), work=work)

    def mixed(*losses: float) -> np.ndarray:
        sums = carry["losses"].new_tensor(losses) * 2
        others = {"candidate 0": before, "candidate 1": near, "candidate 2": far}
        carried = {**carry, "params": before, "others": others, "losses": sums}
        return flat(here.method.finish({"params": before}, carried, ctx).state["params"]) - flat(before)

    # Losses before, of the own and of candidate 0 at distance 0, of near (sqrt 10 away) and of far (3 sqrt 10 away).
    np.testing.assert_allclose(mixed(5.0, 1.0, 1.0, 6.0, 5.5), 0.0)
    np.testing.assert_allclose(mixed(5.0, 1.0, 1.0, 4.0, 6.0), 1.0, rtol=1e-6)
    # Gains 1 / sqrt 10 and 6 / (3 sqrt 10): weights 1/3 and 2/3, so 1/3 + 2/3 * 3.
    np.testing.assert_allclose(mixed(7.0, 1.0, 1.0, 6.0, 1.0), 7 / 3, rtol=1e-6)


class Shy(FedFomo):
    """Client 1 sends its gains, but never its model."""

    def finish(self, state: ModelState, carry: Carry, ctx: Context) -> Finished:
        finished = super().finish(state, carry, ctx)
        if ctx.traits.id != 1 or finished.message is None:
            return finished
        return replace(finished, message={"gains": finished.message["gains"]})


@pytest.mark.parametrize("executor", [InlineExecutor, Shuffled])
def test_a_packet_that_was_not_sent_is_not_relayed(executor: type[InlineExecutor]):
    here = setup(Shy, rounds=2, hyper={**HYPER, "num_candidates": 3})
    records, run_states = play(here, executor(here))
    assert sorted(run_states[-1].server["models"]) == ["0", "2", "3"]
    assert [client.status for client in records[0].clients] == ["delivered"] * 4
    # Client 1 hears three models, the others each of the other two.
    assert [client.downlink_bits for client in records[1].clients] == [640, 960, 640, 640]


def test_the_model_evaluated_is_the_mixed_one_and_after_training_the_trained_one():
    here = made("fedfomo", HYPER, rounds=2, evaluation=Evaluation(pooled=False))
    records, run_states = play(here)
    trained = held(here, run_states[0])
    for client in range(4):
        for batch in batches(here, 1, client, epochs=1, batch_size=2):
            trained[client] = trained[client] - 0.1 * batch.gradient(trained[client])
    for name, models in (("own/loss", held(here, run_states[1])), ("own_after_training/loss", trained)):
        measured = {m.client: m.value for m in records[1].metrics if m.name == name}
        for client, model in enumerate(models):
            assert measured[client] == pytest.approx(points(here, client, "test").loss(model), rel=1e-4)


def test_more_candidates_than_others_are_refused_before_the_run():
    with refused(names=["method.num_candidates=4", "3", "at most"]):
        made("fedfomo", {"num_candidates": 4})
    # The default takes what there is.
    assert made("fedfomo", {}).num_clients == 4
    hyper = FedFomo().hyper.model_dump()
    assert (hyper["epsilon"], hyper["epsilon_decay"], FedFomo.splits) == (0.3, 0.05, {"validation": 0.2})

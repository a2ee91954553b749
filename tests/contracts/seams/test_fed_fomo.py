"""The server sends on other clients' packets, chosen by what its link remembers of each client."""

from dataclasses import replace

import numpy as np
import pytest

from rayfl import tree
from rayfl.methods.base import Carry, Context, Finished
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from rayfl.tree import State
from tests.contracts.seams.closed_form import batches, flat, points, start
from tests.contracts.seams.fed_fomo import FedFomo
from tests.contracts.seams.quadratic import setup
from tests.contracts.seams.ways import Way

ROUNDS = 6
HYPER = {"lr": 0.1, "epochs": 1, "batch_size": 2, "num_candidates": 2}


def expected(setup: Setup) -> tuple[list[np.ndarray], list[set[int]], list[int]]:
    """Every client's model at the end, whom client 0 heard in each round, and how many models came down."""
    num_rounds = setup.rounds
    current: dict[int, np.ndarray] = dict.fromkeys(range(4), start(setup))
    relayed: dict[int, np.ndarray] = {}
    affinity, heard, downloads = np.zeros((4, 4)), [], []
    for round in range(num_rounds):
        new, count = {}, 0
        for i in setup.population.sample_round(round).selected:
            others = [j for j in relayed if j != i]
            chosen = sorted(sorted(others, key=lambda j: (-affinity[i, j], j))[:2])
            count += len(chosen)
            if i == 0:
                heard.append(set(chosen))
            before = trained = current[i]
            for batch in batches(setup, round, i, epochs=1, batch_size=2):
                trained = trained - 0.1 * batch.gradient(trained)
            mine = points(setup, i, "validation")
            candidates = [trained, *(relayed[j] for j in chosen)]
            moves = [candidate - before for candidate in candidates]
            losses = np.array([mine.loss(candidate) for candidate in candidates])
            gains = (mine.loss(before) - losses) / np.maximum(np.linalg.norm(moves, axis=1), 1e-30)
            useful = np.maximum(gains, 0)
            weights = useful / max(useful.sum(), 1e-30)
            new[i] = before + sum(weight * move for weight, move in zip(weights, moves, strict=True))
            affinity[i, chosen] += gains[1:]
        current |= new
        relayed |= new
        downloads.append(count)
    return [current[i] for i in range(4)], heard, downloads


class Shy(FedFomo):
    """Client 1 sends its gains, but never its model."""

    def finish(self, state: State, carry: Carry, ctx: Context) -> Finished:
        finished = super().finish(state, carry, ctx)
        if ctx.traits.id != 1 or finished.message is None:
            return finished
        return replace(finished, message={"gains": finished.message["gains"]})


def test_a_packet_that_was_not_sent_is_not_relayed(way: Way):
    here = setup(Shy, rounds=2, engine=way.engine, hyper={**HYPER, "num_candidates": 3})
    records, run_states = play(here, way.executor(here))
    assert sorted(run_states[-1].server["models"]) == ["0", "2", "3"]
    assert [client.status for client in records[0].clients] == ["delivered"] * 4
    # Client 1 hears three models, the others each of the other two.
    assert [client.downlink_bits for client in records[1].clients] == [640, 960, 640, 640]


@pytest.mark.parametrize("per_round", [4, 2])
def test_fedfomo_follows_its_equations(way: Way, per_round: int):
    # Two a round: in round 1 those who were there know one other model, the rest two, so their carries differ in shape.
    here = setup(FedFomo, rounds=ROUNDS, engine=way.engine, hyper=HYPER, clients={"per_round": per_round})
    models, heard, downloads = expected(here)
    executor = way.executor(here)
    records, run_states = play(here, executor)
    states = run_states[-1].states
    for client, model in enumerate(models):
        if client in states:
            params = tree.to_tensors(executor.get(states[client]))["params"]
            np.testing.assert_allclose(flat(params), model, rtol=1e-4, atol=1e-5)
    # A model is 10 entries of 4 bytes; a gain is 4 bytes.
    assert [record.row.downlink_bits for record in records] == [320 * count for count in downloads]
    assert [record.row.uplink_bits for record in records] == [320 * per_round + 32 * count for count in downloads]
    # The choice is not always the same, so affinity decides.
    assert per_round < 4 or len({frozenset(row) for row in heard[1:]}) > 1

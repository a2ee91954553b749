"""Two candidate masks and a validation gate within one round; personal downloads by the server's memory of a mask."""

from dataclasses import dataclass, field

import numpy as np

from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from tests.contracts.seams.closed_form import WEIGHT, batches, flat, points, start
from tests.contracts.seams.quadratic import setup
from tests.contracts.seams.sub_fedavg import SubFedAvg
from tests.contracts.seams.ways import Way

ROUNDS = 8
HYPER = {"lr": 0.3, "epochs": 3, "batch_size": 3, "prune_ratio": 0.25, "target_density": 0.6, "max_loss": 0.7}


@dataclass
class Story:
    """What the simulation saw."""

    models: list[np.ndarray] = field(default_factory=list)
    densities: list[list[int]] = field(default_factory=list)
    refusals: set[str] = field(default_factory=set)


def pruned(w: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Without the weights strictly below the 25% quantile of those alive; the bias stays."""
    new = mask.copy()
    threshold = np.quantile(np.abs(w[WEIGHT][mask[WEIGHT]]), 0.25)
    new[WEIGHT] &= np.abs(w[WEIGHT]) >= threshold
    return new


def expected(setup: Setup) -> Story:
    x, masks, story = start(setup), [np.ones(10, bool)] * 4, Story()
    for round in range(ROUNDS):
        total, counts = np.zeros(10), np.zeros(10)
        for i in range(4):
            w, candidates = x * masks[i], []
            for stage, epochs in (("first", 1), ("rest", 2)):
                for batch in batches(setup, round, i, stage, epochs=epochs, batch_size=3):
                    w = w - 0.3 * masks[i] * batch.gradient(w)
                candidates.append(pruned(w, masks[i]))
            early, late = candidates
            gates = {
                "masks are equal": (early != late).any(),
                "sparse enough": masks[i][WEIGHT].mean() > 0.6,
                "loss is too large": points(setup, i, "validation").loss(w * late) < 0.7,
            }
            if all(gates.values()):
                masks[i], w = late, w * late
            story.refusals |= {name for name, is_open in gates.items() if not is_open}
            total, counts = total + w, counts + masks[i]
        x = np.where(counts > 0, total / np.maximum(counts, 1), x)
        story.models.append(x)
        story.densities.append([int(mask.sum()) for mask in masks])
    return story


def test_sub_fedavg_follows_its_equations(way: Way):
    here = setup(SubFedAvg, rounds=ROUNDS, engine=way.engine, hyper=HYPER)
    story = expected(here)
    # The example prunes, and every part of the gate is what keeps it shut at least once.
    assert story.densities[-1] != [10] * 4
    assert story.refusals == {"masks are equal", "sparse enough", "loss is too large"}
    records, run_states = play(here, way.executor(here))
    np.testing.assert_allclose(
        [flat(run_state.server["params"]) for run_state in run_states], story.models, rtol=1e-4, atol=1e-5
    )
    ups = [[client.uplink_bits for client in record.clients] for record in records]
    downs = [[client.downlink_bits for client in record.clients] for record in records]
    assert ups == [[bits(density) for density in row] for row in story.densities]
    # What comes down has the support of what went up in the round before.
    assert downs == [[bits(10)] * 4, *ups[:-1]]


def bits(density: int) -> int:
    """4 bytes a value; 8 weights with holes cost 2 bytes of positions (a bitmap and its label), without holes none."""
    return 8 * (4 * density + (2 if density < 10 else 0))

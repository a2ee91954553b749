"""Dis-PFL's gossip average by hand, and what its masks must keep. Its rounds: tests/contracts/seams/test_dis_pfl.py."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rayfl import tree
from rayfl.compress.sparse import sparse_packet
from rayfl.data.batches import Batch
from rayfl.determinism import seeding
from rayfl.gather import Aggregate
from rayfl.methods.base import Work
from rayfl.methods.masks.dispfl import DisPFL, DisPFLCarry
from rayfl.models.dense import MLP
from rayfl.population.client import Traits
from rayfl.rounds.engines import LocalTask
from rayfl.rounds.mix import MixJob, gather_rows
from rayfl.rounds.setup import Setup
from rayfl.task import NetworkTask
from rayfl.topology.graphs import RandomNeighbours
from tests.bound_tasks import classification
from tests.methods.reference import DIM, NUM_CLASSES, SIZES, played, setup_of


def setup(rounds: int = 3, clients: dict[str, Any] | None = None, **hyper: Any) -> Setup:
    """A network of two layers on five clients that each hear two others."""
    made = setup_of(
        "dispfl",
        {"lr": 0.1, "batch_size": 4, **hyper},
        build=MLP(hidden=(8,)).builder((DIM,), NUM_CLASSES),
        clients=clients,
        rounds=rounds,
    )
    return replace(made, topology=RandomNeighbours(degree=2))


def mask(*bits: int) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(bits, dtype=torch.bool)}


def values(*numbers: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(numbers, dtype=torch.float32)}


def mixed(new: dict[str, torch.Tensor], received: dict[str, Aggregate], own: dict[str, torch.Tensor]) -> list[float]:
    here = setup()
    ctx = here.context(0, here.plan(0), 0, "mix")
    return here.peer_half.mix({"params": own, "mask": new}, received, ctx)["params"]["w"].tolist()


def test_the_gossip_average_of_three_peers_by_hand():
    # Entry 0: all three, (2 + 4 + 9) / 3. Entry 1: 0 and 1, 1 with an exact zero that counts: (4 + 0) / 2.
    # Entry 2: 1 alone, which 0 has just regrown: 6, not 6 / 2. Entry 3: nobody holds it, 0 / 0 = 0, though 0 regrew it.
    # Entry 4: 2 and 1 hold it, 0's new mask does not. Entry 5: 0 alone.
    messages = {
        0: {"weights": sparse_packet(values(2, 4, 0, 0, 0, -3), mask(1, 1, 0, 0, 0, 1))},
        1: {"weights": sparse_packet(values(4, 0, 6, 0, 5, 0), mask(1, 1, 1, 0, 1, 0))},
        2: {"weights": sparse_packet(values(9, 0, 0, 0, 7, 0), mask(1, 0, 0, 0, 1, 0))},
    }
    row = dict.fromkeys(range(3), 1 / 3)
    gathered = gather_rows(setup().method.gather, MixJob({0: row}, (0, 1, 2)), messages)[0]
    found = mixed(mask(1, 1, 1, 1, 0, 1), gathered, values(2, 4, 0, 0, 0, -3))
    assert found == pytest.approx([5, 2, 6, 0, 0, -3])


def test_a_peer_that_is_away_only_takes_its_new_mask():
    assert mixed(mask(0, 1, 1), {}, values(2, 4, 0)) == [0, 4, 0]


def counts(masks: dict[str, torch.Tensor]) -> list[int]:
    return [int(part.sum()) for part in masks.values()]


TRAININGS: list[dict[str, Any]] = [
    {"momentum": 0.9, "weight_decay": 0.1},
    {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.1, "prune": "weights_only"},
    {"regrow": "random", "momentum": 0.9, "clip_norm": 0.5},
    {"distribution": "uniform", "different_initial": False, "anneal": 1.0},
]


@pytest.mark.parametrize("hyper", TRAININGS, ids=str)
def test_every_mask_keeps_its_number_of_entries(hyper: dict[str, Any]):
    ratios = [0.2, 0.4, 0.6, 0.8, 1.0]
    here = setup(rounds=6, clients={"retention_ratio": ratios, "dropout_before_download": 0.2}, **hyper)
    first = [here.first_state(client)["mask"] for client in range(5)]
    moved, before = 0, first
    for _, run_state in played(here):
        states = [tree.to_tensors(run_state.states[client]) for client in range(5)]
        for client, state in enumerate(states):
            assert counts(state["mask"]) == counts(first[client])
            for name, kept in state["mask"].items():
                assert not state["params"][name][~kept].any()
                moved += int((kept != before[client][name]).sum())
        before = [state["mask"] for state in states]
    assert moved > 0
    sizes = [sum(counts(part)) for part in first]
    assert sizes == sorted(sizes)
    assert sizes[-1] == tree.num_entries(here.initial)


@pytest.mark.parametrize("hyper", TRAININGS, ids=str)
def test_zeros_stay_zero_through_training(hyper: dict[str, Any]):
    # What is sent has no place for them, so look at the weights as they come out of the training.
    here = setup(density=0.4, **hyper)
    state = here.first_state(2)
    plan = here.plan(0)
    carry = here.method.begin(state, {}, here.context(0, plan, 2, "client"))
    start = LocalTask(2, 0, here.seed, lambda: carry, here.data(2), plan.stages, here.device)
    ((trained, work),) = here.engine(here.method, [start], 1)
    assert work["train"].num_steps == 5 * 4
    for name in ("1.weight", "3.weight"):
        kept = state["mask"][name]
        assert not trained["params"][name][~kept].any()
        assert (trained["params"][name][kept] != state["params"][name][kept]).all()
        # The search's gradient is dense, or there would be nothing to regrow by.
        assert "gradient" not in trained or trained["gradient"][name][~kept].any()


def test_masks_start_different_or_as_one():
    for different in (True, False):
        here = setup(different_initial=different, density=0.3)
        one, other = (here.first_state(client)["mask"] for client in (0, 1))
        assert all(torch.equal(one[name], other[name]) for name in one) is not different
        for client in (0, 1):
            state = here.first_state(client)
            for name, kept in state["mask"].items():
                assert torch.equal(state["params"][name], torch.where(kept, here.initial[name], 0.0))


def test_the_density_is_the_methods_or_the_clients_or_half():
    def density(clients: dict[str, Any], **hyper: Any) -> float:
        here = setup(clients=clients, **hyper, distribution="uniform", prune="weights_only")
        kept = here.first_state(1)["mask"]["1.weight"]
        return float(kept.double().mean())

    # 48 weights.
    assert density({}) == 0.5
    assert density({"retention_ratio": [1.0, 0.25]}) == 0.25
    assert density({"retention_ratio": [1.0, 0.25]}, density=0.75) == 0.75


def test_defaults_are_the_papers():
    method = DisPFL(classification(lambda: nn.Linear(2, 2)))
    train, search = method.plan(3, 0.0).stages
    assert (train.epochs, train.steps, train.batch_size) == (5, None, 128)
    assert (search.epochs, search.steps, search.batch_size) == (None, 1, 128)
    assert train.lr == pytest.approx(0.1 * 0.998**3)
    assert (method.hyper.weight_decay, method.hyper.momentum, method.hyper.anneal) == (5e-4, 0.0, 0.5)
    (only,) = (
        DisPFL(classification(lambda: nn.Linear(2, 2)), DisPFL.Hyper(steps=2, regrow="random")).plan(0, 0.0).stages
    )
    assert (only.epochs, only.steps) == (None, 2)


def test_the_search_looks_without_dropout():
    # With dropout of 1 - 1e-9 the training loss has no gradient; the search's is that of the linear layer alone.
    task = classification(lambda: nn.Sequential(nn.Dropout(0.999999), nn.Linear(3, 2)))
    method = DisPFL(task, DisPFL.Hyper(batch_size=0))
    batch = Batch(torch.eye(3), torch.tensor([0, 1, 0]))
    params = {"1.weight": torch.zeros(2, 3), "1.bias": torch.zeros(2)}
    carry: DisPFLCarry = {**method.start(params), "mask": tree.map(torch.zeros_like, params)}
    search = method.plan(0, 0.0).stages[1]
    found = method.step(carry, batch, stage=search).get("gradient", {})
    # p - onehot = +-1/2 an example, a third each.
    sixth = 1 / 6
    expected = [[-sixth, sixth, -sixth], [sixth, -sixth, sixth]]
    torch.testing.assert_close(found["1.weight"], torch.tensor(expected))


def test_metrics_of_a_round():
    here = setup(steps=3, density=0.5)
    here = replace(here, method=DisPFL(_counted(), DisPFL.Hyper(lr=0.1, batch_size=4, steps=3, density=0.5)))
    ((record, _), *_) = played(here)
    first = here.first_state(0)["mask"]
    kept = 2 * (int(first["1.weight"].sum()) + int(first["3.weight"].sum()))
    dense = 2 * (DIM * 8 + 8 * NUM_CLASSES)
    found = {metric.name: metric.value for metric in record.metrics if metric.client == 0}
    # Client 0 has 9 examples: three steps see 4, 4 and 1, the search 4.
    assert SIZES[0] == 9
    assert found["flops/training"] == 3 * (9 * kept + 4 * dense)
    message = sum(counts(first))
    assert record.means["comm/busiest_received_megabytes"] == pytest.approx(2 * 4 * message / 1e6)


def _counted() -> NetworkTask:
    return classification(MLP(hidden=(8,)).builder((DIM,), NUM_CLASSES), (DIM,))


def test_the_loss_is_the_mean_over_training_steps_alone():
    here = setup()
    ctx = here.context(0, here.plan(0), 0, "client")
    ctx = replace(ctx, work={"train": Work(4, 16), "search": Work(1, 4)})
    state = here.first_state(0)
    carry = {**here.method.begin(state, {}, ctx), "loss": torch.tensor(6.0)}
    assert here.method.finish(state, carry, ctx).metrics["train/loss"] == 1.5


def test_a_model_is_what_was_trained_last():
    here = setup(rounds=1)
    ((_, run_state),) = played(here)
    state = tree.to_tensors(run_state.states[0])
    assert here.method.final_model(state, {}) is state["trained"]
    assert any(not torch.equal(state["trained"][name], state["params"][name]) for name in state["params"])
    fresh = here.method.init_client(Traits(0, 9), here.initial, seeding.FirstDraws(1, 0))
    assert here.method.final_model(fresh, {}) is fresh["params"]
    assert np.isfinite([float(part.sum()) for part in fresh["params"].values()]).all()

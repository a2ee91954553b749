"""MCE-PL and ind-mask against Algorithm 1 in float64 numpy, on one linear layer; masks, bytes and who is away."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rayfl import tree
from rayfl.compress.base import Packet
from rayfl.data.batches import schedule
from rayfl.determinism import seeding
from rayfl.experiment.prepare import prepare
from rayfl.methods.base import Work
from rayfl.methods.masks.mcepl import MCEPL, MCEPLHyper, aggregated
from rayfl.methods.shared.distributed_gradient import GradientCarry
from rayfl.methods.shared.learned_masks import HiddenMaskHyper, HiddenMasks, first_weights
from rayfl.methods.shared.masked_peer import MaskedPeer
from rayfl.models.convolutional import AlexNetMCEPL
from rayfl.models.dense import MLP
from rayfl.population.client import Traits
from rayfl.rounds.setup import Setup
from rayfl.topology.graphs import FullyConnected, RandomNeighbours, Topology
from tests.bound_tasks import classification
from tests.contracts.every_method import experiment
from tests.methods.reference import DIM, NUM_CLASSES, SIZES, initial, played, setup_of, softmax_gradient
from tests.population.statuses import with_status

LAYER, BIAS = "1.weight", "1.bias"


def linear(method: str, sizes: tuple[int, ...], topology: Topology, rounds: int, **options: Any) -> Setup:
    """A linear layer of 3 x 6 weights, the last one, so that Fil does not touch it."""
    hyper = {"lr": 0.7, "batch_size": 4, "lasso": 0.02, **options.pop("hyper", {})}
    return replace(setup_of(method, hyper, sizes=sizes, rounds=rounds, **options), topology=topology)


def hyper_of(here: Setup) -> HiddenMaskHyper:
    assert isinstance(here.method, HiddenMasks)
    return here.method.hyper


def thres(y: np.ndarray, r: float) -> np.ndarray:
    """The n - int((1 - r) n) largest magnitudes."""
    kept = y.size - int((1 - r) * y.size + 1e-9)
    smallest = np.sort(np.abs(y).reshape(-1))[-kept]
    return (np.abs(y) >= smallest).astype(float)


def agg(z: np.ndarray, mbar: np.ndarray) -> np.ndarray:
    return z + np.abs(z).mean() * np.sign(z) * mbar


def gradient(here: Setup, round: int, client: int, m: np.ndarray, z: np.ndarray) -> np.ndarray:
    """G of a client's one minibatch: through v = w o m, times w sign(z), and the lasso's."""
    w, hyper, rows = initial(here), hyper_of(here), here.partition.train[client]
    generator = seeding.generator(here.seed, round, client, "train/train/batches")
    plan = schedule(len(rows), epochs=None, steps=1, batch_size=hyper.batch_size or None, generator=generator)
    (batch,) = (rows[chosen] for chosen in plan)
    examples = here.dataset.train
    scaled = hyper.scale * w[LAYER]
    dv = softmax_gradient(
        {LAYER: scaled * m, BIAS: w[BIAS]}, examples.inputs[batch].astype(np.float64), examples.labels[batch]
    )[LAYER]
    return dv * scaled * np.sign(z) + hyper.lasso * z / np.linalg.norm(z, axis=1, keepdims=True)


def check(here: Setup, ratio: list[float], alone: bool = False) -> list[set[int]]:
    """Plays all rounds beside Algorithm 1. Returns who was in each exchange."""
    count, hyper, seen = len(ratio), hyper_of(here), []
    first = [tree.to_tensors(tree.to_arrays(here.first_state(i))) for i in range(count)]
    z = [state["scores"][LAYER].double().numpy() for state in first]
    mbar = [np.zeros((3, 6)) if alone else state["heard"][LAYER].double().numpy() for state in first]
    m = [thres(agg(z[i], mbar[i]), ratio[i]) for i in range(count)]
    given = hyper.finetune_lr if isinstance(hyper, MCEPLHyper) else None
    tuned = hyper.lr if given is None else given
    for round, (record, run_state) in enumerate(played(here)):
        status = here.population.sample_round(round, everyone=True)
        present, lost = set(with_status(status, "delivered")), set(with_status(status, "dropped_after_training"))
        assert here.topology is not None
        graph = here.topology.receives(count, here.seed, round)
        g, sent = {}, {}
        for i in set(range(count)) - lost:
            g[i] = gradient(here, round, i, m[i], z[i])
            z[i] = z[i] - hyper.lr * (g[i] + hyper.weight_decay * z[i])
            m[i] = sent[i] = thres(agg(z[i], mbar[i]), ratio[i])
        for i in set() if alone else present:
            heard = [sent[j] for j in sorted(present) if graph[i, j]]
            if heard:
                mbar[i] = np.mean(heard, axis=0)
                z[i] = z[i] - tuned * g[i] * mbar[i]
                m[i] = thres(agg(z[i], mbar[i]), ratio[i])
        for i, ref in run_state.states.items():
            state = tree.to_tensors(ref)
            np.testing.assert_allclose(state["scores"][LAYER].numpy(), z[i], rtol=1e-4, atol=1e-6)
            assert np.array_equal(state["mask"][LAYER].numpy(), m[i] > 0)
            assert int(state["mask"][LAYER].sum()) == 18 - int((1 - ratio[i]) * 18 + 1e-9)
            # It is evaluated by m^(k); the biases never move.
            assert isinstance(here.method, MaskedPeer)
            model = here.method.own_model(state)
            scaled = hyper.scale * initial(here)[LAYER]
            np.testing.assert_allclose(model[LAYER].numpy(), scaled * m[i], rtol=1e-6)
            assert torch.equal(model[BIAS], here.initial[BIAS])
            assert "gradient" not in state
        # 18 bits are 3 bytes.
        links = {i: sum(bool(graph[j, i]) for j in present) if i in present else 0 for i in range(count)}
        bits = {row.client: row.uplink_bits for row in record.clients}
        assert bits == {i: 0 if alone else 24 * links[i] for i in bits}
        seen.append(present)
    return seen


def test_two_iterations_of_two_peers():
    here = linear("mcepl", (9, 4), FullyConnected(), 2, clients={"retention_ratio": [0.3, 0.5]})
    check(here, [0.3, 0.5])


@pytest.mark.parametrize(
    "hyper",
    [
        {"weight_decay": 0.1, "lr_decay": 1.0},
        {"finetune_lr": 3.0, "weight_scale": 2.5},
        {"lasso": 0.0, "batch_size": 0},
    ],
    ids=str,
)
def test_five_peers_of_which_some_are_away(hyper: dict[str, Any]):
    clients = {"retention_ratio": [0.3, 0.5, 0.8], "dropout_before_download": 0.3, "dropout_after_training": 0.2}
    here = linear("mcepl", SIZES, RandomNeighbours(degree=2), 8, clients=clients, hyper=hyper)
    present = check(here, [0.3, 0.5, 0.8, 0.3, 0.5])
    assert min(map(len, present)) < 4 and any(len(some) > 2 for some in present)


def test_ind_mask_is_the_same_without_neighbours():
    here = linear("ind_mask", SIZES, FullyConnected(), 5, clients={"retention_ratio": [0.3, 0.5, 0.8]})
    check(here, [0.3, 0.5, 0.8, 0.3, 0.5], alone=True)


def test_the_first_mean_mask_is_one_that_all_know():
    here = setup_of("mcepl", {"first_conv": 0.3}, build=lambda: torch.nn.Sequential(torch.nn.Linear(60, 50)))
    one, other = (here.first_state(i) for i in (0, 1))
    heard = one["heard"]["0.weight"]
    assert torch.equal(heard, other["heard"]["0.weight"]) and set(heard.unique().tolist()) == {0.0, 1.0}
    # 3000 draws at 0.9: a standard deviation of 0.0055.
    assert abs(float(heard.mean()) - 0.9) < 0.022
    assert not torch.equal(one["scores"]["0.weight"], other["scores"]["0.weight"])


def test_the_aggregation_tensor_by_hand():
    # mean |z| = 2; sign(0) = 0.
    z, heard = {"w": torch.tensor([[1.0, -3.0], [0.0, 4.0]])}, {"w": torch.tensor([[0.5, 1.0], [1.0, 0.0]])}
    assert aggregated(z, heard)["w"].tolist() == [[2.0, -5.0], [0.0, 4.0]]


@pytest.mark.parametrize("method", ["mcepl", "ind_mask"])
def test_every_layer_keeps_its_number_in_all_rounds(method: str):
    ratios = [0.1, 0.2, 0.3, 0.4]
    made = setup_of(
        method,
        {"batch_size": 4, "fil": 0, "fc_retention_ratio": None, "weight_scale": 1.0},
        build=MLP(hidden=(8, 5)).builder((DIM,), NUM_CLASSES),
        clients={"retention_ratio": ratios, "dropout_before_download": 0.2},
        rounds=6,
    )
    here = replace(made, topology=RandomNeighbours(degree=2))
    moved, before = 0, [here.first_state(i)["mask"] for i in range(len(SIZES))]
    for _, run_state in played(here):
        for i, r in enumerate((*ratios, ratios[0])):
            state = tree.to_tensors(run_state.states[i])
            for name, mask in state["mask"].items():
                assert int(mask.sum()) == mask.numel() - int((1 - r) * mask.numel() + 1e-9)
                assert torch.equal(state["params"][name], torch.where(mask, here.initial[name], 0.0))
                moved += int((mask != before[i][name]).sum())
            before[i] = state["mask"]
    assert moved > 0


def alexnet(**hyper: Any) -> MCEPL:
    return MCEPL(classification(AlexNetMCEPL().builder((3, 32, 32), 10), (3, 32, 32)), MCEPL.Hyper(**hyper))


def test_the_alexnet_s_mask_is_153_416_bytes():
    method = alexnet(fc_retention_ratio=0.9, fil=0)
    params, client = method.task.init(0), Traits(0, 9, retention_ratio=0.3, retention_given=True)
    made = setup_of("mcepl", {})
    state = method.init_client(client, params, seeding.FirstDraws(1, 0))
    ctx = replace(made.context(0, method.plan(0, 0.0), 0, "client"), initial=params, client=client)
    ctx = replace(ctx, work={"train": Work(1, 128)})
    carry: GradientCarry = {**method.begin(state, {}, ctx), "gradient": tree.zeros_like(params)}
    finished = method.finish(state, carry, ctx)
    assert finished.message is not None
    (packet,) = finished.message.values()
    assert isinstance(packet, Packet)
    assert packet.num_bits == 8 * 153_416
    assert finished.metrics["comm/link_megabytes"] == pytest.approx(0.153416)
    # 0.3 of 1,028,800 weights of convolutions, 0.9 of 198,528 of linear layers: whole numbers, rounded up.
    kept = [int(mask.sum()) for mask in finished.state["mask"].values()]
    assert kept == [1440, 61440, 245760, 176948, 1728]
    assert finished.metrics["comm/link_ones_megabytes"] == pytest.approx(sum(kept) / 8e6)
    assert tree.vector(finished.state["mask"]).equal(packet.decode()["mask"])


def test_defaults_are_the_papers_but_for_the_rate_and_the_scale():
    hyper = alexnet().hyper
    assert (hyper.lr, hyper.lasso, hyper.batch_size, hyper.weight_decay) == (0.3, 1e-3, 128, 0.0)
    assert (hyper.fil, hyper.fil_share, hyper.finetune_lr, hyper.fc_retention_ratio) == (20, 0.05, None, None)
    (stage,) = alexnet().plan(7, 0.0).stages
    assert (stage.steps, stage.epochs, stage.batch_size, stage.lr) == (1, None, 128, 0.3)
    assert [alexnet(**given).hyper.scale for given in ({}, {"weight_init": "uniform"}, {"weight_scale": 2.0})] == [
        3,
        1,
        2,
    ]


@pytest.mark.parametrize("kind", ["model", "uniform", "signed_constant", "kaiming"])
def test_the_fixed_weights(kind: str):
    layers = {"conv": torch.full((64, 8, 5, 5), 0.25), "fc": torch.full((300, 100), 0.25)}
    drawn = first_weights(layers, kind, np.random.default_rng(0))  # type: ignore[arg-type]
    for name, layer in drawn.items():
        found, deviation = layer.double().numpy().reshape(-1), math.sqrt(2 / layers[name][0].numel())
        assert layer.dtype == torch.float32 and layer.shape == layers[name].shape
        if kind == "model":
            assert set(found) == {0.25}
            continue
        # Standard deviations: of uniform [-1, 1] sqrt(1/3), of the others s; of 12,800 and more entries to 3 %.
        assert found.std() == pytest.approx(math.sqrt(1 / 3) if kind == "uniform" else deviation, rel=0.03)
        assert abs(found.mean()) < 0.03 * found.std() * 1.5
        if kind == "uniform":
            assert np.abs(found).max() <= 1
        if kind == "signed_constant":
            assert np.abs(found) == pytest.approx(deviation, rel=1e-6)


def test_fixed_weights_come_from_the_seed_and_nothing_else_changes():
    table = {"name": "ind_mask", "weight_init": "signed_constant", "weight_scale": 2.0}
    here, again, plain = (
        prepare(experiment("ind_mask", method=given, rounds=1)) for given in (table, table, {"name": "ind_mask"})
    )
    for name, tensor in here.initial.items():
        assert torch.equal(tensor, again.initial[name])
        if tensor.dim() == 1:
            assert torch.equal(tensor, plain.initial[name])
        else:
            assert tensor.abs().unique().numel() == 1 and not torch.equal(tensor, plain.initial[name])
    # The model is w o m with the scaled weights.
    state = here.first_state(0)
    kept = {name: here.initial[name] * 2 * mask for name, mask in state["mask"].items()}
    assert all(torch.equal(state["params"][name], tensor) for name, tensor in kept.items())

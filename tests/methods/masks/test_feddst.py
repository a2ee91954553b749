"""FedDST against its equations in float64: masked training, drop and grow, the mean over who keeps an entry."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rayfl.data.batches import schedule
from rayfl.determinism import seeding
from rayfl.methods.masks.feddst import FedDST, zero_shares
from rayfl.methods.shared import masks
from rayfl.rounds.setup import Setup
from tests.methods.reference import SIZES, Vectors, batches, initial, played, setup_of, softmax_gradient
from tests.population.statuses import with_status
from tests.refusals import refused

ROUNDS = 6
HYPER = {
    "lr": 0.3, "epochs": 2, "batch_size": 4, "momentum": 0.5, "weight_decay": 0.01, "sparsity": 0.5,
    "readjust_every": 2, "readjust_end": 5,
}  # fmt: skip


def largest(values: np.ndarray, held: np.ndarray, count: int) -> np.ndarray:
    """The largest |values| among the held, ties to the lowest index."""
    ranked = sorted(range(values.size), key=lambda k: (-(abs(values.flat[k]) if held.flat[k] else -1.0), k))
    mask = np.zeros(values.size, bool)
    mask[ranked[:count]] = True
    return mask.reshape(values.shape)


def gradient_of(here: Setup, params: Vectors, rows: np.ndarray) -> Vectors:
    examples = here.dataset.train
    return softmax_gradient(params, examples.inputs[rows].astype(np.float64), examples.labels[rows])


def trained(here: Setup, round: int, client: int, params: Vectors, mask: np.ndarray) -> Vectors:
    """Masked SGD with momentum and weight decay."""
    hyper = here.method.hyper.model_dump()
    velocity = dict.fromkeys(params, 0.0)
    for rows in batches(here, round, client):
        gradient = gradient_of(here, params, rows)
        gradient["1.weight"] = gradient["1.weight"] * mask
        for name, value in params.items():
            velocity[name] = hyper["momentum"] * velocity[name] + gradient[name] + hyper["weight_decay"] * value
        params = {name: value - hyper["lr"] * velocity[name] for name, value in params.items()}
        params["1.weight"] = params["1.weight"] * mask
    return params


def moved(here: Setup, round: int, client: int, params: Vectors, mask: np.ndarray) -> tuple[Vectors, np.ndarray]:
    """The weights and the mask after a readjustment."""
    hyper, rows = here.method.hyper.model_dump(), here.partition.train[client]
    plan = schedule(
        len(rows), epochs=None, steps=1, batch_size=4,
        generator=seeding.generator(here.seed, round, client, "train/search/batches"),
    )  # fmt: skip
    (batch,) = [rows[chosen] for chosen in plan]
    gradient = gradient_of(here, params, batch)["1.weight"]
    share = hyper["readjust"] / 2 * (1 + np.cos(np.pi * round / hyper["readjust_end"]))
    count = int(np.ceil(share * mask.sum()))
    left = largest(params["1.weight"], mask, int(mask.sum()) - count)
    grown = largest(gradient, ~left, count)
    return {**params, "1.weight": params["1.weight"] * left}, left | grown


def bits(kept: int, changed: bool) -> int:
    """As of Sub-FedAvg: 3 biases and the kept weights; a bitmap of 18 entries, or a byte a position, and a label."""
    return 32 * (3 + kept) + 8 * (min(3, kept) + 1) * changed


@pytest.mark.parametrize(
    ("clients", "hyper"),
    [
        ({}, {"weighting": "uniform"}),
        ({"per_round": 3, "dropout_after_training": 0.2}, {"readjust": 0.8, "sparsity": 0.3}),
    ],
)
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_equals_the_equations(clients: dict[str, Any], hyper: dict[str, Any], engine: str):
    here = replace(setup_of("feddst", {**HYPER, **hyper}, clients=clients, rounds=ROUNDS), engine_name=engine)
    settings, x = here.method.hyper.model_dump(), initial(here)
    kept = int((1 - settings["sparsity"]) * 18 + 1e-9)
    mask, changes = largest(x["1.weight"], np.ones((3, 6), bool), kept), 0
    x["1.weight"] = x["1.weight"] * mask
    known: dict[int, np.ndarray] = {}
    for round, (record, run_state) in enumerate(played(here)):
        readjusts, ends, given = round in (0, 2, 4), {}, mask
        for i in with_status(here.population.sample_round(round), "delivered"):
            end, own = trained(here, round, i, x, given), given
            if readjusts:
                end, own = moved(here, round, i, end, given)
            ends[i] = end, own
        if ends:
            weight = {i: 1.0 if settings["weighting"] == "uniform" else float(SIZES[i]) for i in ends}
            total = sum(weight.values())
            held = np.sum([weight[i] * own for i, (_, own) in ends.items()], axis=0)
            values = np.sum([weight[i] * end["1.weight"] for i, (end, _) in ends.items()], axis=0)
            mean = np.where(held > 0, values / np.maximum(held, 1e-9), 0.0)
            mask = largest(mean, held > 0, kept) if readjusts else mask
            bias = np.sum([weight[i] * end["1.bias"] for i, (end, _) in ends.items()], axis=0) / total
            x = {"1.weight": mean * mask, "1.bias": bias}
        for name, value in x.items():
            np.testing.assert_allclose(run_state.server["params"][name].numpy(), value, rtol=1e-5, atol=1e-6)
        assert np.array_equal(run_state.server["mask"]["1.weight"].numpy(), mask) and mask.sum() == kept
        counted = 64 * (settings["weighting"] == "samples")
        sent = {row.client: row.uplink_bits for row in record.clients if row.status == "delivered"}
        assert sent == {i: bits(kept, not np.array_equal(own, given)) + counted for i, (_, own) in ends.items()}
        for row in record.clients:
            if row.status == "delivered":
                is_known = row.client in known and np.array_equal(known[row.client], given)
                assert row.downlink_bits == bits(kept, not is_known)
                known[row.client] = given
        changes += not np.array_equal(mask, given)
    assert changes


def test_drop_and_grow_by_hand():
    """Ten weights, six kept: the two smallest are dropped, and the two largest gradients of the idle six are grown."""
    weight = torch.tensor([5.0, -1.0, 4.0, 0.5, -3.0, 2.0, 0, 0, 0, 0]).reshape(2, 5)
    gradient = torch.tensor([0.0, 9.0, 0, 0.1, 0, 0, -8.0, 1.0, 7.0, 0]).reshape(2, 5)
    left, count = masks.without_smallest("w", weight != 0, weight, 0.3)
    assert count == 2 and left.flatten().nonzero().flatten().tolist() == [0, 2, 4, 5]
    grown = masks.with_regrown(left, count, masks.by_gradient("w", gradient))
    # Entry 1 was dropped and comes back.
    assert grown.flatten().nonzero().flatten().tolist() == [0, 1, 2, 4, 5, 6]


def test_zeros_by_layer_add_up_to_the_sparsity():
    layers = {"conv": torch.zeros(8, 4, 3, 3), "fc": torch.zeros(10, 64)}
    shares = zero_shares(layers, 0.7, "erk")
    raw = {"conv": 1 - 18 / 288, "fc": 1 - 74 / 640}
    assert shares["conv"] / shares["fc"] == pytest.approx(raw["conv"] / raw["fc"])
    assert shares["conv"] * 288 + shares["fc"] * 640 == pytest.approx(0.7 * 928)
    assert zero_shares(layers, 0.7, "uniform") == {"conv": 0.7, "fc": 0.7}
    with refused(names=["method.sparsity=0.99", "'conv'", "288", "uniform"]):
        FedDST(sparsity=0.99).check_model({"conv": torch.ones(8, 4, 3, 3), "fc": torch.ones(2, 2)})


def test_masks_stay_after_the_last_readjustment():
    hyper = FedDST(readjust_every=10).hyper.for_num_rounds(100)
    assert hyper.readjust_end == 50
    assert [t for t in range(100) if hyper.moved_share(t)] == [0, 10, 20, 30, 40]
    assert hyper.moved_share(0) == 0.5 and hyper.moved_share(20) == pytest.approx(0.25 * (1 + np.cos(0.4 * np.pi)))

"""FLASH: its densities by hand, one round of each variant in float64, masks that are nested, and what is sent."""

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from rayfl import tree
from rayfl.data.batches import schedule
from rayfl.determinism import seeding
from rayfl.methods.masks.flash import Flash, allotted, layer_densities, moved
from rayfl.methods.shared.step_draws import first_key, next_key
from rayfl.rounds.executor import InlineExecutor
from rayfl.rounds.setup import Setup
from tests.methods.masks.test_feddst import gradient_of, largest
from tests.methods.reference import DIM, NUM_CLASSES, SIZES, Vectors, played, setup_of
from tests.population.statuses import with_status

HYPER = {"lr": 0.2, "batch_size": 4, "density": 0.5, "warm_up_epochs": 3}


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(DIM, NUM_CLASSES))


def test_densities_of_layers():
    """0.6 and 0.1 of 100 and 900 entries at d = 0.05 become 0.2 and 0.0333."""
    found = layer_densities({"a": 0.6, "b": 0.1}, {"a": 100, "b": 900}, 0.05)
    assert found == pytest.approx({"a": 0.2, "b": 1 / 30})
    assert layer_densities({"a": 0.9, "b": 0.1}, {"a": 100, "b": 900}, 0.5)["a"] == 1.0


@pytest.mark.parametrize(
    ("total", "importance", "rooms", "expected"),
    [
        (10, {"a": 3.0, "b": 1.0}, {"a": 20, "b": 20}, {"a": 8, "b": 2}),
        (10, {"a": 3.0, "b": 1.0}, {"a": 4, "b": 20}, {"a": 4, "b": 6}),
        (7, {"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 1, "b": 9, "c": 9}, {"a": 1, "b": 3, "c": 3}),
        (3, {"a": 0.0, "b": 0.0}, {"a": 9, "b": 9}, {"a": 2, "b": 1}),
        (4, {"a": 1.0, "b": 0.0}, {"a": 2, "b": 2}, {"a": 2, "b": 2}),
    ],
)
def test_grown_entries_are_divided_over_layers(total: int, importance: Any, rooms: Any, expected: Any):
    assert allotted(total, importance, rooms) == expected


def test_a_move_keeps_the_number_of_entries_and_prefers_large_layers():
    draw = torch.Generator().manual_seed(0)
    params = {
        "a": torch.randn(20, 20, generator=draw),
        "b": 9 * torch.randn(20, 20, generator=draw),
        "c": torch.ones(3),
    }
    mask = {name: torch.rand(t.shape, generator=draw) < 0.3 if t.dim() > 1 else t > 0 for name, t in params.items()}
    new = moved(mask, tree.mul(params, mask), 0.25, np.random.default_rng(1))
    count = {name: (int(mask[name].sum()), int(new[name].sum())) for name in mask}
    assert sum(before for before, _ in count.values()) == sum(after for _, after in count.values())
    assert count["b"][1] > count["b"][0] and count["a"][1] < count["a"][0] and count["c"] == (3, 3)
    # Of b, three quarters of the kept entries stay: the largest.
    stays = largest(params["b"].numpy(), mask["b"].numpy(), count["b"][0] - int(np.ceil(0.25 * count["b"][0])))
    assert np.all(new["b"].numpy()[stays])


def stage_rows(
    here: Setup, round: int, client: int, name: str, steps: int | None = None, epochs: int = 1
) -> list[np.ndarray]:
    rows = here.partition.train[client]
    generator = seeding.generator(here.seed, round, client, f"train/{name}/batches")
    plan = schedule(len(rows), epochs=None if steps else epochs, steps=steps, batch_size=4, generator=generator)
    return [rows[chosen] for chosen in plan]


def descended(here: Setup, params: Vectors, mask: np.ndarray, rows: list[np.ndarray]) -> Vectors:
    for batch in rows:
        gradient = gradient_of(here, params, batch)
        params = {name: value - HYPER["lr"] * gradient[name] for name, value in params.items()}
        params["1.weight"] = params["1.weight"] * mask
    return params


def shifted(here: Setup, round: int, client: int, part: int, mask: np.ndarray, params: Vectors, share: float):
    """The mask after a move; which idle entries are grown follows from the key that the client drew first."""
    key = first_key(seeding.generator(here.seed, round, client, "client"))
    drawn = int(next_key(key) if part else key) % (1 << 64)
    count = int(np.ceil(share * mask.sum()))
    left = largest(params["1.weight"], mask, int(mask.sum()) - count)
    idle = np.flatnonzero(~left)
    left.flat[idle[np.random.default_rng(drawn).choice(len(idle), count, replace=False)]] = True
    return left, {**params, "1.weight": params["1.weight"] * left}


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize(
    ("variant", "clients", "work"),
    [
        ("spdst", {}, {}),
        ("jmwst", {"per_round": 3, "dropout_after_training": 0.2}, {"steps": 5}),
        ("jmwst", {}, {"epochs": 3}),
    ],
)
def test_equals_the_equations(variant: str, clients: dict[str, Any], work: dict[str, int], engine: str):
    hyper = {**HYPER, "variant": variant, **work, **({"move_every": 2} if variant == "jmwst" else {})}
    here = replace(setup_of("flash", hyper, clients=clients, rounds=5), engine_name=engine)
    start, size = {name: value.double().numpy() for name, value in here.initial.items()}, 18
    order = seeding.generator(here.seed, purpose="mask").permutation(size)
    first, x, mask, kept = np.zeros(size, bool), start, np.ones((3, 6), bool), 0
    first[order[:9]] = True
    for round, (_, run_state) in enumerate(played(here)):
        delivered, ends = with_status(here.population.sample_round(round), "delivered"), []
        given = first.reshape(3, 6) if not round else mask
        for i in delivered:
            end, own = {**x, "1.weight": x["1.weight"] * given}, given
            if not round or (work.get("epochs") and round % 2):
                for part in range(3):
                    end = descended(here, end, own, stage_rows(here, round, i, f"part {part} of 3"))
                    if part < 2:
                        share = 0.25 * (1 - (part + 1) / 3)
                        own, end = shifted(here, round, i, part, own, end, share)
            elif variant == "jmwst" and round % 2:
                end = descended(here, end, own, stage_rows(here, round, i, "part 0 of 2", steps=3))
                own, end = shifted(here, round, i, 0, own, end, 0.125)
                end = descended(here, end, own, stage_rows(here, round, i, "part 1 of 2", steps=2))
            else:
                rows = stage_rows(here, round, i, "train", work.get("steps"), work.get("epochs", 1))
                end = descended(here, end, own, rows)
            ends.append((end, own))
        if not round:
            # A single layer has the density d whatever the clients found.
            mask = seeding.generator(here.seed, 0, -1, "server").random((3, 6)) < 0.5
            kept, x = 9, {**start, "1.weight": start["1.weight"] * mask}
        elif ends:
            x = {name: np.mean([end[name] for end, _ in ends], axis=0) for name in x}
            if variant == "jmwst" and round % 2:
                mask = largest(x["1.weight"], np.any([own for _, own in ends], axis=0) | mask, kept)
            x["1.weight"] = x["1.weight"] * mask
        for name, value in x.items():
            np.testing.assert_allclose(run_state.server["params"][name].numpy(), value, rtol=1e-5, atol=1e-6)
        assert np.array_equal(run_state.server["mask"]["1.weight"].numpy(), mask)


def test_masks_by_retention_are_nested_and_absent_entries_do_not_count():
    here = setup_of("flash", {**HYPER, "density": 1.0}, clients={"retention_ratio": [0.5, 0.75, 1.0]}, rounds=2)
    (_, before), (_, after) = played(here)
    ctx = [here.context(1, here.plan(1), client, "client") for client in range(3)]
    method = here.method
    assert isinstance(method, Flash)
    weak, middle, full = (method.mask_for(cast(Any, before.server), one)["1.weight"] for one in ctx)
    assert [int(mask.sum()) for mask in (weak, middle, full)] == [9, 13, 18]
    assert bool((weak <= middle).all()) and bool((middle <= full).all())
    # An entry that only the full clients (2 alone, of five) hold is theirs after the round.
    state = tree.to_tensors(InlineExecutor(here).get(after.states[2]))
    assert bool(state["mask"]["1.weight"].all())
    end = descended(
        here,
        {name: value.double().numpy() for name, value in before.server["params"].items()},
        np.ones((3, 6), bool),
        stage_rows(here, 1, 2, "train"),
    )
    alone = (full & ~middle).numpy()
    assert alone.any()
    np.testing.assert_allclose(after.server["params"]["1.weight"].numpy()[alone], end["1.weight"][alone], atol=1e-6)


def test_round_0_sends_masks_and_later_rounds_send_kept_values():
    here = setup_of("flash", HYPER, rounds=3)
    (first, after), (second, _), (third, _) = played(here)
    assert {row.uplink_bits for row in first.clients} == {24}
    kept = int(after.server["mask"]["1.weight"].sum())
    assert {row.uplink_bits for row in second.clients} == {32 * (kept + 3)}
    assert {row.downlink_bits for row in third.clients} == {32 * (kept + 3)}
    assert {row.downlink_bits for row in second.clients} > {32 * (kept + 3)} or all(
        row.downlink_bits > 32 * (kept + 3) for row in second.clients
    )
    assert len(second.clients) == len(SIZES)

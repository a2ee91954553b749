"""FedCP in plain torch modules: the gate with its noise, the discrepancy, and what is sent and evaluated."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rayfl.determinism import seeding
from rayfl.determinism.seeding import NOBODY, FirstDraws
from rayfl.methods.personal.fedcp import FedCP, gumbels
from rayfl.methods.shared.step_draws import first_key, next_key, uniforms
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from rayfl.tree import Tree, to_arrays
from tests.contracts.every_method import on_digits
from tests.methods.averaging import ABSENCES, ENGINES
from tests.methods.reference import batches
from tests.methods.representations import (
    HEAD,
    WIDTH,
    assert_near,
    averaged,
    doubled,
    examples,
    leaves,
    representation,
    small,
    stepped,
    stored,
)
from tests.population.statuses import with_status
from tests.refusals import refused

GATE = "conditional gate"


def made(hyper: dict[str, Any], engine: str = "loop", **options: Any) -> Setup:
    """Parameters of round 0 with the gate."""
    here = small("fedcp", hyper, engine, **options)
    params = here.method.init_params(here.initial, FirstDraws(here.seed, NOBODY))
    return replace(here, initial_arrays=to_arrays(params))


def gated(params: Tree, z: Tensor, head: Tree, noise: Tensor | None = None) -> Tensor:
    """m, with v the normalised sum of the head's rows."""
    v = head["3.weight"].sum(0)
    layers = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(2 * WIDTH), nn.ReLU()).double()
    names = {"0.weight": f"{GATE}.weight", "0.bias": f"{GATE}.bias"}
    names |= {"1.weight": f"{GATE} norm.weight", "1.bias": f"{GATE} norm.bias"}
    units = torch.func.functional_call(layers, {k: params[name] for k, name in names.items()}, (z * v / v.norm(),))
    first, second = units[:, :WIDTH], units[:, WIDTH:]
    if noise is not None:
        first, second = first + noise[:, 0], second + noise[:, 1]
    return first.exp() / (first.exp() + second.exp())


def outputs(params: Tree, z: Tensor, m: Tensor, head: Tree, generic: Tree) -> Tensor:
    own, other = ((part @ h["3.weight"].T + h["3.bias"]) for part, h in ((m * z, head), ((1 - m) * z, generic)))
    return own + other


def kernel_mean(a: Tensor, b: Tensor) -> Tensor:
    """The mean over all pairs, one by one."""
    return torch.stack(
        [(-(((x - y) ** 2).sum()) / (2 * w)).exp() for x in a for y in b for w in (10, 15, 20, 50)]
    ).sum() / (len(a) * len(b))


def expected(here: Setup) -> list[tuple[Tree, dict[int, Tree]]]:
    """Body, gate and G, and all P after every round."""
    hyper, path, x = here.method.hyper.model_dump(), [], doubled(here.initial)
    heads = {i: {name: x[name] for name in HEAD} for i in range(5)}
    for round in range(here.rounds):
        ends: dict[int, Tree] = {}
        generic = {name: x[name] for name in HEAD}
        for i in with_status(here.population.sample_round(round), "delivered"):
            key = first_key(seeding.generator(here.seed, round, i, "client"))
            y, head = leaves({n: t for n, t in x.items() if n not in HEAD}), leaves(heads[i])
            for rows in batches(here, round, i):
                inputs, labels = examples(here, rows)
                z, fixed = representation(y, inputs), representation(x, inputs).detach()
                u = uniforms(key, {"": torch.zeros(len(rows), 2, WIDTH)})[""].double().clamp(min=2.0**-25)
                m = gated(y, z, heads[i], -torch.log(-torch.log(u)))
                key = next_key(key)
                distance = kernel_mean(z, z) + kernel_mean(fixed, fixed) - 2 * kernel_mean(z, fixed)
                loss = functional.cross_entropy(outputs(y, z, m, head, generic), labels) + hyper["lam"] * distance
                both = stepped({**y, **head}, loss, hyper["lr"])
                y, head = {n: both[n] for n in y}, {n: both[n] for n in head}
            ends[i] = {**y, **{name: (head[name] + generic[name]) / 2 for name in HEAD}}
            heads = {**heads, i: head}
        x = averaged(here, x, ends)
        path.append((x, heads))
    return path


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize("hyper", [{"epochs": 2, "lam": 2.0}, {"weighting": "uniform", "batch_size": 3}], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_its_equations(engine: str, hyper: dict[str, Any], clients: dict[str, Any]):
    here = made(hyper, engine, clients=clients)
    records, run_states = play(here)
    for record, run_state, (x, heads) in zip(records, run_states, expected(here), strict=True):
        assert_near(run_state.server["params"], x)
        test = here.dataset.test
        for client, head in heads.items():
            assert_near(stored(here, run_state, client)["params"], head)
            rows = here.partition.test[client]
            z = representation(x, torch.from_numpy(test.inputs[rows]).double())
            logits = outputs(x, z, gated(x, z, head), head, x)
            loss = functional.cross_entropy(logits, torch.from_numpy(test.labels[rows])).item()
            found = [m.value for m in record.metrics if (m.client, m.name) == (client, "own/loss")]
            assert found == pytest.approx([loss], rel=1e-3)


def test_while_both_heads_are_equal_the_gate_does_nothing():
    """P = G: the outputs are those of a network whose head has twice the bias."""
    here = made({})
    assert isinstance(here.method, FedCP)
    personal = {f"own {name}": here.initial[name] for name in HEAD}
    batch = here.data(2).all("train")
    found = here.method.outputs({**here.initial, **personal}, batch)
    plain = here.method.outputs(here.initial, batch)
    torch.testing.assert_close(found, plain + here.initial["3.bias"])


def test_noise_is_gumbels():
    """Mean 0.5772, variance pi^2 / 6, over 40,000 draws; finite at both ends of the uniform draws."""
    drawn = gumbels(first_key(np.random.default_rng(0)), torch.empty(200, 2, 100)).double()
    assert drawn.mean().item() == pytest.approx(0.5772, abs=0.03)
    assert drawn.var().item() == pytest.approx(np.pi**2 / 6, rel=0.05)
    assert torch.isfinite(-(-torch.tensor([2.0**-25, 1 - 2.0**-24]).log()).log()).all()


def test_what_does_not_fit_is_refused():
    with refused(names=["FedCP", "last linear layer"]):
        on_digits("fedcp")(model="logistic")

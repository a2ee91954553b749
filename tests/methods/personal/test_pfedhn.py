"""pFedHN in plain torch modules and torch.optim, and SGD on f_i(h(v_i)) as one of its cases."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rayfl.determinism.seeding import NOBODY, FirstDraws
from rayfl.methods.personal.pfedhn import PFedHN
from rayfl.rounds.setup import Setup
from rayfl.testing.executors import play
from rayfl.tree import Tree, to_arrays
from tests.contracts.every_method import on_digits
from tests.methods.averaging import ABSENCES, ENGINES
from tests.methods.reference import batches
from tests.methods.representations import (
    assert_near,
    cross_entropy,
    doubled,
    examples,
    leaves,
    representation,
    small,
    stepped,
)
from tests.population.statuses import with_status
from tests.refusals import refused

SMALL = {"hidden": 7, "embedding_dim": 3, "hidden_layers": 2, "steps": 3, "server_lr": 0.05}
PHI = "hypernetwork "


def made(hyper: dict[str, Any], engine: str = "loop", **options: Any) -> Setup:
    here = small("pfedhn", {**SMALL, **hyper}, engine, **options)
    params = here.method.init_params(here.initial, FirstDraws(here.seed, NOBODY))
    return replace(here, initial_arrays=to_arrays(params))


class Hypernetwork(nn.Module):
    """A perceptron with a linear layer for each tensor."""

    def __init__(self, here: Setup) -> None:
        super().__init__()
        start, hyper = doubled(here.initial), here.method.hyper.model_dump()
        self.shapes = {name: tensor.shape for name, tensor in start.items() if not name.startswith(PHI)}
        sizes = [hyper["embedding_dim"], *[hyper["hidden"]] * hyper["hidden_layers"]]
        self.body = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.heads = nn.ModuleList(nn.Linear(hyper["hidden"], shape.numel()) for shape in self.shapes.values())
        self.double()
        names = [*map(str, range(len(self.body))), *(f"of {name}" for name in self.shapes)]
        self.names = dict(zip(names, [*self.body, *self.heads], strict=True))
        for name, layer in self.names.items():
            layer.load_state_dict({part: start[f"{PHI}{name}.{part}"] for part in ("weight", "bias")})

    def forward(self, v: Tensor) -> Tree:
        for layer in self.body:
            v = layer(v).relu()
        return {n: head(v).view(s) for head, (n, s) in zip(self.heads, self.shapes.items(), strict=True)}


def first(here: Setup, client: int) -> Tensor:
    drawn = FirstDraws(here.seed, client).own.standard_normal(here.method.hyper.model_dump()["embedding_dim"])
    return torch.from_numpy(drawn).float().double().requires_grad_()


def expected(here: Setup) -> list[tuple[Tree, list[Tree]]]:
    """phi and the v_i that have moved, and all theta_i after every round."""
    hyper, path = here.method.hyper.model_dump(), []
    h, vectors = Hypernetwork(here), {i: first(here, i) for i in range(5)}
    options = {"momentum": hyper["server_momentum"], "weight_decay": hyper["server_weight_decay"]}
    of_phi = torch.optim.SGD(h.parameters(), lr=hyper["server_lr"], **options)
    of_vectors = {i: torch.optim.SGD([v], lr=hyper["server_lr"], **options) for i, v in vectors.items()}
    moved = set[int]()
    for round in range(here.rounds):
        delivered = with_status(here.population.sample_round(round), "delivered")
        of_phi.zero_grad()
        for i in delivered:
            of_vectors[i].zero_grad()
            theta = h(vectors[i])
            y = leaves(theta)
            velocity = {name: torch.zeros_like(tensor) for name, tensor in y.items()}
            for rows in batches(here, round, i):
                inputs, labels = examples(here, rows)
                decay = hyper["weight_decay"] / 2 * sum((tensor**2).sum() for tensor in y.values())
                loss = cross_entropy(y, representation(y, inputs), labels) + decay
                after = stepped(y, loss, 1.0)
                velocity = {n: hyper["momentum"] * velocity[n] + (y[n] - after[n]).detach() for n in y}
                y = leaves({n: y[n] - hyper["lr"] * velocity[n] for n in y})
            delta = {n: (theta[n] - y[n]).detach() for n in y}
            # Autograd of <theta, delta>, which sums over clients for phi.
            sum((theta[n] * delta[n]).sum() for n in y).backward()  # type: ignore[union-attr]
        if delivered:
            for parameter in h.parameters():
                assert parameter.grad is not None
                parameter.grad /= len(delivered)
            together = [*h.parameters(), *(vectors[i] for i in delivered)]
            nn.utils.clip_grad_norm_(together, hyper["server_clip"])
            of_phi.step()
            for i in delivered:
                of_vectors[i].step()
        moved |= {*delivered}
        phi = {f"{PHI}{n}.{part}": t.detach().clone() for n, m in h.names.items() for part, t in m.named_parameters()}
        state = {**phi, **{f"embedding {i}": vectors[i].detach().clone() for i in sorted(moved)}}
        path.append((state, [{n: t.detach() for n, t in h(v).items()} for v in vectors.values()]))
    return path


@pytest.mark.parametrize("clients", ABSENCES, ids=str)
@pytest.mark.parametrize(
    "hyper",
    [{}, {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.1, "server_clip": 0.05, "server_momentum": 0.5}],
    ids=str,
)
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_its_equations(engine: str, hyper: dict[str, Any], clients: dict[str, Any]):
    here = made(hyper, engine, clients=clients)
    records, run_states = play(here)
    test = here.dataset.test
    for record, run_state, (state, models) in zip(records, run_states, expected(here), strict=True):
        assert_near(run_state.server["moving"], state)
        for client, theta in enumerate(models):
            rows = here.partition.test[client]
            z = representation(theta, torch.from_numpy(test.inputs[rows]).double())
            loss = cross_entropy(theta, z, torch.from_numpy(test.labels[rows])).item()
            found = [m.value for m in record.metrics if (m.client, m.name) == (client, "own/loss")]
            assert found == pytest.approx([loss], rel=1e-4)
    # The model's 53 parameters each way, however large h is.
    sent = {(r.uplink_bits, r.downlink_bits) for rec in records for r in rec.clients if r.status == "delivered"}
    assert sent == {(32 * 53, 32 * 53)}


def test_one_plain_step_is_sgd_through_the_hypernetwork():
    plain = {"steps": 1, "batch_size": 0, "momentum": 0.0, "weight_decay": 0.0, "server_clip": 0.0, "lr": 0.5}
    here = made({**plain, "server_momentum": 0.0, "server_weight_decay": 0.0}, clients={"per_round": 1})
    (client,), h = here.population.sample_round(0).selected, Hypernetwork(here)
    v = first(here, client)
    inputs, labels = examples(here, here.partition.train[client])
    theta = h(v)
    cross_entropy(theta, representation(theta, inputs), labels).backward()
    assert v.grad is not None
    moved = play(here, rounds=1)[1][0].server["moving"]
    torch.testing.assert_close(moved[f"embedding {client}"].double(), v - 0.5 * 0.05 * v.grad, rtol=1e-5, atol=1e-6)
    for name, layer in h.names.items():
        for part, tensor in layer.named_parameters():
            wanted = tensor if tensor.grad is None else tensor - 0.5 * 0.05 * tensor.grad
            torch.testing.assert_close(moved[f"{PHI}{name}.{part}"].double(), wanted, rtol=1e-5, atol=1e-6)


def test_what_it_cannot_do_is_refused():
    with refused(names=["clients.unseen", "PFedHN"]):
        on_digits("pfedhn")(clients={"unseen": 0.3})
    with refused(names=["weighting"]):
        PFedHN.Hyper(weighting="samples")

"""FedPSE against its Algorithms 1 to 4 in float64, whole rounds at a time."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rayfl.methods.base import Context, Finished
from rayfl.methods.compressed.fedpse import FedPSE
from rayfl.methods.server.fedavg import FedAvg
from rayfl.rounds.setup import Setup
from tests.methods.fedpse_paper import close, compare, flat, uplink_of
from tests.methods.reference import (
    SIZES,
    TinyCNN,
    Vectors,
    batches,
    images,
    initial,
    played,
    setup_of,
    softmax_gradient,
    trained_by_torch,
    vectors,
)
from tests.population.statuses import with_status
from tests.refusals import refused

BASE = {"lr": 0.3, "batch_size": 0, "steps": 3, "keep_ratio": 0.4, "absent": "nothing"}


@pytest.mark.parametrize(
    "hyper",
    [
        {},
        {"scope": "model"},
        {"keep_ratio": 0.05},
        {"aggregation": "naive"},
        {"downstream": "broadcast_topk"},
        {"aggregation": "naive", "downstream": "broadcast_topk", "scope": "model"},
        {"weighting": "uniform"},
        {"weighting": "samples", "batch_size": 2},
        {"weighting": "seen", "batch_size": 2},
        {"momentum": 0.9, "lr_decay": 0.5},
        {"optimizer": "adam", "lr": 0.01, "batch_size": 2, "steps": None, "epochs": 2},
        {"batch_size": 4, "steps": None, "epochs": 2, "weight_decay": 0.1},
        {"batch_size": 5, "clip_norm": 0.2},
    ],
    ids=lambda hyper: ", ".join(f"{key}={value}" for key, value in hyper.items()) or "default",
)
def test_equals_the_algorithms(hyper: dict[str, Any]):
    paper = compare(setup_of("fedpse", BASE | hyper, rounds=4))
    if paper.hyper.downstream == "dps":
        assert any((paper.downlink[i] != paper.support).any() for i in paper.downlink), "downlinks must be personal"
    assert len({base.tobytes() for base in paper.base.values()}) == (
        len(SIZES) if paper.hyper.downstream == "dps" else 1
    )


@pytest.mark.parametrize("scope", ["tensor", "model"])
@pytest.mark.parametrize(
    "clients",
    [
        {"per_round": 2},
        {"dropout_before_download": 0.3, "dropout_after_training": 0.3},
        {"per_round": 4, "dropout_after_training": 0.5},
    ],
    ids=str,
)
def test_who_does_not_deliver_keeps_everything(clients: dict[str, Any], scope: str):
    setup = setup_of("fedpse", BASE | {"scope": scope}, clients=clients, rounds=6)
    compare(setup)
    rounds, kept = played(setup), 0
    for round in range(1, 6):
        for client in set(range(len(SIZES))) - set(with_status(setup.population.sample_round(round), "delivered")):
            before, after = (rounds[r][1].states.get(client) for r in (round - 1, round))
            assert before is after
            kept += before is not None
    assert kept


@pytest.mark.parametrize("hyper", [{}, {"scope": "model", "momentum": 0.9}], ids=str)
def test_a_convolutional_network(hyper: dict[str, Any]):
    hyper = {"lr": 0.05, "batch_size": 4, "keep_ratio": 0.25} | hyper
    compare(setup_of("fedpse", hyper, dataset=images(), build=TinyCNN, rounds=3), trained_by_torch)


@pytest.mark.parametrize("keep_ratio", [0.3, 0.7, 0.95])
@pytest.mark.parametrize("aggregation", ["ewa", "naive"])
def test_updates_with_fewer_nonzeros_than_k(keep_ratio: float, aggregation: str):
    # A feature that is 0 in all of a client's examples never moves its 3 weights: client 0 has 9 of 18 moving weights,
    # client 3 none, and features 4 and 5 move for nobody, so that G has 12 nonzeros.
    dead = {0: [0, 1, 2], 1: [3], 2: [], 3: range(6), 4: [1]}
    data = vectors(dead={client: [*features, 4, 5] for client, features in dead.items()})
    hyper = BASE | {"keep_ratio": keep_ratio, "aggregation": aggregation}
    paper = compare(setup_of("fedpse", hyper, dataset=data, rounds=4))
    weights = paper.blocks[0]
    assert not paper.uplink[3][weights].any()
    assert paper.sent[3][weights].sum() == np.ceil(keep_ratio * 18), "padded with zeros on the wire"
    assert paper.support[weights].sum() <= 12


def test_tensors_of_one_entry():
    # keep_ratio 0.01 sends max(1, ceil(0.01 n)) = 1 entry of each tensor, here the whole of the second one.
    data = vectors(SIZES)
    setup = setup_of("fedpse", BASE | {"keep_ratio": 0.01}, dataset=data, build=Shifted, rounds=3)
    rounds = played(setup)
    for record, run_state in rounds:
        for row in record.clients:
            # weight [3, 6]: one value, a gap and the code's name; shift []: one value; and n_i.
            assert row.uplink_bits == (32 + 16) + 32 + 64
            assert row.downlink_bits == (32 + 16) + 32
        for client in run_state.server_memories:
            assert [int(np.count_nonzero(value)) for value in uplink_of(setup, run_state, client).values()] == [1, 1]


def test_everything_kept_is_fedavg():
    # Dense updates: M_i and M_s are full, D_i = G = the average update, which every client adds to its own base.
    hyper = {"lr": 0.3, "batch_size": 4, "epochs": 2}
    averaged = played(setup_of("fedavg", hyper, rounds=4))
    for (record, run_state), (_, expected) in zip(
        played(setup_of("fedpse", hyper | {"keep_ratio": 1.0}, rounds=4)), averaged, strict=True
    ):
        for state in run_state.states.values():
            close(flat(state["base"]), flat(expected.server["params"]))
            assert not flat(state["residual"]).any()
        assert {row.downlink_bits for row in record.clients} == {32 * 21}


def test_clients_that_missed_rounds_add_the_common_update_to_their_own_base():
    # keep_ratio 1 with partial participation: W_i = W^0 + the sum of G over the rounds in which i took part.
    setup = setup_of("fedpse", BASE | {"keep_ratio": 1.0}, clients={"per_round": 2}, rounds=6)
    expected = {client: flat(initial(setup)) for client in range(len(SIZES))}
    for round, (_, run_state) in enumerate(played(setup)):
        for client in setup.population.sample_round(round).selected:
            expected[client] = expected[client] - flat(run_state.server["update"])
            close(flat(run_state.states[client]["base"]), expected[client])
    assert len({value.tobytes() for value in expected.values()}) > 2


def test_the_random_draws_differ_by_client_and_round_and_follow_the_seed():
    def downlinks(seed: int) -> list[np.ndarray]:
        setup = setup_of("fedpse", BASE | {"downstream": "dps"}, seed=seed, rounds=3)
        return [flat(run_state.states[i]["base"]) for _, run_state in played(setup) for i in range(len(SIZES))]

    first, again, other = downlinks(1), downlinks(1), downlinks(2)
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert not any((a == b).all() for a, b in zip(first, other, strict=True))


class Shifted(nn.Module):
    """Logits W x plus one number for the first class: a matrix [3, 6] and a tensor of one entry."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3, bias=False)
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) + self.shift * torch.tensor([1.0, 0.0, 0.0])


def weights(kind: type[FedAvg] | type[FedPSE], hyper: dict[str, Any]) -> dict[int, float]:
    """The weights of clients in a round of three steps of two examples."""
    found = dict[int, float]()

    class Noting(kind):  # pyright: ignore[reportGeneralTypeIssues] (one of two classes)
        # Any: see Method.
        def finish(self, state: Any, carry: Any, ctx: Context) -> Finished:
            finished = super().finish(state, carry, ctx)
            found[ctx.traits.id] = finished.weight
            return finished

    played(setup_of(Noting, {"batch_size": 2, "steps": 3, **hyper}, rounds=1))
    return found


def test_samples_are_those_that_a_client_holds_in_every_method():
    held = {client: float(size) for client, size in enumerate(SIZES)}
    assert weights(FedPSE, {"weighting": "samples"}) == weights(FedAvg, {"weighting": "samples"}) == held
    # Algorithm 1's n_i: three batches of two, of which the last one of 9 examples would be smaller.
    assert weights(FedPSE, {}) == weights(FedPSE, {"weighting": "seen"}) == dict.fromkeys(held, 6.0)
    assert weights(FedPSE, {"weighting": "uniform"}) == dict.fromkeys(held, 1.0)


class Keeping:
    """Local training by Adam or momentum SGD in numpy, whose state a client keeps from one round to the next."""

    def __init__(self) -> None:
        self.moments: dict[int, tuple[Vectors, Vectors, int]] = {}

    def __call__(self, setup: Setup, round: int, client: int, start: Vectors) -> tuple[Vectors, int]:
        hyper, examples, params = setup.method.hyper.model_dump(), setup.dataset.train, dict(start)
        zeros = {name: np.zeros_like(value) for name, value in start.items()}
        m, v, t = self.moments.get(client, (zeros, zeros, 0))
        m, v, num_seen = dict(m), dict(v), 0
        for rows in batches(setup, round, client):
            t, num_seen = t + 1, num_seen + len(rows)
            gradient = softmax_gradient(params, examples.inputs[rows].astype(np.float64), examples.labels[rows])
            for name, g in gradient.items():
                if hyper["optimizer"] == "sgd":
                    m[name] = hyper["momentum"] * m[name] + g
                    params[name] = params[name] - hyper["lr"] * m[name]
                    continue
                m[name], v[name] = 0.9 * m[name] + 0.1 * g, 0.999 * v[name] + 0.001 * g**2
                size = np.sqrt(v[name] / (1 - 0.999**t)) + 1e-8
                params[name] = params[name] - hyper["lr"] * m[name] / (1 - 0.9**t) / size
        self.moments[client] = m, v, t
        return params, num_seen


@pytest.mark.parametrize("correlation", ["pearson", "spearman"])
@pytest.mark.parametrize(
    "hyper", [{"optimizer": "adam", "lr": 0.01, "batch_size": 3}, {"momentum": 0.8, "weighting": "samples"}], ids=str
)
def test_clients_may_keep_their_optimizer(hyper: dict[str, Any], correlation: str):
    more = {"keep_optimizer": True, "correlation": correlation}
    setup = setup_of("fedpse", BASE | hyper | more, clients={"per_round": 4}, rounds=5)
    compare(setup, Keeping())
    forgets = setup_of("fedpse", BASE | hyper | more | {"keep_optimizer": False}, clients={"per_round": 4}, rounds=5)
    bases = [played(each)[-1][1].states for each in (setup, forgets)]
    assert any(not np.array_equal(bases[0][i]["base"]["1.bias"], bases[1][i]["base"]["1.bias"]) for i in bases[0])


def test_plain_sgd_has_no_state_to_keep():
    with refused(names=["keep_optimizer", "momentum"]):
        FedPSE.Hyper(keep_optimizer=True)
